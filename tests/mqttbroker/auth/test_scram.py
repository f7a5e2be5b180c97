"""SCRAM-SHA-256: the example of the RFC, invalid messages, and enhanced authentication in a broker (section 4.12)."""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.broker_process import BrokerProcess
from support.raw_client import RawClient

from mqttbroker.auth.passwords import parse_hash, parse_passwords, scram_password, set_password
from mqttbroker.auth.scram import Exchange, ScramError, derive
from mqttbroker.codec.packets import (
    Auth,
    Connack,
    Connect,
    Disconnect,
    Pingreq,
    Pingresp,
    Publish,
    Subscribe,
    Subscription,
)
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import BAD_AUTHENTICATION_METHOD, NOT_AUTHORIZED, PROTOCOL_ERROR

METHOD = "SCRAM-SHA-256"

# RFC 7677 section 3
NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
CLIENT_FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
SERVER_FIRST = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
CLIENT_FINAL = b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
PENCIL = derive(b"pencil", b64decode("W22ZaJ0SNY7soEsUEjb6gQ=="), 4096)


def exchange() -> Exchange:
    return Exchange(lambda name: PENCIL, NONCE)


def test_the_example_of_the_rfc() -> None:
    server = exchange()
    assert server.step(CLIENT_FIRST) == SERVER_FIRST and not server.done
    assert server.step(CLIENT_FINAL) == SERVER_FINAL and server.done and server.username == "user"
    with pytest.raises(ScramError):
        server.step(CLIENT_FINAL)
    assert not server.done


@pytest.mark.parametrize(
    "first",
    [b"", b"n,,", b"n,,n=,r=x", b"n,,r=x,n=user", b"n,,n=user,r=", b"n,,m=x,n=user,r=x", b"p=tls-unique,,n=user,r=x",
     b"n,a=other,n=user,r=x", b"n,,n=us=er,r=x", b"n,,n=us=2c,r=x", b"n,,n=user,r=a b", b"x,,n=user,r=x", b"\xff", b"n,,n=u,r=x\n"],
)  # fmt: skip
def test_invalid_first_messages(first: bytes) -> None:
    server = exchange()
    with pytest.raises(ScramError):
        server.step(first)
    with pytest.raises(ScramError):
        server.step(CLIENT_FIRST)


@pytest.mark.parametrize(
    "first, username",
    [(b"y,,n=user,r=x", "user"), (b"n,a=user,n=user,r=x", "user"), (b"n,,n=a=2Cb=3D,r=x", "a,b="), (b"n,,n=u,r=x,z=1", "u")],
)
def test_first_messages_with_optional_parts(first: bytes, username: str) -> None:
    server = exchange()
    server.step(first)
    assert server.username == username


@given(st.integers(0, len(CLIENT_FINAL) - 1), st.integers(1, 255))
def test_a_changed_final_message_is_refused(position: int, change: int) -> None:
    server = exchange()
    server.step(CLIENT_FIRST)
    wrong = bytearray(CLIENT_FINAL)
    wrong[position] ^= change
    with pytest.raises(ScramError):
        server.step(bytes(wrong))
    assert not server.done


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_input_ends_in_a_scram_error(first: bytes, second: bytes) -> None:
    for messages in ((first,), (CLIENT_FIRST, second)):
        server = exchange()
        with pytest.raises(ScramError):
            for message in messages:
                server.step(message)


@settings(max_examples=10, deadline=None)
@given(st.binary(min_size=1, max_size=50))
def test_scram_credentials_verify_passwords(password: bytes) -> None:
    stored = parse_hash(scram_password(password))
    assert stored.verify(password) and not stored.verify(password + b"!")


def test_an_unknown_user_always_gets_the_same_salt_and_random_keys() -> None:
    users = parse_passwords(f"user:{scram_password(b'pencil')}\n", "f")
    own, one, two = (users.scram(name) for name in ("user", "eve", "eve"))
    assert (one.salt, one.iterations) == (two.salt, own.iterations) and len(one.salt) == len(own.salt)
    assert len({one.stored_key, two.stored_key, own.stored_key}) == 3


