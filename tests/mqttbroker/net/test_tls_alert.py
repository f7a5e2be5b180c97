"""The alerts that clients get if their certificate is refused."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles, revocation_list
from support.stream_client import tcp_socket

Start = Callable[..., BrokerProcess]

pytestmark = pytest.mark.one_build


@pytest.mark.parametrize(("kind", "workers"), [("tls", 0), ("wss", 0), ("tls", 1)])
def test_a_refused_certificate_is_answered_with_its_alert(start_broker: Start, tmp_path: Path, kind: str, workers: int) -> None:
    files = CertificateFiles(tmp_path)
    long_ago = datetime.now(UTC) - timedelta(days=1)
    expired = files.authority.issue_cert("old@example.org", common_name="old", not_after=long_ago)
    stolen = files.authority.issue_cert("stolen@example.org", common_name="stolen")
    crlfile = tmp_path / "revoked.pem"
    crlfile.write_bytes(revocation_list(files.authority, stolen))
    config = files.config(kind, client_certificate="required", crlfile=str(crlfile))
    broker = start_broker(config=config | {"workers": workers})
    port = int(broker.wait_for_log(rf"event=listening type={kind} .*port=(\d+)")[1])
    cases = [
        (files.client, "handshake failure", "certificate required", "peer did not return a certificate"),
        (lambda: files.client_with(expired), *["certificate expired"] * 2, "certificate has expired"),
        (lambda: files.client_with(stolen), *["certificate revoked"] * 2, "certificate revoked"),
        (lambda: files.client("pump", trustme.CA()), *["unknown ca"] * 2, "unable to get local issuer certificate"),
    ]
    for make_context, alert, newer_alert, reason in cases:
        for version, expected in ((ssl.TLSVersion.TLSv1_2, alert), (ssl.TLSVersion.TLSv1_3, newer_alert)):
            context = make_context()
            context.minimum_version = context.maximum_version = version
            sock = tcp_socket(port)
            host, own_port = sock.getsockname()
            with pytest.raises(ssl.SSLError, match=f"alert {expected}"):
                with context.wrap_socket(sock, server_hostname="localhost") as secure:
                    # The client of TLS 1.3 sends on before the server has seen its certificate.
                    secure.sendall(b"\x10\x0c\x00\x04MQTT\x05\x02\x00\x00\x00\x00")
                    secure.recv(1)
            broker.wait_for_log(f"event=refused .*address={host}:{own_port} reason=.TLS handshake: {reason}. user=")
            assert broker.log.count(f"{host}:{own_port} ") == 1


def test_the_socket_of_a_refused_client_is_closed(start_broker: Start, tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    broker = start_broker(config=files.config(client_certificate="required"))
    port = int(broker.wait_for_log(r"event=listening type=tls .*port=(\d+)")[1])
    with tcp_socket(port) as sock:
        context = files.client()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError, match="alert"):
            context.wrap_socket(sock.dup(), server_hostname="localhost")
        assert sock.recv(1) == b""  # the alert was the last
        sock.shutdown(socket.SHUT_WR)
    with tcp_socket(port) as after:
        assert files.client("pump").wrap_socket(after, server_hostname="localhost").version()
