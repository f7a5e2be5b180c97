"""check-config beyond values: files, the data directory, and whether anybody can log in."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess, to_toml
from support.certificates import CertificateFiles
from support.command_line import one_line, run
from support.raw_client import RawClient

from mqttbroker.admin.data.repair import DATABASE

TLS = '[[listeners]]\ntype = "tls"\nport = 0\ncertfile = "{directory}/server.pem"\nkeyfile = "{directory}/server.key"\n'

PROBLEMS = [
    (TLS, r"listeners\.0: certfile .*server\.pem: No such file"),
    ('http.certfile = "{directory}/none.pem"\nhttp.keyfile = "{directory}/none.key"', r"http: certfile .*none\.pem: No such file"),
    ('http.token_file = "{directory}/token"', r"http\.token_file: .*/token: No such file"),
    ('data_dir = "{directory}/file/data"', r"data_dir: .*/file is not a directory"),
    ("allow_anonymous = false", r"listeners\.0: no client can connect: allow_anonymous is false"),
    ('http.host = "0.0.0.0"', r"http\.token: is required, or token_file, or \[\[http\.access\]\], when the server can be reached at 0\.0\.0\.0"),
    ('http.host = ""', r"http\.token: is required, or token_file, or \[\[http\.access\]\], when the server can be reached at every address"),
    ('[[http.access]]\nname = "a"\nrole = "viewer"\ntoken_file = "{directory}/none"',
     r"http\.access\.0\.token_file: .*none: No such file"),
    ('http.access = [{{name = "a b", role = "viewer", token = "x"}}]', r"http\.access\.0\.name: must be the name of"),
    ('http.access = 5', r"http\.access: must be \[\[http\.access\]\] tables"),
    ('http.token = "a"\nhttp.token_file = "{directory}/file"', r"http\.token_file: token is set, too"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "problem"), PROBLEMS)
def test_problem_is_one_line_with_file_and_key(tmp_path: Path, config: str, problem: str) -> None:
    (tmp_path / "file").write_text("x")
    path = tmp_path / "broker.toml"
    path.write_text(config.format(directory=tmp_path))
    done = run("check-config", str(path), cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(problem, one_line(done.stderr)) and "broker.toml" in done.stderr


def used_by_a_broker(directory: Path) -> None:
    config = directory / "first.toml"
    config.write_text('[streams.s]\nfilters = ["s/#"]\n')
    with BrokerProcess(directory / "data", config.read_text()) as broker:
        with RawClient(broker.port) as client:
            client.connect("c")
            client.publish("kept", b"x", 1, True)
        broker.kill()  # so that there is a commit log


def newer_database(directory: Path) -> None:
    with closing(sqlite3.connect(directory / "data" / DATABASE)) as database:
        database.execute("PRAGMA user_version = 1000")


def other_database(directory: Path) -> None:
    with closing(sqlite3.connect(directory / "data" / DATABASE)) as database:
        database.execute("PRAGMA application_id = 7")


def without_database(directory: Path) -> None:
    for path in (directory / "data").glob(f"{DATABASE}*"):
        path.unlink()


def description(directory: Path, **changes: Any) -> None:
    path = directory / "data/streams/s/stream.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def created_with_a_mistake(directory: Path) -> None:
    path = directory / "data/streams/made/stream.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"format_version": 1, "partitions": 1, "definition": {"filters": ["#/a"]}}))


STREAM = '[streams.s]\nfilters = ["s/#"]\n'
STORED: list[tuple[str, Callable[[Path], object], str]] = [
    (STREAM + "partitions = 2\n", lambda directory: None,
     r"broker\.toml:4: streams\.s\.partitions: has 4 partitions and cannot get 2, as keys would move: set partitions = 4, or .*"),
    (STREAM, lambda directory: description(directory, partitions=3), r"broker\.toml:3: streams\.s\.partitions: has 3 partitions and .*"),
    (STREAM, lambda directory: description(directory, format_version=99), r"broker\.toml:3: streams\.s: .*stream\.json: format 99, but .*"),
    ("", newer_database, r"broker\.toml:1: data_dir: .*mqttbroker\.db: schema version 1000 is newer than this program's \d+; .*"),
    ("", other_database, r"broker\.toml:1: data_dir: .*mqttbroker\.db: not a database of this broker"),
    ("", created_with_a_mistake, r"broker\.toml:1: data_dir: .*made/stream\.json: .*"),
    ("", without_database, r"broker\.toml:1: data_dir: .*: is missing, but its commit log is there; .*"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "change", "problem"), STORED)
def test_what_the_start_refuses_in_the_data_directory_is_a_problem(
    tmp_path: Path, config: str, change: Callable[[Path], object], problem: str
) -> None:
    used_by_a_broker(tmp_path)
    (tmp_path / "broker.toml").write_text(f'data_dir = "{tmp_path / "data"}"\n{config}')
    assert run("check-config", "broker.toml", cwd=tmp_path).returncode == 0 or "partitions = 2" in config
    change(tmp_path)
    done = run("check-config", "broker.toml", cwd=tmp_path)
    assert done.returncode == 2 and re.fullmatch(problem, one_line(done.stderr)), done.stderr
    done = run("serve", "--config", "broker.toml", "--port", "0", "--http-port", "off", cwd=tmp_path)
    assert done.returncode in (1, 2)  # or the check finds too much


VARIABLES = [
    ("LIMITS__MAX_INFLIGHT", "0", r"limits\.max_inflight: must be 1–65535, got 0"),
    ("LIMITS__MAX_INFLIGTH", "5", r"limits\.max_infligth: unknown key, did you mean max_inflight\?"),
    ("DATA_DIR", "{directory}/file/data", r"data_dir: .*/file is not a directory"),
    ("PASSWORD_FILE", "{directory}/none", r"password_file: .*/none: cannot be read: No such file or directory"),
    ("ALLOW_ANONYMOUS", "false", r"listeners\.0: no client can connect: allow_anonymous is false.*"),
    ("HTTP__TOKEN_FILE", "{directory}/none", r"http\.token_file: .*/none: No such file or directory"),
]


@pytest.mark.parametrize(("variable", "value", "problem"), VARIABLES)
def test_variables_count_as_for_serve(tmp_path: Path, variable: str, value: str, problem: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "broker.toml").write_text("")
    environment = {f"MQTTBROKER_{variable}": value.format(directory=tmp_path)}
    done = run("check-config", "broker.toml", cwd=tmp_path, env=environment)
    assert done.returncode == 2
    assert re.fullmatch(rf"MQTTBROKER_{variable}: {problem}", one_line(done.stderr))


def test_problem_of_the_file_names_the_file_beside_variables(tmp_path: Path) -> None:
    (tmp_path / "broker.toml").write_text(f'password_file = "{tmp_path}/none"\n')
    done = run("check-config", "broker.toml", cwd=tmp_path, env={"MQTTBROKER_LOG__LEVEL": "debug"})
    assert done.returncode == 2 and one_line(done.stderr).startswith("broker.toml:1: password_file: ")


def test_variable_mends_the_file(tmp_path: Path) -> None:
    (tmp_path / "broker.toml").write_text("allow_anonymous = false\n")
    done = run("check-config", "broker.toml", cwd=tmp_path, env={"MQTTBROKER_ALLOW_ANONYMOUS": "true"})
    assert done.returncode == 0 and one_line(done.stdout) == "broker.toml with MQTTBROKER_ALLOW_ANONYMOUS: fine"


WARNINGS = [
    ({"http": {"host": "", "token": "t"}}, r"http\.certfile: .*tokens can be read on the network"),
    ({"http_callback": {"url": "http://192.0.2.1/mqtt"}}, r"http_callback\.url: .*passwords can be read on the network"),
    ({"listeners": [{"host": "0.0.0.0", "port": 0}], "password_file": "users"},
     r'listeners\.0: type "tcp" .*passwords can be read on the network'),
    ({"listeners": [{"host": "127.0.0.1", "port": 0}, {"type": "ws", "host": "", "port": 0, "password_file": "users"}]},
     r'listeners\.1: type "ws" .*passwords can be read on the network'),
]  # fmt: skip


@pytest.mark.parametrize(("config", "warning"), WARNINGS)
def test_secrets_without_tls_are_a_warning(
    start_broker: Callable[..., BrokerProcess], tmp_path: Path, config: dict[str, Any], warning: str
) -> None:
    (tmp_path / "users").write_text("")
    config = {key: str(tmp_path / value) if value == "users" else value for key, value in config.items()}
    for listener in config.get("listeners", []):
        if "password_file" in listener:
            listener["password_file"] = str(tmp_path / "users")
    file = tmp_path / "broker.toml"
    file.write_text(to_toml(config))
    done = run("check-config", str(file), cwd=tmp_path)
    assert done.returncode == 0 and re.fullmatch(rf"warning: {file}(:\d+)?: {warning}", one_line(done.stderr))
    broker = start_broker(config=config)
    broker.wait_for_log("event=started")
    lines = [line for line in broker.log.splitlines() if "event=configuration_warning" in line]
    assert len(lines) == 1 and re.search(warning.replace('"', r'\\"'), lines[0])


@pytest.mark.parametrize("config", [
    {"listeners": [{"host": "0.0.0.0", "port": 0}]},  # no client sends a password
    {"listeners": [{"host": "localhost", "port": 0}], "password_file": "/dev/null"},
    {"listeners": [{"host": "::1", "port": 0}], "password_file": "/dev/null"},
    {"listeners": [{"host": "", "port": 0, "proxy_protocol": True}], "password_file": "/dev/null"},
    {"listeners": [{"type": "unix", "path": "s"}], "password_file": "/dev/null"},
    {"http_callback": {"url": "http://[::1]:8080/"}},
    {"http_callback": {"url": "http://localhost/"}},
    {"http_callback": {"url": "https://192.0.2.1/"}},
])  # fmt: skip
def test_no_warning_where_nothing_secret_is_sent_in_clear(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "broker.toml").write_text(to_toml(config))
    done = run("check-config", "broker.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stream_that_may_be_created_later_is_a_warning(tmp_path: Path) -> None:
    access = [{"name": "a", "role": "reader", "token": "t", "streams": ["*", "plant", "made", "none"]}]
    config = {"data_dir": "data", "streams": {"plant": {"filters": ["plant/#"]}}, "http": {"access": access}}
    (tmp_path / "broker.toml").write_text(to_toml(config))
    (tmp_path / "data" / "streams" / "made").mkdir(parents=True)
    (tmp_path / "data" / "streams" / "made" / "stream.json").write_text('{"format_version": 1, "partitions": 1}')
    done = run("check-config", "broker.toml", cwd=tmp_path)
    assert done.returncode == 0
    assert re.fullmatch(r"warning: broker.toml(:\d+)?: http.access.0.streams: there is no stream 'none' yet", one_line(done.stderr))


def test_websockets_in_the_place_of_the_default_listener_are_a_warning(tmp_path: Path) -> None:
    only = '[[listeners]]\ntype = "ws"\nport = 8083\n'
    both = "[[listeners]]\nport = 0\n" + only
    for text, pattern in ((only, r"warning: broker\.toml:2: listeners\.0\.type: all listeners are WebSockets, .* 127\.0\.0\.1:1883 .*\n"),
                          (both, "")):  # fmt: skip
        (tmp_path / "broker.toml").write_text(text)
        done = run("check-config", "broker.toml", cwd=tmp_path)
        assert done.returncode == 0 and re.fullmatch(pattern, done.stderr), done.stderr


def test_complete_configuration_is_fine(tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "broker.toml").write_text(
        f'[http]\nhost = ""\ntoken_file = "{tmp_path}/token"\ncertfile = "{files.certfile}"\n'
        f'keyfile = "{files.keyfile}"\n[[listeners]]\ntype = "tls"\nport = 0\n'
        f'certfile = "{files.certfile}"\nkeyfile = "{files.keyfile}"\n'
    )
    done = run("check-config", "broker.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


WITHOUT_PYARROW = """
import sys
sys.modules["pyarrow"] = None  # as where it is not installed
from mqttbroker.cli.main import main
sys.exit(main())
"""


def test_streams_without_pyarrow_are_named(tmp_path: Path) -> None:
    program = tmp_path / "without_pyarrow.py"
    program.write_text(WITHOUT_PYARROW)
    streams = {"a": {"filters": ["a/#"]}, "b": {"filters": ["b/#"]}, "plain": {"filters": ["c/#"], "seal": False}}
    text = r"streams\.a\.seal: pyarrow is not installed, so no segment of a, b becomes Parquet.*mqttbroker\[parquet\]"
    (tmp_path / "broker.toml").write_text(to_toml({"streams": streams}))
    for command, line in (
        (["check-config", "broker.toml"], rf"warning: broker\.toml:\d+: {text}"),
        (["doctor", "--config", "broker.toml"], text),
    ):
        done = subprocess.run([sys.executable, program, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert len(re.findall(line, done.stdout + done.stderr)) == 1, done.stdout + done.stderr
        assert not re.search("pyarrow", run(*command, cwd=tmp_path).stderr)
    warning = rf'event=configuration_warning reason="[^ ]*broker\.toml:\d+: {text}'
    with BrokerProcess(tmp_path / "data", {"streams": streams, "http": {"token": "t"}}, program=[str(program)]) as broker:
        broker.wait_for_log(warning)
        post = urllib.request.Request(
            f"{broker.url}/api/v1/streams", json.dumps({"name": "made", "filters": ["d/#"]}).encode(),
            {"Authorization": "Bearer t", "Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(post):
            pass
        made = r"configuration_warning reason=\"?streams\.made\.seal: pyarrow"
        broker.wait_for_log(made)
        broker.restart()
        assert len([line for line in broker.lines if re.search(made, line)]) == 2
