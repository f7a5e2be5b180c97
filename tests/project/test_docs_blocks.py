"""Each fenced block of README.md, CONTRIBUTING.md and docs/*.md is run or read by a test, or `NOT_RUN` and `PRINTED` say why not.

The commands of the pages in `RUN_HERE` run as printed on a broker of their own, but for `SUBSTITUTED`, ports, and the passwords that they
ask for. A broker that a command starts gets any free ports, and SIGTERM when it listens.
"""

from __future__ import annotations

import asyncio
import configparser
import io
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from project.test_docs_tutorial import PAGE as TUTORIAL
from support.api_client import ACCESS
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.paths import ROOT
from support.raw_client import RawClient
from support.spark_session import python_path
from support.tools import needs

from mqttbroker.auth.plugin import Accepted, Login
from mqttbroker.cli import bench, mqtt_commands, top
from mqttbroker.cli.api_commands import with_action
from mqttbroker.cli.main import command_parser, main
from mqttbroker.config.load import load_settings
from mqttbroker.config.settings import HttpCallback
from mqttbroker.server.config_check import check

pytestmark = pytest.mark.one_build

FENCED = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)

sys.path.append(str(ROOT / "bench"))

import run  # noqa: E402
import scenarios  # noqa: E402

# Pages whose blocks other tests run or check, all of them.
WHOLE_PAGES = {
    "docs/client-examples.md": "test_client_examples.py",
    "docs/spark.md": "test_docs_examples.py",  # each of its commands has an entry there
    "docs/streams.md": "test_docs_streams.py",
    "docs/tutorial.md": "test_docs_tutorial.py",
}
# Other blocks than shell and TOML, by page and language: the test that reads them.
READ_BY = {
    ("README.md", "python"): "test_docs_examples.py",
    ("docs/authentication.md", "json"): "../mqttbroker/auth/test_jwt_broker.py",  # and the last one here
    ("docs/authentication.md", "python"): "test_docs_blocks.py",
    ("docs/install.md", "yaml"): "test_helm_chart.py",  # and test_compose.py
    ("docs/migration-emqx.md", "sh"): "test_site.py",
    ("docs/monitoring.md", "yaml"): "test_docs_blocks.py",
    ("docs/monitoring.md", "ini"): "test_docs_blocks.py",
    ("docs/security.md", ""): "test_docs_blocks.py",
    ("docs/upgrade.md", "sh"): "test_docs_upgrade.py",
}
# Pictures, and what commands print.
PRINTED = {
    ("README.md", ""): "what `make demo` prints, and the parts of the broker",
    ("docs/architecture.md", ""): "the parts of the broker",
    ("docs/bridges.md", ""): "the parts of a bridge",
    ("docs/cluster.md", ""): "the parts of a cluster",
    ("docs/commands.md", ""): "what `mqttbroker bench` and `mqttbroker doctor` print",
    ("docs/upgrade.md", ""): "the line of a refusal",
    ("docs/http.md", ""): "what `mqttbroker consumers` prints",
    ("docs/spark-issue-filter-pushdown.md", "python"): "a defect of Spark, which test_datasource.py shows with our source",
}
RUN_HERE = (
    "README.md", "docs/authentication.md", "docs/commands.md", "docs/configuration.md", "docs/durability.md", "docs/http.md",
    "docs/install.md", "docs/migration.md", "docs/monitoring.md", "docs/troubleshooting.md",
)  # fmt: skip
SHELL_PAGES = (*RUN_HERE, "CONTRIBUTING.md", "docs/cluster.md", "docs/performance.md", "docs/sizing.md")

