"""Commands on a running broker over its HTTP API: what they print and change, and their exit statuses."""

from __future__ import annotations

import http.server
import io
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api_client import ACCESS
from support.broker_process import BrokerProcess
from support.paths import ROOT
from support.patience import PATIENCE
from support.raw_client import RawClient

from mqttbroker import __version__
from mqttbroker.auth.passwords import parse_passwords
from mqttbroker.cli import bench, mqtt_commands, top
from mqttbroker.cli.api_commands import COMMANDS, GROUPS, with_action
from mqttbroker.cli.main import command_parser, main
from mqttbroker.codec.packets import Disconnect

pytestmark = pytest.mark.one_build


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("files")
    (directory / "passwords").write_text("")
    (directory / "rules").write_text("# rules\ntopic readwrite #\n")
    config = {
        "http": {"access": ACCESS, "backup_dir": str(directory / "backups")}, "streams": {"s": {"filters": ["s/#"]}},
        "password_file": str(directory / "passwords"), "acl_file": str(directory / "rules"), "allow_anonymous": True,
    }  # fmt: skip
    with BrokerProcess(config={**config, "alarms": {"disk_free": "1024TiB"}}) as process:
        yield process


@pytest.fixture
def call(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, capsysbinary: Any) -> Callable[..., tuple[int, str, str]]:
    """Runs a command on the broker; returns its exit status, output and errors."""
    monkeypatch.setenv("MQTTBROKER_API_URL", broker.url)
    monkeypatch.setenv("MQTTBROKER_API_TOKEN", "t-admin")

    def run(*words: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            status = main(words)
        except SystemExit as end:
            status = int(str(end.code))
        out, err = capsysbinary.readouterr()
        return status, out.decode(), err.decode()

    return run


Call = Callable[..., tuple[int, str, str]]


def test_clients(call: Call, broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client, RawClient(broker.port) as other:
        client.connect("dev/1 ü")
        other.connect("other")
        client.subscribe("a/#", "b")
        status, out, err = call("clients")
        lines = out.splitlines()
        assert (status, err) == (0, "") and lines[0].split()[:3] == ["CLIENT", "USER", "VERSION"]
        assert lines[1].startswith("dev/1 ü") and "connected" in lines[1] and "5.0" in lines[1]
        assert lines[2].startswith("other ")
        found = json.loads(call("clients", "list", "--json", "--connected", "--sort", "subscriptions", "--desc")[1])
        assert [item["client_id"] for item in found] == ["dev/1 ü", "other"]
        status, out, err = call("clients", "--limit", "1")
        assert len(out.splitlines()) == 2 and err == "mqttbroker clients: there are more: --limit 0 shows all\n"
        assert call("clients", "--away")[1].count("\n") == 1
        detail = call("clients", "show", "dev/1 ü")[1]
        assert "subscriptions        2\n" in detail and "messages_received    0\n" in detail
        rows = call("clients", "subscriptions", "dev/1 ü")[1].splitlines()[1:]
        assert sorted(row.split()[-3] for row in rows) == ["a/#", "b"]
        assert "dev/1 ü" in call("subscriptions", "receivers", "a/7")[1]
        assert "dev/1 ü" in call("subscriptions", "list", "a/#")[1] and call("subscriptions", "list", "a/+")[1].count("\n") == 1
        assert call("clients", "disconnect", "dev/1 ü") == (0, "", "")
        client.expect(Disconnect)
        assert call("clients", "delete", "other") == (0, "", "")
        assert call("clients", "show", "gone") == (1, "", "mqttbroker clients: no session 'gone'\n")


def test_retained_messages(call: Call) -> None:
    assert call("retained", "set", "r/1", "21 °C") == (0, "", "")
    assert call("retained", "set", "r/2", "-", stdin=b"\x00\xff")[0] == 0
    assert call("retained", "get", "r/1") == (0, "21 °C", "")
    lines = call("retained", "list", "r/#")[1].splitlines()
    assert lines[0].split() == ["TOPIC", "QOS", "BYTES", "AGE", "PAYLOAD"] and lines[1].endswith("21 °C")
    assert call("retained", "set", "escaped", "\x1b[31m\n")[0] == 0
    assert call("retained", "list", "escaped")[1].endswith(" \\x1b[31m\\n\n")
    assert json.loads(call("retained", "get", "r/2", "--json")[1])["payload_base64"] == "AP8="
    assert call("retained", "delete", "r/+") == (0, "2 deleted\n", "")
    assert call("retained", "delete", "r/+")[:2] == (1, "0 deleted\n")
    assert call("retained", "get", "r/1")[0] == 1
    assert call("retained", "list", "a/#/b") == (1, "", 'mqttbroker retained: filter: must be a topic filter, got "a/#/b"\n')


def test_users_rules_and_bans(call: Call, broker: BrokerProcess) -> None:
    assert call("users", "add", "bob", stdin=b"first\n") == (0, "", "")
    assert call("users", "add", "bob", stdin=b"second\n")[0] == 1
    assert call("users", "password", "bob", "--scram", stdin=b"second\n") == (0, "", "")
    listed = json.loads(call("users", "--json")[1])
    assert [(item["username"], item["hash"]) for item in listed] == [("bob", "scram-sha-256")]
    passwords = parse_passwords(Path(listed[0]["file"]).read_text(), "")
    assert passwords.verify("bob", b"second") and not passwords.verify("bob", b"first")
    assert call("users", "add", "carol", stdin=b"\n") == (2, "", "mqttbroker users: the password is empty\n")
    assert call("acl", "add", "write", "x/%u", "--pattern") == (0, "", "")
    assert call("acl", "add", "deny", "y", "--user", "bob") == (0, "", "")
    rows = [line.split()[:-1] for line in call("acl")[1].splitlines()[1:]]
    assert rows == [["anonymous", "readwrite", "#"], ["user", "bob", "deny", "y"], ["pattern", "write", "x/%u"]]
    assert call("acl", "remove", "deny", "y", "--user", "bob")[0] == 0
    assert call("acl", "remove", "write", "x/%u", "--pattern")[0] == 0
    assert call("acl", "text")[1].startswith("# rules\ntopic readwrite #\n")
    assert call("users", "delete", "bob")[0] == 0 and call("users", "delete", "bob")[0] == 1
    assert call("bans", "add", "--client", "mallory", "--seconds", "600", "--reason", "noise")[1] == "0 disconnected\n"
    (line,) = call("bans")[1].splitlines()[1:]
    assert line.split()[:2] == ["mallory", "operator"] and line.endswith("noise")
    assert call("bans", "lift", "--client", "mallory")[0] == 0 and call("bans", "lift", "--client", "mallory")[0] == 1
    assert call("bans", "add") == (1, "", "mqttbroker bans: address: a ban needs an address, a username or a client_id\n")


def test_rules_are_edited_and_mistakes_refused(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    before = call("acl", "text")[1]

    def edit(command: str) -> tuple[int, str, str]:
        editor.write_text(f"#!/bin/sh\n{command}\n")
        editor.chmod(0o755)
        monkeypatch.setenv("VISUAL", str(editor))
        return call("acl", "edit")

    assert edit("true")[::2] == (0, "nothing was changed\n")
    assert edit("false")[0] == 1
    status, _, err = edit('echo "topics x" >> "$1"')
    assert status == 1 and 'must begin with "user", "topic" or "pattern"' in err and err.count("\n") == 1
    assert call("acl", "text")[1] == before
    assert edit('echo "topic read more" >> "$1"') == (0, "", "")
    assert call("acl", "text")[1] == before + "topic read more\n"


def test_the_broker_itself(call: Call, broker: BrokerProcess) -> None:
    assert call("status")[1].split()[:2] == ["version", __version__]
    assert json.loads(call("status", "--json")[1])["version"] == __version__
    assert str(broker.port) in call("listeners")[1]
    settings = call("config", "http.backup")[1].splitlines()
    assert settings[1].split() == ["http.backup_dir", *settings[1].split()[1:2], f"{broker.config}:1"]
    assert "default" not in call("config", "--changed")[1]
    status, out, _ = call("log-level", "debug", "--area", "auth", "--seconds", "600")
    assert (status, [line.split()[:2] for line in out.splitlines()]) == (0, [["AREA", "LEVEL"], ["auth", "debug"]])
    levels = {line.split()[0]: line.split()[1:] for line in call("log-level")[1].splitlines()}
    assert levels["AREA"] == ["LEVEL", "LEFT", "CONFIGURED"] and levels["all"] == levels["store"] == ["info", "info"]
    assert levels["auth"] in (["debug", "9m", "info"], ["debug", "10m", "info"])
    assert (
        call("reload") == (0, "no setting has changed\n", "") and json.loads(call("log-level", "--json")[1])["areas"][2]["level"] == "info"
    )
    status, out, _ = call("backup-now", "monday")
    assert status == 0 and (Path(out.partition(": ")[0]) / "backup.json").exists()
    assert call("backup-now", "monday")[0] == 1
    assert [line.split()[:2] for line in call("streams")[1].splitlines()[1:]] == [["s", str(n)] for n in range(4)]


def test_alarms_are_acknowledged(call: Call, broker: BrokerProcess) -> None:
    broker.wait_for_log("event=alarm_raised alarm=disk")
    heading, line = call("alarms")[1].splitlines()
    assert heading.split() == ["ALARM", "SINCE", "ENDED", "ACKNOWLEDGED", "REASON"]
    assert line.startswith("disk ") and "less than" in line
    assert call("alarms", "acknowledge", "disk") == (0, "", "")
    (alarm,) = json.loads(call("alarms", "--json")[1])
    assert (alarm["name"], alarm["acknowledged_by"]) == ("disk", "admin") and alarm["acknowledged_at"] >= alarm["since"]
    assert call("alarms", "list", "--ended")[1].splitlines() == [heading]
    status, _, problem = call("alarms", "acknowledge", "consumer/s/none")
    assert status == 1 and "no alarm 'consumer/s/none' is active" in problem


def test_the_token_decides(call: Call, broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "viewer").write_text("t-viewer\n")
    viewer = ("--token-file", str(tmp_path / "viewer"))
    assert call("clients", *viewer)[0] == 0
    assert call("reload", *viewer) == (4, "", "mqttbroker reload: role admin is needed; viewer has viewer\n")
    assert call("clients", "--token", "wrong")[0] == 4
    assert call("clients", "--token", "x", *viewer)[0] == 2
    assert call("clients", "--token-file", str(tmp_path / "none"))[0] == 2
    monkeypatch.delenv("MQTTBROKER_API_TOKEN")
    monkeypatch.setenv("MQTTBROKER_API_TOKEN_FILE", str(tmp_path / "viewer"))
    assert call("reload")[0] == 4
    monkeypatch.delenv("MQTTBROKER_API_TOKEN_FILE")
    assert call("reload", "--config", str(broker.config))[0] == 0  # the configuration has the token


def test_status_has_a_line_for_each_row_of_a_list(call: Call, broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client, RawClient(broker.port) as wrong:
        client.connect("counted")
        wrong.connect("wrong", username="nobody", password=b"x")
    rows = json.loads(call("status", "--json")[1])["logins"]
    lines = [line.split()[1:] for line in call("status")[1].splitlines() if line.split()[0] == "logins"]
    assert len(rows) > 1 and lines == [[row["authenticator"], row["outcome"], str(row["count"])] for row in rows]


def test_cluster_commands_on_a_single_broker_say_that_it_is_no_node(call: Call, broker: BrokerProcess) -> None:
    for words in ((), ("status",), ("move", "0", "node-2"), ("drain",), ("snapshot",)):
        assert call("cluster", *words) == (1, "", f"mqttbroker cluster: {broker.url} is not a node of a cluster\n")


class Other(http.server.BaseHTTPRequestHandler):
    """A broker of another version: it has only /status."""

    def do_GET(self) -> None:
        known = self.path == "/api/v1/status"
        answer: dict[str, Any] = {"version": "9.9"} if known else {"detail": f"Not Found: GET {self.path}", "status": 404}
        body = json.dumps({"things": []} if "clients" in self.path else answer).encode()
        self.send_response(200 if known or "clients" in self.path else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_broker_that_is_away_or_of_another_version_is_said_in_one_line(call: Call) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        status, out, err = call("bans", "--url", url)
        assert (status, out) == (3, "")
        assert err.startswith(f"mqttbroker bans: {url} is a broker of version 9.9, this command is of {__version__}: ")
        status, out, err = call("clients", "--url", url)
        assert (status, out, err.count("\n")) == (3, "", 1) and f"as a broker of version {__version__} does" in err
        server.shutdown()
    status, out, err = call("clients", "--url", url)
    assert (status, out, err.count("\n")) == (3, "", 1) and "is it running?" in err


@pytest.mark.parametrize("words", [
    ("clients", "show"), ("clients", "bogus"), ("clients", "--limit", "x"), ("clients", "--url", "ftp://h"),
    ("acl", "add", "all", "x"), ("log-level", "loud"), ("clients", "--url", "http://me:secret@h"),
])  # fmt: skip
def test_a_wrong_call_is_one_line_and_status_2(call: Call, words: tuple[str, ...]) -> None:
    status, out, err = call(*words)
    assert (status, out, err.count("\n")) == (2, "", 1) and "secret" not in err


def test_a_reader_that_ends_early_is_no_error(broker: BrokerProcess) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "mqttbroker", "status", "--url", broker.url, "--token", "t-admin"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_each_group_says_its_actions_and_exit_statuses(call: Call) -> None:
    for group in GROUPS:
        status, out, _ = call(group, "--help")
        actions = [command.action for command in COMMANDS if command.group == group]
        assert status == 0 and actions and all(action in out for action in actions) and "exit status: 0 done" in out


@pytest.mark.parametrize(("words", "completed"), [
    (["mqttbroker", "clie"], ["clients"]), (["mqttbroker", "clients", "dis"], ["disconnect"]),
    (["mqttbroker", "clients", "list", "--lim"], ["--limit"]), (["mqttbroker", "log-level", "w"], ["warning"]),
])  # fmt: skip
def test_bash_completes_commands(call: Call, words: list[str], completed: list[str], tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(call("completion", "bash")[1])
    quoted = " ".join(f"'{word}'" for word in words)
    ask = (
        f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; "
        f"$(complete -p mqttbroker | sed 's/.*-F \\([^ ]*\\).*/\\1/') mqttbroker; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert [word.strip() for word in done.stdout.split()] == completed


def test_the_examples_of_the_documentation_can_be_parsed() -> None:
    parsers = {"pub": mqtt_commands.pub_parser, "sub": mqtt_commands.sub_parser, "top": top.top_parser, "bench": bench.bench_parser}
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    calls = [
        shlex.split(call[1], comments=True)
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for call in re.finditer(r"(?:^|\| )mqttbroker (.*)", block, re.MULTILINE)
    ]
    assert len(calls) > 10
    for words in calls:
        if words[0] in parsers:
            parsers[words[0]]().parse_args(words[1:])
        else:
            command_parser().parse_args(with_action(words))
