"""Authentication by an HTTP server: requests, answers, and servers that hang or answer nonsense."""

from __future__ import annotations

import base64
import json
import os
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme
from support.broker_process import BrokerProcess
from support.callback_server import CallbackServer
from support.certificates import CertificateFiles
from support.config_files import problems, write
from support.core import wait_until
from support.patience import growing
from support.raw_client import RawClient
from support.stream_client import StreamClient, tcp_socket

from mqttbroker.auth.http_callback import parse, render
from mqttbroker.auth.plugin import Accepted, Ignored, Login, Rejected, Unavailable
from mqttbroker.codec.packets import Connack, Connect, Disconnect
from mqttbroker.codec.reason_codes import (
    BAD_USER_NAME_OR_PASSWORD,
    BANNED,
    NOT_AUTHORIZED,
    SERVER_BUSY,
    SERVER_UNAVAILABLE,
    SUCCESS,
)
from mqttbroker.config.load import load_settings
from mqttbroker.server.config_check import check

Start = Callable[..., BrokerProcess]

pytestmark = pytest.mark.one_build


@pytest.fixture
def server() -> Iterator[CallbackServer]:
    server = CallbackServer()
    yield server
    server.close()


def config(server: CallbackServer, **more: Any) -> dict[str, Any]:
    callback = {"url": server.url, "timeout": "1m", **more}
    return {"http_callback": callback, "bans": {"failures": 0, "address_failures": 0}}


def login(broker: BrokerProcess, username: str | None, password: bytes = b"secret", client_id: str = "c") -> int:
    fields: dict[str, Any] = {} if username is None else {"username": username, "password": password}
    with RawClient(broker.port) as client:
        return client.connect(client_id, **fields).reason_code


def test_requests_and_answers(start_broker: Start, server: CallbackServer, tmp_path: Path) -> None:
    secret = tmp_path / "authorization"
    secret.write_text("Bearer of-the-broker\n")
    headers = tmp_path / "headers"
    headers.write_text('{"X-Site": "one"}\n')
    broker = start_broker(config=config(server, authorization_file=str(secret), headers_file=str(headers)))
    server.say("alice", {"result": "allow", "acl": {"all": ["a/#"]}})
    server.say("bob", b"", 204)
    server.say("ignored", {"result": "ignore"})
    server.say(None, {"result": "ignore"})
    with RawClient(broker.port) as alice:
        assert alice.connect("device", username="alice", password=b"s\xc3\xa9same").reason_code == SUCCESS
        assert alice.subscribe("a/b", "b").reason_codes == [2, NOT_AUTHORIZED]
    expect_expiry(broker, server)
    assert server.requests[0] == {
        "username": "alice", "password": "sésame", "clientid": "device", "peerhost": "127.0.0.1",
        "listener": server.requests[0]["listener"], "certificate_name": None,
    }  # fmt: skip
    assert server.headers[0]["Authorization"] == "Bearer of-the-broker" and server.headers[0]["X-Site"] == "one"
    assert login(broker, "bob") == SUCCESS
    assert login(broker, "unknown") == login(broker, "ignored") == BAD_USER_NAME_OR_PASSWORD
    assert login(broker, None) == SUCCESS  # anonymous, from loopback
    assert login(broker, "alice", b"\xff") == BAD_USER_NAME_OR_PASSWORD  # JSON text cannot have it
    assert "same" not in broker.log and "of-the-broker" not in broker.log


def expect_expiry(broker: BrokerProcess, server: CallbackServer) -> None:
    """A login is accepted, and its connection ends when the login expires."""
    for seconds in growing():
        server.say("late", {"result": "allow", "expire_at": time.time() + seconds})
        with RawClient(broker.port) as late:
            if late.connect("late", username="late", password=b"secret").reason_code == SUCCESS:
                assert late.expect(Disconnect).reason_code == NOT_AUTHORIZED
                return
    pytest.fail("a login that has not expired yet was refused")


