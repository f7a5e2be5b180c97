"""Routing: from the bytes of a topic name to all recipients of its messages.

Routes are cached by topic bytes. A cached route always equals a lookup in the trie: each subscription change raises the
router's revision and is recorded by its filter; a route of an older revision is checked against the recorded filters at
its next use, and rebuilt only if one of them matches its topic. The cache is bounded in routes and in bytes, and evicts its
oldest routes.
"""

from __future__ import annotations

from itertools import islice
from typing import Dict, Final, List, Optional, Tuple, cast
from zlib import crc32

from mqttbroker.codec.data_types import text_of
from mqttbroker.codec.reason_codes import MALFORMED_PACKET, TOPIC_NAME_INVALID, MQTTError
from mqttbroker.core.groups import Group, Member, Strategy, Target
from mqttbroker.core.policy import Rules
from sessions.session import NO_LOCAL, Session, Subscription
from topic_matcher.filters import has_wildcard, is_valid_topic, parse_shared, text_bytes
from topic_matcher.trie import SubscriptionTrie

RECORDED_FILTERS: Final = 2048  # changed filters that are recorded at least
MAX_EVICTED: Final = 256  # routes evicted at once
SWEPT_PER_SESSION: Final = 20  # routes and targets that `Router.session_ended` visits

# Memory of a route and of one of its targets, without their texts, and of the header of a bytes object.
_ROUTE_BYTES: Final = 450
_TARGET_BYTES: Final = 110
_BYTES_OBJECT: Final = 34


class StreamRule:
    """The topics a stream keeps; ``key`` selects the partition: "topic", "client" or "user-property:NAME"."""

    def __init__(self, name: str, filters: List[str], partitions: int, key: str) -> None:
        self.name = name
        self.filters = filters
        self.partitions = partitions
        self.key = key


class StreamSink:
    """A stream in a route; ``partition`` is -1 if it depends on the message."""

    def __init__(self, rule: StreamRule, partition: int) -> None:
        self.rule = rule
        self.partition = partition


class Route:
    """All recipients of the messages of one topic; ``size`` is its estimated memory in bytes once it is in the cache."""

    def __init__(self, topic: str, topic_bytes: bytes) -> None:
        self.topic = topic
        self.topic_bytes = topic_bytes
        self.revision = 0  # the router's revision for which this route is known to be right; -1 = discarded
        self.reserved = is_reserved(topic)
        self.size: int = 0
        self.targets: List[Target] = []
        self.has_targets = False  # still true when `discard` has dropped them
        self.groups: List[Group] = []
        self.streams: List[StreamSink] = []
        self.no_local = False  # a target has a No Local subscription
        self.direct = True  # no recipients but `targets`
        self.durable = False  # a stream, a group or a persistent session may store the message
        self.unpersisted = True  # neither a stream nor a session in `targets` stores it; a member of `groups` may
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

    def targets_for(self, publisher: Optional[Session]) -> List[Target]:
        """The targets of a message of ``publisher``, without its own No Local subscriptions [MQTT-3.8.3-3]."""
        if not self.no_local:
            return self.targets
        targets: List[Target] = []
        for target in self.targets:
            if not target.no_local or target.session is not publisher:
                targets.append(target)
            elif target.without_no_local is not None:
                targets.append(target.without_no_local)
        return targets

    @property
    def matched(self) -> bool:
        return self.has_targets or bool(self.groups) or bool(self.streams)

    def discard(self) -> None:
        """The route is no longer valid. A publisher that remembers it must not keep ended sessions alive by it.

        The list of targets stays whole for a message that is being sent to them.
        """
        self.revision = -1
        self.targets = _NO_TARGETS

    def measure(self) -> None:
        """Set `size`. Three remembered headers contain the topic, too."""
        size: int = _ROUTE_BYTES + text_bytes(self.topic) + 4 * (len(self.topic_bytes) + _BYTES_OBJECT)
        for target in self.targets:
            size += _TARGET_BYTES + len(target.subscription_ids)
            if target.without_no_local is not None:
                size += _TARGET_BYTES + len(target.without_no_local.subscription_ids)
        for group in self.groups:
            if group.original is not None:
                size += _TARGET_BYTES + 8 * len(group.members)
        self.size = size + _TARGET_BYTES * len(self.streams)

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


