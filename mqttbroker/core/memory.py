"""The memory that clients fill, part by part, and the stage that follows from it.

Each part has an upper estimate of its memory, kept as a running total, and a limit of its own. `Memory` adds the
estimates up, and compares the sum, or the memory of the process if that is more, with ``max_memory``.
"""

from __future__ import annotations

import logging
from typing import Final

from mypy_extensions import i64

from mqttbroker.core.client.connection import MAX_DECISION_BYTES
from mqttbroker.core.client.outbox import Outbound
from mqttbroker.core.routing.router import Router
from mqttbroker.core.sessions.clients import Clients
from mqttbroker.core.streams.chunk_reads import ChunkReads
from mqttbroker.core.terms.memory_stage import NORMAL, SHEDDING, STAGE_NAMES, MemoryStage
from mqttbroker.core.terms.terms import BrokerTerms
from sessions.context import SessionContext
from sessions.retained import Retained

log = logging.getLogger("mqttbroker")

CONNECTION_BYTES: Final = 4096  # an idle connection
SECURE_BYTES: Final = 49_152  # more for one with TLS
WEBSOCKET_BYTES: Final = 6144  # more for one with WebSocket
RETAINED_BYTES: Final = 450  # a retained message beside its `Message.size`
BRANCH_BYTES: Final = 350  # a level at which topics of retained messages differ

# Per cent of ``max_memory`` at which each stage begins; it ends `HYSTERESIS` per cent below.
BEGINS: Final[list[int]] = [0, 80, 88, 95]
HYSTERESIS: Final = 5


class Part:
    """The memory of one kind of state, in bytes; ``maximum`` is its limit, 0 if it has only a limit by number."""

    def __init__(self, name: str, held: int, maximum: int) -> None:
        self.name = name
        self.held = held
        self.maximum = maximum


