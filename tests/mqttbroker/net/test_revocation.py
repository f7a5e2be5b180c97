"""Certificate revocation lists: handshakes, reload, expiry and invalid files."""

from __future__ import annotations

import os
import re
import signal
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles, revocation_list
from support.stream_client import StreamClient, WebSocketStream, tcp_socket

from mqttbroker.codec.packets import Disconnect
from mqttbroker.codec.reason_codes import NOT_AUTHORIZED
from mqttbroker.config.settings import Listener, Settings
from mqttbroker.net.tls import server_context
from mqttbroker.server.config_check import check

Start = Callable[..., BrokerProcess]

pytestmark = pytest.mark.one_build


class Fleet:
    """A listener's files with a revocation list, and clients of some authorities."""

    def __init__(self, directory: Path) -> None:
        self.files = CertificateFiles(directory)
        self.root = self.files.authority
        self.crlfile = directory / "revoked.pem"
        self.write(revocation_list(self.root))

    def write(self, *lists: bytes) -> None:
        # As cron jobs should: a reader sees the old file or the new one.
        new = self.crlfile.with_suffix(".new")
        new.write_bytes(b"".join(lists))
        new.replace(self.crlfile)

    def config(self, kind: str = "tls", **more: object) -> dict[str, object]:
        listener = {"client_certificate": "required", "crlfile": str(self.crlfile)}
        return {**self.files.config(kind, **listener), **more}

    def issue(self, name: str, authority: trustme.CA | None = None) -> trustme.LeafCert:
        return (authority or self.root).issue_cert(f"{name}@example.org", common_name=name)

    def open(self, broker: BrokerProcess, certificate: trustme.LeafCert, kind: str = "tls") -> StreamClient:
        port = int(broker.wait_for_log(rf"event=listening type={kind} .*port=(\d+)")[1])
        sock = self.files.client_with(certificate).wrap_socket(tcp_socket(port), server_hostname="localhost")
        return StreamClient(WebSocketStream(sock) if kind == "wss" else sock, 5)

    def accepts(self, broker: BrokerProcess, certificate: trustme.LeafCert) -> bool:
        try:
            with self.open(broker, certificate) as client:
                return bool(client.connect("probe").reason_code == 0)
        except (ssl.SSLError, ConnectionError):
            return False

    def listener(self) -> Listener:
        files = self.files
        return Listener(
            type="tls", certfile=files.certfile, keyfile=files.keyfile, cafile=files.cafile,
            client_certificate="required", crlfile=self.crlfile,
        )  # fmt: skip


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


# --- which certificates are checked -------------------------------------------------------------------------------


def test_a_file_with_the_lists_of_several_authorities(start_broker: Start, fleet: Fleet) -> None:
    plant = fleet.root.create_child_ca()
    stolen, lost = fleet.issue("stolen"), fleet.issue("lost", plant)
    fleet.write(revocation_list(plant, lost), revocation_list(fleet.root, stolen))
    broker = start_broker(config=fleet.config())
    accepted = [fleet.accepts(broker, one) for one in (stolen, lost, fleet.issue("a"), fleet.issue("b", plant))]
    assert accepted == [False, False, True, True]


def test_a_revoked_intermediate_authority(start_broker: Start, fleet: Fleet) -> None:
    bad, good = fleet.root.create_child_ca(), fleet.root.create_child_ca()
    fleet.write(revocation_list(fleet.root, bad), revocation_list(bad), revocation_list(good))
    broker = start_broker(config=fleet.config())
    assert not fleet.accepts(broker, fleet.issue("a", bad))
    assert fleet.accepts(broker, fleet.issue("b", good))


def test_the_list_of_an_intermediate_authority_is_enough_for_its_clients(start_broker: Start, fleet: Fleet) -> None:
    plant = fleet.root.create_child_ca()
    stolen = fleet.issue("stolen", plant)
    fleet.write(revocation_list(plant, stolen))
    broker = start_broker(config=fleet.config())
    assert fleet.accepts(broker, fleet.issue("a", plant))
    assert not fleet.accepts(broker, stolen)
    assert not fleet.accepts(broker, fleet.issue("unknown state"))  # without a list of its authority
    broker.wait_for_log("event=refused .*TLS handshake: unable to get certificate CRL")


