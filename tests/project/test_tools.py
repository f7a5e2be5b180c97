"""Tools of the system that tests need are named before the tests start, and installed in CI only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.tools import TOOLS

pytestmark = pytest.mark.one_build

SCRIPT = ROOT / "tests" / "support" / "tools.py"
# An apt-get that notes what it is asked for, and installs a program for each package.
APT_GET = """
echo "$*" >> "$NOTED"
for word in "$@"; do case "$word" in
  install|-*|update|gcc|libc6-dev) ;;
  *) for name in $(cat "$PROGRAMS_OF/$word"); do printf '#!/bin/sh\\n' > "$TOOLS_HERE/$name"; chmod +x "$TOOLS_HERE/$name"; done ;;
esac; done"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A directory for PATH with a shell and no tool; what is in /usr/sbin is found all the same."""
    directory = tmp_path / "path"
    directory.mkdir()
    for name in ("sh", "bash", "cat", "chmod", "rm", "make"):
        (directory / name).symlink_to(str(shutil.which(name)))
    return directory


def tools(path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("CI", "CC")}
    return subprocess.run([sys.executable, "-P", SCRIPT, *arguments], capture_output=True, text=True, timeout=60,
                          env={**inherited, "PATH": str(path), **environment})  # fmt: skip


def test_missing_tools_are_named_with_the_command_that_installs_them(path: Path) -> None:
    """The installation is left to the user, also to one who is root and has apt-get."""
    noted = path.parent / "noted"
    (path / "apt-get").write_text(f'#!/bin/sh\necho "$*" >> {noted}\n')
    (path / "apt-get").chmod(0o755)
    done = tools(path)
    assert (done.returncode, done.stdout) == (0, "") and not noted.exists()
    said = done.stderr.splitlines()
    assert said[0] == "make: missing tools, without which these tests are skipped:"
    named = {line.split()[0]: line for line in said if line.startswith("  ")}
    assert {"mosquitto-clients", "chromium", "paho-c", "maven", "curl", "tshark"} <= named.keys() <= TOOLS.keys()
    assert all(TOOLS[name].tests in line for name, line in named.items())
    (command,) = [line for line in said if "apt-get install" in line]
    assert set(command.partition("--no-install-recommends ")[2].split()) == {
        package for name in named for package in TOOLS[name].packages.split()}  # fmt: skip


def test_a_service_that_would_start_is_named(path: Path) -> None:
    said = tools(path, "prometheus").stderr
    assert "systemctl disable --now prometheus" in said


def test_a_tool_that_a_command_cannot_do_without_fails_it(path: Path) -> None:
    done = tools(path, "chromium")
    assert done.returncode == 1 and "apt-get install --no-install-recommends chromium" in done.stderr
    (path / "chromium").write_text("#!/bin/sh\n")
    (path / "chromium").chmod(0o755)
    assert (tools(path, "chromium").returncode, tools(path, "chromium").stderr) == (0, "")


def test_ci_installs_what_is_missing_and_fails_without_it(path: Path) -> None:
    done = tools(path, CI="true")  # no apt-get
    assert done.returncode == 1 and "skipped" not in done.stderr and "apt-get install" in done.stderr
    if os.geteuid() != 0:
        pytest.skip("only root installs packages")
    programs, noted = path.parent / "programs", path.parent / "noted"
    programs.mkdir()
    for tool in TOOLS.values():
        for package in tool.packages.split():
            (programs / package).write_text(" ".join(tool.programs))
    (path / "apt-get").write_text(f"#!/bin/sh\n{APT_GET}\n")
    (path / "apt-get").chmod(0o755)
    done = tools(path, "tshark", "curl", CI="true", NOTED=str(noted), PROGRAMS_OF=str(programs), TOOLS_HERE=str(path))
    assert done.returncode == 0, done.stderr
    assert noted.read_text().splitlines() == ["update -q", "install -qy --no-install-recommends tshark curl"]


@pytest.mark.parametrize("ci", ["", "true"])
def test_tests_without_their_tool_are_skipped_and_in_ci_they_fail(tmp_path: Path, path: Path, ci: str) -> None:
    test = tmp_path / "test_needy.py"
    test.write_text(
        "import subprocess\nfrom support.tools import lacking, needs\n\n"
        "@needs('curl')\ndef test_marked():\n    subprocess.run(['curl', '--version'], check=True)\n\n"
        "def test_asking():\n    lacking('needs a browser')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", "-ra", "-q", test], capture_output=True, text=True,
        timeout=120, env={**os.environ, "PATH": str(path), "CI": ci, "PYTHONPATH": str(ROOT / "tests")},
    )  # fmt: skip
    assert ("2 failed" if ci else "2 skipped") in done.stdout, done.stdout + done.stderr
    if not ci:
        assert "needs: apt-get install curl" in done.stdout and "needs a browser" in done.stdout


def test_make_test_names_missing_tools_once_and_before_all_else() -> None:
    """`make -n` shows the commands of the recipes, and runs those that are make itself."""
    of_make = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "TOOLS_NAMED")
    inherited = {name: value for name, value in os.environ.items() if name not in of_make}
    done = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, timeout=60, env=inherited)
    assert done.returncode == 0, done.stderr
    commands = done.stdout.splitlines()
    assert [number for number, line in enumerate(commands) if re.search(r"support/tools\.py$", line)] == [0]
    assert sum("bin/pytest" in line for line in commands) >= 2
    named = {word for line in commands if "bin/pytest" in line for word in line.split() if word.startswith("tests/")}
    assert named and [word for word in sorted(named) if not (ROOT / word).exists()] == []
