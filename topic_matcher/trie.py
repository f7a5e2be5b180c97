"""A trie of subscriptions, searched by topic name.

All literal levels between two wildcards are one dictionary key, so that a filter without wildcards is one lookup and a
million filters fit in memory. Searches use an explicit stack instead of recursion, because a filter may have more
levels than the C stack has room for.

A node stands for a position between two levels of a filter. The rest of the filter is empty (``here``), ``#``
(``rest``), ``+`` and more (``plus``), literal levels (``exact``), or literal levels followed by a wildcard
(``prefixes``).
"""

from __future__ import annotations

import sys
from typing import Final

from topic_matcher.filters import matches_from

_UNLIMITED: Final = 1 << 60

# A group is the subscribers of one filter: None, one (subscriber, value) pair, or a dict of several. A pair takes a
# third of the memory of the smallest dict.


class _Leaf:
    """The only subscription behind a prefix; ``suffix`` begins with a wildcard."""

    def __init__(self, suffix: str, subscriber: object, value: object) -> None:
        self.suffix = suffix
        self.subscriber = subscriber
        self.value = value


class _Node:
    """A position between two levels, as described in the module's docstring."""

    def __init__(self) -> None:
        self.here: object = None
        self.rest: object = None
        self.plus: _Node | None = None
        self.exact: dict[str, object] | None = None
        self.prefixes: dict[str, _Leaf | _Node] | None = None
        # Number of keys of ``prefixes`` by their number of levels: only these lengths are looked up.
        self.depths: list[int] | None = None

    def is_empty(self) -> bool:
        return self.here is None and self.rest is None and self.plus is None and self.exact is None and self.prefixes is None


def _same(one: object, other: object) -> bool:
    return one is other or one == other


def _added(group: object, subscriber: object, value: object) -> tuple[object, bool]:
    """The group with the subscriber added, and whether it was not in it before."""
    if group is None:
        return (subscriber, value), True
    if isinstance(group, dict):
        size = len(group)
        group[subscriber] = value
        return group, len(group) > size
    assert isinstance(group, tuple)
    if _same(group[0], subscriber):
        return (subscriber, value), False
    return {group[0]: group[1], subscriber: value}, True


def _without(group: object, subscriber: object) -> tuple[object, bool]:
    """The group without the subscriber, and whether it was in it before."""
    if group is None:
        return None, False
    if isinstance(group, dict):
        if subscriber not in group:
            return group, False
        del group[subscriber]
        if len(group) == 1:
            for pair in group.items():
                return pair, True
        return group, True
    assert isinstance(group, tuple)
    if _same(group[0], subscriber):
        return None, True
    return group, False


def _collect(found: list[object], group: object, counted: bool) -> None:
    """Append the values of a group; or, if ``counted``, one of them with the size of the group."""
    if isinstance(group, tuple):
        found.append((group[1], 1) if counted else group[1])
    elif isinstance(group, dict):
        if counted:
            for value in group.values():
                found.append((value, len(group)))
                break
        else:
            found.extend(group.values())


def _wildcard(topic_filter: str, pos: int) -> int:
    """Position of the first wildcard at or after ``pos``; -1 if there is none."""
    plus = topic_filter.find("+", pos)
    if plus >= 0:
        return plus  # "#" can only be last
    if topic_filter[-1] == "#":
        return len(topic_filter) - 1
    return -1


