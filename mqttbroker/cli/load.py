"""A load on a broker: publishers, subscribers, and what became of each message.

Publisher i publishes to a topic of its own, ``PREFIX/i``, and ``fan_out`` of the subscribers, taken in turn, get it. A payload
begins with a stamp in nanoseconds of the run, the number of the publisher and that of its message.

With a rate the stamp is the time at which the message was due, unless it was sent within `TIMER` of it: a broker that stops
reading for a second delays all messages due in that second, and their latencies show it. Without a rate each publisher keeps
``window`` messages unacknowledged, at QoS 0 undelivered, and the stamp is the time of sending.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, NamedTuple

from mqttbroker.cli.load_client import Connection, LoadError, Publisher, Subscriber
from mqttbroker.cli.load_figures import Deliveries, Latencies
from mqttbroker.codec.packets import Connack, Connect
from mqttbroker.codec.properties import Properties

_HEADER = struct.Struct(">QII")
MIN_SIZE = _HEADER.size  # bytes of a payload
MAX_MESSAGES = (1 << 32) - 1
TIMER = 2_000_000  # nanoseconds by which the timer of the event loop may be late
SESSION_EXPIRY = 300  # seconds that a persistent session outlives a load that was killed, at version 5
CONNECT_SECONDS = 30.0
_CONNECTING = 50  # connections that are being made at a time
_POLL = 0.02  # seconds
_PACKET_OVERHEAD = 32  # bytes of a PUBLISH beside topic and payload, at most


class Plan(NamedTuple):
    """What to do. ``rate`` is in messages/s of all publishers, 0 = as fast as is acknowledged; ``seconds`` and
    ``messages`` bound the sending, ``drain`` the time without progress after it."""

    publishers: int
    subscribers: int
    fan_out: int
    qos: int
    size: int
    rate: float
    window: int
    seconds: float
    messages: int
    drain: float
    persistent: bool
    topics: str  # the prefix of the topics
    client_ids: str  # that of the client ids


class Account(NamedTuple):
    """How each connection logs in. ``version`` is the protocol level."""

    version: int
    keep_alive: int
    username: str | None
    password: bytes | None


Opener = Callable[[Connection], Coroutine[Any, Any, None]]
"""Opens the transport of a connection. Raises OSError."""


class Load:
    """One run: `connect`, `measure` and `close`, in this order, each once; `stop` ends `measure` early."""

    def __init__(self, plan: Plan, account: Account, opener: Opener) -> None:
        self.plan = plan
        self.sent = 0
        self.acknowledged = 0
        self.refused = 0
        self.delivered = 0
        self.unexpected = 0  # messages that no publisher sent, or with another payload
        self.seconds = 0.0  # of sending
        self.finished_after = 0.0  # seconds until the last message was delivered or acknowledged
        self.interrupted = False
        self.delivery = Latencies()
        self.acknowledgement = Latencies()
        self.late = Latencies()  # of messages that were sent more than `TIMER` after they were due
        self.sessions_left: list[str] = []  # that could not be removed
        self.publishers: list[Publisher] = []
        self.subscribers: list[Subscriber] = []
        self._account = account
        self._open = opener
        self._fan_out = plan.fan_out if plan.subscribers else 0
        self._filler = bytes(plan.size - MIN_SIZE)
        self._sent = [0] * plan.publishers
        self._due = [0] * plan.publishers
        self._undelivered = [0] * plan.publishers
        self._windows = [plan.window] * plan.publishers
        self._deliveries: list[Deliveries] = []
        self._to_fill: set[int] = set()  # publishers that may have something to send
        self._planned = 0  # messages that have become due
        self._sending = False
        self._sent_all = asyncio.Event()
        self._stopped = False
        self._pinging: asyncio.Future[None]
        self._start = 0
        self._last = 0  # monotonic nanoseconds of the last delivery or acknowledgement

    # --- figures ------------------------------------------------------------------------------------------------------

    @property
    def unsent(self) -> int:
        """Messages that were due and were not sent."""
        return max(0, self._planned - self.sent)

    @property
    def unacknowledged(self) -> int:
        return sum(len(each.in_flight) for each in self.publishers)

    @property
    def lost(self) -> int:
        """Deliveries that did not come, of messages that the broker did not refuse."""
        return max(0, self._expected - sum(each.received for each in self._deliveries))

    @property
    def duplicated(self) -> int:
        return sum(each.duplicated for each in self._deliveries)

    @property
    def out_of_order(self) -> int:
        return sum(each.out_of_order for each in self._deliveries)

    @property
    def disconnected(self) -> list[str]:
        """The connections that were lost, with the reason."""
        return [f"{each.client_id}: {each.lost}" for each in (*self.publishers, *self.subscribers) if each.lost not in ("", "closed")]

    @property
    def ok(self) -> bool:
        """Whether nothing is missing, out of order, or there twice against the guarantee of its QoS."""
        wrong = self.lost or self.refused or self.unacknowledged or self.out_of_order or self.unexpected or self.disconnected
        return not wrong and not (self.duplicated and self.plan.qos != 1)

    @property
    def _expected(self) -> int:
        return (self.sent - self.refused) * self._fan_out

    def elapsed(self) -> float:
        """Seconds since the first message was due."""
        return (time.monotonic_ns() - self._start) / 1e9

    # --- the run ------------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect all, and subscribe. Raises LoadError or OSError."""
        self._pinging = asyncio.ensure_future(self._ping())
        limit = asyncio.Semaphore(_CONNECTING)
        for index in range(self.plan.subscribers):
            deliveries = {number: Deliveries() for number in self._topics_of(index)}
            self._deliveries += deliveries.values()
            connect = self._connect(f"s{index}", self.plan.persistent)
            self.subscribers.append(Subscriber(connect, self.plan.qos, partial(self._received, deliveries)))
        for index in range(self.plan.publishers):
            self.publishers.append(
                Publisher(
                    self._connect(f"p{index}", False),
                    f"{self.plan.topics}/{index}",
                    self.plan.qos,
                    self._acknowledged,
                    partial(self._may_fill, index),
                )
            )
        # The first alone: a wrong password is one failed login, and not a reason for a ban.
        await self._ready(0, limit)
        await _together(self._subscribed(index, limit) for index in range(self.plan.subscribers))
        await _together(self._ready(index, limit) for index in range(1, self.plan.publishers))

    async def measure(self) -> None:
        """Send, and wait for what is on its way."""
        self._start = self._last = time.monotonic_ns()
        self._sending = True
        end = asyncio.get_running_loop().call_later(self.plan.seconds, self._sent_all.set)
        if self.plan.rate:
            self._tick()
        else:
            self._to_fill.update(range(self.plan.publishers))
            self._fill_all()
        await self._sent_all.wait()
        end.cancel()
        self._sending = False
        self.seconds = self.elapsed()
        await self._drain()
        self.finished_after = (self._last - self._start) / 1e9

    async def close(self) -> None:
        """Disconnect all, and remove the persistent sessions; `sessions_left` has those that could not be."""
        self._pinging.cancel()
        for each in (*self.publishers, *self.subscribers):
            each.close()
        if self.plan.persistent:
            limit = asyncio.Semaphore(_CONNECTING)
            await _together(self._remove(each, limit) for each in self.subscribers)

    def stop(self) -> None:
        """Send no more; the second time, do not wait for what is on its way either."""
        self._stopped = self.interrupted
        self.interrupted = True
        self._sent_all.set()

    # --- connections --------------------------------------------------------------------------------------------------

    async def _subscribed(self, index: int, limit: asyncio.Semaphore) -> None:
        async with limit:
            await self._connected(self.subscribers[index])
            await self.subscribers[index].subscribe(self._filters(index))

    async def _ready(self, index: int, limit: asyncio.Semaphore) -> None:
        plan = self.plan
        async with limit:
            granted = (await self._connected(self.publishers[index])).properties
        if 0 <= granted.maximum_qos < plan.qos:
            raise LoadError(f"the broker grants QoS {granted.maximum_qos} at most")
        if 0 <= granted.maximum_packet_size < plan.size + len(plan.topics) + _PACKET_OVERHEAD:
            raise LoadError(f"the broker takes packets of {granted.maximum_packet_size} bytes at most")
        if granted.receive_maximum > 0:
            self._windows[index] = min(plan.window, granted.receive_maximum)

    def _connect(self, name: str, persistent: bool) -> Connect:
        account, given = self._account, Properties()
        if persistent:
            given.session_expiry_interval = SESSION_EXPIRY
        return Connect(
            f"{self.plan.client_ids}-{name}",
            account.version,
            not persistent,
            account.keep_alive,
            None,
            account.username,
            account.password,
            given,
        )

    async def _connected(self, connection: Connection) -> Connack:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._open(connection)
                return await connection.connected()
        except TimeoutError:
            raise LoadError(f"{connection.client_id}: no CONNACK came in {CONNECT_SECONDS:g} s") from None

    def _topics_of(self, subscriber: int) -> list[int]:
        """The publishers whose messages a subscriber gets: publisher i has the subscribers i × fan_out, i × fan_out + 1, …"""
        subscribers, fan_out = self.plan.subscribers, self._fan_out
        return [i for i in range(self.plan.publishers) if (subscriber - i * fan_out) % subscribers < fan_out]

    def _filters(self, subscriber: int) -> list[str]:
        topics = self._topics_of(subscriber)
        if len(topics) == self.plan.publishers and len(topics) > 1:
            return [f"{self.plan.topics}/+"]
        return [f"{self.plan.topics}/{number}" for number in topics]

    async def _drain(self) -> None:
        """Wait until all is delivered and acknowledged, or nothing more comes for ``drain`` seconds."""
        before, since = -1, time.monotonic()
        while not self._stopped and (self.unacknowledged or self.delivered < self._expected or self.lost) and not self._all_lost():
            now = self.delivered + self.acknowledged + self.refused
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > self.plan.drain:
                break
            await asyncio.sleep(_POLL)

    def _all_lost(self) -> bool:
        return all(each.lost for each in self.publishers) and all(each.lost for each in self.subscribers)

    async def _remove(self, subscriber: Subscriber, limit: asyncio.Semaphore) -> None:
        """Remove its session: a CONNECT with Clean Start, and no Session Expiry Interval."""
        async with limit:
            again = Connection(self._connect(subscriber.client_id.rpartition("-")[2], False))
            try:
                await self._connected(again)
                again.close()
                await again.ended
            except (LoadError, OSError):
                self.sessions_left.append(subscriber.client_id)

    async def _ping(self) -> None:
        if not self._account.keep_alive:
            return
        while True:
            await asyncio.sleep(self._account.keep_alive / 2)
            for each in (*self.publishers, *self.subscribers):
                each.ping()

    # --- messages -----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Send the messages that have become due; message n is due n / rate seconds after the start."""
        if not self._sending:
            return
        plan = self.plan
        due = min(int(self.elapsed() * plan.rate) + 1, plan.messages)
        first, self._planned = self._planned, max(due, self._planned)
        for number in range(first, self._planned):
            self._due[number % plan.publishers] += 1
            self._to_fill.add(number % plan.publishers)
        self._fill_all()
        if self._planned < plan.messages:
            asyncio.get_running_loop().call_later(max(0.001, self._planned / plan.rate - self.elapsed()), self._tick)

    def _may_fill(self, index: int) -> None:
        """Have a publisher send what it may in the next turn of the event loop, in one write."""
        if not self._to_fill:
            asyncio.get_running_loop().call_soon(self._fill_all)
        self._to_fill.add(index)

    def _fill_all(self) -> None:
        indexes = list(self._to_fill)
        self._to_fill.clear()
        for index in indexes:
            self._fill(index)

    def _fill(self, index: int) -> None:
        """Send what a publisher may send now: messages that are due, or those that its window allows."""
        publisher, plan = self.publishers[index], self.plan
        if not self._sending:
            return
        if publisher.lost:
            if all(each.lost for each in self.publishers):
                self._sent_all.set()
            return
        room = self._windows[index]
        if plan.qos:
            room -= len(publisher.in_flight)
        elif self._fan_out and not plan.rate:
            room -= -(-self._undelivered[index] // self._fan_out)
        if plan.rate:
            room = min(room, self._due[index] - self._sent[index])
        room = min(room, plan.messages - self.sent)
        while room > 0 and publisher.writable:
            room -= 1
            number = self._sent[index]
            self._sent[index] = number + 1
            self._undelivered[index] += self._fan_out
            self.sent += 1
            stamp = time.monotonic_ns() - self._start
            if plan.rate:
                late = stamp - int((number * plan.publishers + index) * 1e9 / plan.rate)
                if late > TIMER:
                    self.late.add(late)
                    stamp -= late
            publisher.publish(_HEADER.pack(stamp, index, number) + self._filler, stamp)
        publisher.flush()
        if self.sent >= plan.messages:
            self._sent_all.set()
        elif not plan.rate and not plan.qos and not self._fan_out and publisher.writable:
            self._may_fill(index)  # nothing else would

    def _acknowledged(self, stamp: int, code: int) -> None:
        self._last = time.monotonic_ns()
        if code >= 0x80:
            self.refused += 1
            return
        self.acknowledged += 1
        self.acknowledgement.add(self._last - self._start - stamp)

    def _received(self, deliveries: dict[int, Deliveries], data: bytes, start: int, end: int) -> None:
        if end - start != self.plan.size:
            self.unexpected += 1
            return
        stamp, index, number = _HEADER.unpack_from(data, start)
        if index not in deliveries or number >= self._sent[index]:
            self.unexpected += 1
            return
        self._last = time.monotonic_ns()
        self.delivered += 1
        self.delivery.add(self._last - self._start - stamp)
        self._undelivered[index] -= deliveries[index].add(number)
        if not self.plan.qos and self._sending:
            self._may_fill(index)


async def _together(steps: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at the same time; the first that fails ends the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for step in steps:
                group.create_task(step)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
