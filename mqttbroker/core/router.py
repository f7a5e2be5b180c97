"""Routing: from a topic's bytes to everyone who is owed the message.

The rule kept here: the route of a topic says at any moment what the trie would
say.  Routes are cached by the topic's bytes.  A subscription that changes is
noted, at the cost of its levels and however many routes it concerns; a route
older than a note is looked at when it is used next, and built again only if a
filter that changed since matches its topic.  The cache is bounded; the oldest
routes leave first.
"""

from __future__ import annotations

from itertools import islice
from typing import Dict, Final, List, Optional, cast
from zlib import crc32

from mqttbroker.codec.properties import text_of
from mqttbroker.codec.reason_codes import MALFORMED_PACKET, TOPIC_NAME_INVALID, MQTTError
from mqttbroker.core.groups import Group, Member, Strategy, Target
from mqttbroker.core.policy import Rules
from sessions.session import NO_LOCAL, Session, Subscription
from topic_matcher.filters import has_wildcard, is_valid_topic, parse_shared
from topic_matcher.trie import SubscriptionTrie

CHANGES: Final = 2048  # filters whose last change is known for certain
EVICTED: Final = 256  # routes that leave a full cache at once, of a large one


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
        self.seen = 0  # the last change of a wildcard filter that it takes into account; -1 = it does not count any more
        # The broker's own, and what is no topic but the form of a subscription: no client publishes to it.
        self.reserved = topic == "$SYS" or topic.startswith("$SYS/") or topic.startswith("$share/")
        self.targets: List[Target] = []
        self.groups: List[Group] = []
        self.streams: List[StreamSink] = []
        self.direct = True  # nobody but `targets`
        self.durable = False  # somebody may keep the message on disk
        self.passing = True  # nobody keeps it on disk but members of `groups`
        # Messages of one topic are often of one length; then these bytes are the same:
        # Remaining Length and topic of the last QoS 1 or 2 PUBLISH, and the heads at QoS 1 and 2.
        self.remaining = -1
        self.middle: bytes = b""
        self.head: bytes = b""
        self.head2: bytes = b""

    def remember(self, remaining: int, middle: bytes) -> None:
        """The bytes between first byte and packet id of a PUBLISH of that Remaining Length."""
        self.remaining = remaining
        self.middle = middle
        self.head = b"\x32" + middle
        self.head2 = b"\x34" + middle

    @property
    def matched(self) -> bool:
        return bool(self.targets) or bool(self.groups) or bool(self.streams)


class Changes:
    """The wildcard filters that changed last, with the numbers of their last changes.

    Numbers ascend.  Of ``capacity`` filters at least the last changes are known, of twice
    as many at most.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._unknown = 0  # whatever changed up to here is not known
        self._earlier = SubscriptionTrie()  # what changed up to ``_turn``
        self._turn = 0
        self._later = SubscriptionTrie()

    def note(self, topic_filter: str, number: int) -> None:
        if len(self._later) >= self.capacity:
            self._unknown = self._turn
            self._earlier = self._later
            self._turn = number - 1
            self._later = SubscriptionTrie()
        self._later.insert(topic_filter, "", number)

    def forget(self, number: int) -> None:
        """Everything may have changed at ``number``."""
        self._unknown = self._turn = number
        self._earlier = SubscriptionTrie()
        self._later = SubscriptionTrie()

    def since(self, seen: int, topic: str) -> bool:
        """Whether a filter that matches the topic may have changed after the change ``seen``."""
        if seen < self._unknown:
            return True
        for number in self._later.match(topic):
            if cast(int, number) > seen:
                return True
        if seen < self._turn:
            for number in self._earlier.match(topic):
                if cast(int, number) > seen:
                    return True
        return False


class Router:
    """Subscriptions and the cache of routes.

    A route is right only if its ``seen`` is ``changed``; `route` sees to that.
    """

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
        self.changed = 0  # how often a wildcard filter has changed
        self._changes = Changes(CHANGES)
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
            if route.seen != self.changed:
                if self._changes.since(route.seen, route.topic):
                    route = self._build(route.topic, topic_bytes)
                    self.cache[topic_bytes] = route
                else:
                    route.seen = self.changed
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
        group.add(Member(subscription))
        if self.rules is not None:
            self._forget(topic_filter)

    def leave(self, name: str, topic_filter: str, session: Session) -> None:
        key = f"{name}/{topic_filter}"
        group = self.groups.get(key)
        if group is None:
            return
        group.remove(session)
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
        """The cached routes that a change of this filter touches do not count any more."""
        if not self.cache:
            return
        if has_wildcard(topic_filter):
            self.changed += 1
            self._changes.note(topic_filter, self.changed)
        else:
            route = self.cache.pop(topic_filter.encode("utf-8"), None)
            if route is not None:
                route.seen = -1

    def forget(self, session: Session) -> None:
        """Have the routes that may name a session built again: what it may read has changed."""
        for subscription in session.subscriptions.values():
            shared = parse_shared(subscription.topic_filter)
            self._forget(subscription.topic_filter if shared is None else shared[1])

    def forget_all(self) -> None:
        """Have all routes built again: who may read what has changed."""
        self.changed += 1
        self._changes.forget(self.changed)

    def _evict(self) -> None:
        """Make room: the oldest go, at most a sixteenth."""
        oldest = list(islice(self.cache, min(max(1, self.cache_size // 16), EVICTED)))
        for topic_bytes in oldest:
            self.cache.pop(topic_bytes).seen = -1

    def _build(self, topic: str, topic_bytes: bytes) -> Route:
        route = Route(topic, topic_bytes)
        route.seen = self.changed
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
            target = targets[session]
            target.own_differs = True
            target.own = _without_no_local(session, matched)
        route.targets = list(targets.values())
        for value in self._stream_trie.match(topic):
            rule = cast(StreamRule, value)
            if all(sink.rule is not rule for sink in route.streams):
                partition = crc32(topic_bytes) % rule.partitions if rule.key == "topic" else -1
                route.streams.append(StreamSink(rule, partition))
        route.direct = not route.groups and not route.streams
        route.passing = not route.streams
        for target in route.targets:
            if target.session.id != 0:
                route.passing = False
        route.durable = not route.direct or not route.passing
        return route


def _readers(group: Group, rules: Rules, topic: str) -> Group:
    """The group without the members that may not read this topic."""
    readers = Group(group.name, group.topic_filter)
    readers.whole = group
    for member in group.members:
        if rules.may_read(member.session, topic):
            readers.add(member)
    return group if len(readers.members) == len(group.members) else readers


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
