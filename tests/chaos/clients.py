"""The clients of a run: publishers, subscribers, and readers of retained messages.  They follow their schedules."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import cycle
from random import Random

from chaos.device import Address, Device, Link
from chaos.record import RETAINED, RETAINED_TOPICS, Record, Sent
from chaos.schedule import CUT, LEAVE, TAKEOVER, Habits, Load, Stay
from mqttbroker.codec.packets import Puback, Publish, Pubrec

# A publisher's topics by number: in queues and the stream, in queues only, in the stream only.
TOPICS = ("chaos/{}/both", "chaos/{}/too", "chaos/{}/queue", "log/{}")
SUBSCRIBED = "chaos/#"
STREAM_FILTERS = ("chaos/+/both", "chaos/+/too", "log/#")
WINDOW = 40  # messages in flight per publisher
AHEAD = 100  # messages that publishers send beyond those that are awaited
TRIES = 50  # round trips within which retained messages must arrive


class Broker:
    """The broker as clients see it: ``up`` is set while it listens, ``finishing`` after the last kill.

    Clients connect to the ``addresses`` in turn.
    """

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.up = asyncio.Event()
        self.finishing = asyncio.Event()
        self._addresses = cycle(addresses)

    @property
    def address(self) -> Address:
        """The address for the next connection."""
        return next(self._addresses)


class Client(Device):
    """A device that connects and disconnects on a schedule."""

    async def follow(self, broker: Broker, habits: Habits) -> None:
        """Follow the schedule until the last kill."""
        while not broker.finishing.is_set():
            stay = habits.next()
            link = await self._connect(broker, stay)
            await _first_of(link.closed, broker.finishing, stay.seconds)
            if link.closed.is_set() or broker.finishing.is_set():
                continue
            self.record.counts[stay.end] += 1
            self._end(link, stay)
            if stay.end != TAKEOVER:
                await asyncio.sleep(stay.away)

    async def stay_connected(self, broker: Broker) -> None:
        """Connect, and reconnect whenever the connection ends; an open one must not be slow, since all wait for it."""
        while True:
            link = self.link
            if link is None or not link.up or link.is_slow:
                link = await self._connect(broker, Stay(0, 0, CUT, 0, False, 65535))
            await link.closed.wait()

    async def _connect(self, broker: Broker, stay: Stay) -> Link:
        while True:
            await broker.up.wait()
            link = await self.connect(broker.address, stay.ack_delay, stay.receive_maximum)
            if link is not None and await self.arrived():
                return link
            await asyncio.sleep(0.02)

    async def arrived(self) -> bool:
        """Start work on a new connection; False if the connection ended meanwhile."""
        return True

    def stop_reading(self) -> Link | None:
        """Read nothing more on the connection without closing it; return the connection."""
        link = self.link
        if link is None or not link.up:
            return None
        link.abandon()
        return link

    def _end(self, link: Link, stay: Stay) -> None:
        if stay.end == TAKEOVER:
            link.abandon()
        elif stay.end == LEAVE:
            self.leave()
        else:
            link.cut()


class Quota:
    """The messages that all publishers together may send, so that a slow broker has as many as a fast one."""

    def __init__(self) -> None:
        self._sent = 0
        self._awaited = 0
        self._changed = asyncio.Condition()

    async def take(self) -> None:
        """Wait until one more may be sent."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._sent < self._awaited + AHEAD)
            self._sent += 1
            self._changed.notify_all()

    async def sent(self, count: int) -> None:
        """Permit ``count`` more messages, and wait until they were sent."""
        async with self._changed:
            self._awaited += count
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._sent >= self._awaited)


