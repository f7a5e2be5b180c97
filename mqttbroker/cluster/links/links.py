"""Links between cores: messages at QoS 0, and shared subscriptions, across the cores of a cluster.

Two cores have one link, which the one of the higher shard opens. Over it each tells the other its filters; so a message at QoS 0 is
sent once to each core with a matching filter, and there it goes to sessions of that core only. Messages at QoS 1 and 2 are
in the logs. For shared subscriptions cores tell each other their members; the core of the publisher chooses the member.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol
from zlib import crc32

from mqttbroker.cluster.links.messages import ADD, AVAILABLE, CONNECTED, GROUP, REMOVE, Change, MemberState
from mqttbroker.cluster.links.peer import SHARE, Announcement, Peer, local_states
from mqttbroker.cluster.links.server import CORE, Hello, LinkRefused
from mqttbroker.core.access.policy import AnonymousPolicy, AuthenticationChain
from mqttbroker.core.client.outgoing import Outgoing
from mqttbroker.core.packets.core_link import LinkHandler
from mqttbroker.core.routing.groups import Group, LeastLoaded
from mqttbroker.core.streams.filter import reads_stream
from mqttbroker.core.terms.terms import ListenerTerms
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.link_address import LinkAddress
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.wire import Endpoint, Wire
from topic_matcher.filters import parse_shared

log = logging.getLogger("mqttbroker.cluster")

LISTENER: Final = "cores"  # in the place of a listener's name, in metrics of dropped messages
LINK_ROOM: Final = 1_048_576  # bytes by which a packet of a link may be longer than those of clients
LOST_AFTER: Final = 6.0  # seconds in which a core says nothing, although it is asked, until its link is closed
PINGS: Final = 3  # in the shorter one of that time and the session timeout, at least
TICK: Final = 0.1  # seconds between looks at the members of shared subscriptions
MEMBERS_PER_TICK: Final = 2_000
HELD: Final = 10.0  # seconds for which a filter that was announced is kept, if nobody subscribes to it
SHORTEST_WAIT: Final = 0.05  # seconds between attempts to connect
LONGEST_WAIT: Final = 1.0


class LinkUser(Protocol):
    """Others that send messages over the links, such as `mqttbroker.cluster.other_shards.OtherShards`."""

    def handle(self, shard: int, topic: str, payload: bytes) -> bool:
        """Take a message of the core of a shard; false if it is not for this."""

    def link_up(self) -> None:
        """There is a link to one more core."""

    def link_down(self, shard: int) -> None:
        """The link to the core of a shard is lost."""

    def all_in_log(self) -> bool:
        """Whether all messages with RETAIN that were published here and belong to other cores are in this core's log."""


class LocalFilters:
    """The filters of this core's sessions, counted; `changed` is called with each change that other cores are to be told."""

    def __init__(self, changed: Callable[[Change], None]) -> None:
        self._changed = changed
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def add(self, topic_filter: str) -> None:
        count = self._counts.get(topic_filter, 0)
        self._counts[topic_filter] = count + 1
        if count == 0 or topic_filter.startswith(SHARE):
            self._changed(_change(ADD, topic_filter))

    def remove(self, topic_filter: str) -> None:
        count = self._counts.get(topic_filter, 0)
        if count > 1:
            self._counts[topic_filter] = count - 1
        else:
            self._counts.pop(topic_filter, None)
        if count <= 1 or topic_filter.startswith(SHARE):
            self._changed(_change(REMOVE, topic_filter))


def _change(kind: int, topic_filter: str) -> Change:
    if topic_filter.startswith(SHARE):
        return Change(GROUP, topic_filter[len(SHARE) :])
    return Change(kind, topic_filter)


def is_told(topic_filter: str) -> bool:
    """Whether other cores are told a filter: each has its own $SYS, and streams are not routed."""
    shared = parse_shared(topic_filter)
    inner = topic_filter if shared is None else shared[1]
    return not reads_stream(topic_filter) and inner != "$SYS" and not inner.startswith("$SYS/")


