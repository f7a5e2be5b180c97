"""Routing: from the bytes of a topic name to all recipients of its messages.

Routes are cached by topic bytes. A cached route always equals a lookup in the trie: each subscription change raises the
router's revision and is recorded by its filter; a route of an older revision is checked against the recorded filters at
its next use, and rebuilt only if one of them matches its topic. The cache is bounded in routes and in bytes, and evicts
its oldest routes.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, cast
from zlib import crc32

from mypy_extensions import i64

from mqttbroker.codec.data_types import text_of
from mqttbroker.codec.reason_codes import MALFORMED_PACKET, TOPIC_NAME_INVALID, MQTTError
from mqttbroker.core.access.policy import Rules
from mqttbroker.core.routing.groups import Group, Member, RemoteMember, Strategy
from mqttbroker.core.routing.route import (
    BUILD_WORK,
    QUEUE_ROOT,
    QueueTopic,
    Route,
    RouteBuild,
    StreamRule,
    StreamSink,
    permitted_members,
)
from sessions.session import Session, Subscription
from topic_matcher.filters import has_wildcard, is_valid_topic, matches, parse_shared, text_bytes
from topic_matcher.trie import SubscriptionTrie, TrieSearch

RECORDED_FILTERS: Final = 2048  # changed filters that are recorded at least, unless they are long
RECORDED_BYTES: Final = 4_194_304  # memory of a trie of changed filters, at which it counts as full
MAX_EVICTED: Final = 256  # routes evicted at once
SWEPT_PER_SESSION: Final = 20  # routes and targets that `Router.session_ended` visits on average

_UNLIMITED: Final = 1 << 60
MATCH_WORK: Final = 500  # of a search of the recorded filters; after it, a change is assumed
WORK_LIMIT: Final = 1000  # of one client in one event-loop iteration; a unit is about 0.7 µs
LEAST_BUILD: Final = 300  # of the work limit, for a build behind other work
MAX_BUILDS: Final = 16  # unfinished builds at a time
BUILD_IDLE: Final = 4  # ticks without a step after which an unfinished build is dropped: its publisher has disconnected


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
        self._newer_bytes = 0

    def record(self, topic_filter: str, revision: int) -> None:
        if len(self._newer) >= self.capacity or self._newer_bytes >= RECORDED_BYTES:
            self._newer_bytes = 0
            self._unrecorded = self._older_end
            self._older = self._newer
            self._older_end = revision - 1
            self._newer = SubscriptionTrie()
        self._newer.insert(topic_filter, "", revision)
        self._newer_bytes += 2 * text_bytes(topic_filter)

    def record_all(self, revision: int) -> None:
        """Record a change of every filter."""
        self._unrecorded = self._older_end = revision
        self._older = SubscriptionTrie()
        self._newer = SubscriptionTrie()

    def since(self, revision: int, topic: str) -> bool:
        """Whether a filter that matches ``topic`` may have changed after ``revision``."""
        if revision < self._unrecorded:
            return True
        return _newer_than(revision, self._newer, topic) or (revision < self._older_end and _newer_than(revision, self._older, topic))


def _newer_than(revision: int, recorded: SubscriptionTrie, topic: str) -> bool:
    """Whether a filter that matches ``topic`` has a later revision, or too many filters would have to be searched."""
    search = recorded.search(topic)
    search.step(MATCH_WORK)
    if not search.done:
        return True
    for changed in search.found:
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
        streams: list[StreamRule],
        strategy: Strategy,
        clustered: bool = False,
    ) -> None:
        self.cache: dict[bytes, Route] = {}
        self.cache_size = cache_size
        self.cache_bytes = cache_bytes
        self.cached_bytes = 0  # sizes of the routes in `cache`
        self.max_levels = max_levels
        self.max_length = max_length
        self.strategy = strategy  # of all shared subscriptions
        self.rules: Rules | None = None  # None if every client may read every topic
        self.groups: dict[str, Group] = {}
        self._groups_of: dict[str, list[Group]] = {}  # by filter
        self.revision = 0  # number of changes of wildcard filters
        self._trie = SubscriptionTrie()
        self._changes = FilterChanges(RECORDED_FILTERS)
        # Work done since the reader of a client's packets set it to 0: steps of builds, filters of SUBSCRIBE packets.
        self.work: i64 = 0
        self._builds: dict[object, RouteBuild] = {}  # unfinished ones by publisher
        self._to_sweep: list[bytes] = []  # topics of cached routes that may name ended sessions
        self._sessions_ended = False  # since `_to_sweep` was filled
        self.streams: list[StreamRule] = []
        self.clustered = clustered  # routes are `Route.logged`
        self.queues: dict[str, str] = {}  # the streams of the queues that clients may publish to, by name
        self._sweep_budget = 0  # less than 0 after a visit to a long route
        self._stream_trie = SubscriptionTrie()
        for rule in streams:
            self.add_stream(rule)

    @property
    def subscriptions(self) -> int:
        """The number of subscriptions; a shared one counts once per group."""
        return len(self._trie)

    def search(self, topic: str, counted: bool = False) -> TrieSearch:
        """A search for the subscriptions and groups whose filters match a topic; if ``counted``, for one of each filter
        and their number."""
        return self._trie.search(topic, counted)

    def groups_of(self, topic_filter: str) -> list[Group]:
        """The shared subscriptions with this filter."""
        return self._groups_of.get(topic_filter, [])

    def route(self, topic_bytes: bytes) -> Route:
        """The route of a topic name; MQTTError if the name is not valid or not allowed."""
        route = self._cached(topic_bytes)
        if route is not None:
            return route
        build = RouteBuild(self.topic_of(topic_bytes), topic_bytes, self._trie, self.rules)
        build.step(_UNLIMITED)
        return self._add(build)

    def route_in_parts(self, topic_bytes: bytes, publisher: object) -> Route | None:
        """`route` for a publisher that waits: if None, it calls again in a later iteration of the event loop.

        Other publishers are served meanwhile, and subscriptions may change. A message is sent to every session that has
        a matching subscription from the arrival of the message to the end of the build.
        """
        route = self._cached(topic_bytes)
        if route is not None:
            return route
        build = self._builds.pop(publisher, None) if self._builds else None
        if build is None or build.topic_bytes != topic_bytes:
            build = RouteBuild(self.topic_of(topic_bytes), topic_bytes, self._trie, self.rules)
            self.work += BUILD_WORK
        self.work += build.step(max(LEAST_BUILD, WORK_LIMIT - self.work))
        if build.done:
            return self._add(build)
        if len(self._builds) < MAX_BUILDS:
            build.idle = 0
            self._builds[publisher] = build
        return None

    def first_wanted(self, topics: list[bytes], start: int) -> int:
        """The index, from ``start`` on, of the first topic that may have a target; the number of topics if there is none."""
        cache = self.cache
        revision = self.revision
        index: int = start
        count: int = len(topics)
        while index < count:
            route = cache.get(topics[index])
            if route is None or route.has_targets or route.revision != revision:
                break
            index += 1
        return index

    def _cached(self, topic_bytes: bytes) -> Route | None:
        """The cached route; None if there is none that is valid."""
        route = self.cache.get(topic_bytes)
        if route is not None and route.revision != self.revision:
            self.work += 2
            if self._changes.since(route.revision, route.topic):
                self._drop(topic_bytes)
                return None
            route.revision = self.revision
        return route

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

    def _add(self, build: RouteBuild) -> Route:
        """The route that was built.

        It is cached unless its topic is reserved or a matching filter changed meanwhile.
        """
        queue_topic = self.queue_topic(build.topic) if self.queues else None
        if queue_topic is None:
            route = build.finish(self._streams_of(build.topic, build.topic_bytes), None, self.clustered)
        else:
            sink = self._sink(queue_topic.rule, queue_topic.topic.encode("utf-8"))
            route = build.finish([sink], queue_topic)
        if route.reserved:
            return route
        if build.changed:
            route.revision = -1
            return route
        route.revision = self.revision
        if len(self.cache) >= self.cache_size or self.cached_bytes + route.size > self.cache_bytes:
            self._evict(route.size)
        self._drop(route.topic_bytes)
        self.cache[route.topic_bytes] = route
        self.cached_bytes += route.size
        return route

    def _streams_of(self, topic: str, topic_bytes: bytes) -> list[StreamSink]:
        """The streams that store the messages of a topic."""
        streams: list[StreamSink] = []
        for value in self._stream_trie.match(topic):
            rule = cast(StreamRule, value)
            if all(sink.rule is not rule for sink in streams):
                streams.append(self._sink(rule, topic_bytes))
        return streams

    def _sink(self, rule: StreamRule, topic_bytes: bytes) -> StreamSink:
        return StreamSink(rule, crc32(topic_bytes) % rule.partitions if rule.key == "topic" else -1)

    def queue_topic(self, topic: str) -> QueueTopic | None:
        """Where the messages of a topic ``$queue/NAME[/TOPIC]`` are stored; None if clients may not publish to it.

        Messages of ``$queue/NAME`` keep that topic.
        """
        if not topic.startswith(QUEUE_ROOT):
            return None
        name, slash, inner = topic[len(QUEUE_ROOT) :].partition("/")
        stream = self.queues.get(name)
        if stream is None:
            return None
        for rule in self.streams:
            if rule.name == stream:
                if not slash:
                    return QueueTopic(rule, topic)
                for topic_filter in rule.filters:
                    if inner and matches(topic_filter, inner):
                        return QueueTopic(rule, inner)
        return None

    def queue_refusal(self, topic: str) -> str:
        """Why no message can be stored under a topic of a queue that clients may publish to.

        "" if messages can be, and for all other topics.
        """
        if topic.startswith(QUEUE_ROOT) and self.queue_topic(topic) is None:
            name = topic[len(QUEUE_ROOT) :].partition("/")[0]
            stream = self.queues.get(name, "")
            if stream:
                for rule in self.streams:
                    if rule.name == stream:
                        return f"stream {stream} does not store the topic behind $queue/{name}/"
                return f"queue {name} has no stream {stream}"
        return ""

    def add_stream(self, rule: StreamRule) -> None:
        """Store the messages of a stream's filters from now on; no stream may have its name."""
        self.streams.append(rule)
        for topic_filter in rule.filters:
            self._stream_trie.insert(topic_filter, rule, rule)
            self._invalidate(topic_filter)
        self._invalidate_queues(rule.name)

    def remove_stream(self, name: str) -> None:
        """Store no message in the stream any more."""
        for rule in self.streams:
            if rule.name == name:
                self.streams.remove(rule)
                for topic_filter in rule.filters:
                    self._stream_trie.remove(topic_filter, rule)
                    self._invalidate(topic_filter)
                self._invalidate_queues(name)
                return

    def _invalidate_queues(self, stream: str) -> None:
        for name, source in self.queues.items():
            if source == stream:
                self._invalidate(f"{QUEUE_ROOT}{name}/#")

    def subscribe(self, subscription: Subscription) -> None:
        """Add or replace a subscription that is not shared."""
        self._trie.insert(subscription.topic_filter, subscription.session, subscription)
        self._invalidate(subscription.topic_filter)

    def unsubscribe(self, subscription: Subscription) -> None:
        self._trie.remove(subscription.topic_filter, subscription.session)
        self._invalidate(subscription.topic_filter)

    def join(self, name: str, topic_filter: str, subscription: Subscription) -> None:
        """Add or replace a session's membership of a shared subscription."""
        group = self._group(name, topic_filter)
        group.add(Member(subscription))
        if self.rules is not None:  # then routes hold copies of the group
            self._invalidate(topic_filter)

    def join_remote(self, name: str, topic_filter: str, shard: int, members: list[RemoteMember]) -> None:
        """Have these members of a shared subscription, and no others, on the core of a shard."""
        if not members and f"{name}/{topic_filter}" not in self.groups:
            return
        group = self._group(name, topic_filter)
        group.replace_remote(shard, members)
        if not group.members:
            self._remove_group(group)
        if not group.members or self.rules is not None:
            self._invalidate(topic_filter)

    def _group(self, name: str, topic_filter: str) -> Group:
        """The shared subscription, which is made if there is none."""
        key = f"{name}/{topic_filter}"
        group = self.groups.get(key)
        if group is None:
            group = Group(name, topic_filter)
            self.groups[key] = group
            self._groups_of.setdefault(topic_filter, []).append(group)
            self._trie.insert(topic_filter, group, group)
            self._invalidate(topic_filter)
        return group

    def _remove_group(self, group: Group) -> None:
        topic_filter = group.topic_filter
        del self.groups[f"{group.name}/{topic_filter}"]
        self._groups_of[topic_filter].remove(group)
        if not self._groups_of[topic_filter]:
            del self._groups_of[topic_filter]
        self._trie.remove(topic_filter, group)

    def leave(self, name: str, topic_filter: str, session: Session) -> None:
        """End a session's membership of a shared subscription."""
        group = self.groups.get(f"{name}/{topic_filter}")
        if group is None:
            return
        group.remove(session)
        if not group.members:
            self._remove_group(group)
        if not group.members or self.rules is not None:
            self._invalidate(topic_filter)

    def permitted(self, group: Group, topic: str) -> Group:
        """The group, or a copy of it that has only the members that may read ``topic``."""
        return permitted_members(self.rules, group, topic)

    def invalidate_session(self, session: Session) -> None:
        """Rebuild the routes that may name a session: the topics it may read have changed."""
        for subscription in session.subscriptions.values():
            shared = parse_shared(subscription.topic_filter)
            self._invalidate(subscription.topic_filter if shared is None else shared[1])

    def invalidate_all(self) -> None:
        """Rebuild all routes: the rules have changed."""
        self.revision += 1
        self._changes.record_all(self.revision)
        for build in self._builds.values():
            build.changed = True

    def _invalidate(self, topic_filter: str) -> None:
        """Invalidate the cached routes that a filter matches."""
        for build in self._builds.values():
            if not build.changed and matches(topic_filter, build.topic):
                build.changed = True
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

    def tick(self, budget: int) -> None:
        """Drop builds that were not continued for `BUILD_IDLE` ticks, and `sweep`; called some times per second."""
        for publisher, build in list(self._builds.items()):
            build.idle += 1
            if build.idle > BUILD_IDLE:
                del self._builds[publisher]
        self.sweep(budget)

    def sweep(self, budget: int) -> None:
        """Drop cached routes that name ended sessions; visits ``budget`` routes and targets on average."""
        if not self._to_sweep:
            if not self._sessions_ended:
                return
            self._sessions_ended = False
            self._to_sweep = list(self.cache)
        self._sweep_budget = min(self._sweep_budget, 0) + budget
        while self._sweep_budget > 0 and self._to_sweep:
            topic_bytes = self._to_sweep.pop()
            route = self.cache.get(topic_bytes)
            self._sweep_budget -= 1
            if route is None or route.revision == self.revision:
                continue
            self._sweep_budget -= len(route.targets)
            if route.names_ended_session():
                self._drop(topic_bytes)
