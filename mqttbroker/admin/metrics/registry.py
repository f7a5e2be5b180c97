"""The table of the broker's figures that are one number: `/metrics` and ``$SYS`` are made of it.

Its first rows are the counters of `sessions.counters`; the others are counted, or are, in a part of the broker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from mqttbroker.admin.control.views import BrokerStatus
from mqttbroker.admin.metrics.figures import Metrics
from sessions.counters import COUNTERS, Counter


class Figure(NamedTuple):
    """One number: ``metric``, ``text``, ``topic``, ``load`` and ``label`` are those of `Counter`; "" as ``metric``: not in `/metrics`."""

    metric: str
    text: str
    value: Callable[[BrokerStatus, Metrics], float]
    topics: tuple[str, ...] = ()
    is_counter: bool = False
    load: str = ""
    label: tuple[str, str] = ("", "")


def _counted(counter: Counter) -> Figure:
    def value(status: BrokerStatus, metrics: Metrics) -> float:
        return status.totals[counter.name]

    topics = (counter.topic,) if counter.topic else ()
    return Figure(counter.metric, counter.text, value, topics, True, counter.load, counter.label)


def _dropped(status: BrokerStatus, metrics: Metrics) -> float:
    return sum(status.drops.values())


def _stored(status: BrokerStatus, metrics: Metrics) -> float:
    return status.retained_messages + status.queued_messages


def _disconnected(status: BrokerStatus, metrics: Metrics) -> float:
    return status.sessions - status.clients_connected


# fmt: off
FIGURES: Final = (
    *map(_counted, COUNTERS),
    Figure("handshakes_failed", "", lambda status, metrics: metrics.http_counters.tls_failures, (), True, label=("layer", "https")),
    Figure("logins_failed", "Logins with a wrong password or user name.", lambda status, _: status.logins_failed, (), True),
    Figure("logins_banned", "Logins refused because of a ban.", lambda status, _: status.logins_banned, (), True),
    Figure("publisher_waits", "Times that a publisher was paused by a full queue.", lambda status, _: status.publisher_waits,
           ("publishers/waits",), True),
    Figure("clients_connected", "Clients connected now.", lambda status, _: status.clients_connected,
           ("clients/connected", "clients/active")),
    Figure("bans", "Bans in force now.", lambda status, _: status.bans),
    Figure("publishers_waiting", "Publishers paused by a full queue now.", lambda status, _: status.publishers_waiting,
           ("publishers/waiting",)),
    Figure("sessions", "Sessions, connected or not.", lambda status, _: status.sessions, ("clients/total",)),
    Figure("subscriptions", "Subscriptions; a shared one counts once.", lambda status, _: status.subscriptions,
           ("subscriptions/count",)),
    Figure("retained_messages", "Retained messages.", lambda status, _: status.retained_messages, ("retained messages/count",)),
    Figure("retained_bytes", "Bytes of retained messages: topics, payloads and properties.", lambda status, _: status.retained_bytes),
    Figure("route_cache_entries", "Topics in the route cache.", lambda status, _: status.route_cache_entries),
    Figure("queued_messages", "Messages queued on disk for persistent sessions.", lambda status, _: status.queued_messages,
           ("queued/messages/count",)),
    Figure("queued_bytes", "Bytes of messages queued on disk for persistent sessions.", lambda status, _: status.queued_bytes,
           ("queued/messages/bytes",)),
    Figure("queue_memory_bytes", "Bytes of messages queued in memory.", lambda status, _: status.queue_memory_bytes),
    Figure("store_pending_bytes", "Bytes waiting for the disk.", lambda status, _: status.store_pending_bytes),
    Figure("store_log_bytes", "Bytes of the commit log on disk.", lambda _, metrics: metrics.store_progress().log_bytes,
           ("store/log/bytes",)),
    Figure("store_commits_behind", "Commits that the database does not have yet.",
           lambda _, metrics: metrics.store_progress().commits_behind, ("store/log/behind",)),
    Figure("store_apply_seconds", "Time that the last transaction of the database took.",
           lambda _, metrics: metrics.store_progress().apply_seconds),
    Figure("stream_producers", "Producers whose repeats are recognised.", lambda status, _: status.stream_producers),
    Figure("store_set_aside_files", "Damaged files that are set aside in the data directory.", lambda _, metrics: metrics.set_aside,
           ("store/set_aside",)),
    Figure("uptime_seconds", "Seconds since the start.", lambda _, metrics: metrics.uptime),
    # In `$SYS` only.
    Figure("", "", _disconnected, ("clients/disconnected", "clients/inactive")),
    Figure("", "", lambda status, _: status.clients_connected_maximum, ("clients/maximum",)),
    Figure("", "", lambda status, _: status.sessions_expired, ("clients/expired",), True),
    Figure("", "", _stored, ("messages/stored", "store/messages/count")),
    Figure("", "", lambda status, _: status.retained_payload_bytes + status.queued_bytes, ("store/messages/bytes",)),
    Figure("", "", _dropped, ("publish/messages/dropped",), True, "publish/dropped"),
    Figure("", "", lambda status, _: status.shared_subscriptions, ("shared_subscriptions/count",)),
    Figure("", "", lambda status, _: status.memory.used, ("heap/current",)),
)
# fmt: on