_NO_TARGETS: Final[List[Target]] = []  # of discarded routes; stays empty


def is_reserved(topic: str) -> bool:
    """Whether no client may publish to the topic: $SYS is the broker's, and $share/ is a form of subscription."""
    return topic.startswith("$") and (topic == "$SYS" or topic.startswith("$SYS/") or topic.startswith("$share/"))


class FilterChanges:
    """The wildcard filters that changed last, each with the revision of its last change.

    Revisions ascend. At least ``capacity`` and at most twice as many filters are recorded, in two tries: when the newer
    one is full it replaces the older one.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._unrecorded = 0  # changes up to this revision are not recorded
        self._older = SubscriptionTrie()
        self._older_end = 0  # the last revision in `_older`
        self._newer = SubscriptionTrie()

    def record(self, topic_filter: str, revision: int) -> None:
        if len(self._newer) >= self.capacity:
            self._unrecorded = self._older_end
            self._older = self._newer
            self._older_end = revision - 1
            self._newer = SubscriptionTrie()
        self._newer.insert(topic_filter, "", revision)

    def record_all(self, revision: int) -> None:
        """Record a change of every filter."""
        self._unrecorded = self._older_end = revision
        self._older = SubscriptionTrie()
        self._newer = SubscriptionTrie()

    def since(self, revision: int, topic: str) -> bool:
        """Whether a filter that matches ``topic`` may have changed after ``revision``."""
        if revision < self._unrecorded:
            return True
        for changed in self._newer.match(topic):
            if cast(int, changed) > revision:
                return True
        if revision < self._older_end:
            for changed in self._older.match(topic):
                if cast(int, changed) > revision:
                    return True
        return False


class Router:
    """Subscriptions and the cache of routes.

    A cached route is valid only while its ``revision`` equals the router's; `route` sees to that. Both limits of the
    cache may be exceeded by the newest route.
    """

    def __init__(
        self,
        cache_size: int,
        cache_bytes: int,
        max_levels: int,
        max_length: int,
        streams: List[StreamRule],
        strategy: Strategy,
    ) -> None:
        self.cache: Dict[bytes, Route] = {}
        self.cache_size = cache_size
        self.cache_bytes = cache_bytes
        self.cached_bytes = 0  # sizes of the routes in `cache`
        self.max_levels = max_levels
        self.max_length = max_length
        self.streams = streams
        self.strategy = strategy  # of all shared subscriptions
        self.rules: Optional[Rules] = None  # None if every client may read every topic
        self.groups: Dict[str, Group] = {}
        self._groups_of: Dict[str, List[Group]] = {}  # by filter
        self.revision = 0  # number of changes of wildcard filters
        self._trie = SubscriptionTrie()
        self._changes = FilterChanges(RECORDED_FILTERS)
        self._to_sweep: List[bytes] = []  # topics of cached routes that may name ended sessions
        self._sessions_ended = False  # since `_to_sweep` was filled
        self._stream_trie = SubscriptionTrie()
        for rule in streams:
            for topic_filter in rule.filters:
                self._stream_trie.insert(topic_filter, rule, rule)

    @property
    def subscriptions(self) -> int:
        """The number of subscriptions; a shared one counts once per group."""
        return len(self._trie)

    def matching(self, topic: str) -> List[object]:
        """The subscriptions and the groups whose filters match a topic."""
        return self._trie.match(topic)

    def matching_filters(self, topic: str) -> List[Tuple[str, int]]:
        """The filters that match a topic, each with its number of subscriptions and groups."""
        found: List[Tuple[str, int]] = []
        for value, count in self._trie.count_matches(topic):
            topic_filter = value.topic_filter if isinstance(value, Group) else cast(Subscription, value).topic_filter
            found.append((topic_filter, count))
        return found

    def groups_of(self, topic_filter: str) -> List[Group]:
        """The shared subscriptions with this filter."""
        return self._groups_of.get(topic_filter, [])

    def route(self, topic_bytes: bytes) -> Route:
        """The route of a topic name; MQTTError if the name is not valid or not allowed."""
        route = self.cache.get(topic_bytes)
        if route is not None:
            if route.revision != self.revision:
                if self._changes.since(route.revision, route.topic):
                    topic = route.topic
                    self._drop(topic_bytes)
                    return self._add(topic, topic_bytes)
                route.revision = self.revision
            return route
        return self._add(self.topic_of(topic_bytes), topic_bytes)

    def topic_of(self, topic_bytes: bytes) -> str:
        """The topic name in these bytes; MQTTError if it is not valid or not allowed."""
        topic = text_of(topic_bytes)
        if not is_valid_topic(topic):
            raise MQTTError(MALFORMED_PACKET, "invalid topic name")  # [MQTT-3.3.2-2]
        if len(topic_bytes) > self.max_length:
            raise MQTTError(TOPIC_NAME_INVALID, f"topic name of {len(topic_bytes)} bytes")
        if topic.count("/") >= self.max_levels:
            raise MQTTError(TOPIC_NAME_INVALID, f"more than {self.max_levels} topic levels")
        return topic

    def _add(self, topic: str, topic_bytes: bytes) -> Route:
        """Build a route, and cache it unless its topic is reserved."""
        route = self._build(topic, topic_bytes)
        if route.reserved:
            return route
        route.measure()
        if len(self.cache) >= self.cache_size or self.cached_bytes + route.size > self.cache_bytes:
            self._evict(route.size)
        self.cache[topic_bytes] = route
        self.cached_bytes += route.size
        return route

    def subscribe(self, subscription: Subscription) -> None:
        """Add or replace a subscription that is not shared."""
        self._trie.insert(subscription.topic_filter, subscription.session, subscription)
        self._invalidate(subscription.topic_filter)

    def unsubscribe(self, subscription: Subscription) -> None:
        self._trie.remove(subscription.topic_filter, subscription.session)
        self._invalidate(subscription.topic_filter)

    def join(self, name: str, topic_filter: str, subscription: Subscription) -> None:
        """Add or replace a session's membership of a shared subscription."""
        key = f"{name}/{topic_filter}"
        group = self.groups.get(key)
        if group is None:
            group = Group(name, topic_filter)
            self.groups[key] = group
            self._groups_of.setdefault(topic_filter, []).append(group)
            self._trie.insert(topic_filter, group, group)
            self._invalidate(topic_filter)
        group.add(Member(subscription))
        if self.rules is not None:  # then routes hold copies of the group
            self._invalidate(topic_filter)

    def leave(self, name: str, topic_filter: str, session: Session) -> None:
        """End a session's membership of a shared subscription."""
        key = f"{name}/{topic_filter}"
        group = self.groups.get(key)
        if group is None:
            return
        group.remove(session)
        if not group.members:
            del self.groups[key]
            self._groups_of[topic_filter].remove(group)
            if not self._groups_of[topic_filter]:
                del self._groups_of[topic_filter]
            self._trie.remove(topic_filter, group)
        if not group.members or self.rules is not None:
            self._invalidate(topic_filter)

    def permitted(self, group: Group, topic: str) -> Group:
        """The group, or a copy of it that has only the members that may read ``topic``."""
        rules = self.rules
        if rules is None:
            return group
        permitted = Group(group.name, group.topic_filter)
        permitted.original = group
        for member in group.members:
            if rules.may_read(member.session, topic):
                permitted.add(member)
        return group if len(permitted.members) == len(group.members) else permitted

    def invalidate_session(self, session: Session) -> None:
        """Rebuild the routes that may name a session: the topics it may read have changed."""
        for subscription in session.subscriptions.values():
            shared = parse_shared(subscription.topic_filter)
            self._invalidate(subscription.topic_filter if shared is None else shared[1])

    def invalidate_all(self) -> None:
        """Rebuild all routes: the rules have changed."""
        self.revision += 1
        self._changes.record_all(self.revision)

    def _invalidate(self, topic_filter: str) -> None:
        """Invalidate the cached routes that a filter matches."""
        if not self.cache:
            return
        if has_wildcard(topic_filter):
            self.revision += 1
            self._changes.record(topic_filter, self.revision)
        else:
            self._drop(topic_filter.encode("utf-8"))

    def _drop(self, topic_bytes: bytes) -> None:
        """Remove a route from the cache, if it has one for these bytes."""
        route = self.cache.pop(topic_bytes, None)
        if route is not None:
            self.cached_bytes -= route.size
            route.discard()

    def _evict(self, size: int) -> None:
        """Evict the oldest routes, some at a time, until a route of ``size`` bytes has room or the cache is empty."""
        count: int = min(max(1, self.cache_size // 16), MAX_EVICTED)
        for topic_bytes in list(islice(self.cache, count)):
            self._drop(topic_bytes)
        while self.cache and self.cached_bytes + size > self.cache_bytes:
            for topic_bytes in list(islice(self.cache, MAX_EVICTED)):
                self._drop(topic_bytes)

    def session_ended(self) -> None:
        """A session has ended, and its subscriptions are removed: routes that name it are dropped by and by."""
        self._sessions_ended = True
        self.sweep(SWEPT_PER_SESSION)

    def sweep(self, budget: int) -> None:
        """Drop cached routes that name ended sessions; visits about ``budget`` routes and targets."""
        if not self._to_sweep:
            if not self._sessions_ended:
                return
            self._sessions_ended = False
            self._to_sweep = list(self.cache)
        visited: int = 0
        while visited < budget and self._to_sweep:
            topic_bytes = self._to_sweep.pop()
            route = self.cache.get(topic_bytes)
            visited += 1
            if route is None or route.revision == self.revision:
                continue
            visited += len(route.targets)
            if route.names_ended_session():
                self._drop(topic_bytes)

    def _build(self, topic: str, topic_bytes: bytes) -> Route:
        route = Route(topic, topic_bytes)
        route.revision = self.revision
        rules = self.rules
        targets: Dict[Session, Target] = {}
        denied: Dict[Session, bool] = {}
        matched = self._trie.match(topic)
        for value in matched:
            if isinstance(value, Group):
                group = self.permitted(value, topic)
                if group.members:
                    route.groups.append(group)
                continue
            subscription = cast(Subscription, value)
            session = subscription.session
            target = targets.get(session)
            if target is None:
                if rules is not None and (session in denied or not rules.may_read(session, topic)):
                    denied[session] = True
                    continue
                target = Target(session)
                targets[session] = target
            target.merge(subscription)
            if subscription.options & NO_LOCAL:
                target.no_local = True
        route.targets = list(targets.values())
        route.has_targets = bool(targets)
        for target in route.targets:
            if target.no_local:
                route.no_local = True
                target.without_no_local = _without_no_local(target.session, matched)
        for value in self._stream_trie.match(topic):
            rule = cast(StreamRule, value)
            if all(sink.rule is not rule for sink in route.streams):
                partition = crc32(topic_bytes) % rule.partitions if rule.key == "topic" else -1
                route.streams.append(StreamSink(rule, partition))
        route.direct = not route.groups and not route.streams
        route.unpersisted = not route.streams
        for target in route.targets:
            if target.session.id != 0:
                route.unpersisted = False
        route.durable = not route.direct or not route.unpersisted
        return route


def _without_no_local(session: Session, matched: List[object]) -> Optional[Target]:
    """A session's target of its matching subscriptions without No Local; None if all have it."""
    target: Optional[Target] = None
    for value in matched:
        if isinstance(value, Subscription) and value.session is session and not value.options & NO_LOCAL:
            if target is None:
                target = Target(session)
            target.merge(value)
    return target
