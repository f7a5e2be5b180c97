"""The retained messages of all shards for the new subscriptions of one core.

Messages of this core's shard are read from memory, the others in pages from the cores that keep them, one page at a time, when the
subscriber has room. A core that is away is asked when it is back. A message that was replaced since its page was asked for is not
sent: the subscriber got the newer one when it was published.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from mqttbroker.cluster.retained.pages import PageRequest, RetainedAnswer, decode_page, encode
from mqttbroker.cluster.retained.shards import LOCAL_ROOT
from mqttbroker.cluster.shards import Shards
from mqttbroker.core.broker import Broker
from mqttbroker.core.delivery.cluster_port import CommitGate
from mqttbroker.core.delivery.replay import ReplaySource, ReplaySources
from mqttbroker.core.delivery.turns import LongWork
from sessions.message import Message
from sessions.retained import RetainedScan
from topic_matcher.filters import has_wildcard

PAGE_BYTES: Final = 64 * 1024  # of messages in a page
SMALL_PAGE_BYTES: Final = 4 * 1024  # of messages in a page, while pages for slow subscribers take much memory
MUCH_MEMORY: Final = 16 * 1024 * 1024
MAX_REQUESTS: Final = 64  # that are not answered
ASK_AGAIN_AFTER: Final = 3.0  # seconds
MAX_CHANGES: Final = 50_000  # topics whose change is remembered while a request is not answered

log = logging.getLogger("mqttbroker.cluster")


class _Request:
    """A page that was asked for, or is to be; ``since`` numbers the changes that were known before."""

    def __init__(self, number: int, source: _Source, since: int) -> None:
        self.number = number
        self.source = source
        self.since = since
        self.shard = -1  # that was asked
        self.sent = 0.0  # monotonic time; 0.0 = not yet


class _Arrivals(LongWork):
    """Pages that have come, None for the messages of the own shard, until they are taken."""

    def __init__(self, view: AllShardsRetained) -> None:
        self._view = view
        self.pages: list[tuple[_Request, RetainedAnswer | None]] = []

    @property
    def done(self) -> bool:
        return not self.pages

    def step(self, budget: int) -> int:
        pages, self.pages = self.pages, []
        waiting = [(request, page) for request, page in pages if not self._view.take(request, page)]
        taken = sum(_cost(page) for _, page in pages) - sum(_cost(page) for _, page in waiting)
        self.pages.extend(waiting)
        return taken


def _cost(page: RetainedAnswer | None) -> int:
    return 1 if page is None else len(page.rows) + 1


class _Held:
    """A message, and how many pages have it."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.pages = 0


def _same(one: Message, other: Message) -> bool:
    return (
        one.timestamp == other.timestamp
        and one.publisher == other.publisher
        and one.qos == other.qos
        and one.expires_at == other.expires_at
        and one.properties == other.properties
        and one.payload == other.payload
    )


