"""Routes: all recipients of the messages of one topic, and how a route is built in parts.

A build costs about one unit of work per subscription and per node of the trie. It is cut into steps, so that a topic
that very many filters match holds up its publisher and nobody else.
"""

from __future__ import annotations

from typing import Final, cast

from mypy_extensions import i64

from mqttbroker.codec.data_types import encode_varint
from mqttbroker.core.access.policy import Rules
from mqttbroker.core.routing.groups import Group, Target
from sessions.session import NO_LOCAL, Session, Subscription
from topic_matcher.filters import text_bytes
from topic_matcher.trie import SubscriptionTrie

# Memory of a route and of one of its targets, without their texts, and of the header of a bytes object.
_ROUTE_BYTES: Final = 450
_TARGET_BYTES: Final = 110
_BYTES_OBJECT: Final = 34

LARGE_ROUTE: Final = 2000  # targets; a message to more of them is delivered in parts
_TARGETS_PER_WORK: Final = 32  # deliveries at QoS 0 for which no more is read than for a unit of work
BUILD_WORK: Final = 8  # of each build, beside its steps
_RULES_WORK: Final = 5  # of a decision of the rules


class StreamRule:
    """The topics that a stream stores; ``key`` selects the partition: "topic", "client" or "user-property:NAME".

    ``producers`` is the most producers whose repeats are recognised; 0 if the stream is without deduplication.
    """

    def __init__(self, name: str, filters: list[str], partitions: int, key: str, producers: int = 0) -> None:
        self.name = name
        self.filters = filters
        self.partitions = partitions
        self.key = key
        self.producers = producers


class QueueTopic:
    """A topic below ``$queue/`` that clients may publish to: the queue's stream stores its messages as of ``topic``."""

    def __init__(self, rule: StreamRule, topic: str) -> None:
        self.rule = rule
        self.topic = topic


class StreamSink:
    """A stream in a route; ``partition`` is -1 if it depends on the message."""

    def __init__(self, rule: StreamRule, partition: int) -> None:
        self.rule = rule
        self.partition = partition


class Route:
    """All recipients of the messages of one topic; ``size`` is its estimated memory in bytes once cached."""

    def __init__(self, topic: str, topic_bytes: bytes) -> None:
        self.topic = topic
        self.topic_bytes = topic_bytes
        self.message_topic = topic  # of the messages, which is another one if they are published to a queue
        self.to_queue = False
        self.revision = 0  # the router's revision for which this route is known to be right; -1 = discarded
        self.reserved = is_reserved(topic)
        self.size: int = 0
        self.targets: list[Target] = []
        self.has_targets = False  # still true when `discard` has dropped them
        self.remotes: list[Target] = []  # other cores of a cluster, for messages at QoS 0
        self.groups: list[Group] = []
        self.streams: list[StreamSink] = []
        self.deduplicated = False  # a stream recognises repeats
        self.no_local = False  # a target has a No Local subscription
        self.large = False  # more than `LARGE_ROUTE` targets: neither `direct` nor `unpersisted`
        self.work: i64 = 0  # of one message to all targets, in units of `Router.work`
        self.direct = True  # no recipients but `targets`
        self.durable = False  # `logged`, or a stream, a group or a persistent session may store the message
        self.logged = False  # other shards of a cluster read all messages but those at QoS 0 without the RETAIN flag
        self.unpersisted = True  # not `logged`, and neither a stream nor a session in `targets` stores it; a member of `groups` may
        # The header of the last QoS 1 or 2 PUBLISH. Messages of a topic often have the same length, and then the
        # same header: Remaining Length and topic, and these after the first byte for QoS 1 and for QoS 2.
        self.remaining_length = -1
        self.length_and_topic: bytes = b""
        self.qos1_header: bytes = b""
        self.qos2_header: bytes = b""

    def set_header(self, remaining_length: int, length_and_topic: bytes) -> None:
        """Store the bytes between first byte and packet id of a PUBLISH with this Remaining Length."""
        self.remaining_length = remaining_length
        self.length_and_topic = length_and_topic
        self.qos1_header = b"\x32" + length_and_topic
        self.qos2_header = b"\x34" + length_and_topic

    def targets_for(self, publisher: Session | None) -> list[Target]:
        """The targets of a message of ``publisher``, without the publisher's No Local subscriptions [MQTT-3.8.3-3]."""
        if not self.no_local:
            return self.targets
        targets: list[Target] = []
        for target in self.targets:
            if not target.no_local or target.session is not publisher:
                targets.append(target)
            elif target.without_no_local is not None:
                targets.append(target.without_no_local)
        return targets

    @property
    def matched(self) -> bool:
        return self.has_targets or bool(self.groups) or bool(self.streams) or bool(self.remotes)

    def discard(self) -> None:
        """The route is no longer valid: drop its targets, so that no reference to it keeps ended sessions in memory.

        The list itself is unchanged, because a message may be being sent to it.
        """
        self.revision = -1
        self.targets = _NO_TARGETS
        self.remotes = _NO_TARGETS

    def names_ended_session(self) -> bool:
        for target in self.targets:
            if target.session.ended:
                return True
        for group in self.groups:
            if group.original is not None:
                for member in group.members:
                    if member.session.ended:
                        return True
        return False


