"""Logins with JSON Web Tokens against a broker: paho, aiomqtt and raw clients, expiry, permissions, reload, mistakes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiomqtt
import paho.mqtt.client as paho
import pytest
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.key_server import KeyServer
from support.metric_samples import samples
from support.paths import ROOT
from support.patience import growing
from support.raw_client import RawClient
from support.tokens import SECRET, jwk, key_set, private_pem, public_pem, token

from mqttbroker.auth.passwords import hash_password
from mqttbroker.auth.permissions import PermissionsReader
from mqttbroker.codec.packets import Disconnect
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import (
    BAD_USER_NAME_OR_PASSWORD,
    CLIENT_IDENTIFIER_NOT_VALID,
    NOT_AUTHORIZED,
    SERVER_UNAVAILABLE,
)

EXEMPT = {"exempt": ["127.0.0.1"]}


class TokenBroker:
    """A broker with the public key "RS256" and a password file, and clients with tokens."""

    def __init__(self, directory: Path) -> None:
        self.key_file = directory / "key.pem"
        self.key_file.write_bytes(public_pem("RS256"))
        (directory / "users").write_text(f"alice:{hash_password(b'secret')}\n")
        self.process = BrokerProcess(
            directory / "data",
            {
                "allow_anonymous": False,
                "password_file": str(directory / "users"),
                "jwt": {
                    "algorithms": ["RS256"],
                    "public_key_file": str(self.key_file),
                    "audience": ["mqtt"],
                    "client_id_claim": "device",
                    "claims": {"tenant": "acme"},
                    "leeway": "0s",
                },
                "bans": EXEMPT,
            },
        )

    def token(self, **claims: Any) -> bytes:
        return token(**{"aud": "mqtt", "tenant": "acme", **claims}).encode()

    def log_in(
        self, password: bytes | None, version: int = 5, client_id: str = "c", username: str = "any", **fields: Any
    ) -> tuple[int, RawClient]:
        client = RawClient(self.process.port, version)
        code = client.connect(client_id, username=username, password=password, **fields).reason_code
        return code, client


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenBroker]:
    broker = TokenBroker(tmp_path_factory.mktemp("jwt"))
    with broker.process:
        yield broker


@pytest.mark.parametrize("version", [4, 5])
def test_the_outcomes(broker: TokenBroker, version: int) -> None:
    forged = token("RS256", name="stranger", aud="mqtt", tenant="acme").encode()
    cases = [
        (broker.token(), 0),
        (b"secret", BAD_USER_NAME_OR_PASSWORD),
        (forged, BAD_USER_NAME_OR_PASSWORD),
        (broker.token(exp=int(time.time()) - 1), NOT_AUTHORIZED),
        (broker.token(nbf=int(time.time()) + 60), NOT_AUTHORIZED),
        (broker.token(aud="web"), NOT_AUTHORIZED),
        (broker.token(tenant="other"), NOT_AUTHORIZED),
        (broker.token(acl="everything"), NOT_AUTHORIZED),
        (broker.token(device="other"), CLIENT_IDENTIFIER_NOT_VALID),
        (broker.token(device="c"), 0),
    ]
    for password, expected in cases:
        code, client = broker.log_in(password, version)
        client.close()
        short = 2 if expected == CLIENT_IDENTIFIER_NOT_VALID else 5
        assert code == (expected if version == 5 or expected == 0 else short)
    code, client = broker.log_in(b"secret", version, username="alice")
    client.close()
    assert code == 0
    with RawClient(broker.process.port, version) as anonymous:
        assert anonymous.connect("nobody").reason_code == (NOT_AUTHORIZED if version == 5 else 5)


def test_the_log_has_the_reason_and_never_the_token(broker: TokenBroker) -> None:
    text = broker.token(aud="web")
    broker.log_in(text, client_id="logged")[1].close()
    broker.process.wait_for_log('event=refused client=logged .*reason=".*the token is for another audience"')
    assert text.decode() not in broker.process.log and text.decode().split(".")[2] not in broker.process.log


def test_the_user_of_the_token_owns_the_session(broker: TokenBroker) -> None:
    _, first = broker.log_in(broker.token(sub="owner"), 4, client_id="owned", clean_start=False)
    first.close()
    for claim, code in (("thief", 2), ("owner", 0)):
        got, client = broker.log_in(broker.token(sub=claim), 4, client_id="owned", username="owner")
        client.close()
        assert got == code


def test_a_client_without_an_id_gets_that_of_the_token(broker: TokenBroker) -> None:
    with RawClient(broker.process.port) as client:
        connack = client.connect("", username="any", password=broker.token(device="pump-7"))
        assert (connack.reason_code, connack.properties.assigned_client_identifier) == (0, "pump-7")


@pytest.mark.parametrize("version", [4, 5])
def test_the_connection_ends_when_the_token_expires(broker: TokenBroker, version: int) -> None:
    for seconds in growing():
        expiry = int(time.time() + seconds) + 1
        code, client = broker.log_in(broker.token(exp=expiry), version, client_id="short-lived", keep_alive=0)
        if code == 0:
            break
        client.close()
    assert code == 0
    last = client.expect_closed()
    assert time.time() >= expiry
    if version == 5:
        assert len(last) == 1 and isinstance(last[0], Disconnect) and last[0].reason_code == NOT_AUTHORIZED
    else:
        assert last == []
    broker.process.wait_for_log('event=disconnected client=short-lived .*reason=".*the login has expired"')
    client.close()


def test_permissions_and_a_session_that_outlives_a_restart(tmp_path: Path) -> None:
    broker = TokenBroker(tmp_path)
    lasting = Properties()
    lasting.session_expiry_interval = 3600
    acl = [
        {"permission": "deny", "action": "subscribe", "topic": "plant/secret"},
        {"permission": "allow", "action": "subscribe", "topic": "plant/#"},
        {"permission": "allow", "action": "publish", "topic": "up/%c"},
    ]
    with broker.process:
        _, pump = broker.log_in(broker.token(acl=acl), client_id="pump", clean_start=False, properties=lasting)
        assert pump.subscribe("plant/#", options=1).reason_codes == [1]
        assert pump.subscribe("other").reason_codes == [NOT_AUTHORIZED]
        assert pump.publish("up/pump", b"", 1) == 0x10 and pump.publish("up/other", b"", 1) == NOT_AUTHORIZED
        pump.close()
        broker.process.restart(kill=True)
        _, alice = broker.log_in(b"secret", client_id="a", username="alice")
        for topic in ("plant/secret", "plant/1", "plant/2"):
            assert alice.publish(topic, b"", 1) in (0, 0x10)
        # The next token permits less, and decides about what is queued.
        acl[1]["topic"] = "plant/2"
        _, pump = broker.log_in(broker.token(acl=acl), client_id="pump", clean_start=False, properties=lasting)
        assert pump.take().topic == "plant/2"
        pump.expect_nothing()
        pump.close()
        alice.close()


async def test_aiomqtt(broker: TokenBroker) -> None:
    login = {"username": "any", "password": broker.token().decode()}
    async with aiomqtt.Client("127.0.0.1", broker.process.port, identifier="aio", **login) as client:
        await client.subscribe("t")
        await client.publish("t", b"hello", 1)
        async for message in client.messages:
            assert message.payload == b"hello"
            break
    with pytest.raises(aiomqtt.MqttError):
        async with aiomqtt.Client("127.0.0.1", broker.process.port, username="any", password="eyJh.b.c"):
            pass


@pytest.mark.parametrize("version", [paho.MQTTv311, paho.MQTTv5])
def test_paho(broker: TokenBroker, version: int) -> None:
    outcomes = ((broker.token(), "Success"), (broker.token(aud="x"), "Not authorized"))
    for password, expected in outcomes:
        answers: list[str] = []
        client = paho.Client(paho.CallbackAPIVersion.VERSION2, "paho", protocol=version)
        client.on_connect = lambda client, data, flags, code, properties: answers.append(str(code))
        client.username_pw_set("any", password.decode())
        client.connect("127.0.0.1", broker.process.port)
        while not answers and client.loop(1.0) == paho.MQTT_ERR_SUCCESS:
            pass
        client.disconnect()
        assert answers == [expected]


def test_logins_are_counted(broker: TokenBroker) -> None:
    def logins() -> dict[str, float]:
        found = samples(broker.process.get("/metrics"))
        return {name: value for name, value in found.items() if name.startswith("mqttbroker_logins_total/")}

    before = logins()
    broker.log_in(broker.token())[1].close()
    broker.log_in(b"eyJh.b.c")[1].close()
    broker.log_in(b"secret", username="alice")[1].close()
    broker.log_in(b"wrong", username="nobody")[1].close()
    after = logins()
    changed = {name.partition("/")[2]: value - before.get(name, 0) for name, value in after.items()}
    assert {name: value for name, value in changed.items() if value} == {
        "jwt/accepted": 1,
        "jwt/rejected": 1,
        "password_file/accepted": 1,
        "password_file/rejected": 1,
    }


def test_wrong_tokens_lead_to_a_ban_and_expired_ones_do_not(tmp_path: Path) -> None:
    settings = {"algorithms": ["HS256"], "secret": SECRET}
    with BrokerProcess(tmp_path / "data", {"jwt": settings, "bans": {"failures": 3}}) as process:

        def code(text: str) -> int:
            with RawClient(process.port) as client:
                return client.connect("c", username="pump", password=text.encode()).reason_code

        assert [code(token("HS256", exp=1)) for _ in range(5)] == [NOT_AUTHORIZED] * 5
        assert [code(token("HS256", "wrong")) for _ in range(3)] == [BAD_USER_NAME_OR_PASSWORD] * 3
        assert code(token("HS256")) == 0x8A


# --- the environment ----------------------------------------------------------------------------------------------


def test_keys_from_a_url_that_rotates_and_fails(tmp_path: Path) -> None:
    with KeyServer(key_set(jwk("RS256", "a", "a"))) as server:
        server.mode = "error"
        settings = {"algorithms": ["RS256"], "jwks_url": server.url, "jwks_min_interval": "100ms"}
        with BrokerProcess(tmp_path / "data", {"jwt": settings, "bans": EXEMPT}) as process:

            def code(name: str, version: int = 5) -> int:
                with RawClient(process.port, version) as client:
                    login = {"username": "any", "password": token(name=name, kid=name).encode()}
                    return client.connect("c", **login).reason_code

            assert code("a") == SERVER_UNAVAILABLE and code("a", 4) == 3
            process.wait_for_log('event=jwks_failed url=.* reason="HTTP status 500"')
            assert b"no keys yet" in process.get("/readyz")
            server.mode = "ok"
            wait_until(lambda: code("a") == 0)
            server.body = key_set(jwk("RS256", "b", "b"))
            wait_until(lambda: code("b") == 0)
            assert code("a") == BAD_USER_NAME_OR_PASSWORD
            server.mode = "error"
            failed = len(process.lines)
            os.kill(process.pid, signal.SIGHUP)
            process.wait_for_log("event=jwks_failed", after=failed)
            assert code("b") == 0
            assert b"the last keys stay in use" in process.get("/readyz")
            found = samples(process.get("/metrics"))
            assert found["mqttbroker_jwks_keys"] == 1 and found["mqttbroker_jwks_fetches_total/failed"] >= 2
            assert found["mqttbroker_jwks_fetched_timestamp_seconds"] > 1e9
            assert found["mqttbroker_logins_total/jwt/unavailable"] >= 2


def test_sighup_reads_the_key_again(tmp_path: Path) -> None:
    broker = TokenBroker(tmp_path)
    with broker.process as process:

        def reload(pattern: str) -> None:
            after = len(process.lines)
            os.kill(process.pid, signal.SIGHUP)
            process.wait_for_log(pattern, after=after)

        _, old = broker.log_in(broker.token(), client_id="old")
        broker.key_file.write_bytes(b"")
        reload(r"event=reload_failed reason=.*jwt\.public_key_file: .*/key\.pem: not a public key")
        wait_until(lambda: b"jwt.public_key_file" in process.get("/readyz"))
        broker.key_file.write_bytes(public_pem("RS256", "new"))
        reload("event=passwords_reloaded")
        new = token(name="new", aud="mqtt", tenant="acme").encode()
        wait_until(lambda: broker.log_in(new)[0] == 0)
        assert broker.log_in(broker.token())[0] == BAD_USER_NAME_OR_PASSWORD
        assert old.ping() == []  # a connection lasts until its token expires
        old.close()
        text = process.config.read_text()
        process.config.write_text(text.replace('"mqtt"', '"other"'))
        reload("event=setting_changed key=jwt.audience")
        wait_until(lambda: broker.log_in(new)[0] == NOT_AUTHORIZED)


MISTAKES = [
    ('algorithms = ["RS256"]', "jwt.secret: is required, or secret_file, public_key_file, jwks_file or jwks_url"),
    ('public_key_file = "key.pem"', "jwt.algorithms: is required"),
    ('algorithms = ["RS265"]\npublic_key_file = "key.pem"', 'jwt.algorithms: must be "HS256", "HS384"'),
    ('algorithms = ["none"]\npublic_key_file = "key.pem"', 'jwt.algorithms: must be "HS256", "HS384"'),
    ('algorithms = ["HS256"]\npublic_key_file = "key.pem"', "jwt.algorithms: HS256 needs a secret"),
    ('algorithms = ["HS256"]\njwks_url = "https://id/keys"', "jwt.algorithms: HS256 needs a secret"),
    ('algorithms = ["HS256", "RS256"]\nsecret = "s"', "jwt.algorithms: RS256 needs a public key, not a secret"),
    ('algorithms = ["HS256"]\nsecret = "tellme"', "jwt.secret: HS256 needs a secret of at least 32 bytes"),
    ('algorithms = ["HS256"]\nsecret_file = "key.pem"\nsecret = "tellme"', "jwt.secret_file: secret is set, too"),
    ('algorithms = ["HS256"]\nsecret_file = "none"', "jwt.secret_file: none: No such file or directory"),
    ('algorithms = ["RS256"]\npublic_key_file = "key.pem"\njwks_file = "k"', "jwt.jwks_file: public_key_file is set, too"),
    ('algorithms = ["ES256"]\npublic_key_file = "key.pem"', "jwt.public_key_file: key.pem: an RSA key, which ES256 does not use"),
    ('algorithms = ["RS256"]\npublic_key_file = "private.pem"', "jwt.public_key_file: private.pem: a private key"),
    ('algorithms = ["RS256"]\npublic_key_file = "none"', "jwt.public_key_file: none: cannot be read: No such file"),
    ('algorithms = ["RS256"]\njwks_file = "key.pem"', "jwt.jwks_file: key.pem: not JSON"),
    ('algorithms = ["ES256"]\njwks_file = "keys.json"', "jwt.jwks_file: keys.json: no key for ES256"),
    ('algorithms = ["RS256"]\njwks_url = "http://id.example.org/keys"', "jwt.jwks_url: must begin with https://"),
    ('algorithms = ["RS256"]\njwks_url = "id/keys"', "jwt.jwks_url: must be a URL that begins with https://"),
    ('algorithms = ["RS256"]\njwks_url = "https://u:p@id/keys"', "jwt.jwks_url: must not have a user name or password"),
    ('algorithms = ["RS256"]\njwks_file = "keys.json"\njwks_cafile = "key.pem"', "jwt.jwks_cafile: needs jwks_url"),
    ('algorithms = ["RS256"]\njwks_file = "keys.json"\nclaims = "x"', "jwt.claims: must be a table of strings"),
    ('algorithms = ["RS256"]\njwks_file = "keys.json"\nusername_claim = ""', "jwt.username_claim: must be the name"),
]


@pytest.mark.parametrize(("text", "reason"), MISTAKES)
def test_mistakes_are_one_line_at_start_and_in_check_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    from mqttbroker.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "key.pem").write_bytes(public_pem("RS256"))
    (tmp_path / "private.pem").write_bytes(private_pem("RS256"))
    (tmp_path / "keys.json").write_bytes(key_set(jwk("RS256")))
    (tmp_path / "broker.toml").write_text(f"[jwt]\n{text}\n")
    assert main(["check-config", "broker.toml"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and reason in shown and "tellme" not in shown


def test_a_mistake_prevents_the_start(tmp_path: Path) -> None:
    (tmp_path / "broker.toml").write_text('[jwt]\nalgorithms = ["RS256"]\npublic_key_file = "none"\n')
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mqttbroker", "serve", "--config", "broker.toml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "jwt.public_key_file: none: cannot be read" in done.stderr


def test_the_documented_example(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "authentication.md").read_text(encoding="utf-8")
    section = page.partition("\n## JSON Web Tokens\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(toml|json)\n(.*?)^```", section, re.M | re.S)
    config = next(text for kind, text in blocks if kind == "toml" and "jwks_url" in text)
    claims, *permissions = (json.loads(text) for kind, text in blocks if kind == "json")
    assert len(permissions) == 2
    for each in permissions:
        PermissionsReader().of_claim(each)
    claims["exp"] = int(time.time()) + 3600
    with KeyServer(key_set(jwk("RS256", kid="2026-11"))) as server:
        config = re.sub('jwks_url = ".*"', f'jwks_url = "{server.url}"', config)
        with BrokerProcess(tmp_path / "data", config) as process, RawClient(process.port) as press:
            password = token(kid="2026-11", sub="f3a1", **claims).encode()
            assert press.connect("press-7", username="press-7", password=password).reason_code == 0
            assert press.subscribe("commands/press-7/#", options=1).reason_codes == [1]
            assert press.subscribe("commands/#").reason_codes == [NOT_AUTHORIZED]
            assert press.publish("plant/press-7/temperature", b"20", 1) == 0x10
            assert press.publish("plant/press-8/temperature", b"20", 1) == NOT_AUTHORIZED
            process.wait_for_log("event=connected client=press-7 .*user=press-7")
