"""Assembly: a `Broker` is built from the settings and filled with the rows that the store recovered."""

from __future__ import annotations

import random
import time
from typing import Any, Callable, Dict, Iterator, List, Optional

from bridge_spark.log.stream_log import StreamConfig
from mqttbroker.auth.security import Security
from mqttbroker.codec.reason_codes import NOT_AUTHORIZED, UNSPECIFIED_ERROR
from mqttbroker.config.settings import Limits, Settings
from mqttbroker.core.broker import Broker
from mqttbroker.core.wills import load_will
from mqttbroker.core.connection import Outbound
from mqttbroker.core.groups import HashTopic, LeastLoaded, RandomMember, RoundRobin, Strategy
from mqttbroker.core.policy import Redirect, Terms
from mqttbroker.core.router import Router, StreamRule
from mqttbroker.net.listener_policy import Doorkeeper
from sessions.context import (
    DROP_NEWEST,
    DROP_OLDEST,
    REFUSE,
    SessionContext,
    SessionLimits,
)
from sessions.journal import Journal
from sessions.message import Message
from sessions.registry import Registry
from sessions.session import NEVER, Subscription
from sessions.store.writer import Recovered

QUEUE_FULL = {"drop_newest": DROP_NEWEST, "drop_oldest": DROP_OLDEST, "refuse": REFUSE}
STRATEGIES: Dict[str, Callable[[], Strategy]] = {
    "round_robin": RoundRobin,
    "random": lambda: RandomMember(random.random),
    "hash_topic": HashTopic,
    "least_loaded": LeastLoaded,
}


def stream_configs(settings: Settings) -> List[StreamConfig]:
    """The configuration of each stream, as the stream log takes it."""
    return [
        StreamConfig(
            stream.name,
            stream.filters,
            stream.partitions,
            stream.key,
            stream.retention_age,
            stream.retention_bytes,
            stream.segment_bytes,
            stream.segment_age,
            stream.seals,
        )
        for stream in settings.streams
    ]


def redirect_of(settings: Settings) -> Optional[Redirect]:
    """Where these settings send clients, None if they stay."""
    wanted = settings.redirect
    if wanted.server_reference is None:
        return None
    return Redirect(wanted.server_reference, wanted.permanent, wanted.rate)


def build_broker(
    settings: Settings, recovered: Recovered, security: Optional[Security] = None
) -> Broker:
    """The broker core for these settings; it reads the files they name unless it is given what they say."""
    if security is None:
        security = Security(settings)
    wanted = settings.limits
    limits = SessionLimits(
        wanted.max_inflight,
        wanted.max_queued_messages,
        wanted.max_queued_bytes,
        wanted.max_queue_memory_messages,
        wanted.max_transient_queue_bytes,
    )
    limits.max_inflight_unkept = wanted.max_inflight_unkept
    limits.queue_full = QUEUE_FULL[wanted.queue_full]
    limits.crowded_queue_messages = wanted.crowded_queue_messages
    limits.crowded_queue_bytes = wanted.crowded_queue_bytes
    limits.max_total_queued_messages = wanted.max_total_queued_messages
    limits.max_total_queued_bytes = wanted.max_total_queued_bytes
    limits.max_total_queue_memory_bytes = wanted.max_total_queue_memory_bytes
    journal = Journal(
        settings.durability == "commit", recovered.next_message_id, recovered.next_seq
    )
    context = SessionContext(journal, limits)
    context.clock.now = time.time_ns() // 1000
    context.backpressure_monitor.max_pause = wanted.crowded_queue_wait
    terms = terms_of(settings, wanted, None)
    terms.redirect = redirect_of(settings)
    most = max(settings.limits_of(listener).receive_maximum for listener in settings.listeners)
    streams = [
        StreamRule(stream.name, list(stream.filters), stream.partitions, stream.key)
        for stream in settings.streams
    ]
    return Broker(
        context,
        Registry(context, recovered.next_session_id),
        Router(
            wanted.route_cache_size,
            wanted.max_topic_levels,
            wanted.max_topic_length,
            streams,
            STRATEGIES[settings.shared_subscription_strategy](),
        ),
        Outbound(context.clock, context.counters, wanted.max_outbox_bytes, 2 * most),
        terms,
        Doorkeeper(security.policy),
        security.rules,
    )


def terms_of(settings: Settings, limits: Limits, rules: Optional[str]) -> Terms:
    """What clients are granted under these limits and the rules of that name."""
    terms = Terms()
    terms.rules = rules
    terms.receive_maximum = limits.receive_maximum
    terms.maximum_packet_size = limits.max_packet_size
    terms.topic_alias_maximum = limits.topic_alias_maximum
    terms.max_keep_alive = int(limits.max_keep_alive)
    if limits.max_session_expiry is not None:
        terms.max_session_expiry = min(NEVER, int(limits.max_session_expiry))
    terms.max_connections = limits.max_connections
    terms.max_connect_size = limits.max_connect_size
    terms.max_sessions = limits.max_sessions
    terms.max_retained_messages = limits.max_retained_messages
    terms.max_retained_bytes = limits.max_retained_bytes
    terms.connect_timeout = limits.connect_timeout
    terms.max_topic_length = limits.max_topic_length
    terms.max_topic_levels = limits.max_topic_levels
    terms.max_subscriptions_per_client = limits.max_subscriptions_per_client
    terms.max_pending_write_bytes = limits.max_pending_write_bytes
    terms.retain_available = limits.retain_available
    terms.denial = NOT_AUTHORIZED if settings.reveal_denials else UNSPECIFIED_ERROR
    terms.response_information = settings.response_information or ""
    terms.durability = settings.durability
    return terms


def restore(broker: Broker, recovered: Recovered, now: float) -> None:
    """Put back what the store held, and empty the lists that say it.

    A client connected at a crash counts as gone from ``now``.
    """
    registry = broker.registry
    for row in _consumed(recovered.sessions):
        (
            session_id,
            client_id,
            version,
            expiry,
            disconnected_at,
            will,
            will_due,
            username,
            rules,
        ) = _columns(row)
        session = registry.load(session_id, client_id)
        session.version = version
        session.username = username
        session.rules = rules
        session.expiry_interval = expiry
        session.disconnected_at = now if disconnected_at is None else disconnected_at
        session.received_on_disk = True
        if will is not None:
            load_will(session, will)
            session.will_due = will_due or 0.0
        broker.lifecycle.load(session)
    registry.client_ids.sort()
    for session_id, messages, size, last_seq in _consumed(recovered.queues):
        session = registry.by_id[session_id]
        session.queue.count_stored(messages, size, last_seq)
    for row in _consumed(recovered.subscriptions):
        session_id, topic_filter, _, options, identifier = _columns(row)
        broker.subscriptions.load(
            Subscription(registry.by_id[session_id], topic_filter, options, identifier)
        )
    for row in _consumed(recovered.retained):
        topic, payload, qos, properties, publisher, timestamp, expires_at = _columns(row)
        broker.retained.load(
            Message(topic, payload, qos, True, properties, publisher, timestamp, expires_at)
        )


def _consumed(rows: List[Any]) -> Iterator[Any]:
    """The rows in their order, each let go of at once: what is built of them takes their memory."""
    rows.reverse()
    while rows:
        yield rows.pop()


def _columns(row: Any) -> Any:
    """A row of the store; `WriteSet` tells its columns."""
    return row
