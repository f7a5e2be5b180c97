"""Subscriptions for operators: of a client, to a filter, and those that get the messages of a topic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mqttbroker.admin.control.slices import MAX_VISITS, SLICE, ControlError, Cursors, Slices, check_filter, check_limit
from mqttbroker.admin.control.views import SubscriptionPage, SubscriptionView
from mqttbroker.core.access.policy import Rules
from mqttbroker.core.routing.groups import Group, Member
from mqttbroker.core.routing.router import Router
from sessions.registry import Registry
from sessions.session import NO_LOCAL, RETAIN_AS_PUBLISHED, Session, Subscription
from topic_matcher.filters import is_valid_topic, parse_shared
from topic_matcher.trie import TrieSearch

MATCHES = 2048  # subscriptions that a listing holds; if there are more, all sessions are visited


class SubscriptionControl:
    """The subscriptions of one broker."""

    def __init__(self, router: Router, registry: Registry, rules: Rules) -> None:
        self._router = router
        self._registry = registry
        self._rules = rules
        self._cursors: Cursors[_SubscriptionListing] = Cursors()

    def open_client(self, client_id: str) -> int:
        """A cursor for the subscriptions of one session."""
        session = self._registry.get(client_id)
        if session is None:
            raise ControlError(f"no session {client_id!r}")
        return self._cursors.open(_SubscriptionListing(list(session.subscriptions.values())))

    def open_subscribers(self, topic_filter: str) -> int:
        """A cursor for the subscriptions to exactly this filter, which may be shared."""
        check_filter(topic_filter)
        shared = parse_shared(topic_filter)
        if shared is not None:
            group = self._router.groups.get(f"{shared[0]}/{shared[1]}")
            return self._cursors.open(_SubscriptionListing([] if group is None else [group]))
        # A filter matches the topic that has a letter in the place of each wildcard.
        listing = self._matching(topic_filter.replace("+", "x").replace("#", "x"), topic_filter)
        return self._cursors.open(listing)

    def open_receivers(self, topic: str) -> int:
        """A cursor for the subscriptions that match a topic, of the sessions that may read it.

        A message of the topic goes to one member of a shared subscription only.
        """
        if not is_valid_topic(topic):
            raise ControlError(f"not a topic name: {topic!r}")
        rules = self._rules
        may_read = (lambda session: rules.may_read(session, topic)) if rules.restrictive else None
        return self._cursors.open(self._matching(topic, "", may_read))

    def _matching(self, topic: str, topic_filter: str, may_read: Callable[[Session], bool] | None = None) -> _SubscriptionListing:
        """The subscriptions that match a topic; only those to ``topic_filter`` unless that is empty."""
        search = _MatchingSearch(self._router, self._registry, topic, topic_filter)
        return _SubscriptionListing([], topic_filter, may_read, search)

    def page(self, cursor: int, limit: int = 100) -> Slices[SubscriptionPage]:
        """The next ``limit`` subscriptions of a cursor; those that have ended since it was opened are left out.

        There are fewer if `MAX_VISITS` subscriptions and sessions were visited.
        """
        check_limit(limit)
        listing = self._cursors.take(cursor)
        found: list[SubscriptionView] = []
        for _ in range(MAX_VISITS // SLICE):
            found += listing.step(limit - len(found))
            if listing.done:
                return SubscriptionPage(tuple(found), 0)
            if len(found) == limit:
                break
            yield 0.0
        return SubscriptionPage(tuple(found), self._cursors.open(listing))


class _SessionWalk:
    """The subscriptions of all sessions to any of these filters, a slice at a time."""

    def __init__(self, registry: Registry, filters: set[str]) -> None:
        self._registry = registry
        self._filters = filters
        self._start = ""
        self._client_ids: list[str] = []  # of the next sessions, the first one last
        self._subscriptions: Mapping[str, Subscription] = {}  # of the session that is visited
        self._candidates: list[str] = []  # filters that it may have
        self.done = not filters

    def step(self) -> list[Subscription]:
        found: list[Subscription] = []
        visits = SLICE
        while visits > 0 and not self.done:
            if not self._candidates:
                self._next_session()
                visits -= not self._candidates
            while self._candidates and visits > 0:
                visits -= 1
                topic_filter = self._candidates.pop()
                subscription = self._subscriptions.get(topic_filter)
                if subscription is not None and topic_filter in self._filters:
                    found.append(subscription)
        return found

    def _next_session(self) -> None:
        if not self._client_ids:
            self._client_ids = self._registry.client_ids.at_least(self._start, SLICE)
            if not self._client_ids:
                self.done = True
                return
            self._start = self._client_ids[-1] + "\0"
            self._client_ids.reverse()
        session = self._registry.get(self._client_ids.pop())
        own = self._subscriptions = {} if session is None else session.subscriptions
        self._candidates = list(own if len(own) < len(self._filters) else self._filters)


class _MatchingSearch:
    """The subscriptions and shared subscriptions that match a topic, a slice at a time; if they are many, only those to
    ``topic_filter`` unless it is empty."""

    def __init__(self, router: Router, registry: Registry, topic: str, topic_filter: str) -> None:
        self._router = router
        self._registry = registry
        self._topic = topic
        self._topic_filter = topic_filter
        self._filters: set[str] = set()
        self._groups: list[Any] = []  # shared subscriptions with these filters
        self._matches = 0
        self._counting = router.search(topic, True)
        self._matching: TrieSearch | None = None
        self._walk: _SessionWalk | None = None

    @property
    def done(self) -> bool:
        if self._walk is not None:
            return self._walk.done
        return self._matching is not None and self._matching.done and not self._matching.found

    def step(self) -> list[Any]:
        if self._walk is not None:
            return list(self._walk.step())
        if self._matching is not None:
            self._matching.step(SLICE)
            return _take(self._matching)
        self._counting.step(SLICE)
        for value, count in _take(self._counting):
            self._matches += count
            if self._topic_filter in ("", value.topic_filter):
                self._filters.add(value.topic_filter)
                if not self._topic_filter:
                    self._groups += self._router.groups_of(value.topic_filter)
        if not self._counting.done:
            return []
        if self._matches <= MATCHES:
            self._matching = self._router.search(self._topic)
            return []
        self._walk = _SessionWalk(self._registry, self._filters)
        return self._groups


def _take(search: TrieSearch) -> list[Any]:
    found = list(search.found)
    search.found.clear()
    return found


class _SubscriptionListing:
    """Subscriptions, a slice at a time: ``matching``, and then those of a ``search``.

    Listed are those to ``topic_filter``, if it is not empty, of the sessions for which ``may_read`` holds.
    """

    def __init__(
        self,
        matching: list[Any],
        topic_filter: str = "",
        may_read: Callable[[Session], bool] | None = None,
        search: _MatchingSearch | None = None,
    ) -> None:
        self._left = matching  # Subscription, Group, or Member of the last Group visited
        self._search = search
        self._topic_filter = topic_filter
        self._may_read = may_read
        self._group_filter = ""

    @property
    def done(self) -> bool:
        return not self._left and (self._search is None or self._search.done)

    def step(self, limit: int) -> list[SubscriptionView]:
        """Visit a slice; returns up to ``limit`` subscriptions."""
        found: list[SubscriptionView] = []
        if not self._left and self._search is not None and not self._search.done:
            self._left = self._search.step()
        visits = SLICE
        while self._left and visits and len(found) < limit:
            visits -= 1
            item = self._left.pop()
            if isinstance(item, Group):
                self._group_filter = f"$share/{item.name}/{item.topic_filter}"
                if self._topic_filter in ("", self._group_filter):
                    self._left += item.members
                continue
            topic_filter = self._group_filter if isinstance(item, Member) else item.topic_filter
            subscription = item.session.subscriptions.get(topic_filter)
            if subscription is None or self._topic_filter not in ("", topic_filter):
                continue
            if self._may_read is None or self._may_read(item.session):
                found.append(_subscription_view(subscription))
        return found


def _subscription_view(subscription: Subscription) -> SubscriptionView:
    session = subscription.session
    return SubscriptionView(
        client_id=session.client_id,
        topic_filter=subscription.topic_filter,
        qos=subscription.qos,
        no_local=bool(subscription.options & NO_LOCAL),
        retain_as_published=bool(subscription.options & RETAIN_AS_PUBLISHED),
        identifier=subscription.identifier,
        connected=session.connection is not None,
    )
