"""Pages of retained messages: what one core asks another one for, and the core that answers.

A request names a filter, the topic behind which the page begins, and how far the log of each shard must have been routed before it
is answered. The answer says how far they were, and the asking core waits until it has come so far itself. So a message is either in
the page, or the asking core has routed it after the request, and knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Annotated, Final

import msgspec

from mqttbroker.cluster.shards import Shards
from mqttbroker.core.broker import Broker
from mqttbroker.core.delivery.cluster_port import CommitGate
from mqttbroker.core.delivery.turns import LongWork
from sessions.message import Message
from sessions.retained import SortedScan

READ_AT_ONCE: Final = 64  # topics
LARGEST_PAGE: Final = 65_536  # bytes of messages that a core may ask for at once
MAX_ASKED: Final = 256  # requests of one core that are not answered; further ones are dropped
ANSWER_WITHIN: Final = 5.0  # seconds until a request is forgotten; the other core asks again before

log = logging.getLogger("mqttbroker.cluster")

_QoS = Annotated[int, msgspec.Meta(ge=0, le=2)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  # microseconds
Row = tuple[str, bytes, _QoS, bytes, str, _Time, _Time]


class PageRequest(msgspec.Struct, array_like=True):
    """Asks for ``size`` bytes of retained messages, the last of which may exceed that. ``needed`` are offsets by shard: the answer
    has every message before them."""

    number: int
    topic_filter: str
    after: str
    size: int
    needed: dict[int, int]


class RetainedAnswer(msgspec.Struct, array_like=True):
    """The answer: the messages of the topics up to ``after``, and ``done`` if no later topic matches. They are in the logs before the
    offsets ``routed``, by shard."""

    number: int
    after: str
    done: bool
    routed: dict[int, int]
    rows: list[Row]

    def messages(self) -> list[Message]:
        return [
            Message(topic, payload, qos, True, properties, publisher, timestamp, expires_at)
            for topic, payload, qos, properties, publisher, timestamp, expires_at in self.rows
        ]


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(PageRequest).decode
decode_page = msgspec.msgpack.Decoder(RetainedAnswer).decode


class _Answer:
    """A page that is being gathered."""

    def __init__(self, shard: int, request: PageRequest, scan: SortedScan, until: float) -> None:
        self.shard = shard
        self.request = request
        self.scan = scan
        self.until = until  # monotonic time
        self.size = 0
        self.rows: list[Row] = []


class RetainedPageServer(LongWork):
    """Answers the requests of other cores.

    ``position`` returns the offset up to which this core has routed the log of another shard, ``own_end`` the end of its own one;
    ``send`` hands an answer to the core of a shard, or drops it: then that core asks again.
    """

    def __init__(
        self,
        broker: Broker,
        shards: Shards,
        own: int,
        position: Callable[[int], int],
        own_end: Callable[[], int],
        send: Callable[[int, bytes], object],
    ) -> None:
        self._broker = broker
        self._others = [shard for shard in range(shards.count) if shard != own]
        self._own = own
        self._position = position
        self._own_end = own_end
        self._send = send
        self._answers: list[_Answer] = []

    def asked(self, shard: int, body: bytes) -> None:
        """A request came from the core of a shard."""
        try:
            request = decode_request(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("event=bad_request from_shard=%d reason=%s", shard, error)
            return
        if sum(answer.shard == shard for answer in self._answers) >= MAX_ASKED:
            return
        request.size = min(request.size, LARGEST_PAGE)
        until = self._broker.outbound.clock.monotonic + ANSWER_WITHIN
        scan = self._broker.retained.sorted_scan(request.topic_filter, request.after)
        self._answers.append(_Answer(shard, request, scan, until))
        self._broker.turns.add(self)

    @property
    def done(self) -> bool:
        return not self._answers

    def step(self, budget: int) -> int:
        cost = 0
        left: list[_Answer] = []
        now = self._broker.outbound.clock.monotonic
        for answer in self._answers:
            if cost >= budget:
                left.append(answer)
            elif answer.until <= now:
                cost += 1
            elif not self._has_read(answer.request.needed):
                left.append(answer)
            else:
                cost += READ_AT_ONCE
                if not self._read(answer):
                    left.append(answer)
        self._answers = left
        return cost

    def _has_read(self, needed: dict[int, int]) -> bool:
        return all(shard == self._own or self._position(shard) >= end for shard, end in needed.items())

    def _read(self, answer: _Answer) -> bool:
        """Gather a part of a page; sends it and returns true if it is complete."""
        scan = answer.scan
        for message in scan.read(READ_AT_ONCE, self._broker.context.clock.now):
            answer.rows.append(
                (
                    message.topic,
                    message.payload,
                    message.qos,
                    message.properties,
                    message.publisher,
                    message.timestamp,
                    message.expires_at,
                )
            )
            answer.size += message.size
            if answer.size >= answer.request.size:
                self._send_page(answer, message.topic, False)
                return True
        if scan.done:
            self._send_page(answer, scan.after, True)
        return scan.done

    def _send_page(self, answer: _Answer, after: str, done: bool) -> None:
        routed = {shard: self._position(shard) for shard in self._others}
        page = RetainedAnswer(answer.request.number, after, done, routed, answer.rows)
        journal = self._broker.journal
        if journal.has_pending or not journal.writer_idle:  # by messages that were published here, and may be in the page
            journal.wait_for_commit(CommitGate(partial(self._committed, answer.shard, page)))
        else:
            self._committed(answer.shard, page, False)

    def _committed(self, shard: int, page: RetainedAnswer, failed: bool) -> None:
        if not failed:
            page.routed[self._own] = self._own_end()
            self._send(shard, encode(page))