class SubscriptionTrie:
    """A map of (filter, subscriber) to values, for valid filters without ``$share``.

    Subscribers are hashable.
    """

    def __init__(self) -> None:
        self._root = _Node()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def insert(self, topic_filter: str, subscriber: object, value: object) -> bool:
        """Add or replace; False if the subscriber had the filter before."""
        new = _insert(self._root, topic_filter, 0, subscriber, value)
        if new:
            self._size += 1
        return new

    def remove(self, topic_filter: str, subscriber: object) -> bool:
        """Remove; False if the subscriber did not have the filter."""
        # The nodes on the path, and the key that leads out of each ("+" or a prefix).
        nodes: list[_Node] = []
        keys: list[str] = []
        node = self._root
        pos = 0
        size = len(topic_filter)
        while True:
            wildcard = _wildcard(topic_filter, pos) if pos <= size else -1
            if wildcard < 0 or (wildcard == pos and topic_filter[pos] == "#"):
                removed = _remove_last(node, topic_filter, pos, wildcard, subscriber)
                break
            if wildcard == pos:
                nodes.append(node)
                keys.append("+")
                if node.plus is None:
                    return False
                node = node.plus
                pos += 2
                continue
            prefix = topic_filter[pos : wildcard - 1]
            child = None if node.prefixes is None else node.prefixes.get(prefix)
            if child is None:
                return False
            if isinstance(child, _Leaf):
                removed = _same(child.subscriber, subscriber) and child.suffix == (topic_filter[wildcard:])
                if removed:
                    _remove_prefix(node, prefix)
                break
            nodes.append(node)
            keys.append(prefix)
            node = child
            pos = wildcard
        if removed:
            self._size -= 1
            _prune(nodes, keys, node)
        return removed

    def match(self, topic: str) -> list[object]:
        """The values of all matching filters, in no particular order; one value per matching filter."""
        search = TrieSearch(self, topic, False)
        search.step(_UNLIMITED)
        return search.found

    def search(self, topic: str, counted: bool = False) -> TrieSearch:
        """`match` in parts; if ``counted``, one value of each matching filter with the number of its values, in a time
        that does not depend on that number."""
        return TrieSearch(self, topic, counted)


class TrieSearch:
    """A search for the filters that match a topic, which may take several steps.

    ``found`` has what `SubscriptionTrie.match` returns. Of filters that are inserted or removed between two steps it
    has some.
    """

    def __init__(self, trie: SubscriptionTrie, topic: str, counted: bool) -> None:
        self.found: list[object] = []
        self._topic = topic
        self._counted = counted
        # Start of each level, and of the one that would follow.
        self._starts: list[int] = [0]
        # The nodes to visit, and the number of levels matched at each.
        self._nodes: list[_Node] = []
        self._depths: list[int] = []
        root = trie._root
        if root.exact is not None:
            _collect(self.found, root.exact.get(topic), counted)
        wildcard_first = topic[0] != "$"  # [MQTT-4.7.2-1]
        if wildcard_first and root.rest is not None:
            _collect(self.found, root.rest, counted)
        plus = root.plus if wildcard_first else None
        if root.prefixes is None and plus is None:
            return
        starts = self._starts
        start = 0
        for level in topic.split("/"):
            start += len(level) + 1
            starts.append(start)
        if root.prefixes is not None:
            _follow(root, topic, starts, 0, self.found, self._nodes, self._depths, counted)
        if plus is not None:
            self._nodes.append(plus)
            self._depths.append(1)

    @property
    def done(self) -> bool:
        return not self._nodes

    def step(self, budget: int) -> int:
        """Visit nodes until the search is done or the cost reaches ``budget``; returns the cost: one per node and per
        dictionary looked up, and one per 512 characters of a key."""
        topic = self._topic
        counted = self._counted
        found = self.found
        starts = self._starts
        nodes = self._nodes
        depths = self._depths
        end = len(starts) - 1
        cost = 0
        while nodes and cost < budget:
            node = nodes.pop()
            depth = depths.pop()
            cost += 1
            if node.rest is not None:
                _collect(found, node.rest, counted)
            if depth == end:
                if node.here is not None:
                    _collect(found, node.here, counted)
                continue
            if node.exact is not None:
                _collect(found, node.exact.get(topic[starts[depth] :]), counted)
                cost += (len(topic) - starts[depth]) >> 9
            if node.prefixes is not None:
                cost += _follow(node, topic, starts, depth, found, nodes, depths, counted)
            if node.plus is not None:
                nodes.append(node.plus)
                depths.append(depth + 1)
        return cost


