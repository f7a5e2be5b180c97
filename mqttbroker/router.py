"""Routing: from a topic's bytes to everyone who is owed the message.

The rule kept here: the route of a topic says at any moment what the trie would
say.  Routes are cached by the topic's bytes; a subscription that changes takes
out of the cache the topics its filter matches, and no others.  The cache is
bounded; the oldest routes leave first.
"""

from __future__ import annotations

from typing import Dict, Final, List, Optional, cast
from zlib import crc32

from mqttbroker.groups import Group, Member, Strategy, Target
from mqttbroker.policy import Rules
from mqttbroker.properties import text_of
from mqttbroker.reason_codes import MALFORMED_PACKET, TOPIC_NAME_INVALID, MQTTError
from sessions.session import NO_LOCAL, Session, Subscription
from topic_matcher.filters import has_wildcard, is_valid_topic, parse_shared
from topic_matcher.topic_tree import TopicTree
from topic_matcher.trie import SubscriptionTrie

FORGET_ROUTES: Final = 2000  # cached routes that one subscription may take out one by one


class StreamRule:
    """Which topics a stream keeps and how it picks the partition: by topic, client or property."""

    def __init__(self, name: str, filters: List[str], partitions: int, key: str) -> None:
        self.name = name
        self.filters = filters
        self.partitions = partitions
        self.key = key


class StreamSink:
    """A stream's part in a route; ``partition`` is -1 where it depends on the message."""

    def __init__(self, rule: StreamRule, partition: int) -> None:
        self.rule = rule
        self.partition = partition


class Route:
    """Everyone who is owed the messages of one topic."""

    def __init__(self, topic: str, topic_bytes: bytes) -> None:
        self.topic = topic
        self.topic_bytes = topic_bytes
        # The broker's own, and what is no topic but the form of a subscription: no client publishes to it.
        self.reserved = topic == "$SYS" or topic.startswith("$SYS/") or topic.startswith("$share/")
        self.targets: List[Target] = []
        self.groups: List[Group] = []
        self.streams: List[StreamSink] = []
        self.direct = True  # nobody but `targets`
        self.durable = False  # somebody may keep the message on disk
        # Messages of one topic are often of one length; then these bytes are the same:
        # Remaining Length and topic of the last QoS 1 or 2 PUBLISH, and the head at QoS 1.
        self.remaining = -1
        self.middle: bytes = b""
        self.head: bytes = b""

    def remember(self, remaining: int, middle: bytes) -> None:
        """The bytes between first byte and packet id of a PUBLISH of that Remaining Length."""
        self.remaining = remaining
        self.middle = middle
        self.head = b"\x32" + middle

    @property
    def matched(self) -> bool:
        return bool(self.targets) or bool(self.groups) or bool(self.streams)


