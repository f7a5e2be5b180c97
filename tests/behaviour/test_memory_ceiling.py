"""Every part of the memory is filled to its limit, and then the whole to ``max_memory``: requests are refused in order
with their reason codes, other clients are served, and the broker recovers."""

from __future__ import annotations

import json
import socket
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.metric_samples import drops, samples
from support.raw_client import RawClient

from mqttbroker.auth.passwords import scram_password
from mqttbroker.auth.scram import METHOD
from mqttbroker.codec.packets import Auth, Connack, Connect, Disconnect, Publish, Will
from mqttbroker.codec.properties import Properties
from sessions.counters import CAUSES

MIB = 1 << 20
KIB = 1 << 10
LIMIT = MIB  # of each part
MAX_MEMORY = 160 * MIB
PARTS = "session subscription in_flight queue_memory outbox incomplete connect alias will".split()
LIMITS: dict[str, Any] = {f"max_total_{part}_bytes": "1MiB" for part in PARTS}
LIMITS |= {"max_retained_bytes": "1MiB", "route_cache_bytes": "1MiB", "max_memory": f"{MAX_MEMORY // MIB}MiB"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    users = tmp_path_factory.mktemp("users") / "users"
    users.write_text(f"alice:{scram_password(b'secret')}\n")
    config = {"password_file": str(users), "allow_anonymous": True, "sys_interval": "0s", "limits": LIMITS}
    with BrokerProcess(config=config) as process:
        yield process


@pytest.fixture
def clients(broker: BrokerProcess) -> Iterator[Clients]:
    with ExitStack() as stack:
        yield Clients(broker, stack)


class Clients:
    def __init__(self, broker: BrokerProcess, stack: ExitStack) -> None:
        self.broker = broker
        self.stack = stack

    def open(self) -> RawClient:
        return self.stack.enter_context(RawClient(self.broker.port))

    def connect(self, client_id: str, expiry: int = 0, window: int = 65535, **fields: Any) -> tuple[RawClient, int]:
        """A client, and the reason code of its CONNACK."""
        properties = Properties()
        properties.session_expiry_interval = expiry
        properties.receive_maximum = window
        client = self.open()
        return client, client.connect(client_id, properties=properties, **fields).reason_code

    def accepted(self, client_id: str, **fields: Any) -> RawClient:
        client, code = self.connect(client_id, **fields)
        assert code == 0
        return client

    def close(self) -> None:
        self.stack.close()


def memory(broker: BrokerProcess) -> dict[str, float]:
    """The samples of ``mqttbroker_memory_`` without that prefix, and the drops by cause."""
    found = samples(broker.get("/metrics"))
    return {name.removeprefix("mqttbroker_memory_"): value for name, value in found.items()
            if name.startswith("mqttbroker_memory_")} | {cause: drops(found, cause) for cause in CAUSES}  # fmt: skip


def held(broker: BrokerProcess, part: str) -> float:
    return memory(broker)[f"part_bytes/{part}"]


def until_refused(attempt: Callable[[int], int], code: int = 0x97, tries: int = 200) -> int:
    """Repeat ``attempt`` until its reason code is ``code``; returns how often it succeeded."""
    for number in range(tries):
        if attempt(number) == code:
            return number
    raise AssertionError(f"{tries} attempts were not refused")


# --- each part ----------------------------------------------------------------------------------------------------


def fill_sessions(clients: Clients) -> None:
    names = [str(number) + "x" * 60_000 for number in range(30)]
    count = until_refused(lambda number: clients.connect(names[number], 0xFFFFFFFF)[1])
    assert 10 < count < 20
    assert clients.connect(names[0], 0xFFFFFFFF, clean_start=False)[1] == 0  # a known one may return
    clients.broker.get("/metrics")
    for name in names[:count]:
        assert clients.connect(name)[1] == 0  # ends it


def fill_subscriptions(clients: Clients) -> None:
    client = clients.accepted("c")

    def subscribe(number: int) -> int:
        return client.subscribe(*(f"{number}/{index}/" + "x" * 900 for index in range(20)), options=0).reason_codes[-1]

    assert until_refused(subscribe) > 10
    assert held(clients.broker, "subscriptions") > 0.9 * LIMIT
    assert client.subscribe("0/0/" + "x" * 900, options=0).reason_codes == [0]  # it exists


def fill_retained(clients: Clients) -> None:
    client = clients.accepted("c")
    count = until_refused(lambda number: client.publish(f"t/{number}", b"x" * 60_000, 1, retain=True))
    assert held(clients.broker, "retained") > 0.9 * LIMIT
    for number in range(count):
        assert client.publish(f"t/{number}", b"", 1, retain=True) in (0, 0x10)


def fill_wills(clients: Clients) -> None:
    will = Will("will", b"x" * 60_000)
    accepted: list[RawClient] = []

    def connect(number: int) -> int:
        client, code = clients.connect(f"c{number}", will=will)
        accepted.append(client)
        return code

    assert until_refused(connect) > 10
    for client in accepted[:-1]:
        client.disconnect()


def fill_queues(clients: Clients) -> None:
    slow, publisher = clients.accepted("slow", window=1), clients.accepted("p")
    slow.subscribe("t", options=1)
    before = memory(clients.broker)["memory_full"]
    for _ in range(40):
        assert publisher.publish("t", b"x" * 60_000, 1) == 0
    assert memory(clients.broker)["memory_full"] - before > 10


def fill_in_flight(clients: Clients) -> None:
    slow = [clients.accepted(f"slow{number}", expiry=60) for number in range(3)]
    publisher = clients.accepted("p")
    for client in slow:
        client.subscribe("t", options=1)
    for number in range(30):
        assert publisher.publish("t", b"%02d" % number + b"x" * 60_000, 1) == 0
    assert held(clients.broker, "in_flight") > 0.9 * LIMIT
    for client in slow:  # all of it arrives
        assert [client.take().payload[:2] for _ in range(30)] == [b"%02d" % number for number in range(30)]
    for client in slow:
        client.close()
    for number in range(3):
        clients.accepted(f"slow{number}")  # ends its session


def fill_outboxes(clients: Clients) -> None:
    publisher, reading = clients.accepted("p"), clients.accepted("reading")
    reading.subscribe("t", options=0)
    for number in range(3):
        stalled = clients.open()
        stalled.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(f"stalled{number}")
        stalled.subscribe("t", options=0)
    before = memory(clients.broker)["slow_subscriber"]
    for _ in range(200):
        publisher.publish("t", b"x" * 60_000)
        reading.take()  # is sent everything
    assert memory(clients.broker)["slow_subscriber"] > before


def fill_incomplete(clients: Clients) -> None:
    start = Publish("t", bytes(400_000)).encode(5)[:300_000]
    first = clients.accepted("first")
    first.send(start)
    wait_until(lambda: held(clients.broker, "incomplete") > 290_000)
    for number in range(3):
        clients.accepted(f"c{number}").send(start)
    assert first.expect(Disconnect).reason_code == 0x97


def fill_connects(clients: Clients) -> None:
    properties = Properties()
    properties.authentication_method = METHOD
    properties.authentication_data = b"n,,n=alice,r=nonce"

    def connect(number: int) -> int:
        client = clients.open()
        client.send(Connect(f"c{number}", will=Will("will", b"x" * 60_000), properties=properties))
        answer = client.receive()
        assert isinstance(answer, (Auth, Connack))
        return answer.reason_code

    assert until_refused(connect) > 10


def fill_aliases(clients: Clients) -> None:
    def publish(number: int) -> int:
        client = clients.accepted(f"c{number}")
        for alias in range(1, 4):
            properties = Properties()
            properties.topic_alias = alias
            client.send(Publish(f"{alias}/" + "x" * 60_000, b"", properties=properties))
        try:
            client.ping()
        except ConnectionError:
            return next(packet.reason_code for packet in client.inbox if isinstance(packet, Disconnect))
        return 0

    assert until_refused(publish) > 3


def fill_route_cache(clients: Clients) -> None:
    publisher = clients.accepted("p")
    for number in range(100):
        publisher.send(Publish(f"{number}/" + "x" * 60_000, b""))
    publisher.ping()


FILLERS = {
    "sessions": fill_sessions,
    "subscriptions": fill_subscriptions,
    "retained": fill_retained,
    "wills": fill_wills,
    "queues": fill_queues,
    "in_flight": fill_in_flight,
    "outboxes": fill_outboxes,
    "incomplete": fill_incomplete,
    "connects": fill_connects,
    "aliases": fill_aliases,
    "route_cache": fill_route_cache,
}
# The last message of each client may exceed the limit of messages in flight.
ABOVE = {"in_flight": 3 * 61_000, "sessions": 61_000, "retained": 100 * KIB}


@pytest.mark.parametrize("part", FILLERS)
def test_a_part_stays_within_its_limit(broker: BrokerProcess, clients: Clients, part: str) -> None:
    before = held(broker, part)
    peaks: list[float] = []
    get = broker.get

    def watched(path: str) -> bytes:
        text = get(path)
        peaks.append(samples(text)[f"mqttbroker_memory_part_bytes/{part}"])
        return text

    broker.get = watched  # type: ignore[method-assign]
    try:
        FILLERS[part](clients)
        found = memory(broker)
    finally:
        broker.get = get  # type: ignore[method-assign]
    limit = found[f"part_limit_bytes/{part}"]
    assert limit == LIMIT and max(peaks) <= limit + ABOVE.get(part, 0)
    assert found["counted_bytes"] < MAX_MEMORY and found["resident_bytes"] < MAX_MEMORY and found["stage"] == 0
    clients.close()
    if part != "route_cache":
        wait_until(lambda: held(broker, part) <= before)


# --- the whole ----------------------------------------------------------------------------------------------------


class Bystanders:
    """A pair that exchanges messages at every QoS, over connections that are never refused anything they have."""

    def __init__(self, clients: Clients) -> None:
        self.publisher, self.subscriber = clients.accepted("publisher"), clients.accepted("subscriber")
        self.subscriber.subscribe("by/+", options=2)
        self.exchanged = 0

    def exchange(self) -> None:
        self.exchanged += 1
        payload = b"%d" % self.exchanged
        for qos in (0, 1, 2):
            assert self.publisher.publish(f"by/{qos}", payload, qos) == 0
            assert self.subscriber.take().payload == payload


def readiness(broker: BrokerProcess) -> tuple[int, Any]:
    try:
        return 200, json.loads(broker.get("/readyz"))
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def stage(broker: BrokerProcess) -> int:
    found = memory(broker)
    assert found["resident_bytes"] < found["max_bytes"], found
    assert found["counted_bytes"] < found["max_bytes"], found
    return int(found["stage"])


def test_requests_are_refused_in_order_near_the_limit(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(config={"sys_interval": "0s", "limits": {"max_memory": "200MiB"}})
    with ExitStack() as stack:
        clients = Clients(broker, stack)
        bystanders = Bystanders(clients)
        stalled = [clients.open() for _ in range(20)]
        for number, client in enumerate(stalled):
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(f"stalled{number}")
            client.subscribe(f"stalled/{number}", options=0)
        filler = clients.accepted("filler")
        retained = 0

        # New connections are refused first.
        while stage(broker) < 1:
            for _ in range(4):
                assert filler.publish(f"fill/{retained}", bytes(256 * KIB), 1, retain=True) in (0, 0x10)
                retained += 1
        for version, code in ((5, 0x97), (4, 3)):
            stranger = stack.enter_context(RawClient(broker.port, version))
            assert stranger.connect("stranger").reason_code == code
        status, detail = readiness(broker)
        assert status == 503 and "no_connections" in detail["reasons"][0]
        assert bystanders.subscriber.subscribe("new/#", options=0).reason_codes == [0]
        bystanders.exchange()

        # Then new state.
        retained += until_refused(lambda number: filler.publish(f"fill/{retained + number}", bytes(256 * KIB), 1, retain=True), tries=1000)
        assert stage(broker) == 2, "\n".join(broker.lines[-5:])
        assert bystanders.subscriber.subscribe("other/#", options=0).reason_codes == [0x97]
        assert bystanders.subscriber.subscribe("by/+", options=2).reason_codes == [2]
        bystanders.exchange()

        # Then QoS 0 messages for clients that do not read.
        for number in range(len(stalled)):
            for _ in range(8):  # the kernel takes up to 4 MiB of them
                filler.publish(f"stalled/{number}", bytes(MIB))
            bystanders.exchange()
            if stage(broker) == 3:
                break
        assert stage(broker) == 3
        for _ in range(100):
            filler.publish("stalled/0", bytes(MIB))
        bystanders.exchange()
        found = memory(broker)
        assert found["memory"] > 50 and found["stage"] == 3
        assert (found["refused_total/connections"], found["refused_total/subscriptions"]) == (2, 1)

        # It recovers by itself.
        for client in stalled:
            client.close()
        wait_until(lambda: stage(broker) < 3)
        for number in range(retained):
            filler.send(Publish(f"fill/{number}", b"", 0, True))
        filler.ping()
        wait_until(lambda: stage(broker) == 0)
        assert clients.connect("stranger")[1] == 0
        assert readiness(broker)[0] == 200
        bystanders.exchange()
        broker.wait_for_log("event=memory_stage stage=normal")
        lines = [line.partition("event=memory_stage stage=")[2] for line in broker.lines if "event=memory_stage" in line]
        stages = [line.split()[0] for line in lines]
        assert list(dict.fromkeys(stages))[:3] == ["no_connections", "no_state", "shedding"]