def test_a_client_certificate_is_no_authority(start_broker: Start, fleet: Fleet) -> None:
    broker = start_broker(config=fleet.files.config(client_certificate="required"))
    thief = fleet.issue("thief")
    forged = trustme.CA().issue_cert("forged@example.org", common_name="forged")
    context = fleet.files.client()
    chain = fleet.files.directory / "forged.pem"
    chain.write_bytes(forged.private_key_and_cert_chain_pem.bytes() + thief.cert_chain_pems[0].bytes())
    context.load_cert_chain(chain)
    port = int(broker.wait_for_log(r"event=listening type=tls .*port=(\d+)")[1])
    with pytest.raises((ssl.SSLError, ConnectionError)):
        with context.wrap_socket(tcp_socket(port), server_hostname="localhost") as sock:
            sock.recv(1)
            raise ConnectionError


# --- reload -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tls", "wss"])
def test_a_reloaded_list_disconnects_the_clients_that_it_revokes(start_broker: Start, fleet: Fleet, kind: str) -> None:
    broker = start_broker(config=fleet.config(kind))
    plant = fleet.root.create_child_ca()
    stolen, pump = fleet.issue("stolen"), fleet.issue("pump")
    with fleet.open(broker, stolen, kind) as thief, fleet.open(broker, pump, kind) as other:
        assert thief.connect("thief").reason_code == 0
        assert other.connect("other").reason_code == 0
        fleet.write(revocation_list(fleet.root, stolen, plant))
        os.kill(broker.pid, signal.SIGHUP)
        assert thief.expect(Disconnect).reason_code == NOT_AUTHORIZED
        broker.wait_for_log('event=disconnected client=thief .*reason="Not authorized .0x87.: the certificate was revoked"')
        other.ping()


def test_a_changed_file_is_read_without_a_signal(start_broker: Start, fleet: Fleet) -> None:
    broker = start_broker(config=fleet.config(crl={"refresh_interval": "100ms"}))
    plant = fleet.root.create_child_ca()
    with ExitStack() as stack:
        clients = {}
        fleet.write(revocation_list(fleet.root), revocation_list(plant))
        broker.wait_for_log("event=certificates_reloaded")
        for name, authority in (("root", fleet.root), ("plant", plant)):
            clients[name] = stack.enter_context(fleet.open(broker, fleet.issue(name, authority)))
            assert clients[name].connect(name).reason_code == 0
        fleet.write(revocation_list(fleet.root, plant), revocation_list(plant))
        assert clients["plant"].expect(Disconnect).reason_code == NOT_AUTHORIZED
        clients["root"].ping()