class Memory:
    """All parts of one broker, and the stage in ``state``."""

    def __init__(
        self,
        context: SessionContext,
        outbound: Outbound,
        router: Router,
        retained: Retained,
        clients: Clients,
        terms: BrokerTerms,
        state: MemoryStage,
        chunk_reads: ChunkReads,
    ) -> None:
        self.chunk_reads = chunk_reads
        self.context = context
        self.outbound = outbound
        self.router = router
        self.retained = retained
        self.clients = clients
        self.terms = terms
        self.state = state
        self.base = 0  # bytes of the process before it has any client
        self.resident = 0  # bytes that the process took at the last `sampled`
        self.unapplied = 0  # bytes of changes that are in the commit log, and not in the tables
        self.counted: i64 = 0  # `base` and the sum of all parts, by the last `check`
        self.counted_then: i64 = 0  # `counted` at the last `sampled`
        self.apply()

    def parts(self) -> list[Part]:
        """All parts; their sum is `held`."""
        context = self.context
        outbound = self.outbound
        terms = self.terms
        return [
            Part("connections", self._connection_bytes(), 0),
            Part("sessions", context.session_memory, terms.max_total_session_bytes),
            Part("subscriptions", context.subscription_bytes, terms.max_total_subscription_bytes),
            Part("retained", self._retained_bytes(), terms.max_retained_bytes),
            Part("wills", context.will_bytes, terms.max_total_will_bytes),
            Part("queues", context.queue_memory, terms.max_total_queue_memory_bytes),
            Part("in_flight", context.in_flight.size, terms.max_total_in_flight_bytes),
            Part("outboxes", outbound.blocked_bytes, terms.max_total_outbox_bytes),
            Part("incomplete", outbound.incomplete.size, terms.max_total_incomplete_bytes),
            Part("connects", outbound.connect_bytes, terms.max_total_connect_bytes),
            Part("aliases", outbound.alias_bytes, terms.max_total_alias_bytes),
            Part("pending_writes", context.journal.memory, terms.max_pending_write_bytes),
            Part("unapplied", self.unapplied, terms.max_unapplied_bytes),
            Part("route_cache", self.router.cached_bytes, self.router.cache_bytes),
            Part("decisions", outbound.decision_bytes, MAX_DECISION_BYTES),
            Part("stream_chunks", self.chunk_reads.held, terms.max_total_stream_chunk_bytes),
        ]

    @property
    def held(self) -> i64:
        """The sum of all parts. It is read in each iteration of the event loop, and so makes no objects."""
        context = self.context
        outbound = self.outbound
        return (
            self._connection_bytes()
            + context.session_memory
            + context.subscription_bytes
            + self._retained_bytes()
            + context.will_bytes
            + context.queue_memory
            + context.in_flight.size
            + outbound.blocked_bytes
            + outbound.incomplete.size
            + outbound.connect_bytes
            + outbound.alias_bytes
            + context.journal.memory
            + self.unapplied
            + self.router.cached_bytes
            + outbound.decision_bytes
            + self.chunk_reads.held
        )

    def _connection_bytes(self) -> i64:
        outbound = self.outbound
        return (
            len(self.clients.connections) * CONNECTION_BYTES
            + outbound.secure_connections * SECURE_BYTES
            + outbound.websocket_connections * WEBSOCKET_BYTES
        )

    def _retained_bytes(self) -> i64:
        retained = self.retained
        return retained.size + len(retained) * RETAINED_BYTES + retained.branches * BRANCH_BYTES

    @property
    def used(self) -> i64:
        """The memory that counts towards ``max_memory``, in bytes.

        Tens of megabytes may arrive between two samples of ``resident``, so it grows with what is counted meanwhile.
        """
        resident: i64 = self.resident
        return max(self.counted, resident + max(self.counted - self.counted_then, 0))

    def sampled(self, resident: int) -> None:
        """The process takes ``resident`` bytes now."""
        self.resident = resident
        self.counted_then = self.base + self.held
        self.check()

    def check(self) -> None:
        """Set the stage by the memory that is used now."""
        self.counted = self.base + self.held
        maximum: i64 = self.terms.max_memory
        stage: i64 = self.state.stage
        before: i64 = stage
        if maximum == 0:
            stage = NORMAL
        else:
            per_cent: i64 = self.used * 100 // maximum
            while stage < SHEDDING and per_cent >= BEGINS[stage + 1]:
                stage += 1
            while stage > NORMAL and per_cent < BEGINS[stage] - HYSTERESIS:
                stage -= 1
        if stage != before:
            self.state.stage = stage
            self.apply()
            log.warning(
                "event=memory_stage stage=%s from=%s counted=%d resident=%d max_memory=%d",
                STAGE_NAMES[stage],
                STAGE_NAMES[before],
                self.counted,
                self.resident,
                maximum,
            )

    def apply(self) -> None:
        """Put the limits of the stage in force; called whenever stage or settings change."""
        terms = self.terms
        outbound = self.outbound
        limits = self.context.limits
        shedding: bool = self.state.stage >= SHEDDING
        outbound.shedding = shedding
        # QoS 0 is dropped at once for clients whose socket is blocked; persistent sessions queue on disk only.
        outbound.max_blocked = 0 if shedding else terms.max_total_outbox_bytes
        limits.max_total_queue_memory_bytes = 0 if shedding else terms.max_total_queue_memory_bytes
        # Publishers wait for any client that lags, as long as that client makes progress.
        watermark = terms.queue_high_watermark_messages
        limits.queue_high_watermark_messages = min(watermark, 1) if shedding else watermark
        self.context.in_flight.maximum = terms.max_total_in_flight_bytes
        outbound.incomplete.maximum = terms.max_total_incomplete_bytes
        self.router.cache_bytes = terms.route_cache_bytes // 8 if self.state.refuses_state else terms.route_cache_bytes

    def reason(self) -> str:
        """Why clients should not connect now; "" if they may."""
        stage = self.state.stage
        if stage == NORMAL:
            return ""
        return f"memory: {self.used * 100 // self.terms.max_memory} % of max_memory is used, stage {STAGE_NAMES[stage]}"