FAILURES = {
    "broken": (200, b"{", "the answer is not JSON"),
    "list": (200, b"[]", "the answer has no .*result"),
    "empty": (200, b"", "the answer is not JSON"),
    "other": (200, b'{"result": "yes"}', "the answer has no .*result"),
    "deep": (200, b"[" * 60_000, "the answer is not JSON"),
    "super": (200, b'{"result": "allow", "is_superuser": true}', "is_superuser.* is not supported: send an"),
    "name": (200, b'{"result": "allow", "username": 5}', "invalid answer: the username is no MQTT string"),
    "acl": (200, b'{"result": "allow", "acl": [5]}', "invalid answer: acl: a permission must be an object"),
    "when": (200, b'{"result": "allow", "expire_at": "soon"}', "invalid answer: the expiry is no Unix time"),
    "big": (200, b" " * 100_000, "localhost: answered with more than 65536 bytes"),
    "denied": (401, b'{"result": "allow"}', "localhost: answered with status 401"),
    "error": (500, b'{"result": "allow"}', "localhost: answered with status 500"),
    "redirected": (307, b"", "localhost: answered with status 307"),
    "endless": (200, b"", "localhost: answered with more than 65536 bytes"),
    "slow": (200, b"", "timeout"),
    "silent": (200, b"", "localhost: ServerDisconnectedError"),
    "hangs": (200, b"", "timeout"),
    "garbage": (200, b"", "localhost: "),
}


def test_a_server_that_does_not_decide_refuses_the_login(start_broker: Start, server: CallbackServer) -> None:
    broker = start_broker(config=config(server, timeout="3s"))
    server.say("fine", {"result": "allow"})
    for username, (status, body, reason) in FAILURES.items():
        server.say(username, body, status)
        after = len(broker.lines)
        assert login(broker, username) == SERVER_UNAVAILABLE, username
        broker.wait_for_log(f"event=authenticator_failed .*reason=.*{reason}", after=after)
        assert login(broker, "fine") == SUCCESS
    assert set(server.paths) == {"/login"}  # no redirect was followed
    assert "event=authenticator_ended" not in broker.log


def test_a_server_that_cannot_be_reached(start_broker: Start, server: CallbackServer) -> None:
    server.close()
    broker = start_broker(config=config(server))
    for _ in range(5):
        assert login(broker, "alice") == SERVER_UNAVAILABLE
    broker.wait_for_log("event=authenticator_failed .*ClientConnectorError")
    assert broker.log.count("event=authenticator_failed") == 1  # the same reason is not repeated for each login


def test_a_flood_of_logins_while_the_server_hangs(start_broker: Start, server: CallbackServer) -> None:
    terms = config(server, max_concurrent=8, timeout="60s", max_wait="60s")
    broker = start_broker(config={**terms, "logins": {"max_waiting": 30}})
    server.say("fine", {"result": "allow"})
    server.say("hangs", {"result": "allow"})
    with RawClient(broker.port) as bystander, ExitStack() as stack:
        assert bystander.connect("bystander", username="fine", password=b"x").reason_code == SUCCESS
        bystander.subscribe("t")
        clients = [stack.enter_context(RawClient(broker.port)) for _ in range(60)]
        for number, client in enumerate(clients):
            client.send(Connect(f"c{number}", username="hangs", password=b"x").encode(5))
        for payload in (b"1", b"2", b"3"):
            bystander.publish("t", payload, 1)
            assert bystander.take().payload == payload
        assert [client.expect(Connack).reason_code for client in clients[38:]] == [SERVER_BUSY] * 22
        server.release.set()
        assert [client.expect(Connack).reason_code for client in clients[:38]] == [SUCCESS] * 38
        bystander.ping()


def test_a_login_that_waits_for_too_long(start_broker: Start, server: CallbackServer) -> None:
    broker = start_broker(config=config(server, max_concurrent=1, timeout="60s", max_wait="500ms"))
    with RawClient(broker.port) as first, RawClient(broker.port) as second:
        first.send(Connect("first", username="hangs", password=b"x").encode(5))
        wait_until(lambda: len(server.requests) == 1)  # clients of two workers come in any order
        second.send(Connect("second", username="fine", password=b"x").encode(5))
        assert first.expect(Connack).reason_code == second.expect(Connack).reason_code == SERVER_UNAVAILABLE
    broker.wait_for_log('event=authenticator_failed .*reason="no answer in time"')


def test_remembered_answers(start_broker: Start, server: CallbackServer) -> None:
    broker = start_broker(config=config(server, cache_ttl="1h"))
    server.say("alice", {"result": "allow", "username": "a", "acl": {"all": ["a/#"]}})
    for _ in range(3):
        assert login(broker, "alice") == SUCCESS
        assert login(broker, "mallory") == BAD_USER_NAME_OR_PASSWORD
    assert len(server.requests) == 2
    assert login(broker, "alice", b"other") == SUCCESS  # another password is another login
    assert login(broker, "alice", client_id="d") == SUCCESS
    assert len(server.requests) == 4
    server.say("down", b"", 500)
    for _ in range(2):
        assert login(broker, "down") == SERVER_UNAVAILABLE
    assert len(server.requests) == 6  # a failure is not remembered
    server.say("alice", {"result": "deny"})
    os.kill(broker.pid, signal.SIGHUP)
    broker.wait_for_log("event=authenticator_reloaded")
    assert login(broker, "alice") == BAD_USER_NAME_OR_PASSWORD  # SIGHUP forgets the answers


