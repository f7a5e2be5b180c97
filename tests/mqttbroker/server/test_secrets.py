"""Secrets appear in no output of a broker: log, audit log, metrics, HTTP, $SYS, arguments, data directory, errors."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import jwt
import pytest
from support.broker_process import BrokerProcess
from support.known_secrets import KEYS, MARK, PASSWORD, SCRAM_PASSWORD, SecretConfig, secret_keys
from support.processes import children, command_line
from support.raw_client import RawClient

from mqttbroker.cli.main import main
from mqttbroker.codec.packets import Will

GUESS = f"{MARK}-guess"
PAYLOAD, WILL = f"{MARK}-payload", f"{MARK}-will"
BEARER_GUESS = f"{MARK}-bearer-guess"


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
    config = SecretConfig(tmp_path)
    audit = config.audit_file
    broker = start_broker(config=config.tables)
    outputs: dict[str, str] = {}
    secrets = [MARK, *config.secrets]

    with RawClient(broker.port) as client, RawClient(broker.port) as other:
        client.connect("c", username="alice", password=PASSWORD.encode(), clean_start=False, will=Will("a/w", WILL.encode()))
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
        ssl.create_default_context().wrap_socket(socket.create_connection((broker.host, tls_port)), server_hostname="localhost"),
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
