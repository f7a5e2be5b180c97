"""Clients that load a broker, and a record of the packets they send and receive.

Times are ns of CLOCK_MONOTONIC. A client records a packet before it sends it and after it receives it: a packet is sent
at its recorded time or later, and received at it or earlier.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

from support.broker_process import BrokerProcess
from support.raw_client import RawClient, describe

from mqttbroker.codec.packets import Disconnect, Packet, Puback, Pubcomp, Publish, Pubrec, Pubrel
from mqttbroker.codec.properties import Properties

NEVER = 1 << 63
WINDOW = 10
PARTITIONS = 3
# Retention deletes records of "short" during the run; sizes are small, so that segments roll and are deleted often.
STREAMS = {
    "load": {"filters": ["load/#"], "partitions": PARTITIONS, "segment_bytes": "256KiB"},
    "short": {"filters": ["load/#"], "partitions": 1, "segment_bytes": "64KiB", "retention_bytes": "256KiB"},
}
CONFIG = {"streams": STREAMS, "limits": {"max_inflight": 50}}

Ident = tuple[str, int]  # publisher and number


def now() -> int:
    return time.monotonic_ns()


class Publication:
    """One message of a publisher. ``acked``: PUBACK or PUBREC came, with ``reason``; ``completed``: PUBCOMP came."""

    def __init__(self, publisher: str, number: int, topic: str, qos: int, retain: bool, payload: bytes) -> None:
        self.ident: Ident = (publisher, number)
        self.packet_id = number + 1
        self.topic = topic
        self.qos = qos
        self.retain = retain
        self.payload = payload
        self.sent = self.acked = self.released = self.completed = NEVER
        self.reason = 0
        self.repeated = False  # so that at QoS 1 it may be stored twice

    def packet(self, dup: bool = False) -> Publish:
        return Publish(self.topic, self.payload, self.qos, self.retain, dup, self.packet_id)

    def accepted(self, before: int) -> bool:
        return self.acked < before and self.reason < 0x80


class Delivery:
    """One message to a subscriber. Times of PUBACK or PUBREC, PUBREL, and PUBCOMP."""

    def __init__(self, packet: Publish, came: int) -> None:
        self.ident = ident_of(packet.payload)
        self.packet_id = packet.packet_id
        self.qos = packet.qos
        self.came = came
        self.answered = self.released = self.completed = NEVER


class SubscriptionChange:
    """A SUBSCRIBE (``wanted``) or UNSUBSCRIBE of a client."""

    def __init__(self, topic_filter: str, wanted: bool) -> None:
        self.topic_filter = topic_filter
        self.wanted = wanted
        self.sent = now()
        self.acked = NEVER


class History:
    """The record; times as in the module's docstring."""

    def __init__(self) -> None:
        self.publications: dict[str, list[Publication]] = {}
        self.deliveries: dict[str, list[Delivery]] = {}
        self.changes: list[SubscriptionChange] = []
        self.watermarks: list[tuple[int, tuple[str, int], int]] = []  # time, (stream, partition), offset

    def shown(self, before: int) -> dict[tuple[str, int], int]:
        """The high watermark that readers have seen of each partition."""
        found: dict[tuple[str, int], int] = {}
        for when, key, offset in self.watermarks:
            if when < before:
                found[key] = max(offset, found.get(key, 0))
        return found

    def all_publications(self) -> list[Publication]:
        return [publication for one in self.publications.values() for publication in one]


def ident_of(payload: bytes) -> Ident:
    publisher, number, _ = payload.split(b":", 2)
    return publisher.decode(), int(number)


def qos_of(client_id: str) -> int:
    """The QoS in a client id such as ``pub-4-1``, after the version."""
    return int(client_id[-1])


def open_session(port: int, client_id: str) -> tuple[RawClient, bool]:
    """Connect with a session that never expires; returns whether it was present too."""
    client = RawClient(port, int(client_id.split("-")[1]))
    properties = Properties()
    if client.version == 5:
        properties.session_expiry_interval = 0xFFFFFFFF
    connack = client.connect(client_id, clean_start=False, properties=properties)
    assert connack.reason_code == 0, describe(connack)
    return client, connack.session_present


