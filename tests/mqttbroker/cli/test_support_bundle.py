"""``mqttbroker support-bundle``: what is in it, what could not be had, and that no secret and no payload is in it."""

from __future__ import annotations

import json
import re
import resource
import stat
import subprocess
import sys
import tarfile
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from support.broker_process import BrokerProcess
from support.command_line import one_line, run
from support.known_secrets import KEYS, MARK, PASSWORD, SecretConfig
from support.patience import PATIENCE
from support.raw_client import RawClient

from mqttbroker.cli import support_bundle
from mqttbroker.cli.log_excerpt import events
from mqttbroker.cli.main import main
from mqttbroker.cli.redaction import Redactor, secrets_in_environment, secrets_in_tree
from mqttbroker.config.in_force import MASK

pytestmark = pytest.mark.one_build

PAYLOAD = f"{MARK}-payload"
ALWAYS = {
    "version.json",
    "machine.json",
    "limits.json",
    "configuration.toml",
    "doctor.json",
    "data-directory.json",
    "missing.txt",
    "README.txt",
}
RUNNING = {
    "processes.json", "api/readyz.json", "api/status.json", "api/alarms.json", "api/listeners.json", "api/bridges.json",
    "api/streams.json", "api/configuration.json", "api/log-level.json", "api/metrics.txt", "api/sys.txt",
}  # fmt: skip
TIME = "2026-01-01T00:00:00.000Z"


def unpacked(output: Path) -> dict[str, str]:
    """The texts of a bundle by name, without the directory that all are in."""
    with tarfile.open(output) as archive:
        members = archive.getmembers()
        assert all(member.isfile() and member.mode == 0o600 for member in members)
        folders = {member.name.partition("/")[0] for member in members}
        assert len(folders) == 1 and folders.pop().startswith("mqttbroker-support-")
        return {member.name.partition("/")[2]: archive.extractfile(member).read().decode() for member in members}  # type: ignore[union-attr]


def bundle(tmp_path: Path, *words: str, env: dict[str, str] | None = None) -> dict[str, str]:
    output = tmp_path / "bundle.tar.gz"
    output.unlink(missing_ok=True)
    done = run("support-bundle", "-o", str(output), *words, cwd=tmp_path, env=env)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    texts = unpacked(output)
    for name in texts:
        assert re.search(rf"^{re.escape(name)} +\d+$", done.stdout, re.M), name
    assert done.stdout.splitlines()[-1].startswith(f"{output}, {output.stat().st_size} bytes.")
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    texts["what was printed"] = done.stdout
    return texts


def has_none(texts: dict[str, str], secrets: list[str]) -> None:
    for name, text in texts.items():
        for secret in secrets:
            for form in (secret, b64encode(secret.encode()).decode().rstrip("=")):
                assert form not in text, f"{name} has {form!r}: {text[max(0, text.index(form) - 200) :][:400]}"


def log_lines(key: str, token: str) -> str:
    """Lines that the broker would not write, and such as another program or a library does."""
    trace = f'Traceback (most recent call last):\n      File "x.py", line 7, in handle\n        check("{MARK}-source")\n    ValueError: {PAYLOAD}'
    stack = "\\n".join(part.strip() for part in trace.split("\n")).replace('"', '\\"')
    return "\n".join((
        f'{TIME} info event=refused client=c1 reason="password={MARK}-log, secret: {MARK}-other"',
        f'{TIME} warning event=bridge_down reason="mqtts://north:{MARK}/url@127.0.0.1:9 and http://h/?a={MARK}-query"',
        f'{TIME} warning event=callback reason="Authorization: Bearer {MARK}-bearer" text="Basic {MARK}-basic"',
        f'{TIME} warning event=callback reason="{{\\"password\\": \\"{MARK}-json\\"}}" token={token}',
        f"{TIME} error event=defect\n    {trace}",
        f"{TIME} info a library says {PAYLOAD}", PAYLOAD, key,
        f'{{"time": "{TIME}", "level": "error", "event": "json_defect", "token": "{MARK}-field", "exception": "{stack}"}}',
        f'{{"time": "{TIME}", "level": "info", "message": "{PAYLOAD}"}}', f'{{"{MARK}', "",
    ))  # fmt: skip