def _follow(
    node: _Node,
    topic: str,
    starts: list[int],
    matched: int,
    found: list[object],
    nodes: list[_Node],
    depths: list[int],
    counted: bool,
) -> int:
    """Look up the literal levels after the first ``matched`` ones; append matching leaves and the nodes to visit.

    Returns the cost as for `TrieSearch.step`.
    """
    prefixes = node.prefixes
    sizes = node.depths
    assert prefixes is not None and sizes is not None
    start = starts[matched]
    cost = 0
    for size in range(1, min(len(sizes), len(starts) - matched)):
        if sizes[size]:
            after = starts[matched + size]
            cost += 1 + ((after - start) >> 9)
            child = prefixes.get(topic[start : after - 1])
            if child is None:
                continue
            if isinstance(child, _Leaf):
                if child.suffix == "#" or matches_from(child.suffix, 0, topic, after):
                    found.append((child.value, 1) if counted else child.value)
            else:
                nodes.append(child)
                depths.append(matched + size)
    return cost


def _insert(node: _Node, topic_filter: str, pos: int, subscriber: object, value: object) -> bool:
    """Insert the rest of the filter, from ``pos`` on, below ``node``."""
    size = len(topic_filter)
    while pos <= size:
        wildcard = _wildcard(topic_filter, pos)
        if wildcard < 0:
            if node.exact is None:
                node.exact = {}
            rest = topic_filter[pos:] if pos else topic_filter
            node.exact[rest], new = _added(node.exact.get(rest), subscriber, value)
            return new
        if wildcard > pos:
            prefix = topic_filter[pos : wildcard - 1]
            child = None if node.prefixes is None else node.prefixes.get(prefix)
            if child is None:
                leaf = _Leaf(sys.intern(topic_filter[wildcard:]), subscriber, value)
                _add_prefix(node, prefix, leaf)
                return True
            if isinstance(child, _Leaf):
                if _same(child.subscriber, subscriber) and child.suffix == topic_filter[wildcard:]:
                    child.value = value
                    return False
                child = _expanded(child)
                assert node.prefixes is not None
                node.prefixes[prefix] = child
            node = child
            pos = wildcard
        if topic_filter[pos] == "#":
            node.rest, new = _added(node.rest, subscriber, value)
            return new
        if node.plus is None:
            node.plus = _Node()
        node = node.plus
        pos += 2
    node.here, new = _added(node.here, subscriber, value)
    return new


def _expanded(leaf: _Leaf) -> _Node:
    node = _Node()
    _insert(node, leaf.suffix, 0, leaf.subscriber, leaf.value)
    return node


def _add_prefix(node: _Node, prefix: str, child: _Leaf) -> None:
    if node.prefixes is None or node.depths is None:
        node.prefixes = {}
        node.depths = []
    node.prefixes[prefix] = child
    depth = prefix.count("/") + 1
    while len(node.depths) <= depth:
        node.depths.append(0)
    node.depths[depth] += 1


def _remove_prefix(node: _Node, prefix: str) -> None:
    assert node.prefixes is not None and node.depths is not None
    del node.prefixes[prefix]
    if not node.prefixes:
        node.prefixes = None
        node.depths = None
        return
    node.depths[prefix.count("/") + 1] -= 1
    while node.depths[-1] == 0:
        node.depths.pop()


def _remove_last(node: _Node, topic_filter: str, pos: int, wildcard: int, subscriber: object) -> bool:
    """Remove the subscriber from the group in which the filter ends: ``rest``, ``exact`` or ``here``."""
    if wildcard >= 0:
        node.rest, removed = _without(node.rest, subscriber)
        return removed
    if pos > len(topic_filter):
        node.here, removed = _without(node.here, subscriber)
        return removed
    if node.exact is None:
        return False
    rest = topic_filter[pos:] if pos else topic_filter
    group, removed = _without(node.exact.get(rest), subscriber)
    if group is not None:
        node.exact[rest] = group
    elif removed:
        del node.exact[rest]
        if not node.exact:
            node.exact = None
    return removed


def _prune(nodes: list[_Node], keys: list[str], node: _Node) -> None:
    """Remove ``node`` and its ancestors while they are empty."""
    while nodes and node.is_empty():
        parent = nodes.pop()
        key = keys.pop()
        if key == "+":
            parent.plus = None
        else:
            _remove_prefix(parent, key)
        node = parent