class Load:
    """Publishers, disconnected and connected subscribers, a client that changes its subscriptions, a stream reader."""

    def __init__(self, broker: BrokerProcess, seed: str, publishers: list[str], messages: int) -> None:
        self.broker = broker
        self.seed = seed
        self.publishers = publishers
        self.messages = messages
        self.history = History()
        self._over = threading.Event()

    def run(self, ready: Callable[[], None]) -> History:
        """Connect all, call ``ready``, and publish everything; returns when every publisher has its answers."""
        for client_id in ("away-4-2", "away-5-2"):
            client, _ = open_session(self.broker.port, client_id)
            client.subscribe("load/#", options=2)
            client.close()
        clients = [(client_id, open_session(self.broker.port, client_id)[0]) for client_id in ("online-4-1", "online-5-2")]
        for client_id, client in clients:
            client.subscribe("load/#", options=qos_of(client_id))
        publishers = [(client_id, open_session(self.broker.port, client_id)[0]) for client_id in self.publishers]
        ready()
        with ThreadPoolExecutor(max_workers=16) as pool:
            others = [pool.submit(self._receive, client_id, client) for client_id, client in clients]
            others += [pool.submit(self._change, "changing-5-1"), pool.submit(self._watch)]
            publishing = [pool.submit(self._publish, client_id, client) for client_id, client in publishers]
            try:
                for task in publishing:
                    task.result()
            finally:
                self._over.set()
            for other in others:
                other.result()
        return self.history

    # -- publishers -------------------------------------------------------------------------------------------------

    def _publications(self, client_id: str) -> list[Publication]:
        rng = Random(f"{self.seed}:{client_id}")
        made = []
        for number in range(self.messages):
            retain = rng.random() < 0.2
            topic = f"load/{client_id}/{rng.randrange(3)}" if retain else f"load/{client_id}"
            size = rng.choice((20, 200, 2000)) if rng.random() < 0.98 else 20_000
            payload = f"{client_id}:{number}:".encode() + rng.randbytes(rng.randrange(size))
            made.append(Publication(client_id, number, topic, qos_of(client_id), retain, payload))
        return made

    def _publish(self, client_id: str, client: RawClient) -> None:
        publications = self.history.publications[client_id] = self._publications(client_id)
        packet_ids_in_use: dict[int, Publication] = {}
        waiting = deque(publications)
        while waiting or packet_ids_in_use:
            try:
                while waiting and len(packet_ids_in_use) < WINDOW:
                    publication = waiting.popleft()
                    packet_ids_in_use[publication.packet_id] = publication
                    publication.sent = now()
                    client.send(publication.packet())
                self._answer(client, packet_ids_in_use)
            except ConnectionError:
                client.close()
                client = self._return(client_id, packet_ids_in_use)
        client.close()

    def _answer(self, client: RawClient, packet_ids_in_use: dict[int, Publication]) -> None:
        """Receive one answer of the broker and continue the exchange."""
        packet = client.receive(30)
        if isinstance(packet, Disconnect):
            raise ConnectionResetError(describe(packet))
        assert isinstance(packet, (Puback, Pubrec, Pubcomp)), describe(packet)
        publication = packet_ids_in_use[packet.packet_id]
        if isinstance(packet, Pubcomp):
            publication.completed = now()
        else:
            publication.reason = packet.reason_code
            publication.acked = now()
            if isinstance(packet, Pubrec) and packet.reason_code < 0x80:
                publication.released = now()
                client.send(Pubrel(packet.packet_id))
                return
        del packet_ids_in_use[packet.packet_id]

    def _return(self, client_id: str, packet_ids_in_use: dict[int, Publication]) -> RawClient:
        """Connect again and repeat the messages in flight (section 4.4)."""
        while True:
            try:
                client, present = open_session(self.broker.port, client_id)
                break
            except ConnectionError:
                self._over.wait(0.01)
        assert present
        for publication in packet_ids_in_use.values():
            if publication.acked < NEVER:
                client.send(Pubrel(publication.packet_id))
            else:
                publication.repeated = True
                client.send(publication.packet(dup=True))
        return client

    # -- other clients ----------------------------------------------------------------------------------------------

    def _receive(self, client_id: str, client: RawClient) -> None:
        deliveries = self.history.deliveries[client_id] = []
        rng = Random(f"{self.seed}:{client_id}")
        waiting: list[Callable[[], None]] = []
        with client:
            while not self._over.is_set():
                packet = _arrived(client)
                if packet is not None:
                    waiting.append(self._response(client, packet, deliveries))
                # Answers are delayed, so that some deliveries are always in flight.
                while waiting and (packet is None or len(waiting) > rng.randrange(20)):
                    waiting.pop(0)()

    def _response(self, client: RawClient, packet: Packet, deliveries: list[Delivery]) -> Callable[[], None]:
        came = now()
        if isinstance(packet, Publish):
            delivery = Delivery(packet, came)
            deliveries.append(delivery)

            def answer() -> None:
                delivery.answered = now()
                client.send(Puback(delivery.packet_id) if packet.qos == 1 else Pubrec(delivery.packet_id))

            return answer
        assert isinstance(packet, Pubrel), describe(packet)
        released = next(d for d in reversed(deliveries) if d.packet_id == packet.packet_id)
        released.released = came

        def complete() -> None:
            released.completed = now()
            client.send(Pubcomp(released.packet_id))

        return complete

    def _change(self, client_id: str) -> None:
        client, _ = open_session(self.broker.port, client_id)
        rng = Random(f"{self.seed}:{client_id}")
        with client:
            while not self._over.wait(0.005):
                change = SubscriptionChange(f"changing/{rng.randrange(5)}", rng.random() < 0.5)
                self.history.changes.append(change)
                try:
                    if change.wanted:
                        client.subscribe(change.topic_filter, options=1)
                    else:
                        client.unsubscribe(change.topic_filter)
                except ConnectionError:
                    return  # a broker that cannot write closes the connection
                change.acked = now()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            for stream in STREAMS:
                manifest = json.loads(self.broker.get(f"/streams/{stream}"))
                when = now()
                for partition in manifest["partitions"]:
                    key = (stream, int(partition["partition"]))
                    self.history.watermarks.append((when, key, int(partition["high_watermark"])))


def _arrived(client: RawClient) -> Packet | None:
    try:
        return client.receive(0.05)
    except TimeoutError:
        return None