# --- in a broker --------------------------------------------------------------------------------------------------


class ScramClient:
    """The client side of one exchange."""

    def __init__(self, username: str, password: bytes) -> None:
        self.password = password
        self.bare = f"n={username},r=fyko+d2lbbFgONRv9qkxdawL"

    def first(self) -> bytes:
        return f"n,,{self.bare}".encode()

    def final(self, answer: bytes) -> bytes:
        fields = dict(part.split("=", 1) for part in answer.decode().split(","))
        salted = hashlib.pbkdf2_hmac("sha256", self.password, b64decode(fields["s"]), int(fields["i"]))
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        without_proof = f"c=biws,r={fields['r']}"
        message = f"{self.bare},{answer.decode()},{without_proof}".encode()
        signature = hmac.digest(hashlib.sha256(client_key).digest(), message, "sha256")
        self.expected = b"v=" + b64encode(hmac.digest(hmac.digest(salted, b"Server Key", "sha256"), message, "sha256"))
        proof = b64encode(bytes(a ^ b for a, b in zip(client_key, signature))).decode()
        return f"{without_proof},p={proof}".encode()


def method(data: bytes | None, name: str = METHOD) -> Properties:
    properties = Properties()
    properties.authentication_method = name
    properties.authentication_data = data
    return properties


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    path = tmp_path_factory.mktemp("scram") / "users"
    set_password(path, "user", scram_password(b"pencil"))
    set_password(path, "other", scram_password(b"pen"))
    with BrokerProcess(config={"password_file": str(path), "allow_anonymous": False}) as process:
        yield process


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[RawClient]:
    with RawClient(broker.port) as client:
        yield client


def begin(client: RawClient, scram: ScramClient, *more: Any) -> Auth:
    client.send(Connect("scram", 5, True, 60, properties=method(scram.first())), *more)
    answer = client.expect(Auth)
    assert (answer.reason_code, answer.properties.authentication_method) == (0x18, METHOD)
    return answer


def log_in(client: RawClient, username: str = "user", password: bytes = b"pencil") -> None:
    scram = ScramClient(username, password)
    answer = begin(client, scram)
    client.send(Auth(0x18, method(scram.final(answer.properties.authentication_data or b""))))
    connack = client.expect(Connack)
    assert connack.reason_code == 0
    assert connack.properties.authentication_method == METHOD
    assert connack.properties.authentication_data == scram.expected


def again(client: RawClient, scram: ScramClient) -> None:
    client.send(Auth(0x19, method(scram.first())))
    answer = client.expect(Auth)
    assert answer.reason_code == 0x18
    client.send(Auth(0x18, method(scram.final(answer.properties.authentication_data or b""))))


@pytest.mark.normative("5", "MQTT-4.12.0-2", "MQTT-4.12.0-5")
def test_a_client_authenticates(client: RawClient) -> None:
    log_in(client)
    assert client.ping() == []


@pytest.mark.parametrize("username, password", [("user", b"wrong"), ("nobody", b"pencil")])
def test_wrong_proofs_and_unknown_users_are_refused_alike(client: RawClient, username: str, password: bytes) -> None:
    scram = ScramClient(username, password)
    answer = begin(client, scram)
    client.send(Auth(0x18, method(scram.final(answer.properties.authentication_data or b""))))
    refusal = client.expect(Connack)
    assert (refusal.reason_code, refusal.properties.reason_string) == (NOT_AUTHORIZED, "wrong user name or password")
    client.expect_closed()


