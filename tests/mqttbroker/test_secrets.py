"""Secrets appear in no output of a broker: log, audit log, metrics, HTTP, $SYS, arguments, data directory, errors."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import ssl
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.processes import children, command_line
from support.raw_client import RawClient

from mqttbroker.auth.passwords import hash_password, scram_password
from mqttbroker.cli.main import main
from mqttbroker.codec.packets import Will
from mqttbroker.config.settings import Settings

MARK = "s3cr3t"
# Every secret key of the configuration, with its value here: a new one needs a line.
KEYS = {
    "http.token": f"{MARK}-http-token",
    "http.access.token": f"{MARK}-access-token",
    "jwt.secret": f"{MARK}-jwt-secret-of-32-bytes-or-more",
    "http_callback.authorization": f"Bearer {MARK}-callback",
    "http_callback.headers": f"{MARK}-header",
    "plugin.options": f"{MARK}-option",
    "bridges.password": f"{MARK}-bridge",
    "cluster.sasl_password": f"{MARK}-kafka",
}
PASSWORD, SCRAM_PASSWORD, GUESS = f"{MARK}-password", f"{MARK}-scram", f"{MARK}-guess"
PAYLOAD, WILL = f"{MARK}-payload", f"{MARK}-will"
BEARER_GUESS = f"{MARK}-bearer-guess"


PLUGIN = """
class Silent:
    def __init__(self, key):
        pass

    async def authenticate(self, request):
        return None