class Announced:
    """Filters that somebody is about to subscribe to: each is one of ``filters`` until that is done, or for `HELD` seconds."""

    def __init__(self, filters: LocalFilters) -> None:
        self._filters = filters
        self._waiting: dict[str, int] = {}
        self._subscribed: dict[str, int] = {}  # those of `_ends` that do not wait any more
        self._ends: deque[tuple[float, list[str]]] = deque()

    def __contains__(self, topic_filter: str) -> bool:
        return topic_filter in self._waiting

    def add(self, filters: list[str], now: float) -> None:
        for each in filters:
            self._waiting[each] = self._waiting.get(each, 0) + 1
            self._filters.add(each)
        if filters:
            self._ends.append((now + HELD, filters))

    def subscribed(self, topic_filter: str) -> None:
        """A session has subscribed, perhaps one that waited."""
        if topic_filter in self._waiting:
            self._subscribed[topic_filter] = self._subscribed.get(topic_filter, 0) + 1
            self._forget(topic_filter)

    def expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            for each in self._ends.popleft()[1]:
                if not _decrement(self._subscribed, each):
                    self._forget(each)

    def _forget(self, topic_filter: str) -> None:
        _decrement(self._waiting, topic_filter)
        self._filters.remove(topic_filter)


def _decrement(counts: dict[str, int], key: str) -> bool:
    """Count one less; false if it was 0."""
    count = counts.get(key, 0)
    if count > 1:
        counts[key] = count - 1
    elif count:
        del counts[key]
    return count > 0


def link_endpoint(scheduler: FlushScheduler, on_error: Callable[[Any], None], longest_packet: int) -> Endpoint:
    """The endpoint of the links' wires: no limit of a listener is for them. ``longest_packet`` is that of all clients, in bytes."""
    terms = ListenerTerms()
    terms.listener = LISTENER
    terms.max_packet_size = longest_packet + LINK_ROOM
    counters = scheduler.broker.outbound.counters
    policy = ListenerPolicy(AuthenticationChain([], AnonymousPolicy(False)), terms, None, counters)
    return Endpoint(scheduler, policy, OpenSockets(1 << 20, 1 << 20, counters), lambda: "", on_error)