class AllShardsRetained(ReplaySources):
    """Opens the retained messages of a filter.

    ``positions`` returns the offset up to which this core has routed the log of each other shard, and its own one's end, ``find_ends``
    gives the ends of the other logs, with everything that was retained before, to its argument, at once or later;
    ``uncommitted`` whether messages for other cores are not in its log yet; ``send`` hands a request to the core of a shard, and returns whether it is linked.
    """

    def __init__(
        self,
        broker: Broker,
        shards: Shards,
        own: int,
        positions: Callable[[], dict[int, int]],
        find_ends: Callable[[Callable[[dict[int, int]], None]], object],
        uncommitted: Callable[[], bool],
        send: Callable[[int, bytes], bool],
    ) -> None:
        self.broker = broker
        self.shards = shards
        self.own = own
        self._positions = positions
        self._find_ends = find_ends
        self._first: list[_Request] = []  # requests for the first page of a source
        self._finding = False
        self._uncommitted = uncommitted
        self._send = send
        self._queue: deque[_Source] = deque()  # sources that wait for one of `MAX_REQUESTS`
        self._away: list[_Source] = []  # sources that wait for a core that is away
        self._requests: dict[int, _Request] = {}
        self._arrived = _Arrivals(self)
        self._number = 0
        self._changes: dict[str, int] = {}  # topics that changed while requests were not answered, numbered
        self._change = 0  # the last one's number
        self._forgotten = 0  # changes up to this one are not known any more
        self._held: dict[str, _Held] = {}  # the messages of pages that were not replaced, by topic
        self.held_bytes = 0

    def open(self, topic_filter: str) -> ReplaySource:
        left: dict[int, str] = {}
        own = True
        local = f"{topic_filter}/".startswith(LOCAL_ROOT)
        if not local:
            if has_wildcard(topic_filter):
                left = {shard: "" for shard in range(self.shards.count) if shard != self.own}
            else:
                shard = self.shards.of_text(topic_filter)
                own = shard == self.own
                if not own:
                    left = {shard: ""}
        source = _Source(self, topic_filter, own, left)
        if local:
            source.open_own()
        return source

    # -- changes -----------------------------------------------------------------

    def changed(self, topic: str) -> None:
        """A message that another core retains was routed to the subscribers of this one, by the bus or from a link."""
        if self._requests:
            self._change += 1
            self._changes[topic] = self._change
            if len(self._changes) > MAX_CHANGES:
                self._changes = {}
                self._forgotten = self._change
        self._drop(topic)

    def _drop(self, topic: str) -> None:
        held = self._held.pop(topic, None)
        if held is not None:
            self.held_bytes -= held.message.size

    def holds(self, message: Message) -> bool:
        """Whether a message of a page is still its topic's."""
        held = self._held.get(message.topic)
        return held is not None and held.message is message

    def hold(self, message: Message) -> Message:
        """Keep a message of a page until `release`; returns the one that other pages brought, if it is the same."""
        held = self._held.get(message.topic)
        if held is None or not _same(held.message, message):
            # A page that comes later is not older: one core answers for a topic.
            self._drop(message.topic)
            held = self._held[message.topic] = _Held(message)
            self.held_bytes += message.size
        held.pages += 1
        return held.message

    def release(self, messages: list[Message]) -> None:
        for message in messages:
            held = self._held.get(message.topic)
            if held is not None and held.message is message:
                held.pages -= 1
                if held.pages == 0:
                    self._drop(message.topic)

    # -- requests ------------------------------------------------------------------

    def ask(self, source: _Source) -> None:
        """Ask for the next page of a source, now or later."""
        self._queue.append(source)
        self._ask_next()

    def _ask_next(self) -> None:
        while self._queue and len(self._requests) < MAX_REQUESTS:
            source = self._queue.popleft()
            if source.closed:
                continue
            self._number += 1
            request = self._requests[self._number] = _Request(self._number, source, self._change)
            if source.ends is None:
                self._first.append(request)
            else:
                self._commit_first(request)
        self._find_next()

    def _find_next(self) -> None:
        """Look for the ends of the logs for all new sources together.

        A message at QoS 0 goes over a link to this core only if the publisher's core knew the filter, and to a subscription only if that
        was there when it came. Any older one must be in the first page, so the core that keeps it, which may be this one, has to have read it.
        """
        if self._first and not self._finding:
            requests, self._first = self._first, []
            self._finding = True
            self._find_ends(partial(self._found_ends, requests))

    def _found_ends(self, requests: list[_Request], ends: dict[int, int]) -> None:
        self._finding = False
        for request in requests:
            request.source.ends = ends
            if request.source.has_own:
                self._arrived.pages.append((request, None))
                self.broker.turns.add(self._arrived)
            else:
                self._commit_first(request)
        self._find_next()

    def _commit_first(self, request: _Request) -> None:
        """Send a request, when what this core has routed is in its log: else the other core cannot read it."""
        if self._uncommitted():
            self.broker.journal.wait_for_commit(CommitGate(partial(self._send_request, request)))
        else:
            self._send_request(request)

    def _send_request(self, request: _Request, failed: bool = False) -> None:
        """Send a request to the core of one of the shards that are left."""
        source = request.source
        if self._requests.get(request.number) is not request:
            return
        if not source.closed:
            needed = self._positions()
            for shard, end in (source.ends or {}).items():
                needed[shard] = max(needed[shard], end)
            size = PAGE_BYTES if self.held_bytes < MUCH_MEMORY else SMALL_PAGE_BYTES
            for shard, after in source.left.items():
                if self._send(shard, encode(PageRequest(request.number, source.topic_filter, after, size, needed))):
                    request.shard = shard
                    request.sent = self.broker.outbound.clock.monotonic
                    return
            self._away.append(source)
        self._end(request)

    def _end(self, request: _Request) -> None:
        del self._requests[request.number]
        if not self._requests:
            self._changes.clear()

    def answered(self, shard: int, body: bytes) -> None:
        """A page came from the core of a shard."""
        try:
            page = decode_page(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("event=bad_answer from_shard=%d reason=%s", shard, error)
            return
        request = self._requests.get(page.number)
        if request is not None and request.shard == shard:
            self._arrived.pages.append((request, page))
            self.broker.turns.add(self._arrived)

    def take(self, request: _Request, page: RetainedAnswer | None) -> bool:
        """Take a page, when this core has routed as much as the other one; false until then."""
        if self._requests.get(request.number) is not request:
            return True
        source = request.source
        routed = self._positions()
        needed = (source.ends or {}) if page is None else page.routed
        if any(shard != self.own and routed[shard] < end for shard, end in needed.items()):
            return False
        if source.closed:
            pass
        elif page is None:
            source.open_own()
            self.broker.turns.wake()
        elif request.since < self._forgotten:
            self._queue.append(source)
        else:
            changes = self._changes
            source.arrived(
                request.shard,
                [message for message in page.messages() if changes.get(message.topic, 0) <= request.since],
                page.after,
                page.done,
            )
            self.broker.turns.wake()
        self._end(request)
        self._ask_next()
        return True

    def link_up(self) -> None:
        """There is a link to one more core."""
        self._queue.extend(self._away)
        self._away.clear()
        self._ask_next()

    def link_down(self, shard: int) -> None:
        """The link to the core of a shard is lost, and what was asked for there."""
        self._ask_again([request for request in self._requests.values() if request.shard == shard])

    def tick(self) -> None:
        """Ask again for what was not answered."""
        before = self.broker.outbound.clock.monotonic - ASK_AGAIN_AFTER
        self._ask_again([request for request in self._requests.values() if request.sent and request.sent <= before])

    def _ask_again(self, requests: list[_Request]) -> None:
        for request in requests:
            self._queue.append(request.source)
            self._end(request)
        self.link_up()


class _Source(ReplaySource):
    """The retained messages that match one filter: with ``has_own`` those of the own shard are still to be read, ``left`` has the others, and
    of each the last topic that was read."""

    def __init__(self, view: AllShardsRetained, topic_filter: str, has_own: bool, left: dict[int, str]) -> None:
        super().__init__()
        self.has_own = has_own
        self.topic_filter = topic_filter
        self.left = left
        self.closed = False
        self.ends: dict[int, int] | None = None  # of other logs, which the first page must have
        self._view = view
        self._scan: RetainedScan | None = None
        self._page: list[Message] = []  # the last one
        self._read = 0  # of its messages
        self._asked = False

    @property
    def _local(self) -> bool:
        return self._scan is not None and not self._scan.done

    @property
    def done(self) -> bool:
        return not self.has_own and not self._local and self._read == len(self._page) and not self.left

    @property
    def waiting(self) -> bool:
        return self._asked

    def read(self, budget: int, now: int) -> list[Message]:
        if self._scan is not None and not self._scan.done:
            found = self._scan.read(budget, now)
            self.visited = self._scan.visited
            return found
        if self._read < len(self._page):
            found = self._page[self._read : self._read + budget]
            self._read += len(found)
            self.visited = len(found)
            return [message for message in found if self.is_current(message, now)]
        self.visited = 1
        if (self.left or self.has_own) and not self._asked:
            self._view.release(self._page)
            self._page, self._read = [], 0
            self._asked = True
            self._view.ask(self)
        return []

    def open_own(self) -> None:
        """Read the messages of the own shard from now on."""
        self.has_own = self._asked = False
        self._scan = self._view.broker.retained.scan(self.topic_filter)

    def arrived(self, shard: int, messages: list[Message], after: str, done: bool) -> None:
        """A page of a shard came."""
        self._asked = False
        self._page, self._read = [self._view.hold(message) for message in messages], 0
        if done:
            del self.left[shard]
        else:
            self.left[shard] = after

    def is_current(self, message: Message, now: int) -> bool:
        view = self._view
        if view.holds(message):
            return message.expires_at == 0 or message.expires_at > now
        return view.broker.retained.is_current(message, now)

    def close(self) -> None:
        self.closed = True
        self._view.release(self._page)
        self._page = []
        self._read = 0
