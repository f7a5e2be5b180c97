"""All counters and gauges of a broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from mqttbroker.admin.control.views import BrokerStatus, MemoryPart, MemoryStatus, QueueStatus
from mqttbroker.core.broker import Broker
from mqttbroker.core.terms.memory_stage import STAGE_NAMES
from sessions.counters import CAUSES, COUNTERS
from sessions.reason_names import REASON_NAMES


class StatusReport:
    """Reads the counters and gauges of one broker. ``monotonic`` is the clock of `Bans`."""

    def __init__(self, broker: Broker, monotonic: Callable[[], float]) -> None:
        self._broker = broker
        self._monotonic = monotonic

    def __call__(self) -> BrokerStatus:
        """All counters and gauges."""
        broker = self._broker
        context = broker.context
        counters = context.counters
        drops: dict[tuple[str, ...], int] = {
            (listener, cause): getattr(drops, cause) for listener, drops in counters.drops.items() for cause in CAUSES
        }
        return BrokerStatus(
            durability=broker.terms.durability,
            totals=MappingProxyType({counter.name: counters.total(counter) for counter in COUNTERS}),
            drops=MappingProxyType(_by_cause(drops)),
            drops_by_listener=MappingProxyType(drops),
            clients_connected=broker.clients.connected,
            clients_connected_maximum=broker.clients.connected_maximum,
            sessions=len(broker.registry),
            sessions_expired=broker.lifecycle.expired,
            subscriptions=broker.router.subscriptions,
            shared_subscriptions=len(broker.router.groups),
            retained_messages=len(broker.retained),
            retained_bytes=broker.retained.size,
            retained_payload_bytes=broker.retained.payload_bytes,
            route_cache_entries=len(broker.router.cache),
            queued_messages=context.queued_messages,
            queued_bytes=context.queued_bytes,
            queue_memory_bytes=context.memory_bytes,
            store_pending_bytes=broker.journal.size,
            bans=broker.bans.active(self._monotonic()),
            bans_started=MappingProxyType(dict(broker.bans.started)),
            limits_reached=MappingProxyType(dict(counters.limits_reached)),
            logins=dict(broker.connect_handler.logins.counts),
            logins_failed=broker.bans.failed_logins,
            connects_refused=MappingProxyType(_refused(broker)),
            denials=MappingProxyType(dict(broker.outbound.denials.counts)),
            logins_banned=broker.bans.refused_logins,
            publishers_waiting=context.backpressure_monitor.paused,
            publisher_waits=context.backpressure_monitor.pauses,
            stream_producers=len(broker.producers),
            queues=MappingProxyType(
                {
                    name: QueueStatus(
                        queue.stored.row.stream,
                        queue.depth,
                        queue.in_flight,
                        len(queue.consumers),
                        queue.redeliveries,
                        queue.dead_letters,
                    )
                    for name, queue in broker.work_queues.all.items()
                }
            ),
            memory=_memory_status(broker),
        )


def _memory_status(broker: Broker) -> MemoryStatus:
    memory = broker.memory
    stage = broker.memory_stage
    refused = {
        "connections": stage.refused_connections,
        "subscriptions": stage.refused_subscriptions,
        "retained": stage.refused_retained,
        "wills": stage.refused_wills,
    }
    return MemoryStatus(
        maximum=broker.terms.max_memory,
        used=memory.used,
        counted=memory.counted,
        resident=memory.resident,
        stage=stage.stage,
        stage_name=STAGE_NAMES[stage.stage],
        parts=tuple(MemoryPart(part.name, part.held, part.maximum) for part in memory.parts()),
        refused=MappingProxyType(refused),
    )


def _by_cause(drops: Mapping[tuple[str, ...], int]) -> dict[str, int]:
    """The drops of all listeners together."""
    totals = dict.fromkeys(CAUSES, 0)
    for (_, cause), count in drops.items():
        totals[cause] += count
    return totals


def _refused(broker: Broker) -> dict[tuple[str, ...], float]:
    """Refused CONNECTs by listener and the name of the reason code, "not_authorized"."""
    return {
        (listener, REASON_NAMES.get(code, f"{code:#x}").lower().replace(" ", "_")): count
        for (listener, code), count in broker.connect_handler.refused.items()
    }