# Commands that do not run here, by their beginning: the reason, or the test that runs them.
NOT_RUN = {
    "make demo": "test_demo.py runs the program; a fresh clone is tried by hand before a release",
    "make test": "this test is a part of it",
    "make build": "make test begins with it",
    "make check": "a part of make test",
    "make run": "test_cli.py loads its configuration",
    "make bench": "takes 15 minutes; test_bench.py runs each scenario with a small load",
    "PYTHONPATH=$PWD EXPECT_BUILD=plain .venv/bin/pytest": "make test-plain runs pytest in the same way",
    "git worktree add": "builds a second checkout",
    "printf '#!/bin/sh": "a peer for the comparison with a second checkout",
    "chmod +x before.sh": "the same",
    "mqttbroker alarms acknowledge": "needs an alarm; test_api_commands.py",
    "mqttbroker cluster": "needs a cluster; test_nodes.py",
    "mqttbroker serve --config node-": "needs Kafka; test_nodes.py",
    "mqttbroker import-store": "needs Kafka; ../mqttbroker/cluster/transfer/test_store_import.py",
    "mqttbroker export-store": "needs Kafka; ../cluster/test_there_and_back.py",
    "python3 -m venv /opt/mqttbroker": "../packages/test_wheel.py",
    "/opt/mqttbroker/bin/": "../packages/test_wheel.py",
    "pip install 'mqttbroker[cluster]'": "test_packaging.py has the extras",
    "mqttbroker top": "needs a terminal; test_top.py",
    "mqttbroker sub -h broker": "the same options run in test_mqtt_commands.py",
    "mqttbroker pub -h broker": "the same options run in test_mqtt_commands.py",
    "mqttbroker bench -h broker": "takes a minute; the same options run in test_bench_command.py",
    "generate |": "a program of the reader; -l runs in test_mqtt_commands.py",
    "mosquitto_sub -h broker": "needs an issuer; a client has such a token in test_jwt_broker.py",
    "docker ": "there is no Docker engine here; test_image.py and test_compose.py run the steps and commands of the images",
    "python bench/": "scripts of minutes that print figures of the machine",
    ".venv/bin/mqttbroker serve --log-level": "the broker to look at with the profilers",
    "bench/mqtt_load": "load for the profilers; test_bench.py runs the generator",
    "perf ": "perf needs rights that a test has not",
    "py-spy ": "a profiler that the project does not install",
}
SUBSTITUTED = {
    "README.md": {
        ".venv/bin/": "", "sub -t 'plant/#' -v": "sub -p $PORT -t 'plant/#' -v -C 1 -W 20",
        "mosquitto_sub -V 5 -t": "mosquitto_sub -p $PORT -C 1 -W 20 -V 5 -t",
        "mosquitto_sub -t": "mosquitto_sub -p $PORT -C 1 -W 20 -t",
        "mosquitto_sub -V 5 -q 1": "mosquitto_sub -p $PORT -E -V 5 -q 1",
    },
    "docs/authentication.md": {},
    "docs/commands.md": {"https://broker:18083": "$MQTTBROKER_API_URL", "/run/secrets/admin": "$PWD/token"},
    "docs/configuration.md": {"FILE": "conf/mqttbroker.toml"},
    "docs/durability.md": {
        "/backup": "$PWD/backup", "/var/lib/mqttbroker": "$PWD/restored", "repair-store data": "repair-store stopped",
    },
    "docs/http.md": {"http://127.0.0.1:18083": "$MQTTBROKER_API_URL", "/run/secrets/admin": "$PWD/token"},
    "docs/install.md": {"helm install": "helm template"},
    "docs/migration.md": {
        "/etc/mosquitto": "$PWD", "/srv/mqttbroker": "$PWD/srv", "/etc/mqttbroker": "$PWD/etc",
        "/var/lib/mqttbroker": "$PWD/restored", "chown -R mqttbroker:": "chown -R $(id -un):",
    },
    "docs/monitoring.md": {
        "trace --client dev-7": "trace --client dev-7 --seconds 1", "--seconds 600 --write": "--seconds 1 --write",
        "--write - | wireshark -k -i -": "--seconds 1 --write - | cat >capture",
    },
    "docs/troubleshooting.md": {"/etc/mqttbroker/mqttbroker.toml": "conf/mqttbroker.toml"},
}  # fmt: skip
# `curl` and `mqttbroker` of the shell: an HTTP status of 400 or above is a failure.
PRELUDE = """
curl() { command curl -fsS -o answer "$@"; }
api=$MQTTBROKER_API_URL/api/v1
auth="Authorization: Bearer $(cat token)"
mqttbroker() {
  case "$*" in
    serve*--print-config*) "$PYTHON" -P -m mqttbroker "$@" ;;
    serve*)
      "$PYTHON" -P -m mqttbroker "$@" --port 0 --http-port 0 >served 2>&1 &
      until grep -q event=listening served; do kill -0 $!; sleep 0.02; done
      kill -TERM $!
      wait $! ;;
    *) "$PYTHON" -P -m mqttbroker "$@" ;;
  esac
}
"""
# The database of a Mosquitto 2.0 without clients.
MOSQUITTO_DATABASE = "ALUAbW9zcXVpdHRvIGRiAAAAAAAAAAYAAAABAAAAEDQAAAAAAAAAAQgAAAAAAAA="
OPERATORS = {"|", ">", "<", "&", "&&", ";"}
PREPARED = {
    "docs/durability.md": ["mqttbroker serve --data-dir stopped"],
    "docs/migration.md": [
        f"echo {MOSQUITTO_DATABASE} | base64 -d >mosquitto.db",
        'printf "persistence true\npersistence_location $PWD/\n" >mosquitto.conf',
    ],
}
WITHOUT_BROKER = ("docs/install.md", "docs/migration.md")


