"""The ``mqttbroker`` command: exit statuses, one-line errors, and the build under test."""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.command_line import one_line, run
from support.paths import ROOT
from support.source_tree import compiled_paths

import mqttbroker

EXPECTED = os.environ.get("EXPECT_BUILD")


# --- the build ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(EXPECTED is None, reason="EXPECT_BUILD is not set; make test sets it")
def test_the_build_under_test_is_the_expected_one(tmp_path: Path) -> None:
    assert mqttbroker.build_kind() == EXPECTED
    for path in compiled_paths():
        name = path.removesuffix(".py").replace("/", ".")
        assert str(importlib.import_module(name).__file__).endswith(".py") is (EXPECTED == "plain"), name
    in_the_source_tree = Path(str(mqttbroker.__file__)).is_relative_to(ROOT / "mqttbroker")
    assert in_the_source_tree is bool(os.environ.get("PYTHONPATH"))
    assert f"({EXPECTED}," in run("--version", cwd=tmp_path).stdout


def test_version(tmp_path: Path) -> None:
    done = run("--version", cwd=tmp_path)
    assert done.returncode == 0
    first, second = done.stdout.splitlines()
    assert re.fullmatch(r"mqttbroker \d+\.\d+\.\d+ \((compiled|plain), Python 3\.\d+\.\d+\S*\)", first)
    assert re.fullmatch(r"data formats: store schema \d+, commit log \d+, streams \d+, segments \d+, sealed segments \d+", second)


# --- wrong calls --------------------------------------------------------------------------------------------------

WRONG = [
    ([], r"mqttbroker: .*COMMAND.*"),
    (["bogus"], r"mqttbroker: argument COMMAND: there is no 'bogus' \(see mqttbroker --help\)"),
    (["server"], r"mqttbroker: argument COMMAND: there is no 'server', did you mean serve\? .*"),
    (["clients", "shwo"], r"mqttbroker clients: argument ACTION: there is no 'shwo', did you mean show\? .*"),
    (["completion", "fish"], r"mqttbroker completion: argument shell: there is no 'fish': must be one of bash, zsh, tcsh .*"),
    (["serve", "--prot", "1"], r"mqttbroker: unrecognized arguments: --prot 1.*"),
    (["serve", "--port"], r"mqttbroker serve: argument --port: expected one argument.*"),
    (["serve", "--port", "x"], r'--port: listeners\.0\.port: must be a whole number, got "x"'),
    (["serve", "--port", "99999"], r"--port: listeners\.0\.port: must be 0–65535, got 99999"),
    (["serve", "--durability", "no"], r'--durability: durability: must be .*, got "no"'),
    (["serve", "--allow-anonymous", "no"], r'--allow-anonymous: allow_anonymous: must be .*, got "no"'),
    (["serve", "--config", "none.toml"], r"none\.toml: cannot be read: No such file or directory"),
    (["check-config", "none.toml"], r"none\.toml: cannot be read: No such file or directory"),
]


@pytest.mark.parametrize(("arguments", "pattern"), WRONG)
def test_a_wrong_call_is_one_line_and_status_2(tmp_path: Path, arguments: list[str], pattern: str) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert re.fullmatch(pattern, one_line(done.stderr))
    assert (done.returncode, done.stdout) == (2, "")


def test_check_config(tmp_path: Path) -> None:
    done = run("check-config", str(ROOT / "conf" / "mqttbroker.toml"), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and one_line(done.stdout).endswith("mqttbroker.toml: fine")
    (tmp_path / "x.toml").write_text("listeners = [{port = 99999}]\ndurabilty = 'off'\n")
    done = run("check-config", "x.toml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "x.toml:2: durabilty: unknown key, did you mean durability?",
        "x.toml:1: listeners.0.port: must be 0–65535, got 99999",
    ]


def test_ingest_without_spark_names_the_extra(tmp_path: Path) -> None:
    # A module that fails to import and comes first on the path simulates an installation without the extra.
    (tmp_path / "pyspark.py").write_text("raise ModuleNotFoundError(\"No module named 'pyspark'\", name='pyspark')\n")
    path = os.pathsep.join(part for part in (str(tmp_path), os.environ.get("PYTHONPATH", "")) if part)
    (tmp_path / "tables.toml").write_text("[source]\npath = 'data'\n[tables.t]\nstream = 's'\nformat = 'raw'\noutput = 'out'\n")
    done = run("ingest", "tables.toml", cwd=tmp_path, env={"PYTHONPATH": path})
    assert done.returncode != 0
    assert re.fullmatch(r"mqttbroker ingest: .*: pip install 'mqttbroker\[spark\]'.*", one_line(done.stderr))


# --- serve --------------------------------------------------------------------------------------------------------


def test_serve_ends_with_0_on_sigterm_and_on_sigint(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker()
    assert broker.terminate() == 0
    broker.start()
    assert broker._end(signal.SIGINT) == 0


def test_a_port_in_use_is_one_line_and_status_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flags in (["--port", port, "--http-port", "off"], ["--port", "0", "--http-port", port]):
            done = run("serve", *flags, "--data-dir", "data", "--log-level", "error", cwd=tmp_path)
            assert done.returncode == 1
            assert f"127.0.0.1:{port}" in one_line(done.stderr)


def test_a_data_directory_that_cannot_be_made_is_one_line_and_status_1(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flags = ["--port", "0", "--http-port", "off", "--data-dir", "file/data", "--log-level", "error"]
    done = run("serve", *flags, cwd=tmp_path)
    assert done.returncode == 1
    assert "file/data" in one_line(done.stderr)


def test_two_brokers_on_one_data_directory_are_refused(tmp_path: Path, start_broker: Callable[..., BrokerProcess]) -> None:
    start_broker(data_dir=tmp_path / "data")
    flags = ["--port", "0", "--http-port", "off", "--data-dir", "data", "--log-level", "error"]
    done = run("serve", *flags, cwd=tmp_path)
    assert done.returncode == 1
    assert "data" in one_line(done.stderr)


def test_check_config_warns_of_a_memory_limit_below_the_sum_of_its_parts(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("limits.max_memory = '1GiB'\n")
    done = run("check-config", "x.toml", cwd=tmp_path)
    assert (done.returncode, one_line(done.stdout)) == (0, "x.toml: fine")
    assert one_line(done.stderr).startswith("warning: x.toml:1: limits.max_memory: 1,024 MiB is less than all parts")
