"""User names and client ids from client certificates, on every kind of listener, and from a proxy that speaks TLS."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.config_files import problems, write
from support.stream_client import StreamClient, WebSocketStream, tcp_socket

from mqttbroker.codec.reason_codes import (
    BAD_USER_NAME_OR_PASSWORD,
    CLIENT_IDENTIFIER_NOT_VALID,
    NOT_AUTHORIZED,
)

Start = Callable[..., BrokerProcess]
SPIFFE = "spiffe://example.org/pump/7"


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return CertificateFiles(tmp_path)


def with_uri(files: CertificateFiles, uri: str, name: str | None) -> trustme.LeafCert:
    """A certificate with a URI as alternative name, which trustme does not issue."""
    authority = x509.load_pem_x509_certificate(files.authority.cert_pem.bytes())
    signer: Any = serialization.load_pem_private_key(files.authority.private_key_pem.bytes(), None)
    template = files.authority.issue_cert("pump@example.org")
    key: Any = serialization.load_pem_private_key(template.private_key_pem.bytes(), None)
    subject = x509.Name([] if name is None else [x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(authority.subject)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(authority.not_valid_before_utc).not_valid_after(authority.not_valid_after_utc)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), name is None)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    signed = builder.add_extension(identifier, False).sign(signer, hashes.SHA256())
    pem = signed.public_bytes(serialization.Encoding.PEM)
    return trustme.LeafCert(template.private_key_pem.bytes(), pem, [])


def open_client(broker: BrokerProcess, files: CertificateFiles, certificate: Any, kind: str = "tls") -> StreamClient:
    broker.wait_for_log("event=started")
    port = int(broker.wait_for_log(rf"event=listening type={kind} .*port=(\d+)")[1])
    context = files.client() if certificate is None else files.client_with(certificate)
    sock = context.wrap_socket(tcp_socket(port), server_hostname="localhost")
    return StreamClient(WebSocketStream(sock) if kind == "wss" else sock)


@pytest.mark.parametrize("kind", ["tls", "wss"])
def test_a_spiffe_id_is_the_user_name_and_the_client_id(start_broker: Start, files: CertificateFiles, kind: str) -> None:
    more = {"client_certificate": "optional", "use_identity_as_username": True, "allow_anonymous": False}
    names = {"certificate_identity": ["san_uri", "cn"], "client_id_from": "certificate"}
    broker = start_broker(config=files.config(kind, **more, **names))
    pump = with_uri(files, SPIFFE, None)
    with open_client(broker, files, pump, kind) as client:
        assert client.connect(SPIFFE).reason_code == 0
        broker.wait_for_log(f"event=connected client={SPIFFE} .*user={SPIFFE} ")
    with open_client(broker, files, pump, kind) as client:
        assert client.connect("").properties.assigned_client_identifier == SPIFFE
    with open_client(broker, files, pump, kind) as client:
        assert client.connect("another").reason_code == CLIENT_IDENTIFIER_NOT_VALID
    with open_client(broker, files, files.authority.issue_cert("a@b.example", common_name="old"), kind) as client:
        assert client.connect("old").reason_code == 0  # the second kind of name
    with open_client(broker, files, None, kind) as client:
        assert client.connect(SPIFFE).reason_code == NOT_AUTHORIZED


def test_a_certificate_without_the_configured_name(start_broker: Start, files: CertificateFiles) -> None:
    more = {"use_identity_as_username": True, "certificate_identity": "san_uri", "client_certificate": "required"}
    broker = start_broker(config=files.config(**more))
    with open_client(broker, files, files.authority.issue_cert("a.example.org", common_name="a")) as client:
        assert client.connect("a").reason_code == BAD_USER_NAME_OR_PASSWORD
    broker.wait_for_log('event=refused client=a .*reason=".*certificate without a usable san_uri"')


@pytest.mark.parametrize("former", [False, True])
def test_a_client_id_bound_to_a_certificate_without_its_user_name(start_broker: Start, files: CertificateFiles, former: bool) -> None:
    """The clients are anonymous, and yet nobody takes the client id of another one."""
    key = "client_id_pattern" if former else "client_id_from"
    broker = start_broker(config=files.config(client_certificate="optional", **{key: "%i-*"}))
    pump = files.authority.issue_cert("pump@example.org", common_name="pump")
    for certificate, client_id, code in (
        (pump, "pump-1", 0),
        (pump, "valve-1", CLIENT_IDENTIFIER_NOT_VALID),
        (None, "pump-1", CLIENT_IDENTIFIER_NOT_VALID),
    ):
        with open_client(broker, files, certificate) as client:
            assert client.connect(client_id).reason_code == code
    if former:
        broker.wait_for_log("client_id_pattern")


# --- behind a proxy that speaks TLS -------------------------------------------------------------------------------


def header(common_name: bytes, client: int = 0x07, verified: int = 0) -> bytes:
    """A PROXY protocol header of HAProxy with send-proxy-v2-ssl-cn."""

    def field(kind: int, value: bytes) -> bytes:
        return struct.pack("!BH", kind, len(value)) + value

    tls = struct.pack("!BI", client, verified) + field(0x21, b"TLSv1.3") + field(0x22, common_name)
    peers = socket.inet_aton("203.0.113.7") + socket.inet_aton("10.0.0.1") + struct.pack("!HH", 50000, 1883)
    data = peers + field(0x04, b"\0\0") + field(0x20, tls)
    return b"\r\n\r\n\x00\r\nQUIT\n" + struct.pack("!BBH", 0x21, 0x11, len(data)) + data


@pytest.mark.parametrize("kind", ["tcp", "ws"])
def test_a_common_name_from_a_proxy(start_broker: Start, kind: str) -> None:
    listener = {
        "type": kind, "port": 0, "proxy_protocol": True, "proxy_sources": ["127.0.0.0/8"], "allow_anonymous": False,
        "use_identity_as_username": True, "client_id_from": "certificate",
    }  # fmt: skip
    broker = start_broker(config={"listeners": [{"host": "127.0.0.1"}, listener]})
    broker.wait_for_log("event=started")
    port = int([line for line in broker.lines if f"listening type={kind}" in line][-1].rpartition("port=")[2])
    for proxied, client_id, code in (
        (header(b"pump"), "pump", 0),
        (header(b"pump"), "valve", CLIENT_IDENTIFIER_NOT_VALID),
        (header(b"pump", verified=10), "pump", NOT_AUTHORIZED),
        (header(b"pump", client=0x01), "pump", NOT_AUTHORIZED),  # TLS without a certificate
        (header(b"pu\0mp"), "pump", BAD_USER_NAME_OR_PASSWORD),
        (header(b"\xff"), "pump", NOT_AUTHORIZED),
        (b"PROXY TCP4 203.0.113.7 10.0.0.1 50000 1883\r\n", "pump", NOT_AUTHORIZED),
    ):
        sock = tcp_socket(port)
        sock.sendall(proxied)
        with StreamClient(WebSocketStream(sock) if kind == "ws" else sock) as client:
            assert client.connect(client_id).reason_code == code


def test_a_proxy_in_front_of_tls_gives_no_name(start_broker: Start, files: CertificateFiles) -> None:
    """The broker verifies the certificate itself, so what the proxy says of it does not count."""
    more = {"proxy_protocol": True, "proxy_sources": ["127.0.0.0/8"], "use_identity_as_username": True}
    broker = start_broker(config=files.config(client_certificate="optional", allow_anonymous=False, **more))
    broker.wait_for_log("event=started")
    port = int(broker.wait_for_log(r"event=listening type=tls .*port=(\d+)")[1])
    for certificate, code in ((None, NOT_AUTHORIZED), (files.authority.issue_cert("b@x.org", common_name="bob"), 0)):
        context = files.client() if certificate is None else files.client_with(certificate)
        sock = tcp_socket(port)
        sock.sendall(header(b"admin"))
        with StreamClient(context.wrap_socket(sock, server_hostname="localhost")) as client:
            assert client.connect("c").reason_code == code
    broker.wait_for_log("event=connected client=c address=203.0.113.7:50000 .*user=bob ")


WRONG = [
    ("use_identity_as_username = true",
     'use_identity_as_username: needs type "tls" or "wss", or proxies named in proxy_sources'),
    ('client_id_from = "certificate"\nproxy_protocol = true',
     'client_id_from: needs type "tls" or "wss", or proxies named in proxy_sources'),
    ('use_identity_as_username = true\nproxy_protocol = true\nproxy_sources = ["10.0.0.1"]\ncertificate_identity = "san_uri"',
     'certificate_identity: must have "cn": a proxy sends no other name'),
    ('type = "unix"\npath = "p"\nclient_id_from = "%i"', "client_id_from: clients of a Unix socket have no certificates"),
    ('type = "tls"\ncertfile = "c"\nkeyfile = "k"\nclient_id_from = "certificate"',
     'client_certificate: must be "optional" or "required" for client_id_from'),
    ("certificate_identity = []", "certificate_identity: must not be empty"),
    ('certificate_identity = "uid"',
     'certificate_identity: must be "cn", "san_dns", "san_uri", "san_email" or "subject", got "uid"'),
    ('certificate_identity = ["cn", "cn"]', 'certificate_identity: "cn" stands there twice'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "problem"), WRONG, ids=[problem for _, problem in WRONG])
def test_settings_that_do_not_fit(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, f"[[listeners]]\n{text}\n")
    assert problems(path) == [f"{path}: listeners.0.{problem}"]