class Block(NamedTuple):
    """A fenced block; ``line`` is its first line, ``language`` "" if the fence names none."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, at.start()) + 2, at[1], at[2]) for at in FENCED.finditer(text)]


PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
TOML = [block for page in PAGES if page not in WHOLE_PAGES for block in blocks(page) if block.language == "toml"]


def commands(page: str) -> list[str]:
    """The lines of the page's shell blocks; continued lines are one."""
    code = "".join(block.code for block in blocks(page) if block.language == "sh")
    return [line for line in re.sub(r"\\\n\s*", "", code).splitlines() if line.strip()]


def reason(line: str) -> str | None:
    """Why this command is not run here."""
    return next((begin for begin in NOT_RUN if line.removeprefix(".venv/bin/").startswith(begin) or line.startswith(begin)), None)


def test_each_block_has_a_test_or_a_reason() -> None:
    assert TUTORIAL == ROOT / "docs" / "tutorial.md"
    for page in PAGES:
        found = {block.language for block in blocks(page)}
        if page in WHOLE_PAGES:
            test = ROOT / "tests" / "project" / WHOLE_PAGES[page]
            assert Path(page).name in test.read_text(encoding="utf-8"), f"{test} does not read {page}"
            continue
        for language in found - {"toml"}:
            assert (page, language) in READ_BY or (page, language) in PRINTED or (language == "sh" and page in SHELL_PAGES), (
                f"{page}: no test uses its blocks of the language {language!r}"
            )
    for page, language in [*READ_BY, *PRINTED]:
        assert language in {block.language for block in blocks(page)}, f"{page} has no block of the language {language!r} any more"
    for (page, language), name in READ_BY.items():
        test = ROOT / "tests" / "project" / name
        assert Path(page).stem in test.read_text(encoding="utf-8"), f"{test} does not read {page}"


def test_each_reason_is_that_of_a_command() -> None:
    used = {reason(line) for page in SHELL_PAGES for line in commands(page)}
    assert used == {None, *NOT_RUN}
    assert not [line for page in set(SHELL_PAGES) - set(RUN_HERE) for line in commands(page) if reason(line) is None]