def test_guesses_without_a_user_name_ban_their_address(start_broker: Start, server: CallbackServer) -> None:
    broker = start_broker(config={**config(server), "bans": {"address_failures": 3, "first": "1h", "longest": "1h"}})
    server.say(None, {"result": "deny"})

    def guess(password: bytes | None) -> int:
        with RawClient(broker.port) as client:
            return client.connect("pump", password=password).reason_code

    assert [guess(None) for _ in range(5)] == [NOT_AUTHORIZED] * 5  # no credentials, so nothing is guessed
    wrong = [guess(b"%d" % number) for number in range(4)]
    assert wrong == [BAD_USER_NAME_OR_PASSWORD] * 3 + [BANNED]


def test_answer_that_has_expired_is_not_remembered(start_broker: Start, server: CallbackServer) -> None:
    broker = start_broker(config=config(server, cache_ttl="1h"))
    expect_expiry(broker, server)
    server.say("late", {"result": "allow", "expire_at": time.time() + 3600})
    assert login(broker, "late") == SUCCESS


def test_answer_of_before_a_reload_is_not_remembered(start_broker: Start, server: CallbackServer) -> None:
    broker = start_broker(config=config(server, cache_ttl="1h", timeout="30s"))
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(login, broker, "hangs")
        wait_until(lambda: len(server.requests) == 1)
        os.kill(broker.pid, signal.SIGHUP)
        broker.wait_for_log("event=authenticator_reloaded")
        server.say("hangs", {"result": "allow"})
        server.release.set()
        assert begun.result() == SUCCESS
    server.say("hangs", {"result": "deny"})
    assert login(broker, "hangs") == BAD_USER_NAME_OR_PASSWORD


def test_https_with_its_own_authorities_and_sighup(start_broker: Start, tmp_path: Path) -> None:
    trusted, stranger = trustme.CA(), trustme.CA()
    cafile = tmp_path / "ca.pem"
    stranger.cert_pem.write_to_path(str(cafile))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trusted.issue_cert("localhost").configure_cert(context)
    server = CallbackServer(context)
    try:
        server.say("alice", {"result": "allow"})
        broker = start_broker(config=config(server, cafile=str(cafile)))
        assert login(broker, "alice") == SERVER_UNAVAILABLE
        broker.wait_for_log("event=authenticator_failed .*ClientConnectorCertificateError")
        trusted.cert_pem.write_to_path(str(cafile))
        os.kill(broker.pid, signal.SIGHUP)
        broker.wait_for_log("event=authenticator_reloaded")
        assert login(broker, "alice") == SUCCESS
        after = len(broker.lines)
        cafile.write_text("nonsense")
        os.kill(broker.pid, signal.SIGHUP)
        broker.wait_for_log(f"event=reload_failed .*http_callback: cafile {cafile}: not PEM, or damaged", after=after)
        assert login(broker, "alice") == SUCCESS
    finally:
        server.close()


def test_sighup_applies_other_settings(start_broker: Start, server: CallbackServer) -> None:
    second = CallbackServer()
    try:
        server.say("alice", {"result": "allow"})
        text = 'http_callback.url = "{}"\nhttp_callback.timeout = "{}"\n'
        broker = start_broker(config=text.format(server.url, "5s"))
        assert login(broker, "alice") == SUCCESS
        broker.config.write_text(text.format(server.url, "300ms") + 'plugin.object = "devices:Devices"\n')
        os.kill(broker.pid, signal.SIGHUP)
        broker.wait_for_log("event=authenticator_reloaded")
        broker.wait_for_log("event=restart_needed key=plugin.object")
        assert login(broker, "hangs") == SERVER_UNAVAILABLE
        after = len(broker.lines)
        broker.config.write_text(text.format(second.url, "5s"))
        os.kill(broker.pid, signal.SIGHUP)
        broker.wait_for_log("event=authenticator_reloaded", after=after)
        assert login(broker, "alice") == BAD_USER_NAME_OR_PASSWORD  # says the other server
        broker.config.write_text("")
        os.kill(broker.pid, signal.SIGHUP)
        broker.wait_for_log("event=restart_needed key=http_callback.url")
        assert login(broker, "alice") == BAD_USER_NAME_OR_PASSWORD  # never without the server
    finally:
        second.close()