def test_a_damaged_new_file_keeps_the_old_list_and_is_reported_once(start_broker: Start, fleet: Fleet) -> None:
    stolen = fleet.issue("stolen")
    fleet.write(revocation_list(fleet.root, stolen))
    broker = start_broker(config=fleet.config(crl={"refresh_interval": "50ms"}))
    broker.wait_for_log("event=started")
    fleet.write(b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n")
    broker.wait_for_log(f"event=reload_failed .*crlfile {fleet.crlfile}: list 1 is damaged")
    assert not fleet.accepts(broker, stolen)
    assert fleet.accepts(broker, fleet.issue("pump"))
    assert f"crlfile {fleet.crlfile}: list 1 is damaged" in broker.get("/readyz").decode()
    fleet.write(revocation_list(fleet.root))
    broker.wait_for_log("event=certificates_reloaded")
    assert fleet.accepts(broker, stolen)
    assert "list 1 is damaged" not in broker.get("/readyz").decode()
    assert broker.log.count("event=reload_failed") == 1


# --- expiry -------------------------------------------------------------------------------------------------------


def test_an_expired_list_fails_closed(start_broker: Start, fleet: Fleet) -> None:
    fleet.write(revocation_list(fleet.root, lasts=timedelta(hours=-1)))
    broker = start_broker(config=fleet.config())
    broker.wait_for_log(f"error event=crl_not_valid listener=.* reason=.crlfile {fleet.crlfile}: expired at 20")
    assert not fleet.accepts(broker, fleet.issue("pump"))
    broker.wait_for_log("event=refused .*TLS handshake: CRL has expired")
    assert "expired at 20" in broker.get("/readyz").decode()


def test_a_list_that_expires_soon_is_logged_and_every_expiry_is_a_metric(start_broker: Start, fleet: Fleet) -> None:
    fleet.write(revocation_list(fleet.root, lasts=timedelta(hours=3)))
    broker = start_broker(config=fleet.config())
    broker.wait_for_log("warning event=crl_expires_soon .*expires at 20")
    metrics = broker.get("/metrics").decode()
    line = next(one for one in metrics.splitlines() if one.startswith("mqttbroker_crl_expiry_timestamp_seconds{"))
    left = float(line.split()[-1]) - datetime.now(UTC).timestamp()
    assert 2 * 3600 < left < 4 * 3600


def test_a_resumed_session_does_not_skip_the_checks(start_broker: Start, fleet: Fleet) -> None:
    """A session of a valid certificate is resumed after the list has expired."""
    # Each connection worker has TLS sessions of its own, so with several it depends on luck whether one is resumed.
    broker = start_broker(config=fleet.config(crl={"refresh_interval": "100ms"}), arguments=["--workers", "0"])
    port = int(broker.wait_for_log(r"event=listening type=tls .*port=(\d+)")[1])
    context = fleet.files.client_with(fleet.issue("pump"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    fleet.write(revocation_list(fleet.root, lasts=timedelta(seconds=3)))
    broker.wait_for_log("event=certificates_reloaded")
    with context.wrap_socket(tcp_socket(port), server_hostname="localhost") as sock:
        assert StreamClient(sock).connect("first").reason_code == 0
        session = sock.session
        sock.unwrap()  # OpenSSL forgets sessions that end without an alert
    broker.wait_for_log("event=crl_not_valid")
    with context.wrap_socket(tcp_socket(port), server_hostname="localhost", session=session) as sock:
        assert sock.session_reused
        assert StreamClient(sock).connect("again").reason_code == NOT_AUTHORIZED


def test_sessions_of_tls_1_3_are_not_resumed(start_broker: Start, fleet: Fleet) -> None:
    broker = start_broker(config=fleet.config())
    port = int(broker.wait_for_log(r"event=listening type=tls .*port=(\d+)")[1])
    context = fleet.files.client_with(fleet.issue("pump"))
    session = None
    for name in ("first", "again"):
        with context.wrap_socket(tcp_socket(port), server_hostname="localhost", session=session) as sock:
            assert not sock.session_reused
            client = StreamClient(sock)
            assert client.connect(name).reason_code == 0
            client.ping()
            session = sock.session


# --- invalid files ------------------------------------------------------------------------------------------------


def test_the_check_of_a_configuration_says_what_is_wrong_with_a_list(fleet: Fleet) -> None:
    listed = revocation_list(fleet.root)
    cases = [
        (b"", "not PEM, or no revocation list in it"),
        (fleet.files.cafile.read_bytes(), "not PEM, or no revocation list in it"),
        (listed + b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n", "list 2 is damaged"),
        (revocation_list(fleet.root, lasts=timedelta(days=-1)), "expired at .*, so no client certificate is accepted"),
    ]
    for content, reason in cases:
        fleet.write(content)
        (problem,) = check(Settings(listeners=(fleet.listener(),), data_dir=fleet.files.directory))
        assert problem.startswith(f"listeners.0: crlfile {fleet.crlfile}: ")
        assert re.search(reason, problem), problem


def test_a_list_that_another_key_has_signed_is_refused(fleet: Fleet) -> None:
    fleet.write(revocation_list(fleet.root, signed_by=trustme.CA()))
    with pytest.raises(OSError, match="crlfile .*: the list of .* is not signed by that authority"):
        server_context(fleet.listener())
