"""The broker core: the components of one broker, put together.

It uses no socket, clock, thread or randomness. Packets come in through `PacketReader`, time through `Clock` and `tick`,
the store's answers through `Commits.answered`; packets go out through the connections' outboxes, writes through
`Commits.next_write_set`.
"""

from __future__ import annotations

from typing import Final

from mqttbroker.core.access.bans import Bans
from mqttbroker.core.access.policy import Rules
from mqttbroker.core.client.connection import Connection
from mqttbroker.core.client.outbox import Outbound
from mqttbroker.core.commits import Commits
from mqttbroker.core.delivery.broker_messages import BrokerMessages
from mqttbroker.core.delivery.cluster_port import NO_STREAMS, ClusterPort
from mqttbroker.core.delivery.deduplication import Deduplication
from mqttbroker.core.delivery.publisher import Publisher
from mqttbroker.core.delivery.replay import Replays, RetainedSources
from mqttbroker.core.delivery.turns import Turns
from mqttbroker.core.memory import Memory
from mqttbroker.core.routing.router import Router
from mqttbroker.core.sessions.clients import Clients
from mqttbroker.core.sessions.connect_handler import ConnectHandler
from mqttbroker.core.sessions.lifecycle import SessionLifecycle
from mqttbroker.core.sessions.subscriptions import Subscriptions
from mqttbroker.core.streams.chunk_reads import ChunkReads
from mqttbroker.core.streams.consumer import StreamConsumers
from mqttbroker.core.streams.groups import StreamGroups
from mqttbroker.core.streams.subscriptions import StreamSubscriptions
from mqttbroker.core.streams.work_queues import QueueRule, WorkQueues
from mqttbroker.core.terms.memory_stage import MemoryStage
from mqttbroker.core.terms.rates import Rate
from mqttbroker.core.terms.terms import BrokerTerms, ListenerTerms
from mqttbroker.core.terms.users import Users
from sessions.context import REFUSE, SessionContext
from sessions.expiry import Expiry
from sessions.journal import Journal
from sessions.producers import Producers
from sessions.readers.stored_readers import StoredReaders
from sessions.registry import Registry
from sessions.retained import Retained

SWEEP_TOPICS: Final = 4000  # retained topics visited in one tick
SWEEP_ROUTES: Final = 4000  # cached routes and targets visited in one tick


class Broker:
    """The components of one broker; ``cluster`` is the port to the other shards, None on a single broker."""

    def __init__(
        self,
        context: SessionContext,
        registry: Registry,
        router: Router,
        outbound: Outbound,
        terms: BrokerTerms,
        rules: Rules,
        bans: Bans,
        producers: Producers,
        queues: list[QueueRule],
        cluster: ClusterPort | None,
    ) -> None:
        journal = context.journal
        self.cluster = cluster
        self.context = context
        self.journal: Journal = journal
        self.registry = registry
        self.router = router
        self.outbound = outbound
        self.terms = terms
        self.rules = rules
        self.bans = bans
        if rules.restrictive:
            router.rules = rules
        self.retained = Retained(journal)
        self.producers = producers
        self.deduplication = Deduplication(producers, journal, router.streams, outbound.counters)
        self.memory_stage = MemoryStage()
        self.turns = Turns(outbound)
        self.publisher = Publisher(
            context, router, self.retained, outbound, rules, self.deduplication, terms, self.memory_stage, self.turns, cluster
        )
        self.messages = BrokerMessages(context, self.publisher, self.turns)
        self.replays = Replays(RetainedSources(self.retained) if cluster is None else cluster, rules, outbound.counters)
        self.chunk_reads = ChunkReads(terms)
        self.stream_consumers = StreamConsumers(self.chunk_reads, outbound)
        self.stored_readers = StoredReaders(journal)
        self.stream_groups = StreamGroups(self.stored_readers, terms, outbound.counters, outbound.clock)
        for queue in queues:
            if queue.allow_publish:
                router.queues[queue.name] = queue.stream
        self.work_queues = WorkQueues(
            queues,
            router.streams,
            self.stored_readers,
            self.chunk_reads,
            journal,
            outbound.counters,
            outbound.clock,
            self.turns,
            terms,
        )
        self.stream_subscriptions = StreamSubscriptions(
            router.streams,
            rules,
            self.chunk_reads,
            self.stream_consumers,
            outbound.clock,
            self.stored_readers,
            self.stream_groups,
            self.work_queues,
            "" if cluster is None else NO_STREAMS,
        )
        self.subscriptions = Subscriptions(
            context, router, self.replays, terms, rules, self.memory_stage, self.turns, self.stream_subscriptions, cluster
        )
        self.users = Users(registry, terms, outbound.counters)
        self.lifecycle = SessionLifecycle(
            journal,
            registry,
            self.publisher,
            self.subscriptions,
            router,
            self.messages,
            self.turns,
            outbound.clock,
            self.users,
            paused=cluster is not None,
        )
        self.clients = Clients(registry, self.lifecycle, terms, self.users, self.turns)
        self.connect_handler = ConnectHandler(
            journal,
            registry,
            router,
            self.replays,
            self.lifecycle,
            self.clients,
            self.users,
            self.publisher.fan_out,
            terms,
            rules,
            bans,
            self.memory_stage,
            cluster,
        )
        self.commits = Commits(journal, registry, self.clients, self.connect_handler, outbound, rules, self.turns)
        self.expiry = Expiry(registry)
        self.memory = Memory(context, outbound, router, self.retained, self.clients, terms, self.memory_stage, self.chunk_reads)
        # Whether a PUBLISH that does not fit a subscriber's queue is refused rather than dropped.
        self.refuse_when_full: bool = context.limits.queue_full == REFUSE

    def accept(self, peer: str, terms: ListenerTerms, now: float) -> Connection:
        """The connection of a new client; ``now`` is monotonic time in seconds."""
        connection = Connection(self.outbound, self.clients, peer, terms, now)
        self.clients.connections[connection] = True
        self.outbound.counters.connections += 1
        if terms.max_publish_rate or terms.max_receive_rate:
            received = Rate("max_publish_rate", "max_receive_rate")
            received.limit(terms.max_publish_rate, terms.max_receive_rate)
            connection.limit_received(received)
        if terms.max_delivery_rate or terms.max_send_rate:
            sent = Rate("max_delivery_rate", "max_send_rate")
            sent.limit(terms.max_delivery_rate, terms.max_send_rate)
            connection.limit_sent(sent)
        return connection

    def rules_changed(self) -> None:
        """Discard all cached decisions: some rules answer differently."""
        self.router.invalidate_all()
        self.stream_consumers.rules_changed()
        for connection in self.clients.connections:
            connection.forget_decisions()

    def tick(self, monotonic: float) -> None:
        """Run the periodic work; interval and clock are those of `Clients.tick`."""
        self.clients.tick(monotonic)
        self.work_queues.tick()
        self.expiry.tick()
        self.retained.sweep(SWEEP_TOPICS, self.context.clock.now)
        self.router.tick(SWEEP_ROUTES)
        self.replays.sweep(SWEEP_TOPICS)
        self.memory.check()
        self.journal.write_rest()