class Publisher(Client):
    """Publishes at QoS 1 and 2 to several topics; some messages are retained."""

    def __init__(self, name: str, version: int, record: Record, load: Load, quota: Quota | None = None) -> None:
        super().__init__(name, version, record)
        self.load = load
        self.quota = quota
        self.room = asyncio.Event()

    async def publish_all(self) -> None:
        while True:
            burst = self.load.next()
            await asyncio.sleep(burst.pause)
            for choice in burst.messages:
                if self.quota is not None:
                    await self.quota.take()
                while not self.up or len(self.outgoing) >= WINDOW:
                    self.room.clear()
                    await self.room.wait()
                self.publish(self._new(*choice))

    def _new(self, topic: int, qos: int, retain: bool, size: int) -> Sent:
        if retain:
            return self.record.send(self.name, f"{RETAINED_TOPICS}{self.name}/{qos}", qos, True, size if size > 20 else 0)
        return self.record.send(self.name, TOPICS[topic].format(self.name), qos, False, size)

    def stop_reading(self) -> Link | None:
        """Publish messages whose acknowledgements will not be read, then stop reading."""
        if self.up and len(self.outgoing) < WINDOW:
            for topic in range(len(TOPICS)):
                for qos in (1, 2):
                    self.publish(self._new(topic, qos, False, 60))
        return super().stop_reading()

    def connected(self) -> None:
        self.room.set()

    def settled(self) -> None:
        self.room.set()

    def _end(self, link: Link, stay: Stay) -> None:
        if stay.end == CUT and stay.half and self.up and len(self.outgoing) < WINDOW:
            self.publish_half(self._new(0, 2, False, 200))
        else:
            super()._end(link, stay)


class Subscriber(Client):
    """A client with one subscription at ``qos``, a shared one if it has a ``group``."""

    def __init__(
        self,
        name: str,
        version: int,
        record: Record,
        qos: int,
        group: str = "",
        persistent: bool = True,
        topic_filter: str = SUBSCRIBED,
    ) -> None:
        super().__init__(name, version, record, persistent)
        self.topic_filter = f"$share/{group}/{topic_filter}" if group else topic_filter
        self.qos = qos
        self.group = group

    async def arrived(self) -> bool:
        if self.known and self.persistent:
            return True
        subscribed = await self.subscribe(self.topic_filter, self.qos)
        self.record.since[self.label] = len(self.record.sent)
        return subscribed


class RetainedReader(Device):
    """Repeatedly subscribes to all retained messages and compares them with the acknowledged ones.

    They must arrive within `TRIES` round trips, and in a cluster within ``patience`` seconds.
    """

    def __init__(self, name: str, version: int, record: Record, seed: str, patience: float = 0.0) -> None:
        super().__init__(name, version, record, False)
        self.patience = patience
        self.random = Random(f"{seed}:{name}")
        self.found: dict[str, Sent | None] = {}

    async def check_repeatedly(self, broker: Broker) -> None:
        while True:
            await broker.up.wait()
            await self.check(broker)
            await asyncio.sleep(self.random.uniform(0.05, 0.5))

    async def check(self, broker: Broker) -> None:
        if await self.connect(broker.address) is None:
            return
        expected = dict(self.record.last_retained)
        self.found = {}
        if await self.subscribe(f"{RETAINED_TOPICS}#", 2):
            until = time.monotonic() + self.patience
            tries = 0
            while tries < TRIES or time.monotonic() < until:
                tries += 1
                if not await self.ping():
                    break
                wrong = [text for topic, floor in expected.items() if (text := self._judge(topic, floor))]
                if not wrong:
                    self.record.checked[RETAINED] += len(expected)
                    break
            else:
                for text in wrong:
                    self.record.fault(RETAINED, text)
        assert self.link is not None
        self.link.cut()

    def _judge(self, topic: str, floor: int) -> str:
        """The error in the value of a topic whose last acknowledged message is number ``floor``, or ""."""
        message = self.found.get(topic)
        if message is not None and message.number < floor:
            return f"{topic} is {message} after {self.record.sent[floor]} was acknowledged"
        if message is None and not any(number >= floor for number in self.record.cleared.get(topic, ())):
            return f"{topic} has no value, though {self.record.sent[floor]} was acknowledged"
        return ""

    def receive(self, link: Link, packet: Publish) -> None:
        if packet.retain:
            self.found[packet.topic] = self.record.identify(self.name, packet.topic, packet.payload, packet.qos)
        if packet.qos == 1:
            link.answer(Puback(packet.packet_id))
        elif packet.qos == 2:
            link.answer(Pubrec(packet.packet_id))


async def _first_of(one: asyncio.Event, other: asyncio.Event, seconds: float) -> None:
    """Wait until one of the events is set, or for ``seconds``."""
    waits = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