def test_no_text_has_a_secret_or_a_payload(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    config = SecretConfig(tmp_path)
    log = tmp_path / "broker.log"
    config.tables["log"] |= {"to": ["stderr", "file"], "file": str(log)}
    config.tables["bridges"][0] |= {"addresses": ["mqtt://127.0.0.1:9"]}
    environment = {
        "AWS_SECRET_ACCESS_KEY": f"{MARK}-aws", "DATABASE_URL": f"postgres://me:{MARK}-database@127.0.0.1/x", "SOME_TOKEN": "unmarked-token",
        "MQTTBROKER_HTTP__TOKEN": f"{MARK}-variable",
    }  # fmt: skip
    broker = start_broker(config=config.tables, env=environment)
    token = jwt.encode({"sub": "pump", "exp": 9_999_999_999, "jti": MARK}, KEYS["jwt.secret"])
    with RawClient(broker.port) as client, RawClient(broker.port) as other, RawClient(broker.port) as pump:
        client.connect("c", username="alice", password=PASSWORD.encode(), clean_start=False)
        client.subscribe("a/#", options=1)
        client.publish("a/b", PAYLOAD.encode(), qos=1, retain=True)
        assert other.connect("g", username="alice", password=f"{MARK}-guess".encode()).reason_code == 0x86
        assert pump.connect("p", username="pump", password=token.encode()).reason_code == 0
    broker.wait_for_log("event=disconnected client=p ")
    key = Path(config.tables["listeners"][-1]["keyfile"]).read_text()
    # Values of the configuration, its files and the environment, where nothing else shows that they are secret.
    known = [
        *(value for name, value in KEYS.items() if name != "cluster.sasl_password"),
        *config.secrets,
        f"{MARK}-aws",
        f"{MARK}-database",
        "unmarked-token",
        f"{MARK}-variable",
        f"{MARK}-query",
    ]
    with open(log, "a", encoding="utf-8") as file:
        file.write("".join(f"{TIME} info event=told words={value.split()[-1]}\n" for value in known) + log_lines(key, token))
    (tmp_path / "the-token").write_text(f"{MARK}-variable")

    secrets = [MARK, *config.secrets, token, "unmarked-token"]
    words = ("--config", str(broker.config), "--data-dir", str(broker.data_dir), "--url", broker.url)
    for more in ((), ("--anonymize",), ("--token-file", str(tmp_path / "the-token"))):
        texts = bundle(tmp_path, *words, *more, env=environment)
        assert set(texts) == ALWAYS | RUNNING | {"log.txt", "audit.txt", "what was printed"}, texts["missing.txt"]
        has_none(texts, secrets)
        assert texts["missing.txt"] == "nothing\n"
        log_text = texts["log.txt"]
        assert log_text.count("event=refused") >= 2 and "event=started" in log_text and "event=bridge_down" in log_text
        assert '\n      File "x.py", line 7, in handle\n    ValueError\n' in log_text and '"json_defect"' in log_text
        assert log_text.endswith("lines that are no events were left out)\n") and "event=" in texts["audit.txt"]
        assert f'#password = "{MASK}"' in texts["configuration.toml"]
        assert "$SYS/broker/version mqttbroker" in texts["api/sys.txt"] and "mqttbroker_build_info" in texts["api/metrics.txt"]
        json.loads(texts["api/configuration.json"])
        assert "MQTTBROKER_HTTP__TOKEN" in json.loads(texts["processes.json"])["environment"]

    with open(broker.config, "a", encoding="utf-8") as file:
        file.write(f'\n[limits]\nmax_session = "{MARK}-mistake"\n')
    broken = bundle(tmp_path, *words, "--log", str(log), env=environment)
    has_none(broken, secrets)
    assert "configuration.toml: " in broken["missing.txt"] and "max_session" in broken["missing.txt"]
    assert set(broken) >= {"data-directory.json", "log.txt", "processes.json"}


def test_what_is_said_about_the_broker_and_its_files(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    config: dict[str, Any] = {"workers": 2, "streams": {"a": {"filters": ["a/#"], "partitions": 1}}, "limits": {"max_sessions": 7}}
    broker = start_broker(config=config)
    with RawClient(broker.port) as client:
        client.connect("c")
        client.publish("a/b", b"x", qos=1)
        texts = bundle(tmp_path, "--config", str(broker.config), "--data-dir", str(broker.data_dir), "--url", broker.url)
    found = json.loads(texts["data-directory.json"])
    paths = {each["path"]: each for each in found["listed"]}
    assert found["files"] == len(paths) and found["bytes"] == sum(each["bytes"] for each in paths.values())
    assert {"mqttbroker.db", "lock", "version.json"} <= set(paths) and any(path.startswith("streams/a/0/") for path in paths)
    assert found["disk_free_bytes"] > 0 and found["formats"][0]["version"] > 0
    processes = json.loads(texts["processes.json"])["processes"]
    assert processes[0]["pid"] == broker.pid and len(processes) >= 3
    assert sum("mqttbroker: worker" in each["title"] for each in processes) == 2
    assert all(each["open_files"]["all"] > 0 for each in processes)
    limits = json.loads(texts["limits.json"])
    assert limits["of"] == "the broker" and len(limits["soft_and_hard"]["nofile"]) == 2
    version = json.loads(texts["version.json"])
    assert version["build"] in ("plain", "compiled") and any(each.startswith("aiohttp ") for each in version["packages"])
    assert re.search(r"^max_sessions = 7 +# .*broker\.toml:\d+$", texts["configuration.toml"], re.M)
    assert json.loads(texts["api/status.json"])["clients_connected"] == 1
    assert "log.txt: " in texts["missing.txt"] and "give --log FILE" in texts["missing.txt"]
    assert "audit.txt: log.audit_file is not set" in texts["missing.txt"]


def test_a_broker_that_is_down(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    broker = start_broker()
    broker.terminate()
    (tmp_path / "log").write_text(broker.log + "\n")
    texts = bundle(tmp_path, "--config", str(broker.config), "--data-dir", str(broker.data_dir), "--url", broker.url, "--log", "log")
    assert set(texts) == ALWAYS | {"log.txt", "what was printed"}
    missing = texts["missing.txt"].splitlines()
    assert missing[0].startswith(f"api: all that a running broker answers: {broker.url}") and "refused" in missing[0]
    assert "processes.json: no broker has locked the data directory" in missing
    assert "event=started" in texts["log.txt"] and '"of": "this command"' in texts["limits.json"]
    assert all(f"missing: {line}" in texts["what was printed"] for line in missing)
    nowhere = bundle(tmp_path, "--data-dir", str(tmp_path / "none"), "--log", "none", "--url", "http://127.0.0.1:9")
    assert f"data-directory.json: {tmp_path}/none: No such file or directory" in nowhere["missing.txt"]
    assert "log.txt: none: No such file or directory" in nowhere["missing.txt"]


def test_a_token_without_rights(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    broker = start_broker(config={"http": {"token": "t" * 20}})
    texts = bundle(tmp_path, "--data-dir", str(broker.data_dir), "--url", broker.url)
    assert re.search(r"^api/status\.json: .*401", texts["missing.txt"], re.M) and "api/status.json" not in texts
    assert "processes.json" in texts


def test_names_are_anonymized_alike_everywhere(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        f"{TIME} info event=connected client=pump-17 address=192.0.2.7:5000 user=alice\n"
        f'{TIME} info event=refused client="two words" address=[2001:db8::7]:5000 reason="client pump-17 of alice: two words, 192.0.2.7"\n'
        f'{{"time": "{TIME}", "event": "denied", "client": "pump-17", "topic": "plant/pump-17/t", "address": "127.0.0.1:1", "n": 3}}\n'
    )
    plain = bundle(tmp_path, "--data-dir", str(tmp_path), "--log", "log", "--url", "http://127.0.0.1:9")["log.txt"]
    assert plain == log.read_text()
    texts = bundle(tmp_path, "--data-dir", str(tmp_path), "--log", "log", "--url", "http://127.0.0.1:9", "--anonymize")
    has_none(texts, ["pump-17", "192.0.2.7", "alice", "2001:db8::7", "two words"])
    lines = texts["log.txt"].splitlines()
    tags = [re.findall(r"(?:name|address)-[0-9a-f]{10}", line) for line in lines]
    client, address, user = tags[0]
    assert len({client, address, user}) == 3 and tags[1][2:4] == [client, user] and tags[1][-1] == address and tags[1][0] == tags[1][4]
    denied = json.loads(lines[2])
    assert denied["client"] == client and denied["address"] == "127.0.0.1:1" and denied["n"] == 3
    again = bundle(tmp_path, "--data-dir", str(tmp_path), "--log", "log", "--url", "http://127.0.0.1:9", "--anonymize")
    assert client not in again["log.txt"]


def test_it_overwrites_nothing_and_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    done = run("support-bundle", "-o", "there", cwd=tmp_path)
    assert done.returncode == 1 and one_line(done.stderr) == "mqttbroker support-bundle: there: File exists"
    assert (tmp_path / "there").read_text() == "mine"
    done = run("support-bundle", "-o", "no/where", cwd=tmp_path)
    assert done.returncode == 1 and one_line(done.stderr) == "mqttbroker support-bundle: no/where: No such file or directory"
    done = run("support-bundle", "--log-lines", "-1", cwd=tmp_path)
    assert done.returncode == 2 and one_line(done.stderr) == "mqttbroker support-bundle: --log-lines must be 0 to 100000"

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    command = [sys.executable, "-P", "-m", "mqttbroker", "support-bundle", "-o", "full"]
    full = subprocess.run(command, cwd=tmp_path, preexec_fn=small_files, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert (full.returncode, one_line(full.stderr)) == (1, "mqttbroker support-bundle: full: File too large")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support_bundle, "MAX_ENTRY_BYTES", 4000)
    monkeypatch.setattr(support_bundle, "MAX_BUNDLE_BYTES", 12_000)
    monkeypatch.setattr(support_bundle, "MAX_LISTED_FILES", 3)
    data = tmp_path / "data"
    data.mkdir()
    for number in range(9):
        (data / f"file{number}").write_text("x")
    log = tmp_path / "log"
    log.write_text("".join(f"{TIME} info event=e{number} \n" for number in range(500)))
    output = tmp_path / "b.tar.gz"
    words = ["--data-dir", str(data), "--log", str(log), "--log-lines", "400", "--url", "http://127.0.0.1:9", "-o", str(output)]
    assert main(["support-bundle", *words]) == 0
    texts = unpacked(output)
    found = json.loads(texts["data-directory.json"])
    assert (found["files"], len(found["listed"])) == (9, 3)
    assert re.fullmatch(r"(?s).{4000}\n\(cut: 4000 of \d+ bytes\)\n", texts["configuration.toml"])
    assert "log.txt: the bundle has 0 MiB" in texts["missing.txt"] and "log.txt" not in texts
    monkeypatch.setattr(support_bundle, "MAX_BUNDLE_BYTES", 1 << 20)
    output.unlink()
    assert main(["support-bundle", *words]) == 0
    log_text = unpacked(output)["log.txt"]
    assert (
        3900 < len(log_text) <= 4000
        and log_text.startswith(TIME)
        and log_text.endswith(f"{TIME} info event=e499 \n")
        and "event=e100 " not in log_text
    )


def test_a_broker_that_answers_slowly(start_broker: Callable[..., BrokerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = start_broker()
    monkeypatch.setattr(support_bundle, "API_SECONDS", -1.0)
    output = tmp_path / "b.tar.gz"
    assert main(["support-bundle", "--data-dir", str(broker.data_dir), "--url", broker.url, "-o", str(output)]) == 0
    texts = unpacked(output)
    assert texts["missing.txt"].count("the broker took more than -1 s for the answers before this one\n") == len(RUNNING) - 1
    assert not [name for name in texts if name.startswith("api/")]


def test_a_defect_of_one_part_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def defective(self: support_bundle.Bundle) -> str:
        raise KeyError(MARK)

    monkeypatch.setattr(support_bundle.Bundle, "_machine", defective)
    output = tmp_path / "b.tar.gz"
    assert main(["support-bundle", "--data-dir", str(tmp_path), "--url", "http://127.0.0.1:9", "-o", str(output)]) == 0
    texts = unpacked(output)
    assert "machine.json: unexpected KeyError\n" in texts["missing.txt"] and "version.json" in texts
    has_none(texts, [MARK])


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ('password_file = "/etc/users"', None), ('password = ""', None), ('"token": null, "n": 1', None), ("event=a token_in=password", None),
        ('password = "a b" # x', 'password = "***" # x'), ("db_password=x;y", "db_password=***;y"), ("{'secret': 'x'}", "{'secret': '***'}"),
        ("mqtt://h:1883/t", None), ("mqtt://u:p@ss@h:1883", "mqtt://***@h:1883"), ("$7$101$abc$def", "***"), ("alice:$6$ab$cd", "alice:***"),
        ("a Bearer abcdefgh.x b", "a Bearer *** b"), ("Cookie: id=1", "Cookie: ***"),
    ],
)  # fmt: skip
def test_what_looks_like_a_secret(text: str, cleaned: str | None) -> None:
    assert Redactor(False).clean(text) == (text if cleaned is None else cleaned)


@pytest.mark.parametrize("part", ["a.", "http://a", "a://b:c", "password=", "-----BEGIN ", "eyJaaaaaa.", "1:"])
def test_a_long_text_takes_no_time_that_grows_with_its_square(part: str) -> None:
    """With such a pattern these texts take longer than the time limit of a test."""
    assert Redactor(True).clean(part * (1_200_000 // len(part)))


def test_where_secrets_are_looked_for(tmp_path: Path) -> None:
    variables = {
        "MY_PASSWORD": "one",
        "PASSWORD_FILE": "/path",
        "PROXY": "http://u:two@h",
        "PATH": "/bin",
        "MQTTBROKER_PLUGIN__OPTIONS": '{"key": "three"}',
    }
    assert set(secrets_in_environment(variables)) == {"one", "two", "three", '{"key": "three"}'}
    tree = {
        "http": {"token": "t1", "access": [{"token": "t2", "name": "n"}]},
        "plugin": {"options": {"key": "t3"}},
        "bridges": [{"password": 5}],
    }
    assert set(secrets_in_tree(tree)) == {"t1", "t2", "t3"}
    redactor = Redactor(False)
    redactor.add_secret('a b/c"ü')
    assert (
        redactor.clean('1 a b/c"ü 2 a%20b/c%22%C3%BC 3 a%20b%2Fc%22%C3%BC 4 a b/c\\"\\u00fc 5 YSBiL2Miw7w=')
        == "1 *** 2 *** 3 *** 4 *** 5 ***="
    )
    redactor.add_secret("abc")
    assert redactor.too_short == 1 and redactor.clean("abc") == "abc"


def test_only_events_of_a_log_are_taken() -> None:
    lines = [
        f"<6>{TIME} info event=a b=c",
        "event=journal x=1",
        "eventually event=b",
        f"{TIME} info told event=c",
        "    KeyError: 'x'",
        "    call(x)",
        '{"event": "e"}',
        '{"message": "m"}',
        "[]",
        "",
    ]
    assert list(events(lines)) == [lines[0], lines[1], "    KeyError", '{"event": "e"}', "(6 lines that are no events were left out)"]
    assert list(events([])) == []
