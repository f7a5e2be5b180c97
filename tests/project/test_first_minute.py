"""`make demo`, `make run` and `make build` where something is missing: one line names the step and what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.tools import needs

pytestmark = pytest.mark.one_build

INSTALL = ROOT / "requirements" / "install.py"


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


# --- packages -------------------------------------------------------------------------------------------------------


def install(tmp_path: Path, pip: str, *groups: str) -> subprocess.CompletedProcess[str]:
    """Run install.py where `python -m pip` is this program."""
    (tmp_path / "pip").mkdir(parents=True)
    (tmp_path / "pip" / "__init__.py").touch()  # or Python would find the real one
    (tmp_path / "pip" / "__main__.py").write_text(f"import os, sys\narguments = sys.argv[1:]\n{pip}\n", encoding="utf-8")
    return subprocess.run([sys.executable, str(INSTALL), "make: packages", *groups], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})  # fmt: skip


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "free some space"),
        ("ERROR: Exception:\nOSError: [Errno 28] No space left on device: '/x'\nsee above for output", "free some space"),
        ("WARNING: Retrying after NewConnectionError: Temporary failure in name resolution\n"
         "ERROR: Could not find a version that satisfies the requirement aiohttp (from versions: none)\n"
         "ERROR: No matching distribution found for aiohttp", "is there a network?"),
        ("ERROR: Exception:\nurllib3.exceptions.ProtocolError: ('Connection broken: IncompleteRead(9 bytes read, 9 more expected)',",
         "a download broke off: repeat"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "a download broke off: repeat"),
        ("ERROR: Package 'x' requires a different Python: 3.9.2 not in '>=3.11'", "use a newer Python"),
        ("ERROR: something else", "something else: then repeat"),
    ],
)  # fmt: skip
def test_a_failed_installation_is_one_line(tmp_path: Path, said: str, advice: str) -> None:
    done = install(tmp_path, f"print({said!r})\nsys.exit(1)", ".")
    assert done.returncode == 1 and done.stdout == ""
    *progress, line = done.stderr.splitlines()
    assert line.startswith("make: packages: ") and advice in line and line.endswith("packages that are installed stay")
    assert all(shown.startswith("make: packages: ") and shown.endswith(" s") for shown in progress)


def test_spark_is_built_beside_the_other_packages(tmp_path: Path) -> None:
    done = install(tmp_path, f"open({str(tmp_path)!r} + f'/run-{{os.getpid()}}', 'w').write('\\n'.join(arguments))", ".", "spark", "demo")
    assert done.returncode == 0, done.stderr
    spark, rest = sorted((path.read_text().splitlines() for path in tmp_path.glob("run-*")), key=len)
    assert [argument for argument in spark if argument.startswith(("pyspark", "--build-option"))] == spark[-3::2]
    assert not [argument for argument in rest if "pyspark" in argument]
    assert {"rich", "aiohttp", "pandas"} <= {argument.partition(">")[0] for argument in rest}


def test_packages_that_need_spark_are_installed_after_it(tmp_path: Path) -> None:
    done = install(tmp_path, f"with open({str(tmp_path / 'runs')!r}, 'a') as file: print(*arguments, file=file)", "all")
    assert done.returncode == 0, done.stderr
    runs = (tmp_path / "runs").read_text().splitlines()
    assert len(runs) == 3 and "pyspark[connect]" in runs[2] and not [run for run in runs[:2] if "pyspark[" in run]


# --- the Makefile ---------------------------------------------------------------------------------------------------

PYTHON = """
case "$*" in
  *mqttbroker*|*demo.py*) echo "ran $*"; echo "path $PYTHONPATH" ;;
  *"setup.py"*) echo "compiled" ; exit ${COMPILER_FAILS:-0} ;;
  *sysconfig*) echo "$PWD" ;;
  *pip*) echo "ERROR: OSError: [Errno 28] No space left on device"; exit ${PIP_FAILS:-0} ;;