class Links:
    """The links of the core of shard ``own`` of ``shards`` to all other cores.

    To be made after the broker and before its rows are restored. ``connect(address, hello, protocol)`` opens a link, as
    `server.connect_link` does; ``hello`` is the first line without shard. A core that says nothing for ``timeout`` seconds is not
    waited for. ``buffer`` are the bytes of messages that may wait for one core.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        own: int,
        shards: int,
        hello: Callable[[int], Hello],
        connect: Callable[[LinkAddress, Hello, Any], Any],
        timeout: float,
        buffer: int,
        user: LinkUser,
    ) -> None:
        broker = endpoint.scheduler.broker
        self.broker = broker
        self._user = user
        self._endpoint = endpoint
        self._loop = endpoint.scheduler.loop
        self._own = own
        self._hello = hello
        self._connect = connect
        self._timeout = timeout
        self.buffer = buffer
        self._ping_interval = min(timeout, LOST_AFTER) / PINGS
        self._owners: dict[int, LinkAddress] = {}
        self._peers: dict[int, Peer] = {shard: Peer(self, shard) for shard in range(shards) if shard != own}
        self._links: dict[int, _Link] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._synchronized = asyncio.Event()
        self._scheduled = False
        self._closed = False
        self._filters = LocalFilters(self._filter_changed)
        self._announced = Announced(self._filters)
        self._told: dict[str, tuple[MemberState, ...]] = {}  # the members that other cores know
        self._to_look_at: list[str] = []  # shared subscriptions
        self._counts_load = isinstance(broker.router.strategy, LeastLoaded)
        self._ping_at = 0.0
        self._timer: Any = None
        self._timer = self._loop.call_later(TICK, self._tick)

    # -- interface ------------------------------------------------------------------

    def direct(self, owners: Mapping[int, LinkAddress]) -> None:
        """The cores of these shards are at these addresses."""
        before, self._owners = self._owners, dict(owners)
        for shard in self._peers:
            link = self._links.get(shard)
            address = self._owners.get(shard)
            if shard > self._own or self._closed or (address == before.get(shard) and shard in self._tasks):
                continue
            task = self._tasks.pop(shard, None)
            if task is not None:
                task.cancel()
            if link is not None:
                link.abort()
            if address is not None:
                self._tasks[shard] = self._loop.create_task(self._keep(shard, address))
        self.peer_synchronized()

    def accept(self, hello: Hello) -> Any:
        """The protocol of a link that another core opens."""
        shard = hello.from_shard
        if shard is None or shard not in self._peers:
            raise ValueError(f"node {hello.node}: a link from no shard")
        return _Link(self, shard)

    def announce(self, filters: list[str], done: Callable[[], object]) -> None:
        """Tell all cores of filters that somebody is about to subscribe to; ``done`` is called when those with a link have them."""
        self._announced.add([each for each in filters if is_told(each)], self._loop.time())
        self._wait_for_peers(done)

    def filter_added(self, topic_filter: str) -> None:
        """A session has one more subscription, to this full filter, and the router knows it."""
        if is_told(topic_filter):
            self._filters.add(topic_filter)
            self._announced.subscribed(topic_filter)

    def filter_removed(self, topic_filter: str) -> None:
        """A session has one less."""
        if is_told(topic_filter):
            self._filters.remove(topic_filter)

    def send_shared(self, shard: int, group: Group, outgoing: Outgoing) -> None:
        """Send the core of a shard a message at QoS 0 for a member of a shared subscription, or drop it."""
        self._peers[shard].send_shared(f"{group.name}/{group.topic_filter}", outgoing)

    def after_retained(self, done: Callable[[], object]) -> None:
        """Call ``done`` when all messages with RETAIN that were published on other cores before are in their logs, and those at QoS 0 that
        come over links from now on were published later. Cores without a link are not waited for, silent ones for a while."""
        announcement = Announcement(done)
        heard_after = self._loop.time() - self._timeout
        for peer in self._peers.values():
            if not peer.silent_since(heard_after):
                peer.settle(announcement)
        if announcement.waits:
            announcement.timer = self._loop.call_later(self._timeout, announcement.finish)
        announcement.answered()

    def send(self, shard: int, topic: str, payload: bytes) -> bool:
        """Send the core of a shard a message; false if there is no link to it."""
        peer = self._peers.get(shard)
        return peer is not None and peer.send(topic.encode("utf-8"), payload)

    @property
    def missing(self) -> list[int]:
        """The shards that have an owner, to which there is no link with all filters."""
        return [shard for shard in self._owners if shard in self._peers and not self._peers[shard].synchronized]

    @property
    def linked(self) -> list[int]:
        """The shards to whose cores there is a link with all filters."""
        return [shard for shard, peer in self._peers.items() if peer.synchronized]

    async def synchronized(self, timeout: float) -> bool:
        """Wait until nothing is `missing`; false if that takes more than ``timeout`` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.missing:
                    await self._synchronized.wait()
        return not self.missing

    def take_packets(self, longest_packet: int) -> None:
        """Clients may send packets of so many bytes from now on."""
        self._endpoint.policy.terms.max_packet_size = longest_packet + LINK_ROOM

    async def close(self) -> None:
        """Close all links, and open no more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for link in list(self._links.values()):
            link.abort()

    # -- for `Peer` -------------------------------------------------------------------

    def all_changes(self) -> Iterator[Change]:
        return (_change(ADD, topic_filter) for topic_filter in self._filters)

    def members(self, key: str) -> tuple[MemberState, ...]:
        group = self.broker.router.groups.get(key)
        states = () if group is None else local_states(group)
        if not states and SHARE + key in self._announced:
            # Somebody is about to join: messages may come already, and go to others if it does not.
            states = (MemberState(crc32(f"{self._own}".encode()), CONNECTED | AVAILABLE, 0),)
        if not self._counts_load:
            states = tuple(MemberState(one.client_id_hash, one.flags, 0) for one in states)
        if states:
            self._told[key] = states
        else:
            self._told.pop(key, None)
        return states

    def schedule(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def peer_message(self, shard: int, topic: str, payload: bytes) -> None:
        if not self._user.handle(shard, topic, payload):
            log.warning("event=link_message_dropped shard=%d topic=%s", shard, topic)

    def all_in_log(self) -> bool:
        return self._user.all_in_log()

    def peer_synchronized(self) -> None:
        if not self.missing:
            synchronized, self._synchronized = self._synchronized, asyncio.Event()
            synchronized.set()

    # -- filters ------------------------------------------------------------------------

    def _filter_changed(self, change: Change) -> None:
        for peer in self._peers.values():
            peer.tell(change)

    def _flush(self) -> None:
        self._scheduled = False
        for peer in self._peers.values():
            peer.flush()

    def _wait_for_peers(self, done: Callable[[], object]) -> None:
        announcement = Announcement(done)
        heard_after = self._loop.time() - self._timeout
        for peer in self._peers.values():
            if not peer.silent_since(heard_after):
                peer.wait(announcement)
        if announcement.waits:
            announcement.timer = self._loop.call_later(self._timeout, announcement.finish)
            self._flush()
        announcement.answered()

    # -- periodic work ------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK, self._tick)
        now = self._loop.time()
        self._announced.expire(now)
        if now >= self._ping_at:
            self._ping_at = now + self._ping_interval
            self._ping()
        if self._links:
            self._look_at_members()

    def _ping(self) -> None:
        """Ask the other cores whether they are there, and close the links of those that say nothing for long.

        It counts pings, not seconds, because this process may have been stopped meanwhile (SIGSTOP).
        """
        for shard, link in list(self._links.items()):
            if link.silent_pings() * self._ping_interval >= LOST_AFTER:
                log.warning("event=link_silent shard=%d seconds=%g", shard, LOST_AFTER)
                link.abort()
            else:
                self._peers[shard].ping()

    def _look_at_members(self) -> None:
        """Tell the other cores of members that came, went, or are available again; of some shared subscriptions at a time."""
        if not self._to_look_at:
            self._to_look_at = list(self._told)
        groups = self.broker.router.groups
        budget = MEMBERS_PER_TICK
        while self._to_look_at and budget > 0:
            key = self._to_look_at.pop()
            told = self._told.get(key)
            group = groups.get(key)
            if told is None or group is None:
                continue
            budget -= 1 + len(group.members)
            if self.members(key) != told:
                self._filter_changed(Change(GROUP, key))

    # -- links --------------------------------------------------------------------------

    def opened(self, link: _Link, shard: int, wire: Wire) -> None:
        """A link to the core of a shard is open."""
        old = self._links.get(shard)
        if old is not None:
            old.abort()
            self._lost(shard)
        self._links[shard] = link
        peer = self._peers[shard]
        wire.connection.maximum_packet_size = self._endpoint.policy.terms.max_packet_size
        wire.connection.outbox.limit_to(self.buffer // 2)
        wire.reader.protocol.use_publish_handler(LinkHandler(self.broker, wire.connection, peer))
        peer.up(wire.connection)
        log.info("event=link_up shard=%d address=%s", shard, wire.connection.peer)
        self._user.link_up()

    def closed(self, link: _Link, shard: int) -> None:
        """A link is lost, or was replaced before."""
        if self._links.get(shard) is link:
            self._lost(shard)

    def _lost(self, shard: int) -> None:
        del self._links[shard]
        self._peers[shard].down()
        log.info("event=link_down shard=%d", shard)
        self._user.link_down(shard)

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    async def _keep(self, shard: int, address: LinkAddress) -> None:
        """Have a link to the core of a lower shard."""
        wait = SHORTEST_WAIT
        reason = ""
        while True:
            link = _Link(self, shard)
            try:
                await self._connect(address, self._hello(shard), link)
            except Exception as error:
                if not isinstance(error, OSError):
                    log.exception("event=defect in=link shard=%d", shard)
                elif str(error) != reason:
                    reason = str(error)
                    say = log.warning if isinstance(error, LinkRefused) else log.info
                    say("event=link_failed shard=%d address=%s reason=%s", shard, address, reason)
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)
                continue
            reason = ""
            opened = self._loop.time()
            await link.lost.wait()
            # It is lost soon if another process is the shard's core, and this one does not know it yet.
            wait = SHORTEST_WAIT if self._loop.time() - opened > LONGEST_WAIT else min(2 * wait, LONGEST_WAIT)
            await asyncio.sleep(wait)


class _Link:
    """The asyncio protocol of a link: a `Wire`, and its end."""

    def __init__(self, links: Links, shard: int) -> None:
        wire = Wire(links.endpoint)
        self.lost = asyncio.Event()
        self.data_received = wire.data_received
        self.eof_received = wire.eof_received
        self.pause_writing = wire.pause_writing
        self.resume_writing = wire.resume_writing
        self._links = links
        self._shard = shard
        self._wire = wire
        self._made = False
        self._heard = 0.0  # when something was received, in the time of the loop
        self._silent_pings = 0  # since then

    def connection_made(self, transport: Any) -> None:
        self._made = True
        # The outbox has the other half. It is written while the transport has less than its half.
        transport.set_write_buffer_limits(self._links.buffer // 2)
        self._wire.connection_made(transport)
        self._links.opened(self, self._shard, self._wire)

    def connection_lost(self, error: Exception | None) -> None:
        if self._made:
            self._wire.connection_lost(error)
            self._links.closed(self, self._shard)
        self.lost.set()

    def silent_pings(self) -> int:
        """The number of calls, this one included, since something was received; those while this side does not read do not count."""
        heard = self._wire.connection.last_received
        if heard != self._heard:
            self._heard = heard
            self._silent_pings = 0
        elif not self._wire.reading_paused:
            self._silent_pings += 1
        return self._silent_pings

    def abort(self) -> None:
        if not self.lost.is_set():
            self._wire.abort()


__all__ = ["CORE", "Links", "link_endpoint"]