@pytest.mark.parametrize("block", TOML, ids=str)
def test_toml_is_a_configuration(block: Block, tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    for name in ("clients-ca.pem", "auth-ca.pem"):
        (tmp_path / name).write_bytes(files.cafile.read_bytes())
    for name, file in (("node.pem", files.certfile), ("node.key", files.keyfile)):
        (tmp_path / name).write_bytes(file.read_bytes())
    (tmp_path / "callback").write_text("Bearer 9f86d081884c7d65")
    with sqlite3.connect(tmp_path / "devices.db") as database:
        database.execute("CREATE TABLE devices (name, salt, hash, blocked)")
    for number, name in enumerate(("grafana", "spark", "cloud-password", "http-token")):
        (tmp_path / name).write_text(f"{number}" * 32)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "users.txt").write_text("")
    (tmp_path / "rules.acl").write_text("topic read public/#\n")
    text = block.code.replace("/etc/mqttbroker/plugins", str(ROOT / "docs" / "examples" / "plugin"))
    text = re.sub(r"/(?:etc/mqttbroker|run/secrets|run/mqttbroker|var/lib)/", f"{tmp_path}/", text)
    text = re.sub(r'"(users\.txt|rules\.acl)"', rf'"{tmp_path}/\1"', text)
    if 'streams = ["sensors"]' in text:
        text += '[streams.sensors]\nfilters = ["sensors/#"]\n'
    text = re.sub(r"^data_dir = .*\n", "", text)
    path = tmp_path / "broker.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\n{text}', encoding="utf-8")
    assert check(load_settings(path)) == []


def test_the_rules_of_the_page_are_an_acl_file(tmp_path: Path) -> None:
    (rules,) = [block.code for block in blocks("docs/security.md") if not block.language]
    path = tmp_path / "rules.acl"
    path.write_text(rules, encoding="utf-8")
    config = tmp_path / "broker.toml"
    config.write_text(f'data_dir = "{tmp_path}/data"\nacl_file = "{path}"\n', encoding="utf-8")
    assert check(load_settings(config)) == []
    path.write_text(rules.replace("topic deny", "topic forbid"), encoding="utf-8")
    assert len(check(load_settings(config))) == 1


def test_the_request_of_the_callback_has_its_keys() -> None:
    *_, request = [block.code for block in blocks("docs/authentication.md") if block.language == "json"]
    assert json.loads(request).keys() == dict(HttpCallback().body).keys()


def test_the_plug_in_of_the_page_accepts_a_login() -> None:
    (code,) = [block.code for block in blocks("docs/authentication.md") if block.language == "python"]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/authentication.md", "exec"), names)
    login = Login("press-7", "alice", b"secret", "192.0.2.1", "*:1883", None, 5)
    assert asyncio.run(names["Devices"]("devices.db").authenticate(login)) == Accepted(acl={"all": ["devices/alice/#"]})


def test_the_files_for_prometheus_and_fail2ban_are_shipped() -> None:
    (scrape,) = [block.code for block in blocks("docs/monitoring.md") if block.language == "yaml"]
    assert [(ROOT / "conf" / "prometheus" / name).is_file() for name in yaml.safe_load(scrape)["rule_files"]] == [True]
    (jail,) = [block.code for block in blocks("docs/monitoring.md") if block.language == "ini"]
    parser = configparser.ConfigParser()
    parser.read_string(jail)
    assert [(ROOT / "conf" / "fail2ban" / f"{name}.conf").is_file() for name in parser.sections()] == [True]