"""


def secret_keys(section: type[Any] = Settings, path: str = "") -> Iterator[str]:
    for field in dataclasses.fields(section):
        if "section" in field.metadata:
            yield from secret_keys(field.metadata["section"], f"{path}{field.name}.")
        elif "tables" in field.metadata:
            yield from secret_keys(field.metadata["tables"], f"{path}{field.name}.")
        elif not field.repr:
            yield path + field.name


def test_every_secret_key_is_used_here() -> None:
    assert set(secret_keys()) == set(KEYS)


def http(broker: BrokerProcess, path: str, token: str = KEYS["http.token"]) -> str:
    request = urllib.request.Request(broker.url + path, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return str(response.headers) + response.read().decode()
    except urllib.error.HTTPError as error:
        return str(error.headers) + error.read().decode()


def test_no_output_of_a_node_has_the_password_for_kafka(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = {
        "engine": "kafka", "bootstrap_servers": ["127.0.0.1:9"], "security_protocol": "SASL_PLAINTEXT",
        "sasl_username": "node", "sasl_password": KEYS["cluster.sasl_password"],
    }  # fmt: skip
    node = BrokerProcess(config={"cluster": cluster, "log": {"level": "debug"}})
    try:
        node.launch()
        node.wait_for_log("event=kafka_not_ready", 30.0)
        node.terminate()
        main(["check-config", str(node.config), "--print-config"])
        for text in (node.log, *capsys.readouterr()):
            assert "sasl_username" in text or "kafka_not_ready" in text or not text
            assert MARK not in text
    finally:
        node.close()


def send_bad_http(broker: BrokerProcess, request: bytes) -> None:
    """Send bytes and wait for the answer, which may quote them, because the sender knows them."""
    with socket.create_connection((broker.host, broker.http_port), 10) as sock:
        sock.sendall(request)
        assert sock.recv(65536)


def test_no_output_has_a_secret(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    hashed, scram = hash_password(PASSWORD.encode()), scram_password(SCRAM_PASSWORD.encode())
    (tmp_path / "users").write_text(f"alice:{hashed}\nbob:{scram}\n")
    (tmp_path / "rules").write_text("user alice\ntopic readwrite a/#\ntopic read $SYS/#\n")
    (tmp_path / "access-token").write_text(KEYS["http.access.token"] + "\n")
    (tmp_path / "silent.py").write_text(PLUGIN)
    audit = tmp_path / "audit.log"
    config = {
        "allow_anonymous": False, "password_file": str(tmp_path / "users"), "acl_file": str(tmp_path / "rules"),
        "sys_interval": "100ms",
        "log": {"level": "debug", "audit_file": str(audit)},
        "http": {"token": KEYS["http.token"], "access": [
            {"name": "grafana", "role": "viewer", "token_file": str(tmp_path / "access-token")}]},
        "jwt": {"algorithms": ["HS256"], "secret": KEYS["jwt.secret"], "token_in": "password"},
        "http_callback": {"url": f"http://127.0.0.1:9/?key={MARK}-query", "authorization": KEYS["http_callback.authorization"],
                          "headers": {"X-Api-Key": KEYS["http_callback.headers"]}},
        "plugin": {"object": "silent:Silent", "path": str(tmp_path), "options": {"key": KEYS["plugin.options"]}},
        "streams": {"a": {"filters": ["a/#"], "partitions": 1}},
        "bridges": [{"name": "north", "addresses": ["127.0.0.1:9"], "username": "north", "password": KEYS["bridges.password"],
                     "topics": [{"filter": "a/#", "direction": "out"}]}],
        **files.config(),
    }  # fmt: skip
    broker = start_broker(config=config)
    outputs: dict[str, str] = {}
    secrets = [MARK, hashed, scram, files.keyfile.read_text().splitlines()[1]]

    with RawClient(broker.port) as client, RawClient(broker.port) as other:
        client.connect(
            "c", username="alice", password=PASSWORD.encode(), clean_start=False, will=Will("a/w", WILL.encode())
        )
        client.subscribe("$SYS/#", "a/#", options=1)
        client.publish("a/b", PAYLOAD.encode(), qos=1, retain=True)
        client.publish("denied", PAYLOAD.encode(), qos=1)
        assert other.connect("g", username="alice", password=GUESS.encode()).reason_code == 0x86
        system = [client.take() for _ in range(5)]
        outputs["$SYS"] = "".join(f"{each.topic} {each.payload!r}" for each in system if each.topic.startswith("$SYS"))
        for password, code in ((SCRAM_PASSWORD, 0), (GUESS, 0x86)):
            with RawClient(broker.port) as bob:
                assert bob.connect("b", username="bob", password=password.encode()).reason_code == code
        with RawClient(broker.port) as carol:  # whom only the callback could know, which nobody answers
            assert carol.connect("d", username="carol", password=PASSWORD.encode()).reason_code == 0x88
        for key, code in ((KEYS["jwt.secret"], 0), (GUESS * 4, 0x86)):
            token = jwt.encode({"sub": "pump", "exp": 9_999_999_999, "jti": MARK}, key)
            secrets.append(token)
            with RawClient(broker.port) as pump:
                assert pump.connect("p", username="pump", password=token.encode()).reason_code == code
    with RawClient(broker.port) as client:  # malformed
        client.socket.sendall(b"\x10\x20" + PASSWORD.encode() * 2)
    tls_port = int(broker.wait_for_log(r"event=listening type=tls .*port=(\d+)")[1])
    with (
        pytest.raises(OSError),
        ssl.create_default_context().wrap_socket(
            socket.create_connection((broker.host, tls_port)), server_hostname="localhost"
        ),
    ):
        pass

    for path in (
        "/metrics",
        "/livez",
        "/readyz",
        "/streams",
        "/streams/a",
        "/streams/a/consumers",
        f"/x?token={BEARER_GUESS}",
        "/api",
        "/api/v1/config",
        "/openapi.json",
    ):
        for token in (*KEYS.values(), BEARER_GUESS):
            outputs[f"{path} {token}"] = http(broker, path, token)
    for head in (
        f"GET /metrics HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {KEYS['http.token']}\x01\r\n\r\n",
        f"GET /metrics HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {KEYS['http.token']}\r\nno colon\r\n\r\n",
        f"Authorization: Bearer {KEYS['http.token']}\r\n\r\n",
        f"GET /{BEARER_GUESS} HTTP/9.9\r\n\r\n",
    ):
        send_bad_http(broker, head.encode("latin-1"))

    (tmp_path / "access-token").write_text(f"{MARK} two words\n")
    os.kill(broker.pid, signal.SIGHUP)
    broker.wait_for_log("reload_failed")
    outputs["/readyz after a mistake"] = http(broker, "/readyz")
    for pid in (broker.pid, *children(broker.pid)):
        outputs[f"arguments of {pid}"] = command_line(pid).decode()
    broker.terminate()
    outputs["log"], outputs["audit log"] = broker.log, audit.read_text()
    for name, text in outputs.items():
        for secret in secrets:
            assert secret not in text, f"{name} has {secret!r}: {text[max(0, text.index(secret) - 300) :][:600]}"
            assert b64encode(secret.encode()).decode().rstrip("=") not in text, name

    for path in broker.data_dir.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            for secret in (*KEYS.values(), PASSWORD, SCRAM_PASSWORD, GUESS, *secrets[1:]):
                assert secret.encode() not in data, f"{path} has {secret!r}"


def test_no_error_of_a_command_has_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mistake is beside a secret, or is the secret's own."""
    file = tmp_path / "broker.toml"
    for text in (
        f'http.token = "{MARK} x"', f'http.token = ["{MARK}"]', f'http.tokne = "{MARK}"',
        f'http = "{MARK}"', f'http.token = "{MARK}',
        f'[[http.access]]\nname = "n"\nrole = "x"\ntoken = "{MARK}"', f'[[http.access]]\ntoken = {{ "{MARK}" = 1 }}',
        f'http.token = "{MARK}"\nhttp.access = [{{ name = "n", role = "viewer", token = "{MARK}" }}]',
    ):  # fmt: skip
        file.write_text(text + "\n")
        assert main(["check-config", str(file)]) == 2
        output = capsys.readouterr()
        assert MARK not in output.out + output.err, f"{text}: {output.err}"