class Router:
    """Subscriptions and the cache of routes."""

    def __init__(
        self,
        cache_size: int,
        max_levels: int,
        max_length: int,
        streams: List[StreamRule],
        strategy: Strategy,
    ) -> None:
        self.cache: Dict[bytes, Route] = {}
        self.cache_size = cache_size
        self.max_levels = max_levels
        self.max_length = max_length
        self.streams = streams
        self.strategy = strategy  # of all shared subscriptions
        self.rules: Optional[Rules] = None  # where not everybody may read everything
        self.groups: Dict[str, Group] = {}
        self._trie = SubscriptionTrie()
        self._cached = TopicTree()
        self._stream_trie = SubscriptionTrie()
        for rule in streams:
            for topic_filter in rule.filters:
                self._stream_trie.insert(topic_filter, rule, rule)

    @property
    def subscriptions(self) -> int:
        """How many subscriptions there are, a shared one counted once per group."""
        return len(self._trie)

    def route(self, topic_bytes: bytes) -> Route:
        """The route of a topic name as it stands on the wire; MQTTError if it is none."""
        route = self.cache.get(topic_bytes)
        if route is not None:
            return route
        topic = text_of(topic_bytes)
        if not is_valid_topic(topic):
            raise MQTTError(MALFORMED_PACKET, "invalid topic name")  # [MQTT-3.3.2-2]
        if len(topic_bytes) > self.max_length:
            raise MQTTError(TOPIC_NAME_INVALID, f"topic name of {len(topic_bytes)} bytes")
        if topic.count("/") >= self.max_levels:
            raise MQTTError(TOPIC_NAME_INVALID, f"more than {self.max_levels} topic levels")
        route = self._build(topic, topic_bytes)
        if len(self.cache) >= self.cache_size:
            self._evict()
        self.cache[topic_bytes] = route
        self._cached.set(topic, route)
        return route

    def subscribe(self, subscription: Subscription) -> None:
        """Add or replace a subscription that is not shared."""
        self._trie.insert(subscription.topic_filter, subscription.session, subscription)
        self._forget(subscription.topic_filter)

    def unsubscribe(self, subscription: Subscription) -> None:
        self._trie.remove(subscription.topic_filter, subscription.session)
        self._forget(subscription.topic_filter)

    def join(self, name: str, topic_filter: str, subscription: Subscription) -> None:
        """Add or replace a session's membership of a shared subscription."""
        key = f"{name}/{topic_filter}"
        group = self.groups.get(key)
        if group is None:
            group = Group(name, topic_filter)
            self.groups[key] = group
            self._trie.insert(topic_filter, group, group)
            self._forget(topic_filter)
        member = Member(subscription)
        old = group.member(subscription.session)
        if old is None:
            group.members.append(member)
        else:
            group.members[group.members.index(old)] = member
        if self.rules is not None:
            self._forget(topic_filter)

    def leave(self, name: str, topic_filter: str, session: Session) -> None:
        key = f"{name}/{topic_filter}"
        group = self.groups.get(key)
        if group is None:
            return
        member = group.member(session)
        if member is not None:
            group.members.remove(member)
        if not group.members:
            del self.groups[key]
            self._trie.remove(topic_filter, group)
        if not group.members or self.rules is not None:
            self._forget(topic_filter)

    def readers(self, group: Group, topic: str) -> Group:
        """The members of a group that may read a topic."""
        rules = self.rules
        return group if rules is None else _readers(group, rules, topic)

    def _forget(self, topic_filter: str) -> None:
        """Drop the cached routes that a change of this filter touches."""
        if not has_wildcard(topic_filter):
            route = self._cached.pop(topic_filter)
            if route is not None:
                del self.cache[cast(Route, route).topic_bytes]
            return
        scan = self._cached.scan(topic_filter)
        touched = scan.take_within(FORGET_ROUTES, 4 * FORGET_ROUTES)
        if not scan.done:
            # So many that it is cheaper for everybody to begin anew.
            self.cache = {}
            self._cached = TopicTree()
            return
        for topic, value in touched:
            self._cached.pop(topic)
            del self.cache[cast(Route, value).topic_bytes]

    def forget(self, session: Session) -> None:
        """Drop the cached routes that may name a session: what it may read has changed."""
        for subscription in session.subscriptions.values():
            shared = parse_shared(subscription.topic_filter)
            self._forget(subscription.topic_filter if shared is None else shared[1])

    def forget_all(self) -> None:
        """Drop all cached routes: who may read what has changed."""
        self.cache.clear()
        self._cached = TopicTree()

    def _evict(self) -> None:
        """Make room: the oldest sixteenth goes."""
        oldest = list(self.cache)[: max(1, self.cache_size // 16)]
        for topic_bytes in oldest:
            route = self.cache.pop(topic_bytes)
            self._cached.pop(route.topic)

    def _build(self, topic: str, topic_bytes: bytes) -> Route:
        route = Route(topic, topic_bytes)
        targets: Dict[Session, Target] = {}
        limited: Dict[Session, bool] = {}
        rules = self.rules
        barred: Dict[Session, bool] = {}
        matched = self._trie.match(topic)
        for value in matched:
            if isinstance(value, Group):
                group = self.readers(value, topic)
                if group.members:
                    route.groups.append(group)
                continue
            subscription = cast(Subscription, value)
            session = subscription.session
            target = targets.get(session)
            if target is None:
                if rules is not None and (session in barred or not rules.may_read(session, topic)):
                    barred[session] = True
                    continue
                target = Target(session)
                targets[session] = target
            target.merge(subscription)
            if subscription.options & NO_LOCAL:
                limited[session] = True
        for session in limited:
            targets[session].own = _without_no_local(session, matched)
        route.targets = list(targets.values())
        for value in self._stream_trie.match(topic):
            rule = cast(StreamRule, value)
            if all(sink.rule is not rule for sink in route.streams):
                partition = crc32(topic_bytes) % rule.partitions if rule.key == "topic" else -1
                route.streams.append(StreamSink(rule, partition))
        route.direct = not route.groups and not route.streams
        route.durable = not route.direct
        for target in route.targets:
            if target.session.id != 0:
                route.durable = True
        return route


def _readers(group: Group, rules: Rules, topic: str) -> Group:
    """The group without the members that may not read this topic."""
    members: List[Member] = []
    for member in group.members:
        if rules.may_read(member.session, topic):
            members.append(member)
    if len(members) == len(group.members):
        return group
    readers = Group(group.name, group.topic_filter)
    readers.whole = group
    readers.members = members
    return readers


def _without_no_local(session: Session, matched: List[object]) -> Optional[Target]:
    """What a session with No Local subscriptions is owed of its own messages."""
    own: Optional[Target] = None
    for value in matched:
        if isinstance(value, Subscription) and value.session is session:
            if not value.options & NO_LOCAL:
                if own is None:
                    own = Target(session)
                own.merge(value)
    return own
