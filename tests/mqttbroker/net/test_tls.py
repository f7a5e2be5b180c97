"""TLS and client certificates, for MQTT and WebSocket: handshakes, user names and reload."""

from __future__ import annotations

import os
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from support.broker_process import BrokerProcess, to_toml
from support.certificates import CertificateFiles
from support.config_files import without_line
from support.stream_client import StreamClient, WebSocketStream, tcp_socket

from mqttbroker.codec.reason_codes import BAD_USER_NAME_OR_PASSWORD, NOT_AUTHORIZED
from mqttbroker.config.load import ConfigError, load_settings
from mqttbroker.config.settings import Listener
from mqttbroker.net.tls import server_context

Start = Callable[..., BrokerProcess]


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return CertificateFiles(tmp_path)


def port_of(broker: BrokerProcess, kind: str) -> int:
    broker.wait_for_log("event=started")
    return int(broker.wait_for_log(rf"event=listening type={kind} .*port=(\d+)")[1])


def secure_socket(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    return context.wrap_socket(tcp_socket(port), server_hostname="localhost")


def open_client(broker: BrokerProcess, context: ssl.SSLContext, kind: str = "tls", version: int = 5) -> StreamClient:
    sock = secure_socket(port_of(broker, kind), context)
    return StreamClient(WebSocketStream(sock) if kind == "wss" else sock, version)


# --- in general ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tls", "wss"])
def test_messages_through_tls(start_broker: Start, files: CertificateFiles, kind: str) -> None:
    broker = start_broker(config=files.config(kind))
    with open_client(broker, files.client(), kind) as client:
        assert client.connect("secure").reason_code == 0
        client.subscribe("tls", options=2)
        payload = os.urandom(300_000)
        for qos in range(3):
            client.publish("tls", payload, qos)
            assert client.take().payload == payload
        client.disconnect()


@pytest.mark.parametrize(
    ("oldest", "newest", "welcome"),
    [("1.2", "TLSv1_2", True), ("1.2", "TLSv1_3", True), ("1.3", "TLSv1_3", True), ("1.3", "TLSv1_2", False)],
)
def test_versions(start_broker: Start, files: CertificateFiles, oldest: str, newest: str, welcome: bool) -> None:
    broker = start_broker(config=files.config(tls_version=oldest))
    context = files.client()
    context.maximum_version = ssl.TLSVersion[newest]
    if welcome:
        assert secure_socket(port_of(broker, "tls"), context).version() == newest.replace("_", ".")
    else:
        with pytest.raises(ssl.SSLError):
            secure_socket(port_of(broker, "tls"), context)


def test_tls_before_1_2_is_refused(files: CertificateFiles) -> None:
    context = server_context(Listener(type="tls", certfile=files.certfile, keyfile=files.keyfile))
    assert context is not None and context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_protocol_names(start_broker: Start, files: CertificateFiles) -> None:
    broker = start_broker(config=files.config())
    for offered, chosen in ((["mqtt"], "mqtt"), (["x-amzn-mqtt-ca", "mqtt"], "mqtt"), (["h2"], None), (None, None)):
        context = files.client()
        if offered:
            context.set_alpn_protocols(offered)
        assert secure_socket(port_of(broker, "tls"), context).selected_alpn_protocol() == chosen


def test_plain_mqtt_on_a_tls_port_does_not_affect_others(start_broker: Start, files: CertificateFiles) -> None:
    broker = start_broker(config=files.config())
    with open_client(broker, files.client()) as client, tcp_socket(port_of(broker, "tls")) as plain:
        client.connect("bystander")
        plain.sendall(b"\x10\x0c\x00\x04MQTT\x05\x02\x00\x00\x00\x00" * 20)
        while plain.recv(65536):
            pass
        client.ping()


def test_a_failed_handshake_is_logged_once_and_counted(start_broker: Start, files: CertificateFiles) -> None:
    config = files.config(client_certificate="optional", tls_version="1.3")
    broker = start_broker(config={**config, "limits": {"connect_timeout": "1h"}})
    untrusting, old = ssl.create_default_context(), files.client()
    old.maximum_version = ssl.TLSVersion.TLSv1_2

    def shake(context: ssl.SSLContext) -> Callable[[socket.socket], object]:
        return lambda sock: context.wrap_socket(sock, server_hostname="localhost").recv(1)

    attempts: list[tuple[Callable[[socket.socket], object], str]] = [
        (lambda sock: sock.sendall(b"\x10\x0c\x00\x04MQTT\x05\x02\x00\x00\x00\x00"), "wrong version number"),
        (lambda sock: sock.sendall(b"GET / HTTP/1.1\r\n\r\n"), "http request"),
        (lambda sock: sock.close(), "closed by the client"),
        (shake(old), "unsupported protocol"),
        (shake(untrusting), ".*alert unknown ca"),
        (shake(files.client("stranger", trustme.CA())), "unable to get local issuer certificate"),
    ]
    for number, (attempt, reason) in enumerate(attempts):
        with tcp_socket(port_of(broker, "tls")) as sock:
            host, port = sock.getsockname()
            with suppress(OSError):
                attempt(sock)
            broker.wait_for_log(f"event=refused .*address={host}:{port} reason=.TLS handshake: {reason}. user=")
        assert broker.log.count(f"{host}:{port} ") == 1
        assert f'handshakes_failed_total{{layer="tls"}} {number + 1}.0' in broker.get("/metrics").decode()


def test_a_handshake_that_takes_too_long(start_broker: Start, files: CertificateFiles) -> None:
    broker = start_broker(config={**files.config(), "limits": {"connect_timeout": "300ms"}})
    with tcp_socket(port_of(broker, "tls")) as sock:
        host, port = sock.getsockname()
        assert sock.recv(1) == b""
    broker.wait_for_log(f"event=refused .*address={host}:{port} reason=.TLS handshake: not done in time. user=")
    assert 'handshakes_failed_total{layer="tls"} 1.0' in broker.get("/metrics").decode()


# --- client certificates ------------------------------------------------------------------------------------------


def assert_refused(broker: BrokerProcess, context: ssl.SSLContext) -> None:
    """Assert that the certificate is refused.  In TLS 1.3 the client learns this only after its handshake."""
    with pytest.raises((ssl.SSLError, ConnectionError)):
        with open_client(broker, context) as client:
            client.connect("stranger")


def test_a_required_certificate(start_broker: Start, files: CertificateFiles) -> None:
    broker = start_broker(config=files.config(client_certificate="required"))
    with open_client(broker, files.client("pump")) as client:
        assert client.connect("pump").reason_code == 0
    assert_refused(broker, files.client())
    assert_refused(broker, files.client("pump", trustme.CA()))


def test_an_optional_certificate(start_broker: Start, files: CertificateFiles) -> None:
    broker = start_broker(config=files.config(client_certificate="optional"))
    for context in (files.client("pump"), files.client()):
        with open_client(broker, context) as client:
            assert client.connect("pump").reason_code == 0
    assert_refused(broker, files.client("pump", trustme.CA()))


@pytest.mark.parametrize("kind", ["tls", "wss"])
def test_the_common_name_is_the_user_name(start_broker: Start, files: CertificateFiles, kind: str) -> None:
    more = {"client_certificate": "optional", "use_identity_as_username": True, "allow_anonymous": False}
    broker = start_broker(config=files.config(kind, **more))
    with open_client(broker, files.client("pump"), kind) as client:
        assert client.connect("known").reason_code == 0
    with open_client(broker, files.client(), kind) as client:
        assert client.connect("anonymous").reason_code == NOT_AUTHORIZED


@pytest.mark.parametrize(("version", "code"), [(4, 5), (5, BAD_USER_NAME_OR_PASSWORD)])
def test_a_certificate_without_a_name(start_broker: Start, files: CertificateFiles, version: int, code: int) -> None:
    broker = start_broker(config=files.config(client_certificate="required", use_identity_as_username=True))
    context = files.client()
    files.authority.issue_cert("nameless@example.org").configure_cert(context)
    with open_client(broker, context, version=version) as client:
        assert client.connect("nameless").reason_code == code


# --- reload -------------------------------------------------------------------------------------------------------


def serial_of(sock: Any) -> Any:
    certificate = sock.getpeercert()
    assert certificate is not None
    return certificate["serialNumber"]


def test_sighup_reloads_the_certificates(start_broker: Start, files: CertificateFiles) -> None:
    broker = start_broker(config=files.config(client_certificate="required"))
    trusted = files.client("pump")
    with open_client(broker, trusted) as old:
        assert old.connect("old").reason_code == 0
        before = serial_of(old.socket)
        stranger = trustme.CA()
        files.new_server_certificate()
        stranger.cert_pem.write_to_path(str(files.cafile))
        os.kill(broker.pid, signal.SIGHUP)
        broker.wait_for_log("event=certificates_reloaded")
        with open_client(broker, files.client("pump", stranger)) as new:
            assert new.connect("new").reason_code == 0
            assert serial_of(new.socket) != before
        assert_refused(broker, trusted)  # its authority is no longer among them
        old.ping()


def test_sighup_applies_other_files_and_requirements(start_broker: Start, files: CertificateFiles) -> None:
    """The paths may change, not only the files: a rotation often writes new names."""
    config = files.config(client_certificate="optional")
    broker = start_broker(config=config)
    with open_client(broker, files.client()) as early:
        assert early.connect("early").reason_code == 0
        listener = config["listeners"][1]
        for name in ("certfile", "keyfile", "cafile"):
            path = Path(listener[name]).rename(files.directory / f"new-{name}.pem")
            listener[name] = str(path)
        listener |= {"client_certificate": "required", "use_identity_as_username": True, "tls_version": "1.3"}
        broker.config.write_text(to_toml(config))
        os.kill(broker.pid, signal.SIGHUP)
        broker.wait_for_log("event=certificates_reloaded")
        assert "restart_needed" not in broker.log
        early.ping()
        assert_refused(broker, files.client())
        with open_client(broker, files.client("pump")) as client:
            assert client.connect("pump").reason_code == 0
        broker.wait_for_log("event=connected client=pump .*user=pump ")


def test_a_reload_of_invalid_files_changes_nothing(start_broker: Start, files: CertificateFiles) -> None:
    broker = start_broker(config=files.config())
    broker.wait_for_log("event=started")
    files.certfile.write_text("nonsense")
    os.kill(broker.pid, signal.SIGHUP)
    reason = broker.wait_for_log("event=reload_failed listener=.* reason=(.*)")[1]
    assert str(files.certfile) in reason
    with open_client(broker, files.client()) as client:
        assert client.connect("still").reason_code == 0


# --- invalid files and settings -----------------------------------------------------------------------------------


def encrypt(files: CertificateFiles) -> None:
    key = serialization.load_pem_private_key(files.keyfile.read_bytes(), None)
    scheme = serialization.BestAvailableEncryption(b"secret")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files.keyfile.write_bytes(key.private_bytes(pem, pkcs8, scheme))


def other_key(files: CertificateFiles) -> None:
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(str(files.keyfile))


BROKEN: list[tuple[str, Callable[[CertificateFiles], Any], str]] = [
    ("missing certificate", lambda f: f.certfile.unlink(), "certfile {f.certfile}: No such file or directory"),
    ("missing key", lambda f: f.keyfile.unlink(), "keyfile {f.keyfile}: No such file or directory"),
    ("missing authority", lambda f: f.cafile.unlink(), "cafile {f.cafile}: No such file or directory"),
    ("certificate that is none", lambda f: f.certfile.write_text("x"),
     "certfile {f.certfile} and keyfile {f.keyfile}: not PEM, or damaged"),
    ("authority that is none", lambda f: f.cafile.write_text("x"), "cafile {f.cafile}: not PEM, or damaged"),
    ("another's key", other_key, "certfile {f.certfile} and keyfile {f.keyfile}: they do not belong together"),
    ("encrypted key", encrypt,
     "keyfile {f.keyfile}: is encrypted; a broker that starts by itself needs a key without a password"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_invalid_files_are_reported_in_one_line(files: CertificateFiles, damage: Callable[[CertificateFiles], Any], message: str) -> None:
    listener = Listener(type="tls", certfile=files.certfile, keyfile=files.keyfile, cafile=files.cafile, client_certificate="required")
    server_context(listener)
    damage(files)
    with pytest.raises(OSError) as caught:
        server_context(listener)
    assert str(caught.value) == message.format(f=files)


WRONG: list[tuple[str, str]] = [
    ('type = "unix"', "path: is required for a Unix socket"),
    ('type = "tls"\nkeyfile = "k"', 'certfile: is required for type "tls"'),
    ('certfile = "c"', 'certfile: a listener of type "tcp" has none'),
    ('path = "p"', 'path: a listener of type "tcp" has none'),
    ('type = "unix"\npath = "p"\nport = 5', 'port: a listener of type "unix" has none'),
    ('origins = ["https://x"]', 'origins: a listener of type "tcp" has none'),
    ('type = "tls"\ncertfile = "c"\nkeyfile = "k"\nclient_certificate = "required"',
     "cafile: is required to check client certificates"),
    ('type = "tls"\ncertfile = "c"\nkeyfile = "k"\nuse_identity_as_username = true',
     'client_certificate: must be "optional" or "required" for use_identity_as_username'),
    ('type = "tls"\ncertfile = "c"\nkeyfile = "k"\ncrlfile = "r"', "crlfile: needs client_certificate"),
    ('type = "unix"\npath = "p"\nmode = "rw"', 'mode: must be permissions like "0660", got "rw"'),
    ('max_connections = 0', 'max_connections: must be 1–10000000, or "global", got 0'),
    ('allow_anonymous = "no"', 'allow_anonymous: must be true, false or "loopback", or "global", got "no"'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "problem"), WRONG, ids=[problem for _, problem in WRONG])
def test_invalid_combinations_of_settings(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "broker.toml"
    path.write_text(f"[[listeners]]\n{text}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert [without_line(text) for text in caught.value.problems] == [f"{path}: listeners.0.{problem}"]


# --- third-party clients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "transport"), [("tls", "tcp"), ("wss", "websockets")])
def test_paho(start_broker: Start, files: CertificateFiles, kind: str, transport: Any) -> None:
    broker = start_broker(config=files.config(kind, client_certificate="required"))
    received: list[bytes] = []
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, "paho", protocol=paho.MQTTv5, transport=transport)
    client.tls_set_context(files.client("paho"))

    def on_connect(*_: Any) -> None:
        client.subscribe("paho", 1)

    def on_subscribe(*_: Any) -> None:
        client.publish("paho", b"hello", 1)

    def on_message(_client: Any, _userdata: Any, message: Any) -> None:
        received.append(message.payload)
        client.disconnect()

    client.on_connect, client.on_subscribe, client.on_message = on_connect, on_subscribe, on_message
    client.connect("localhost", port_of(broker, kind))
    client.loop_forever()
    assert received == [b"hello"]