@needs("curl", "mosquitto-clients")
@pytest.mark.parametrize("page", RUN_HERE)
def test_commands_run_as_printed(
    page: str, tmp_path: Path, start_broker: Callable[..., BrokerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = ExitStack()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    (tmp_path / "backup").mkdir()
    for name, text in {"token": "t-admin", "passwords": "", "rules": "topic readwrite #\n", "mqttbroker.toml": ""}.items():
        (tmp_path / name).write_text(text)
    variables = {
        "PWD": str(tmp_path), "PYTHON": sys.executable, "PYTHONPATH": python_path(), "MQTTBROKER_API_URL": "", "PORT": "",
        "MQTTBROKER_API_TOKEN_FILE": str(tmp_path / "token"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    if page not in WITHOUT_BROKER:
        config = {
            "http": {"access": ACCESS, "backup_dir": str(tmp_path / "backups")}, "password_file": str(tmp_path / "passwords"),
            "acl_file": str(tmp_path / "rules"), "allow_anonymous": True, "streams": {"sensors": {"filters": ["sensors/#"]}},
        }  # fmt: skip
        broker = start_broker(data_dir=tmp_path / "data", config=config)
        variables.update(MQTTBROKER_API_URL=broker.url, PORT=str(broker.port))
        device = stack.enter_context(RawClient(broker.port))
        device.connect("dev-7")
        device.publish("plant/1/temperature", b"21.5", 1, retain=True)
        device.publish("sensors/1", b"21.5", 1)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    waiting: list[str] = []  # for a shell
    lines = [*PREPARED.get(page, ()), *substituted(page)]
    for line in lines:
        words = shlex.split(os.path.expandvars(line), comments=True)
        if words[0] == "mqttbroker" and words[1] not in ("serve", "sub") and OPERATORS.isdisjoint(words):
            run_shell(waiting)
            run_here(words[1:], monkeypatch)
        else:
            waiting.append(line)
            if words[0] == "export":
                for name, _, value in (word.partition("=") for word in words[1:]):
                    monkeypatch.setenv(name, value)
    run_shell(waiting)
    stack.close()


def substituted(page: str) -> list[str]:
    """The commands of a page that run, with the values of a test."""
    text = "\n".join(line for line in commands(page) if reason(line) is None)
    for printed, here in SUBSTITUTED[page].items():
        assert printed in text, f"{page} has no {printed!r} any more"
        text = text.replace(printed, here)
    return text.splitlines()


def run_here(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command without the start of an interpreter, as a test that runs forty would take long."""
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"secret\n")))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, "utf-8", write_through=True))
    assert main(words) == 0, (words, output)


def run_shell(lines: list[str]) -> None:
    """Run the commands that wait for a shell; there are none afterwards."""
    if lines:
        text = "\n".join([PRELUDE, "set -x", *lines])
        lines.clear()
        done = subprocess.run(
            ["bash", "-e", "-u", "-o", "pipefail", "-c", text], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=50
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", SHELL_PAGES)
def test_commands_that_are_not_run_exist(page: str) -> None:
    parsers = {"pub": mqtt_commands.pub_parser, "sub": mqtt_commands.sub_parser, "top": top.top_parser, "bench": bench.bench_parser}
    targets = re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)[0].split()
    for line in commands(page):
        if reason(line) is None:
            continue
        subprocess.run(["bash", "-n", "-c", line], check=True)
        for call in re.findall(r"(?:^|\| |/)mqttbroker (.*)", line):
            words = shlex.split(re.sub(r"&.*", "", call), comments=True)
            if words[0] in parsers:
                parsers[words[0]]().parse_args(words[1:])
            else:
                command_parser().parse_args(with_action(words))
        for target in re.findall(r"(?:^|&& )make(?: -C \S+)? (\w+)", line):
            assert target in targets, line
        variables = dict(word.split("=", 1) for word in shlex.split(line, comments=True) if "=" in word)
        if line.startswith("make bench"):
            if (names := variables.get("SCENARIOS", "all")) != "spark":
                assert scenarios.chosen(names)
            run.parse(variables.get("BENCH_ARGS", "").split())
        for path in re.findall(r"(?:^python |pytest )(\S+\.py)", line):
            options = re.findall(r"(--[a-z-]+)", line.partition("#")[0])
            assert all(f'"{option}"' in (ROOT / path).read_text(encoding="utf-8") for option in options), line