def test_the_name_in_the_certificate_is_sent(start_broker: Start, server: CallbackServer, tmp_path: Path) -> None:
    """The certificate proves the name, and the server decides what it may do."""
    files = CertificateFiles(tmp_path)
    server.say(None, {"result": "allow", "username": "pump-7", "acl": {"all": ["pumps/#"]}})
    broker = start_broker(config={**files.config(client_certificate="required"), **config(server)})
    port = int(broker.wait_for_log(r"event=listening type=tls .*port=(\d+)")[1])
    sock = files.client("pump").wrap_socket(tcp_socket(port), server_hostname="localhost")
    with StreamClient(sock) as client:
        assert client.connect("c").reason_code == SUCCESS
        broker.wait_for_log("event=connected client=c .*user=pump-7 ")
    assert server.requests[0]["certificate_name"] == "pump"


def test_an_empty_user_name_is_anonymous(start_broker: Start, server: CallbackServer) -> None:
    server.say("", {"result": "allow"})
    server.say("alice", {"result": "allow"})
    broker = start_broker(config=config(server))
    with RawClient(broker.port) as first:
        assert first.connect("c", username="", password=b"").reason_code == SUCCESS
        assert login(broker, "alice") == SUCCESS  # a user may take over the session of an anonymous client only


# --- bodies and answers -------------------------------------------------------------------------------------------

LOGIN = Login("c-1", "alice", b"pass", "10.0.0.1", "*:1883", None, 5)


def test_templates() -> None:
    body = {
        "user": "${username}", "id": "site/${clientid}", "cert": "${certificate_name}", "both": "${certificate_name}-x",
        "fixed": "word", "secret": "${password_base64}", "v": "${version}",
    }  # fmt: skip
    rendered = render(body, LOGIN)
    assert rendered is not None and json.loads(rendered) == {
        "user": "alice", "id": "site/c-1", "cert": None, "both": "-x", "fixed": "word",
        "secret": base64.b64encode(b"pass").decode(), "v": "5",
    }  # fmt: skip
    binary = Login("c", "${password}", b"\xff", "", "", None, 5)
    assert render({"p": "${password}"}, binary) is None
    rendered = render({"p": "${password_base64}", "u": "${username}"}, binary)
    assert rendered is not None and json.loads(rendered) == {"p": "/w==", "u": "${password}"}  # not filled in twice


def test_parsed_answers() -> None:
    assert parse(b'{"result": "deny", "username": "x"}') == Rejected()
    assert parse(b'{"result": "ignore"}') == Ignored()
    full = b'{"result": "allow", "username": "u", "client_id": "c", "acl": [], "expire_at": 5, "client_attrs": {}}'
    assert parse(full) == Accepted("u", "c", [], 5)
    with pytest.raises(Unavailable):
        parse(b"\xff")


WRONG = [
    ('url = "ftp://host/x"', "url: must be a URL that begins with https:// or http://"),
    ('url = "https://user:word@host/"', "url: must not have a user name or password"),
    ('headers = { Authorization = "x" }', "headers: give authorization_file, or authorization"),
    ('headers = { "X Y" = "x" }', 'headers: "X Y" is not a header, or has no printable ASCII text'),
    ('headers = "X: y"', "headers: must be a table of strings, or a JSON object"),
    ('headers = { X = 5 }', "headers: must be a table of strings, or a JSON object"),
    ('headers = { X = "a\\r\\nb" }', 'headers: "X" is not a header, or has no printable ASCII text'),
    ('url = "http://localhost/"\ncafile = "c"', "cafile: needs a url that begins with https://"),
    ("body = {}", "body: must not be empty"),
    ('body = { a = "${secret}" }',
     "body: ${secret} is none of username, password, password_base64, clientid, peerhost, listener, certificate_name,"
     " version"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "problem"), WRONG, ids=[problem for _, problem in WRONG])
def test_invalid_settings(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, f"[http_callback]\n{text}\n")
    assert problems(path) == [f"{path}: http_callback.{problem}"]


def test_the_check_of_a_configuration_opens_the_authorities(tmp_path: Path) -> None:
    missing = tmp_path / "ca.pem"
    path = write(tmp_path, f'data_dir = "{tmp_path}"\n[http_callback]\nurl = "https://host/"\ncafile = "{missing}"\n')
    assert check(load_settings(path)) == [f"http_callback: cafile {missing}: No such file or directory"]