_NO_TARGETS: Final[list[Target]] = []  # of discarded routes; stays empty


QUEUE_ROOT: Final = "$queue/"
_SUBSCRIPTION_ROOTS: Final = ("$share/", "$stream/", QUEUE_ROOT, "$replay/")


def is_reserved(topic: str) -> bool:
    """Whether no client may publish to the topic: $SYS is the broker's, the others are forms of subscription.

    Bridges of other brokers say in ``$SYS/broker/connection/<name>/state`` whether they are connected, as with Mosquitto.
    """
    if not topic.startswith("$"):
        return False
    if topic.startswith("$SYS/broker/connection/") and topic.endswith("/state") and topic.count("/") == 4:
        return False
    return topic == "$SYS" or topic.startswith("$SYS/") or topic.startswith(_SUBSCRIPTION_ROOTS)


def permitted_members(rules: Rules | None, group: Group, topic: str) -> Group:
    """The group, or a copy of it that has only the members that may read ``topic``."""
    if rules is None:
        return group
    permitted = Group(group.name, group.topic_filter)
    permitted.original = group
    for member in group.members:
        if member.session.remote or rules.may_read(member.session, topic):  # the other core asks its rules
            permitted.add(member)
    return group if len(permitted.members) == len(group.members) else permitted


class RouteBuild:
    """A route while it is built: the search for subscriptions, then their merge into one target per session.

    If a session has No Local subscriptions, the others of that session are merged once more without them.
    """

    def __init__(self, topic: str, topic_bytes: bytes, trie: SubscriptionTrie, rules: Rules | None) -> None:
        self.topic = topic
        self.topic_bytes = topic_bytes
        self.changed = False  # a subscription that matches was added or removed since the build began
        self.idle = 0  # ticks since the last step
        self._rules = rules
        self._search = trie.search(topic)
        self._route = Route(topic, topic_bytes)
        self._targets: dict[Session, Target] = {}
        self._denied: dict[Session, bool] = {}
        self._identifiers: dict[Target, bytearray] = {}
        self._has_remotes = False
        self._merged = 0  # values of the search that are in targets
        self._merged_without = 0  # the same for the targets without No Local subscriptions
        route_bytes: int = _ROUTE_BYTES + text_bytes(topic)
        self._route.size = route_bytes + 4 * (len(topic_bytes) + _BYTES_OBJECT)  # three remembered headers have it, too

    @property
    def done(self) -> bool:
        count = len(self._search.found)
        return self._search.done and self._merged == count and (not self._route.no_local or self._merged_without == count)

    def step(self, budget: int) -> int:
        """Continue until the build is done or has cost about ``budget``; returns the cost."""
        cost: int = 0
        if not self._search.done:
            cost = self._search.step(budget)
        found = self._search.found
        if self._search.done:
            while self._merged < len(found) and cost < budget:
                cost += self._merge(found[self._merged])
                self._merged += 1
            if self._route.no_local and self._merged == len(found):
                while self._merged_without < len(found) and cost < budget:
                    cost += self._merge_without_no_local(found[self._merged_without])
                    self._merged_without += 1
        return cost

    def _merge(self, value: object) -> int:
        """Add a subscription or a group to the route; returns the cost."""
        route = self._route
        if isinstance(value, Group):
            group = permitted_members(self._rules, value, self.topic)
            if group.members:
                route.groups.append(group)
            if self._rules is None:
                return 1
            if group.original is not None:
                route.size += _TARGET_BYTES + 8 * len(group.members)
            return 1 + _RULES_WORK * len(value.members)
        subscription = cast(Subscription, value)
        session = subscription.session
        if session.ended:
            return 1
        cost: int = 1
        target = self._targets.get(session)
        if target is None:
            rules = self._rules
            if session.remote:
                self._has_remotes = True
            elif rules is not None:
                if session in self._denied:
                    return 1
                cost += _RULES_WORK
                if not rules.may_read(session, self.topic):
                    self._denied[session] = True
                    return cost
            target = Target(session)
            self._targets[session] = target
            route.size += _TARGET_BYTES
        self._add_to(target, subscription)
        if subscription.options & NO_LOCAL:
            target.no_local = True
            route.no_local = True
        return cost

    def _merge_without_no_local(self, value: object) -> int:
        if isinstance(value, Subscription) and not value.options & NO_LOCAL:
            target = self._targets.get(value.session)
            if target is not None and target.no_local:
                if target.without_no_local is None:
                    target.without_no_local = Target(value.session)
                    self._route.size += _TARGET_BYTES
                self._add_to(target.without_no_local, value)
        return 1

    def _add_to(self, target: Target, subscription: Subscription) -> None:
        """`Target.merge`, but the identifiers are joined at the end."""
        target.merge_options(subscription)
        if subscription.identifier:
            identifiers = self._identifiers.get(target)
            if identifiers is None:
                identifiers = bytearray()
                self._identifiers[target] = identifiers
            identifiers += b"\x0b" + encode_varint(subscription.identifier)
            self._route.size += 5

    def finish(self, streams: list[StreamSink], queue_topic: QueueTopic | None, clustered: bool = False) -> Route:
        """The route, when the build is done; not for sessions that ended meanwhile."""
        route = self._route
        if queue_topic is not None:
            route.reserved = False
            route.to_queue = True
            route.message_topic = queue_topic.topic
            route.size += text_bytes(queue_topic.topic)
        for target, identifiers in self._identifiers.items():
            target.subscription_ids = bytes(identifiers)
            target.zero_copy = False
        route.streams = streams
        for sink in streams:
            if sink.rule.producers:
                route.deduplicated = True
        route.size += _TARGET_BYTES * len(streams)
        route.logged = clustered and queue_topic is None and not self.topic.startswith("$SYS/")
        route.unpersisted = not streams and not route.logged
        targets = list(self._targets.values())
        if self.changed:
            targets = [target for target in targets if not target.session.ended]
        if self._has_remotes:
            route.remotes = [target for target in targets if target.session.remote]
            targets = [target for target in targets if not target.session.remote]
        for target in targets:
            if target.session.id != 0:
                route.unpersisted = False
                break
        route.targets = targets
        route.has_targets = bool(targets)
        route.direct = not route.groups and not streams
        route.durable = not route.direct or not route.unpersisted
        route.work = len(targets) // _TARGETS_PER_WORK
        if len(targets) > LARGE_ROUTE:
            route.large = True
            route.direct = route.unpersisted = False
        return route
