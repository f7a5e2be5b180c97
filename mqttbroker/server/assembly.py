"""Builds a `Broker` from the settings and the rows that the store recovered."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

from bridge_spark.log.stream_log import StreamConfig
from mqttbroker.auth.permissions import NoPermissions, PermissionsError, PermissionsReader
from mqttbroker.auth.security import Security
from mqttbroker.bridges.context import LARGEST_PACKET
from mqttbroker.bridges.context import RULES as BRIDGE_RULES
from mqttbroker.config import settings as config
from mqttbroker.config.settings import Listener, Settings, Stream
from mqttbroker.core.access.policy import Permissions
from mqttbroker.core.broker import Broker
from mqttbroker.core.client.outbox import Outbound
from mqttbroker.core.delivery.cluster_port import ClusterPort
from mqttbroker.core.delivery.wills import load_will
from mqttbroker.core.routing.groups import HashTopic, LeastLoaded, RandomMember, RoundRobin, Strategy
from mqttbroker.core.routing.route import StreamRule
from mqttbroker.core.routing.router import Router
from mqttbroker.core.streams.work_queues import QueueRule
from mqttbroker.core.terms.memory_stage import MemoryStage
from mqttbroker.core.terms.networks import Networks
from mqttbroker.core.terms.terms import BrokerTerms, ListenerTerms, Redirect
from mqttbroker.net.link_flush import LinkFlush
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.shared_admission import SharedAdmission
from mqttbroker.system.file_limit import client_sockets
from mqttbroker.system.memory_limit import memory_bytes
from sessions.context import DROP_NEWEST, DROP_OLDEST, REFUSE, SessionContext, SessionLimits
from sessions.counters import Counters
from sessions.journal import Journal
from sessions.producers import Producers
from sessions.registry import Registry
from sessions.retained import message_from_row
from sessions.row_kinds import OFFSETS, PRODUCERS, READERS, RETAINED, SESSIONS, SUBSCRIPTIONS
from sessions.session import AWAITS_RETAINED, NEVER, Subscription
from sessions.store.interface import Recovered

T = TypeVar("T")

QUEUE_FULL = {"drop_newest": DROP_NEWEST, "drop_oldest": DROP_OLDEST, "refuse": REFUSE}
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "round_robin": RoundRobin,
    "random": lambda: RandomMember(random.random),
    "hash_topic": HashTopic,
    "least_loaded": LeastLoaded,
}


def stream_config(stream: Stream, definition: Mapping[str, object] | None = None) -> StreamConfig:
    """The stream as the stream log is configured; its parameters have the names of the settings.

    ``definition`` is that of a stream which was created at run time.
    """
    values = dataclasses.asdict(stream)
    del values["dedup"], values["dedup_producers"]  # of the core
    return StreamConfig(**{**values, "seal": stream.seals, "definition": definition})


def stream_rule(stream: Stream) -> StreamRule:
    """The stream as the core routes messages to it."""
    producers = stream.dedup_producers if stream.dedup else 0
    return StreamRule(stream.name, list(stream.filters), stream.partitions, stream.key, producers)


def redirect_of(redirect: config.Redirect) -> Redirect | None:
    """The redirect for these settings; None without a server reference."""
    if redirect.server_reference is None:
        return None
    return Redirect(redirect.server_reference, redirect.permanent, redirect.rate)


# Settings that the core has in another form, by name.
_CONVERSIONS: dict[str, Callable[[Any], object]] = {
    "max_keep_alive": int,
    "max_session_expiry": lambda seconds: NEVER if seconds is None else min(NEVER, int(seconds)),
    "max_memory": memory_bytes,
    "queue_full": QUEUE_FULL.__getitem__,
    "redirect": redirect_of,
}


def fields_of(target: object) -> list[str]:
    """The names of an object's fields. `dir` is the only list of them that a compiled class has."""
    return [name for name in dir(target) if name[0] != "_" and not callable(getattr(target, name))]