esac"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A checkout whose packages are installed, with programs that print what they are called with."""
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for package in ("topic_matcher", "sessions", "bridge_spark", "mqttbroker"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    script(tmp_path / ".venv" / "bin" / "python", PYTHON)
    script(tmp_path / ".venv" / "bin" / "mqttbroker", "echo version")
    for stamp in ("created", "runtime", "base", "demo"):
        (tmp_path / ".venv" / stamp).touch()
    return tmp_path


def make(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    unset = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MQTTBROKER_COMPILE", "PYTHONPATH")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(["make", "--no-print-directory", *arguments], cwd=directory, capture_output=True, text=True, timeout=60,
                          env=inherited | environment)  # fmt: skip


def test_an_old_python_is_named(clone: Path) -> None:
    shutil.rmtree(clone / ".venv")
    old = script(clone / "python3.9", "exit 1")
    done = make(clone, "demo", f"PYTHON={old}")
    assert done.returncode != 0 and done.stdout == ""
    line, _ = done.stderr.splitlines()  # and make's own
    assert line.startswith(f"make: {old} is not Python 3.11 or newer") and "PYTHON=" in line


def test_a_full_disk_at_the_virtual_environment_is_one_line(clone: Path) -> None:
    shutil.rmtree(clone / ".venv")
    full = script(clone / "python3.11", 'test "$1" = -c || { echo Traceback; echo "OSError: [Errno 28] No space left on device"; exit 1; }')
    done = make(clone, "run", f"PYTHON={full}")
    assert done.returncode != 0
    step, line, _ = done.stderr.splitlines()
    assert step == "make: a virtual environment in .venv" and "failed: OSError: [Errno 28] No space left" in line


@pytest.mark.parametrize(("target", "program"), [("demo", "docs/examples/demo/demo.py"), ("run", "mqttbroker serve")])
def test_sources_run_until_they_are_built(clone: Path, target: str, program: str) -> None:
    """At once, and again after a change of a source."""
    sources = f"path {clone}:{clone}/bridge_spark/autoload"
    done = make(clone, target)
    assert done.returncode == 0, done.stderr
    assert program in done.stdout and sources in done.stdout and "`make build`" in done.stderr
    assert make(clone, "build", MQTTBROKER_COMPILE="1").returncode == 0
    done = make(clone, target, MQTTBROKER_COMPILE="1")
    assert program in done.stdout and sources not in done.stdout and done.stderr == ""
    (clone / "sessions" / "__init__.py").write_text('"""Changed."""\n')
    done = make(clone, target, MQTTBROKER_COMPILE="1")
    assert sources in done.stdout and "`make build`" in done.stderr


def test_the_command_is_there_before_a_build(clone: Path) -> None:
    (clone / ".venv" / "bin" / "mqttbroker").unlink()
    assert make(clone, "run").returncode == 0
    done = subprocess.run([clone / ".venv" / "bin" / "mqttbroker", "--version"], capture_output=True, text=True, timeout=60)
    assert "-P -m mqttbroker --version" in done.stdout
    assert (clone / "mqttbroker-sources.pth").read_text().splitlines() == [str(clone), f"{clone}/bridge_spark/autoload"]


def test_without_a_compiler_the_build_is_plain(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    tools = tmp_path_factory.mktemp("tools")
    for name in ("bash", "sh", "find", "sort", "sha256sum", "cat", "rm", "mkdir", "touch", "grep", "tail", "make"):
        tool = shutil.which(name)
        assert tool is not None
        (tools / name).symlink_to(tool)
    done = make(clone, "build", PATH=str(tools))
    assert done.returncode == 0 and "compiled" not in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("make build: no C compiler (cc or gcc)")


def test_a_build_that_cannot_be_installed_is_one_line(clone: Path) -> None:
    done = make(clone, "build", MQTTBROKER_COMPILE="1", PIP_FAILS="1")
    assert done.returncode != 0
    line, _ = done.stderr.splitlines()
    assert line.startswith("make build: installing mqttbroker into .venv failed: ERROR: OSError: [Errno 28] No space left")
    done = make(clone, "build", MQTTBROKER_COMPILE="1")
    assert done.returncode == 0, done.stderr


# --- the compiled modules -------------------------------------------------------------------------------------------

PARTS = """PARTS = {
    "filters": ("-O1", ["topic_matcher/filters.py"]),
    "trees": ("-O1", ["topic_matcher/topic_tree.py", "topic_matcher/trie.py"]),
}
"""
# Counts what is compiled, by the first function of the part, and fails if asked to.
COMPILER = """
case "$*" in
  *code.c*) source=$(echo "$*" | grep -o '[^ ]*code[.]c')
    for part in filters trees; do grep -q "^PyObject \\*${part}_literals" "$source" && echo $part >> "$COMPILED" || :; done
    if test -n "$FULL" && grep -q "^PyObject \\*trees_literals" "$source"; then
      echo "code.c:1: fatal error: error writing to /scratch/a.s: No space left on device" >&2; exit 1
    fi ;;
esac
exec cc "$@"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Three modules in two parts, and a compiler that notes what it compiles."""
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    begin = text.index("PARTS = {")
    text = text[:begin] + PARTS + text[text.index("COMPILED = ") :]
    (tmp_path / "setup.py").write_text(text, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "parts"\nversion = "1"\n', encoding="utf-8")
    shutil.copytree(ROOT / "topic_matcher", tmp_path / "topic_matcher", ignore=shutil.ignore_patterns("__pycache__"))
    script(tmp_path / "compiler", COMPILER)
    return tmp_path


def build(project: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Build; returns the process and the parts that were compiled."""
    noted = project / "compiled"
    noted.write_text("")
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", "lib"], cwd=project, capture_output=True, text=True,
        timeout=170, env={**os.environ, "MQTTBROKER_COMPILE": "1", "CC": str(project / "compiler"), "COMPILED": str(noted), **environment},
    )  # fmt: skip
    return done, sorted(noted.read_text().split())


@needs("cc")
def test_a_build_goes_on_where_it_failed_and_compiles_what_changed(project: Path) -> None:
    failed, compiled = build(project, FULL="1")
    assert failed.returncode == 1 and "filters" in compiled
    line = failed.stderr.splitlines()[-1]
    assert "compiling trees failed" in line and "No space left on device" in line and "free space" in line

    done, compiled = build(project)
    assert done.returncode == 0, done.stderr
    assert compiled == ["trees"]
    assert build(project)[1] == []

    source = project / "topic_matcher" / "filters.py"
    source.write_text(source.read_text(encoding="utf-8") + '\n\ndef added() -> str:\n    return "a new literal"\n', encoding="utf-8")
    done, compiled = build(project)
    assert done.returncode == 0, done.stderr
    assert compiled == ["filters"]

    check = (
        "from topic_matcher import filters, trie\n"
        "tree = trie.SubscriptionTrie(); tree.insert('a/+', 'x', 1)\n"
        "print(filters.added(), tree.match('a/b'), filters.__file__, trie.__file__)"
    )
    shutil.copytree(project / "topic_matcher", project / "lib" / "topic_matcher", dirs_exist_ok=True)
    ran = subprocess.run([sys.executable, "-P", "-c", check], env={**os.environ, "PYTHONPATH": str(project / "lib")},
                         capture_output=True, text=True, timeout=60)  # fmt: skip
    assert ran.stdout.startswith("a new literal ") and ran.stdout.count(".so") == 2, ran.stderr


def test_a_compiler_without_python_headers_is_one_line(project: Path) -> None:
    script(project / "compiler", 'echo "probe.c:1:10: fatal error: Python.h: No such file or directory" >&2; exit 1')
    done, _ = build(project)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "trying the C compiler failed" in line and "python3-dev" in line


def test_a_compiler_that_is_not_there_is_one_line(project: Path) -> None:
    done, _ = build(project, CC="no-such-compiler")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "no-such-compiler" in line and "install a C compiler" in line
