"""bridge_spark.sink.publisher: what arrives at real brokers, through restarts, refusals and their limits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos.log_reader import LogReader
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.mosquitto import NEEDS_MOSQUITTO, mosquitto
from support.properties import properties_of
from support.raw_client import RawClient
from support.scripted_broker import Peer, ScriptedBroker

from bridge_spark.sink.errors import SinkError
from bridge_spark.sink.options import parse_options
from bridge_spark.sink.packets import field
from bridge_spark.sink.publisher import Publisher
from bridge_spark.sink.rows import Packet, PacketEncoder, Row
from mqttbroker.codec.packets import Disconnect, Pingreq, Pingresp, Puback, Publish, Pubrec
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import NOT_AUTHORIZED, QUOTA_EXCEEDED

pytestmark = [pytest.mark.one_build]

ROWS = 3000
MOSQUITTO_ROWS = 600
STREAM = {"s": {"filters": ["s/#"], "partitions": 2, "dedup": True, "seal": False}}
StartBroker = Callable[..., BrokerProcess]


def row(number: int, qos: int = 1, retain: bool = False) -> Row:
    return field(b"s/%d" % (number % 7)), 0x30 | qos << 1 | retain, b"", b"%d" % number


def encode(rows: list[Row], version: int = 5, producer: str | None = "p") -> list[Packet]:
    return PacketEncoder(version, producer if version == 5 else None).encode(rows, 0)


def publisher(port: int, sleep: Callable[[float], None] = time.sleep, **options: str) -> Publisher:
    given = options if "url" in options else {"url": f"mqtt://127.0.0.1:{port}", **options}
    return Publisher(parse_options(given), "sink", lambda number: f"partition 0, row {number}", sleep=sleep)


def publish(port: int, packets: list[Packet], **options: str) -> None:
    sink = publisher(port, **options)
    try:
        sink.publish(packets)
        sink.finish()
    finally:
        sink.close()


def stored(broker: BrokerProcess) -> Counter[int]:
    return Counter(int(record.payload) for record in LogReader(broker.data_dir, "s").records())


@pytest.fixture(scope="module")
def streaming(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(config={"streams": STREAM, "limits": {"receive_maximum": 40}}) as broker:
        yield broker


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("version", [5, 4])
def test_everything_is_in_the_stream_when_finish_returns(start_broker: StartBroker, qos: int, version: int) -> None:
    broker = start_broker(config={"streams": STREAM})
    name = "5" if version == 5 else "3.1.1"
    publish(broker.port, encode([row(number, qos) for number in range(ROWS)], version), protocolVersion=name)
    if qos == 0:  # the broker has read them; the commit follows
        broker.restart()
    assert stored(broker) == Counter(range(ROWS))


def test_receive_maximum_is_honoured_and_a_second_attempt_adds_nothing(streaming: BrokerProcess) -> None:
    packets = encode([row(number, 1 + number % 2) for number in range(ROWS)])
    for _ in range(2):
        publish(streaming.port, packets)
    assert stored(streaming) == Counter(range(ROWS))


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("kill", [True, False], ids=["killed", "terminated"])
def test_a_restart_of_the_broker_loses_and_doubles_nothing(start_broker: StartBroker, qos: int, kill: bool) -> None:
    broker = start_broker(config={"streams": STREAM})
    packets = encode([row(number, qos) for number in range(6 * ROWS)])
    sink = publisher(broker.port)
    for start in range(0, len(packets), ROWS):
        sink.publish(packets[start : start + ROWS])
        if start in (ROWS, 3 * ROWS):
            broker.restart(kill=kill)
    sink.finish()
    assert stored(broker) == Counter(range(6 * ROWS))


def test_the_broker_is_away_when_the_first_row_comes(start_broker: StartBroker) -> None:
    broker = start_broker(config={"streams": STREAM})
    broker.kill()
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 4:
            broker.start()

    sink = publisher(broker.port, sleep)
    sink.publish(encode([row(number) for number in range(10)]))
    sink.finish()
    assert stored(broker) == Counter(range(10))
    assert len(waits) == 4 and all(one < two for one, two in zip(waits, waits[2:]))


def test_a_broker_that_stays_away_is_one_line() -> None:
    def refuse(peer: Peer) -> None:
        peer.socket.close()

    with ScriptedBroker(refuse) as broker:
        port = broker.port
    with pytest.raises(SinkError) as caught:
        publish(port, encode([row(0)]), **{"delivery.timeoutMs": "300ms"})
    assert str(caught.value) == (
        f"mqtt sink: mqtt://127.0.0.1:{port} accepted no message for 0.3 s (option 'delivery.timeoutMs'), the last time: Connection refused"
    )


def test_login_and_tls(tmp_path: Path, start_broker: StartBroker) -> None:
    files = CertificateFiles(tmp_path)
    (tmp_path / "passwords").touch()
    config = {
        **files.config(),
        "streams": STREAM,
        "allow_anonymous": False,
        "password_file": str(tmp_path / "passwords"),
        "durability": "commit",
    }
    from mqttbroker.auth.passwords import hash_password

    (tmp_path / "passwords").write_text(f"spark:{hash_password('s3cret')}\n")
    broker = start_broker(config=config)
    port = int(broker.wait_for_log(r"event=listening .*\btype=tls\b.*\bport=(\d+)")[1])
    certificate = files.authority.issue_cert("sink@example.org", common_name="sink")
    (tmp_path / "sink.pem").write_bytes(certificate.private_key_and_cert_chain_pem.bytes())
    tls = {
        "url": f"mqtts://localhost:{port}",
        "user": "spark",
        "password": "s3cret",
        "caFile": str(files.cafile),
        "certFile": str(tmp_path / "sink.pem"),
        "delivery.timeoutMs": "500ms",
    }
    packets = encode([row(number) for number in range(ROWS)])
    publish(port, packets, **tls)
    assert stored(broker) == Counter(range(ROWS))

    def line(**changes: str) -> str:
        with pytest.raises(SinkError) as caught:
            publish(port, packets[:1], **{**tls, **changes})
        return str(caught.value).removeprefix(f"mqtt sink: mqtts://localhost:{port}")

    assert line(password="guessed").startswith(" refused the connection: 0x86 Bad User Name or Password")
    (tmp_path / "other").mkdir()
    other = CertificateFiles(tmp_path / "other")
    assert "its certificate is not to be trusted: " in line(caFile=str(other.cafile))
    assert line(url=f"mqtts://localhost:{broker.port}").endswith(": does it speak TLS there?")
    assert line(caFile="/none").endswith("option 'caFile': /none does not exist")
    assert line(caFile=str(tmp_path / "passwords")).endswith(f"option 'caFile': {tmp_path}/passwords has no certificates in PEM")
    assert line(certFile=str(files.cafile)).startswith("mqtt sink: option 'certFile': ")
    with pytest.raises(SinkError, match="does not answer in MQTT|closed|accepted no message"):
        publish(port, packets[:1], url=f"mqtt://localhost:{port}", user="spark", password="s3cret", **{"delivery.timeoutMs": "1s"})


def test_a_refused_message_is_one_line_with_its_row(tmp_path: Path, start_broker: StartBroker) -> None:
    (tmp_path / "acl").write_text("topic write s/0\ntopic write s/1\n")
    broker = start_broker(config={"streams": STREAM, "acl_file": str(tmp_path / "acl")})
    with pytest.raises(SinkError) as caught:
        publish(broker.port, encode([row(number) for number in range(10)]))
    assert str(caught.value) == (f"mqtt sink: mqtt://127.0.0.1:{broker.port} refused a message: 0x87 Not authorized (partition 0, row 2)")


def test_a_retained_tombstone_clears_the_retained_message(streaming: BrokerProcess) -> None:
    publish(streaming.port, encode([row(0, retain=True), row(1, retain=True)], producer="retained"))
    first, second = row(0, retain=True), row(1, retain=True)
    publish(streaming.port, encode([(first[0], first[1], b"", b"")], producer="tombstone"))
    with RawClient(streaming.port) as client:
        client.connect("reader")
        client.subscribe("s/0", "s/1")
        assert [packet.payload for packet in client.ping() if isinstance(packet, Publish)] == [second[3]]


# -- limits and answers of other brokers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits, packet, line",
    [
        ({"maximum_qos": 0}, row(0), "column 'qos': 1: {} takes at most 0 (partition 0, row 0)"),
        ({"retain_available": 0}, row(0, retain=True),
         "column 'retain': true: {} has no retained messages (partition 0, row 0)"),
        ({"maximum_packet_size": 30}, row(0),
         "column 'payload': a packet of 37 bytes: {} takes at most 30 (partition 0, row 0)"),
    ],
)  # fmt: skip
def test_a_limit_of_the_broker_is_one_line(limits: dict[str, int], packet: Row, line: str) -> None:
    with ScriptedBroker(lambda peer: list(peer.welcome(0, properties_of(**limits))) and None) as broker:
        with pytest.raises(SinkError) as caught:
            publish(broker.port, encode([packet]))
    assert str(caught.value) == f"mqtt sink: {line.format(f'mqtt://127.0.0.1:{broker.port}')}"


def test_no_more_than_receive_maximum_is_in_flight() -> None:
    most = 0

    def answer(peer: Peer) -> None:
        nonlocal most
        waiting: list[int] = []
        packets = peer.welcome(0, properties_of(receive_maximum=3))
        for packet in packets:
            if isinstance(packet, Publish):
                waiting.append(packet.packet_id)
                most = max(most, len(waiting))
                if len(waiting) == 3:
                    peer.send(*(Puback(packet_id) for packet_id in waiting))
                    waiting.clear()

    with ScriptedBroker(answer) as broker:
        publish(broker.port, encode([row(number) for number in range(30)]))
    assert most == 3


def test_a_message_without_room_is_sent_again_before_any_other() -> None:
    received: list[int] = []

    def answer(peer: Peer) -> None:
        for packet in peer.welcome(0, properties_of(receive_maximum=4)):
            if isinstance(packet, Publish):
                number = int(packet.payload)
                full = number in (1, 2) and received.count(number) < 3
                received.append(number)
                peer.send(Puback(packet.packet_id, QUOTA_EXCEEDED if full else 0))

    with ScriptedBroker(answer) as broker:
        publish(broker.port, encode([row(number) for number in range(20)]))
    assert Counter(received) == Counter({number: 4 if number in (1, 2) else 1 for number in range(20)})
    assert max(received[: received.index(1) + 1]) < 8 and received[-1] == 19


def test_a_broker_that_never_has_room_is_one_line() -> None:
    def answer(peer: Peer) -> None:
        for packet in peer.welcome():
            if isinstance(packet, Publish):
                peer.send(Puback(packet.packet_id, QUOTA_EXCEEDED))

    with ScriptedBroker(answer) as broker, pytest.raises(SinkError) as caught:
        publish(broker.port, encode([row(number) for number in range(3)]), **{"delivery.timeoutMs": "500ms"})
    assert str(caught.value).endswith("the last time: it refused a message: 0x97 Quota exceeded (partition 0, row 2)")


@pytest.mark.parametrize("end", ["close", "shutting down", "silence"])
def test_after_a_lost_connection_everything_unacknowledged_is_sent_again_in_order(end: str) -> None:
    received: list[list[int]] = []

    def answer(peer: Peer) -> None:
        received.append([])
        for packet in peer.welcome(0, properties_of(receive_maximum=10)):
            if not isinstance(packet, Publish):
                continue
            assert not packet.dup
            received[-1].append(int(packet.payload))
            if peer.number == 0 and len(received[0]) == 7:
                if end == "shutting down":
                    peer.send(Disconnect(0x8B))
                if end != "silence":
                    return
            if peer.number or len(received[-1]) < 5:
                peer.send(Puback(packet.packet_id))

    with ScriptedBroker(answer) as broker:
        publish(broker.port, encode([row(number) for number in range(40)]), **{"request.timeoutMs": "500ms"})
    assert received[0][:5] == list(range(5))
    assert received[1] == list(range(4, 40))


@pytest.mark.parametrize(
    "answer, line",
    [
        (lambda peer: peer.welcome(0x8A) and None, "refused the connection: 0x8A Banned"),
        (lambda peer: peer.socket.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
         "does not answer in MQTT: another packet where CONNACK comes"),
    ],
)  # fmt: skip
def test_an_answer_that_no_later_attempt_changes_is_one_line(answer: Callable[[Peer], None], line: str) -> None:
    with ScriptedBroker(answer) as broker, pytest.raises(SinkError) as caught:
        publish(broker.port, encode([row(0)]))
    assert str(caught.value) == f"mqtt sink: mqtt://127.0.0.1:{broker.port} {line}"


def test_a_disconnect_because_of_a_packet_is_one_line() -> None:
    def answer(peer: Peer) -> None:
        packets = peer.welcome()
        next(packets)
        peer.send(Disconnect(0x99))

    with ScriptedBroker(answer) as broker, pytest.raises(SinkError) as caught:
        publish(broker.port, encode([row(0)]))
    assert str(caught.value) == (
        f"mqtt sink: mqtt://127.0.0.1:{broker.port} disconnected: 0x99 Payload format invalid "
        "(partition 0, row 0, or one of the 1 in flight)"
    )


def test_a_refused_pubrec_and_reason_strings() -> None:
    def answer(peer: Peer) -> None:
        for packet in peer.welcome():
            if isinstance(packet, Publish):
                properties = Properties()
                properties.reason_string = "not\nyours"
                properties.user_properties.append(("a", "b"))
                peer.send(Pubrec(packet.packet_id, NOT_AUTHORIZED, properties))

    with ScriptedBroker(answer) as broker, pytest.raises(SinkError) as caught:
        publish(broker.port, encode([row(0, 2)]))
    assert str(caught.value).endswith("refused a message: 0x87 Not authorized (not yours) (partition 0, row 0)")


def test_qos_0_is_confirmed_by_pingresp() -> None:
    kinds: list[type] = []

    def answer(peer: Peer) -> None:
        for packet in peer.welcome():
            kinds.append(type(packet))
            if isinstance(packet, Pingreq):
                peer.send(Pingresp())

    with ScriptedBroker(answer) as broker:
        publish(broker.port, encode([row(number, 0) for number in range(3)]))
    assert kinds == [Publish, Publish, Publish, Pingreq, Disconnect]


# -- Mosquitto ---------------------------------------------------------------------------------------------------------


@NEEDS_MOSQUITTO
@pytest.mark.parametrize("version, qos", [("5", 1), ("3.1.1", 2)])
def test_mosquitto_has_each_message_at_least_once_through_a_restart(tmp_path: Path, version: str, qos: int) -> None:
    with mosquitto(tmp_path, "max_queued_messages 0") as other:
        never = Properties()
        never.session_expiry_interval = 0xFFFFFFFF
        reader = RawClient(other.port)
        reader.connect("reader", clean_start=False, properties=never)
        reader.subscribe("s/#", options=1)
        reader.send(Disconnect())
        reader.close()
        packets = encode([row(number, qos) for number in range(MOSQUITTO_ROWS)], 5 if version == "5" else 4)
        sink = publisher(other.port, protocolVersion=version)
        sink.publish(packets[: MOSQUITTO_ROWS // 2])
        other.stop()
        other.start()
        sink.publish(packets[MOSQUITTO_ROWS // 2 :])
        sink.finish()
        found: Counter[int] = Counter()
        with RawClient(other.port) as reader:
            reader.connect("reader", clean_start=False, properties=never)
            while len(found) < MOSQUITTO_ROWS:
                packet = reader.expect(Publish)
                found[int(packet.payload)] += 1
                reader.send(Puback(packet.packet_id))
    assert set(found) == set(range(MOSQUITTO_ROWS))