def fill(target: T, *sources: object) -> T:
    """Set each field of ``target`` to the setting of that name in the first source that has one.

    Raises AttributeError for a field without a setting.
    """
    for name in fields_of(target):
        source = next((source for source in sources if hasattr(source, name)), None)
        value = getattr(source, name)
        setattr(target, name, _CONVERSIONS[name](value) if name in _CONVERSIONS else value)
    return target


def listener_terms(settings: Settings, listener: Listener, rules: str | None = None) -> ListenerTerms:
    """The terms for clients of a listener; ``rules`` names its rules."""
    limits = settings.limits_of(listener)
    own = SimpleNamespace(
        rules=rules,
        of_bridges=False,
        listener=listener.address,
        client_id_pattern=listener.client_id_from,
        ignores_username_query=listener.username_query == "ignore",
        certificate_identity=listener.certificate_identity,
        networks=Networks(limits.ipv4_prefix, limits.ipv6_prefix),
    )
    return fill(ListenerTerms(), limits, own)


def listener_policy(settings: Settings, listener: Listener, security: Security, counters: Counters) -> ListenerPolicy:
    """The policy for clients of a listener."""
    return ListenerPolicy(
        security.policy_of(listener),
        listener_terms(settings, listener, security.rules_of(listener)),
        listener.max_connections,
        counters,
        listener.max_half_open or 0,
    )


def bridge_terms(settings: Settings) -> ListenerTerms:
    """The terms for the local clients of bridges: the limits of listeners are for others."""
    terms = ListenerTerms()
    terms.listener = "bridges"
    terms.of_bridges = True
    terms.rules = BRIDGE_RULES
    terms.receive_maximum = 65535  # remotes of version 3.1.1 have no limit
    terms.max_packet_size = LARGEST_PACKET
    terms.max_keep_alive = 65535
    terms.connect_timeout = settings.limits.connect_timeout
    return terms


def build_broker(settings: Settings, recovered: Recovered, security: Security | None = None, cluster: ClusterPort | None = None) -> Broker:
    """The broker core for these settings; without ``security`` it reads the files that they name. ``cluster`` is that of a shard's core."""
    if security is None:
        security = Security(settings)
    if any(row.permissions is not None for row in recovered.rows(SESSIONS)):
        security.rules.restrictive = True
    limits = settings.limits
    clustered = cluster is not None
    gated = settings.durability == "commit"
    journal = Journal(gated, recovered.next_message_id, recovered.next_seq, gated and clustered)
    context = SessionContext(journal, fill(SessionLimits(), limits))
    context.clock.now = time.time_ns() // 1000
    context.backpressure_monitor.max_pause = limits.backpressure_wait
    terms = fill(BrokerTerms(), limits, settings)
    return Broker(
        context,
        Registry(context, recovered.next_session_id, clustered),
        Router(
            limits.route_cache_size,
            limits.route_cache_bytes,
            limits.max_topic_levels,
            limits.max_topic_length,
            [stream_rule(stream) for stream in settings.streams],
            STRATEGIES[settings.shared_subscription_strategy](),
            clustered,
        ),
        _outbound(settings, context, terms),
        terms,
        security.rules,
        security.bans,
        Producers(settings.producer_window),
        [
            QueueRule(queue.name, queue.source, queue.lease, queue.max_deliveries, queue.dead_letter or "", queue.allow_publish)
            for queue in settings.queues
        ],
        cluster,
    )


def _outbound(settings: Settings, context: SessionContext, terms: BrokerTerms) -> Outbound:
    limits = settings.limits
    return Outbound(
        context,
        terms,
        limits.max_outbox_bytes,
        limits.max_total_outbox_bytes,
        limits.max_total_incomplete_bytes,
        limits.max_pending_acks,
    )


def node_admission(settings: Settings, loop: asyncio.AbstractEventLoop) -> SharedAdmission:
    """The admission that the listeners of a node share. The connections of its clients are in the cores of all nodes."""
    limits = settings.limits
    context = SessionContext(Journal(False), fill(SessionLimits(), limits))
    flush = LinkFlush(_outbound(settings, context, fill(BrokerTerms(), limits, settings)), loop)
    return SharedAdmission(flush, MemoryStage(), OpenSockets(client_sockets(settings), limits.max_half_open, context.counters))


