"""Who may do what over HTTP: tokens, certificates, roles, readers of streams, and wrong tokens."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.core import wait_until
from support.metric_samples import samples
from support.patience import PATIENCE
from support.raw_client import RawClient

from mqttbroker.admin.http.access import ROLES, Principal, Right, access_list, certificate_names, role_for
from mqttbroker.auth.acl import parse_acl
from mqttbroker.config.settings import Http, HttpAccess, Settings, Stream
from mqttbroker.core.access.policy import AllowAll

pytestmark = pytest.mark.one_build
Start = Callable[..., BrokerProcess]
STREAMS = {"plant": {"filters": ["plant/#"], "partitions": 1}, "lab": {"filters": ["lab/#"], "partitions": 1}}
FILE = "0/00000000000000000000.seg"


def ask(
    broker: BrokerProcess,
    method: str,
    path: str,
    token: str = "",
    body: bytes | None = None,
    context: ssl.SSLContext | None = None,
    host: str = "",
    origin: str = "",
) -> tuple[int, bytes]:
    """The status and body of a request."""
    if context is None:
        connection = http.client.HTTPConnection(broker.host, broker.http_port, timeout=PATIENCE)
    else:
        connection = http.client.HTTPSConnection("localhost", broker.http_port, timeout=PATIENCE, context=context)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if host:
        headers["Host"] = host
    if origin:
        headers["Origin"] = origin
    try:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def entry(name: str, role: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "token": f"token-{name}", **more}


def publish(broker: BrokerProcess, *topics: str) -> None:
    with RawClient(broker.port) as client:
        assert client.connect("publisher").reason_code == 0
        for topic in topics:
            client.publish(topic, b"21.5", qos=1)


def test_roles_see_metrics_and_streams_as_far_as_they_may(start_broker: Start) -> None:
    access = [
        entry("grafana", "viewer"),
        entry("both", "viewer", streams=["lab"]),
        entry("spark", "reader", streams=["plant"]),
        entry("root", "admin"),
    ]
    broker = start_broker(config={"http": {"access": access}, "streams": STREAMS})
    publish(broker, "plant/1", "lab/1")
    report = b'{"offsets": {"0": 1}}'
    expected = {
        # sender: metrics, manifest of plant, file of plant, file of lab, report for plant
        "grafana": (200, 200, 403, 403, 403),
        "both": (200, 200, 403, 200, 403),
        "spark": (403, 200, 200, 403, 204),
        "root": (200, 200, 200, 200, 204),
    }
    for name, statuses in expected.items():
        token = f"token-{name}"
        found = (
            ask(broker, "GET", "/metrics", token)[0],
            ask(broker, "GET", "/streams/plant", token)[0],
            ask(broker, "GET", f"/streams/plant/{FILE}", token)[0],
            ask(broker, "GET", f"/streams/lab/{FILE}", token)[0],
            ask(broker, "PUT", "/streams/plant/consumers/c", token, report)[0],
        )
        assert found == statuses, name
    names = {name: json.loads(ask(broker, "GET", "/streams", f"token-{name}")[1])["streams"] for name in expected}
    every = ["lab", "plant"]
    assert names == {"grafana": every, "both": every, "spark": ["plant"], "root": every}
    hidden, unknown = (ask(broker, "GET", f"/streams/{name}", "token-spark") for name in ("lab", "none"))
    assert hidden[0] == 403 and unknown == (403, hidden[1].replace(b"lab", b"none"))
    assert ask(broker, "GET", "/streams/none", "token-grafana")[0] == 404
    for path in ("/metrics", "/streams", "/nowhere"):
        assert ask(broker, "GET", path)[0] == ask(broker, "GET", path, "wrong")[0] == 401
    assert ask(broker, "GET", "/livez")[0] == ask(broker, "GET", "/readyz")[0] == 200
    counts = samples(ask(broker, "GET", "/metrics", "token-root")[1])
    assert counts["mqttbroker_http_requests_total/reader/403"] == 4  # metrics, a file, two manifests
    assert counts["mqttbroker_http_requests_total/none/401"] == 6


def test_reader_bound_to_a_user_reads_the_streams_that_the_rules_allow(start_broker: Start, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("user ann\ntopic read plant/#\n\nuser bob\ntopic read #\ntopic deny lab/secret\n")
    access = [
        entry("ann", "reader", user="ann"),
        entry("bob", "reader", user="bob"),
        entry("narrow", "reader", user="bob", streams=["lab"]),
    ]
    config = {"acl_file": str(rules), "http": {"access": access}, "streams": STREAMS}
    broker = start_broker(config=config)

    def streams(name: str) -> Any:
        return json.loads(ask(broker, "GET", "/streams", f"token-{name}")[1])["streams"]

    assert (streams("ann"), streams("bob"), streams("narrow")) == (["plant"], ["plant"], [])
    rules.write_text("user ann\ntopic read lab/+\n\nuser bob\ntopic read #\n")
    os.kill(broker.pid, signal.SIGHUP)
    broker.wait_for_log("event=acl_reloaded")
    assert (streams("ann"), streams("bob"), streams("narrow")) == ([], ["lab", "plant"], ["lab"])


def test_certificates_give_roles(start_broker: Start, tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    access = [
        {"name": "prometheus", "role": "viewer", "certificate": "prometheus"},
        {"name": "mail", "role": "viewer", "certificate": "ops@example.org"},
        entry("token", "viewer"),
    ]
    settings = {"certfile": str(files.certfile), "keyfile": str(files.keyfile), "cafile": str(files.cafile)}
    broker = start_broker(config={"http": {**settings, "client_certificate": "optional", "access": access}})
    named = files.client("prometheus")
    assert ask(broker, "GET", "/metrics", context=named)[0] == 200  # by its common name
    assert ask(broker, "GET", "/metrics", context=files.client("ops"))[0] == 200  # by its e-mail address
    assert ask(broker, "GET", "/metrics", context=files.client("other"))[0] == 401
    assert ask(broker, "GET", "/metrics", context=files.client())[0] == 401
    assert ask(broker, "GET", "/metrics", "token-token", context=files.client())[0] == 200
    assert ask(broker, "GET", "/metrics", "wrong", context=named)[0] == 401  # the token decides


def test_web_page_of_another_site_cannot_use_the_certificate_of_a_browser(start_broker: Start, tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    access = [{"name": "boss", "role": "admin", "certificate": "prometheus"}, entry("token", "admin")]
    settings = {"certfile": str(files.certfile), "keyfile": str(files.keyfile), "cafile": str(files.cafile)}
    broker = start_broker(config={"http": {**settings, "client_certificate": "optional", "access": access}})
    named = files.client("prometheus")
    body = b'{"username": "alice"}'  # of a form or a script, without a preflight request

    def ban(origin: str, token: str = "") -> int:
        return ask(broker, "POST", "/api/v1/bans", token, body, named, origin=origin)[0]

    for origin in ("https://attacker.example", "null", f"https://localhost.attacker.example:{broker.http_port}"):
        assert ban(origin) == 403
    assert json.loads(ask(broker, "GET", "/api/v1/bans", context=named)[1])["items"] == []
    assert ban(f"https://localhost:{broker.http_port}") == ban("https://attacker.example", "token-token") == 200
    broker.wait_for_log('event=denied action=POST target=/api/v1/bans .*reason="a web page of another site needs a token"')


def test_required_certificate_is_checked_in_the_handshake(start_broker: Start, tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    settings = {"certfile": str(files.certfile), "keyfile": str(files.keyfile), "cafile": str(files.cafile)}
    access = [{"name": "prometheus", "role": "viewer", "certificate": "prometheus"}]
    broker = start_broker(config={"http": {**settings, "client_certificate": "required", "access": access}})
    assert ask(broker, "GET", "/metrics", context=files.client("prometheus"))[0] == 200
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
        ask(broker, "GET", "/livez", context=files.client())


def test_connection_with_a_certificate_ends_with_the_authorities_that_verified_it(start_broker: Start, tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    settings = {"certfile": str(files.certfile), "keyfile": str(files.keyfile), "cafile": str(files.cafile)}
    access = [{"name": "prometheus", "role": "viewer", "certificate": "prometheus"}]
    broker = start_broker(config={"http": {**settings, "client_certificate": "optional", "access": access}})
    context = files.client("prometheus")
    plain = socket.create_connection((broker.host, broker.http_port))
    with context.wrap_socket(plain, server_hostname="localhost") as kept:
        kept.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in kept.recv(4096)
        while b"mqttbroker_uptime_seconds " not in kept.recv(1 << 16):
            pass
        files.cafile.write_bytes(trustme.CA().cert_pem.bytes())
        os.kill(broker.pid, signal.SIGHUP)
        with suppress(ConnectionError, ssl.SSLError):
            while kept.recv(1 << 16):
                pass
    broker.wait_for_log("event=certificates_reloaded listener=http")
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
        ask(broker, "GET", "/metrics", context=context)


def test_wrong_tokens_ban_the_address(start_broker: Start) -> None:
    config = {"http": {"token": "right"}, "bans": {"address_failures": 3, "first": "1h", "longest": "1h"}}
    broker = start_broker(config=config)
    assert [ask(broker, "GET", "/metrics", "wrong")[0] for _ in range(4)] == [401, 401, 401, 429]
    assert ask(broker, "GET", "/metrics", "right")[0] == 429
    assert ask(broker, "GET", "/livez")[0] == 200
    with RawClient(broker.port) as client:
        assert client.connect("c").reason_code == 0  # MQTT logins are counted apart
    broker.wait_for_log(r"event=banned address=127\.0\.0\.1 ")
    denied = r"event=denied action=GET target=/metrics address=127\.0\.0\.1:\d+ reason=.*token.* listener=http"
    broker.wait_for_log(denied)
    assert "wrong" not in broker.log.replace("wrong tokens", "")


def test_a_ban_of_wrong_tokens_ends(start_broker: Start) -> None:
    config = {"http": {"token": "right"}, "bans": {"address_failures": 1, "first": "1s", "longest": "1s"}}
    broker = start_broker(config=config)
    assert ask(broker, "GET", "/metrics", "wrong")[0] == 401
    broker.wait_for_log(r"event=banned address=127\.0\.0\.1 ")
    wait_until(lambda: ask(broker, "GET", "/metrics", "right")[0] == 200)


def test_access_is_read_again_on_sighup(start_broker: Start, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("first\n")
    table = '[[http.access]]\nname = "grafana"\nrole = "{role}"\ntoken_file = "{file}"\n'
    broker = start_broker(config=table.format(role="viewer", file=secret))

    def reload(awaited: str) -> None:
        after = len(broker.lines)
        os.kill(broker.pid, signal.SIGHUP)
        broker.wait_for_log(awaited, after=after)
        broker.wait_for_log("event=reloaded", after=after)

    assert ask(broker, "GET", "/metrics", "first")[0] == 200
    secret.write_text("second\n")
    reload("event=setting_changed key=http.access")
    assert ask(broker, "GET", "/metrics", "first")[0] == 401
    assert ask(broker, "GET", "/metrics", "second")[0] == 200
    secret.write_text("")
    reload(r"event=reload_failed reason=.*http\.access\.0\.token_file: .*secret: is empty")
    assert ask(broker, "GET", "/metrics", "second")[0] == 200


def test_request_without_token_must_name_an_address_or_localhost(start_broker: Start) -> None:
    """Else a web page could read from the server by a name that points to loopback."""
    broker = start_broker()
    for host in ("127.0.0.1:18083", "localhost", "[::1]:1", "probe"):
        assert ask(broker, "GET", "/metrics", host=host)[0] == 200
    assert ask(broker, "GET", "/metrics", host="attacker.example:18083")[0] == 421


def test_request_without_token_can_change_consumers_only(start_broker: Start) -> None:
    broker = start_broker(config={"streams": STREAMS})
    publish(broker, "plant/1")
    document = json.loads(broker.get("/api/v1/openapi.json"))
    changes = [(method.upper(), path) for path, item in document["paths"].items() for method in item if method != "get"]
    consumers = "/streams/{name}/consumers/{consumer}"
    assert len(changes) > 10 and {("PUT", consumers), ("DELETE", consumers)} <= set(changes)
    for method, path in changes:
        target = re.sub(r"{\w+}", "plant", path)
        status = ask(broker, method, target, body=b'{"offsets": {"0": 1}}' if method == "PUT" else b"{}")[0]
        expected = {consumers: 204, f"/api/v1{consumers}": 404}  # the consumer is forgotten by then
        assert status == expected.get(path, 403), (method, path)
    protected = start_broker(config={"streams": STREAMS, "allow_anonymous": False})
    target = "/streams/plant/consumers/c"
    assert [ask(protected, method, target, body=b'{"offsets": {"0": 1}}')[0] for method in ("PUT", "DELETE")] == [403] * 2


# --- the parts ----------------------------------------------------------------------------------------------------


def test_token_has_one_sender() -> None:
    http = Http(access=(HttpAccess("a", "viewer", token="x"), HttpAccess("b", "operator", token="y")))
    access = access_list(Settings(http=http), AllowAll())
    assert access.anonymous is None
    found = {token: access.of_token(token) for token in (b"x", b"y", b"", b"xy", b"X")}
    assert {token: sender.name for token, sender in found.items() if sender is not None} == {b"x": "a", b"y": "b"}


def test_single_token_is_that_of_an_administrator() -> None:
    found = access_list(Settings(http=Http(token="t")), AllowAll()).of_token(b"t")
    assert found is not None and found.rights == ROLES["admin"] and found.may_read_stream("any", ["#"])


@pytest.mark.parametrize(
    ("settings", "rights", "reads"),
    [
        (Settings(), ROLES["viewer"], True),
        (Settings(allow_anonymous=False), Right.STATUS, False),
        (Settings(acl_file=Path("rules")), Right.STATUS, False),
    ],
)
def test_sender_without_credentials_has_the_rights_of_an_anonymous_client(settings: Settings, rights: Right, reads: bool) -> None:
    anonymous = access_list(settings, AllowAll()).anonymous
    assert anonymous is not None and anonymous.rights == rights
    assert anonymous.may_read_stream("s", ["#"]) is reads


def test_least_role_of_a_right() -> None:
    assert [role_for(right) for right in (Right.STATUS, Right.OPERATE, Right.ADMINISTER)] == [
        "viewer", "operator", "admin"
    ]  # fmt: skip


def test_user_bounds_what_a_sender_reads_and_publishes() -> None:
    rules = parse_acl("user ann\ntopic read a/#\ntopic write b\npattern read u/%u\npattern readwrite c/%c/#\n", "rules")
    http = Http(access=(HttpAccess("x", "operator", token="t", user="ann"),))
    found = access_list(Settings(http=http), rules).of_token(b"t")
    assert isinstance(found, Principal)
    reads = {topic for topic in ("a/1", "b", "u/ann", "u/bob", "c//1", "c/x/1") if found.may_read(topic)}
    assert reads == {"a/1", "u/ann"}
    assert found.may_publish("b") and not found.may_publish("a/1")


def test_names_of_a_certificate() -> None:
    certificate = {
        "subject": ((("countryName", "CH"),), (("commonName", "ops"),)),
        "subjectAltName": (("DNS", "ops.example"), ("email", "ops@example.org"), ("URI", "spiffe://x/ops")),
    }
    assert certificate_names(certificate) == ["ops.example", "ops@example.org", "spiffe://x/ops", "ops"]
    assert certificate_names({}) == []


def test_commands_use_the_token_of_the_most_powerful_sender() -> None:
    access = (
        HttpAccess("r", "reader", token="a", streams=("*",)),
        HttpAccess("v", "viewer", token="b"),
        HttpAccess("o", "operator", token="c"),
        HttpAccess("p", "operator", token="d"),
    )
    assert [Http(access=access[:count]).command_token for count in range(5)] == [None, None, "b", "c", "c"]
    assert Http(token="t", access=access).command_token == "t"


# --- the configuration --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("access", "problem"),
    [
        ({"name": "a", "role": "viewer"}, ("token_file", "is required, or certificate")),
        ({"name": "a", "role": "reader", "token": "t"}, ("streams", 'is required for role "reader", or user')),
        ({"name": "a", "role": "admin", "token": "t", "streams": ("s",)}, ("streams", 'role "admin" reads all streams')),
    ],
)
def test_entry_that_cannot_be(access: dict[str, Any], problem: tuple[str, str]) -> None:
    assert list(HttpAccess(**access).problems()) == [problem]


def test_entries_that_cannot_be_together() -> None:
    http = Http(token="t", access=(HttpAccess("a", "viewer", token="t"), HttpAccess("a", "viewer", certificate="c")))
    assert list(http.problems()) == [
        ("access.0.token", "is also the token of http.token"),
        ("access.1.name", "a is taken by an earlier entry"),
        ("access.1.certificate", 'needs http.client_certificate "optional" or "required"'),
    ]
    http = Http(access=(HttpAccess("a", "reader", token="t", streams=("x", "s"), user="u"),))
    assert list(Settings(http=http, streams=(Stream("s", ("#",)),)).access_problems()) == [
        (("http", "access", "0", "user"), "needs acl_file, whose rules apply to this user"),
    ]


def test_certificates_need_tls() -> None:
    assert list(Http(client_certificate="required").problems()) == [
        ("certfile", "is required to check client certificates"),
        ("cafile", "is required to check client certificates"),
    ]
    assert list(Http(cafile=Path("ca")).problems()) == [("cafile", 'needs client_certificate "optional" or "required"')]