@pytest.mark.parametrize(
    "packet, code",
    [
        (Pingreq(), PROTOCOL_ERROR),
        (Publish("a", b""), PROTOCOL_ERROR),
        (Subscribe(1, [Subscription("a", 0)]), PROTOCOL_ERROR),
        (Connect("again", 5), PROTOCOL_ERROR),
        (Auth(0x19, method(b"")), PROTOCOL_ERROR),
        (Auth(0x00, method(b"")), PROTOCOL_ERROR),
        (Auth(0x18, method(b"", "PLAIN")), PROTOCOL_ERROR),
        (Auth(0x18, method(b"nonsense")), NOT_AUTHORIZED),
        (Auth(0x18, method(None)), NOT_AUTHORIZED),
    ],
)
def test_only_auth_is_accepted_before_the_connack(client: RawClient, packet: Any, code: int) -> None:
    begin(client, ScramClient("user", b"pencil"))
    client.send(packet)
    assert client.expect(Connack).reason_code == code
    client.expect_closed()


def test_a_client_may_disconnect_during_authentication(client: RawClient) -> None:
    begin(client, ScramClient("user", b"pencil"))
    client.send(Disconnect())
    assert client.expect_closed() == []


def test_unknown_methods_are_refused(client: RawClient) -> None:
    assert client.connect("c", properties=method(b"x", "PLAIN")).reason_code == BAD_AUTHENTICATION_METHOD


def test_a_connect_with_a_password_gets_no_method(client: RawClient) -> None:
    connack = client.connect("plain", username="user", password=b"pencil")
    assert connack.reason_code == 0 and connack.properties.authentication_method is None
    client.send(Auth(0x19, method(b"x")))
    assert client.expect(Disconnect).reason_code == PROTOCOL_ERROR


def test_without_a_password_file_there_is_no_method() -> None:
    with BrokerProcess() as process, RawClient(process.port) as client:
        assert client.connect("c", properties=method(b"x")).reason_code == BAD_AUTHENTICATION_METHOD


@pytest.mark.normative("5", "MQTT-4.12.0-5", "MQTT-4.12.1-1")
def test_re_authentication(client: RawClient) -> None:
    log_in(client)
    for _ in range(2):
        scram = ScramClient("user", b"pencil")
        again(client, scram)
        done = client.expect(Auth)
        assert (done.reason_code, done.properties.authentication_data) == (0x00, scram.expected)
    client.send(Auth(0x19, method(scram.first())), Pingreq())
    client.expect(Auth)
    client.expect(Pingresp)


@pytest.mark.normative("5", "MQTT-4.12.1-2")
@pytest.mark.parametrize("username, password", [("user", b"wrong"), ("other", b"pen")])
def test_a_failed_re_authentication_disconnects_the_client(client: RawClient, username: str, password: bytes) -> None:
    log_in(client)
    again(client, ScramClient(username, password))
    assert client.expect(Disconnect).reason_code == NOT_AUTHORIZED
    client.expect_closed()


@pytest.mark.parametrize("packet", [Auth(0x18, method(b"")), Auth(0x00, method(b"")), Auth(0x19, method(b"", "PLAIN"))])
def test_an_unexpected_auth_closes_the_connection(client: RawClient, packet: Auth) -> None:
    log_in(client)
    client.send(packet)
    assert client.expect(Disconnect).reason_code == PROTOCOL_ERROR


def test_an_unfinished_exchange_times_out(tmp_path: Path) -> None:
    path = tmp_path / "users"
    set_password(path, "user", scram_password(b"pencil"))
    with BrokerProcess(config={"password_file": str(path), "limits": {"connect_timeout": "2s"}}) as process:
        with RawClient(process.port) as client:
            begin(client, ScramClient("user", b"pencil"))
            client.expect_closed()
        process.wait_for_log("event=refused client=scram .*reason=.not authenticated in time")


@pytest.mark.normative("5", "MQTT-3.1.2-24")
def test_a_challenge_larger_than_the_maximum_packet_size_is_not_sent(client: RawClient) -> None:
    properties = method(ScramClient("user", b"pencil").first())
    properties.maximum_packet_size = 40
    client.send(Connect("small", 5, True, 60, properties=properties))
    assert all(not isinstance(packet, Auth) for packet in client.expect_closed())