def apply_terms(terms: BrokerTerms, settings: Settings) -> None:
    """Put the terms in force that may change while the broker runs."""
    fill(terms, settings.limits, settings)


def apply_limits(broker: Broker, settings: Settings) -> None:
    """Put the limits and options of the core in force that may change while it runs."""
    limits = settings.limits
    apply_terms(broker.terms, settings)
    broker.users.terms_changed()
    fill(broker.context.limits, limits)
    broker.memory.apply()
    broker.memory.check()
    broker.context.backpressure_monitor.max_pause = limits.backpressure_wait
    broker.refuse_when_full = broker.context.limits.queue_full == REFUSE
    broker.outbound.max_backlog = limits.max_outbox_bytes
    broker.outbound.max_acks = limits.max_pending_acks
    broker.producers.window = settings.producer_window
    router = broker.router
    router.cache_size, router.max_levels, router.max_length = (limits.route_cache_size, limits.max_topic_levels, limits.max_topic_length)


def apply_to_listener(policy: ListenerPolicy, settings: Settings, listener: Listener, security: Security) -> None:
    """Put a listener's options in force; connected clients keep the terms of their CONNACK."""
    policy.terms = listener_terms(settings, listener, security.rules_of(listener))
    policy.max_connections = listener.max_connections
    policy.max_half_open = listener.max_half_open or 0
    policy.policy = security.policy_of(listener)


def restore(broker: Broker, recovered: Recovered, now: float) -> None:
    """Restore sessions, queues, subscriptions and retained messages, and empty the lists of their rows.

    A session that was connected at a crash counts as disconnected at ``now``, in Unix seconds.
    """
    registry = broker.registry
    permissions_reader = PermissionsReader()
    for row in _consumed(recovered.rows(SESSIONS)):
        session = registry.load(row.session_id, row.client_id)
        session.version = row.version
        session.set_username(row.username)
        session.rules = row.rules
        if row.permissions is not None:
            permissions = _stored_permissions(permissions_reader, row.permissions)
            session.set_permissions(permissions, permissions.size)
        session.expiry_interval = row.expiry_interval
        session.disconnected_at = now if row.disconnected_at is None else row.disconnected_at
        session.received_on_disk = True
        if row.will is not None:
            load_will(session, row.will, row.will_due or 0.0)
        broker.lifecycle.load(session)
    registry.client_ids.sort()
    for queue in _consumed(recovered.queues):
        registry.by_id[queue.session_id].deliveries.queue.count_stored(queue.entries, queue.size, queue.last_seq)
    for stored in _consumed(recovered.rows(SUBSCRIPTIONS)):
        session = registry.by_id[stored.session_id]
        subscription = Subscription(session, stored.topic_filter, stored.options, stored.subscription_id)
        broker.subscriptions.load(subscription)
        if subscription.options & AWAITS_RETAINED:
            session.add_pending_retained([subscription])
    for retained in _consumed(recovered.rows(RETAINED)):
        broker.retained.load(message_from_row(retained))
    for known in _consumed(recovered.rows(PRODUCERS)):
        broker.deduplication.load(known)
    for reader in _consumed(recovered.rows(READERS)):
        broker.stored_readers.load(reader)
    for offsets in _consumed(recovered.rows(OFFSETS)):
        broker.stored_readers.load_offsets(offsets)
    broker.users.terms_changed()


def _stored_permissions(reader: PermissionsReader, text: str) -> Permissions:
    try:
        return reader.of_text(text)
    except PermissionsError:
        return NoPermissions(text)


def _consumed(rows: list[T]) -> Iterator[T]:
    """The rows in their order; each is removed first, so that its memory is free for the restored object."""
    rows.reverse()
    while rows:
        yield rows.pop()
