"""A tree of topic names with values, searched by topic filter.

A scan stays valid while the tree changes: a topic that is present from the first `Scan.read` to the last is found
exactly once. The children of a branch are a dictionary and a linked list that grows only at its end; a removed child
keeps its ``next``, so that a scan positioned on it can continue.

The tree is compressed: a topic without siblings below some level is one leaf at that level, and branches exist only
where topics differ.
"""

from __future__ import annotations

from topic_matcher.filters import matches


class Stored:
    """A topic and its value; valid until the tree changes."""

    def __init__(self, topic: str, value: object) -> None:
        self.topic = topic  # "" for a branch that is not a topic itself
        self.value = value
        self.live = True  # False once removed; then a scan continues with ``next``
        self.next: Stored | None = None
        self.previous: Stored | None = None


class _Branch(Stored):
    """A level with children; possibly a topic itself."""

    def __init__(self, topic: str, value: object) -> None:
        super().__init__(topic, value)
        self.children: dict[str, Stored] = {}
        self.first: Stored | None = None
        self.last: Stored | None = None

    def append(self, level: str, child: Stored) -> None:
        self.children[level] = child
        child.previous = self.last
        if self.last is None:
            self.first = child
        else:
            self.last.next = child
        self.last = child

    def remove(self, level: str) -> None:
        child = self.children.pop(level)
        before = child.previous
        after = child.next
        if before is None:
            self.first = after
        else:
            before.next = after
        if after is None:
            self.last = before
        else:
            after.previous = before
        child.live = False
        child.previous = None

    def replace(self, level: str, child: Stored) -> None:
        """Replace the child at ``level``; scans positioned on it continue with the new one."""
        old = self.children[level]
        self.children[level] = child
        child.previous = old.previous
        child.next = old.next
        if old.previous is None:
            self.first = child
        else:
            old.previous.next = child
        if old.next is None:
            self.last = child
        else:
            old.next.previous = child
        old.live = False
        old.previous = None
        old.next = child


class Scan:
    """A search for the topics that match a filter; each `read` continues it."""

    def __init__(self, root: _Branch, topic_filter: str) -> None:
        self._filter = topic_filter
        self._levels: list[str] = topic_filter.split("/")
        # One frame per wildcard level: the entry to visit next, and the filter level of its children.
        self._waiting: list[Stored | None] = [root]
        self._depths: list[int] = [0]
        self._found: list[Stored] = []
        self.visited = 0  # entries visited by the last `read_within`

    @property
    def done(self) -> bool:
        """Whether all entries have been visited."""
        return not self._waiting

    def read(self, limit: int) -> list[Stored]:
        """The next matches, at most ``limit`` (at least 1); empty at the end."""
        found: list[Stored] = []
        while not found and not self.done:
            found = self.read_within(limit, 1024)
        return found

    def read_within(self, limit: int, visits: int) -> list[Stored]:
        """The next matches among about ``visits`` entries, at most ``limit``; empty at the end, or if none matched.

        A filter like ``+/+/rare`` visits many more entries than it finds.
        """
        found: list[Stored] = []
        self._found = found
        budget = visits
        waiting = self._waiting
        depths = self._depths
        levels = self._levels
        topic_filter = self._filter
        while waiting and visits > 0 and len(found) < limit:
            entry = waiting.pop()
            depth = depths.pop()
            rest = depth < len(levels) and levels[depth] == "#"
            while entry is not None and visits > 0 and len(found) < limit:
                after = entry.next
                if entry.live:
                    visits -= 1
                    if isinstance(entry, _Branch):
                        waiting.append(after)
                        depths.append(depth)
                        self._visit(entry, depth)
                        entry = None
                        break
                    if (rest and entry.topic[0] != "$") or matches(topic_filter, entry.topic):
                        found.append(entry)
                entry = after
            if entry is not None:
                waiting.append(entry)
                depths.append(depth)
        self.visited = budget - visits
        return found

    def _visit(self, entry: Stored, depth: int) -> None:
        """Descend from an entry that matches ``depth`` levels: record a match, or push a frame for its children."""
        levels = self._levels
        while isinstance(entry, _Branch):
            if depth == len(levels):
                if entry.topic:
                    self._record(entry)
                return
            level = levels[depth]
            if level == "#":
                if entry.topic:
                    self._record(entry)
                self._waiting.append(entry.first)
                self._depths.append(depth)
                return
            if level == "+":
                self._waiting.append(entry.first)
                self._depths.append(depth + 1)
                return
            child = entry.children.get(level)
            if child is None:
                return
            entry = child
            depth += 1
        self._record(entry)

    def _record(self, entry: Stored) -> None:
        if matches(self._filter, entry.topic):
            self._found.append(entry)


class Level:
    """One level below a prefix of topics."""

    def __init__(self, name: str, own: Stored | None, below: bool) -> None:
        self.name = name
        self.own = own  # the topic that ends with this level, if it is stored
        self.below = below  # whether stored topics continue after it


class LevelScan:
    """The levels that follow a prefix of topics; each `read` continues it."""

    def __init__(self, root: _Branch, prefix: list[str]) -> None:
        self._root = root
        self._prefix = prefix
        self._depth = len(prefix)
        self._begun = False
        self._next: Stored | None = None
        self._single = False  # the prefix lies inside of one compressed topic

    def _begin(self) -> None:
        self._begun = True
        prefix = self._prefix
        entry: Stored = self._root
        for depth in range(len(prefix)):
            if isinstance(entry, _Branch):
                child = entry.children.get(prefix[depth])
                if child is None:
                    return
                entry = child
            else:
                levels = entry.topic.split("/", depth + 1)
                if len(levels) <= depth or levels[depth] != prefix[depth]:
                    return
        if isinstance(entry, _Branch):
            self._next = entry.first
        elif entry.topic.count("/") >= self._depth:
            self._next = entry
            self._single = True

    @property
    def done(self) -> bool:
        return self._begun and self._next is None

    def read(self, visits: int) -> list[Level]:
        """The levels of the next ``visits`` entries, each at most once."""
        if not self._begun:
            self._begin()
        found: list[Level] = []
        entry = self._next
        while entry is not None and visits > 0:
            visits -= 1
            if entry.live:
                found.append(self._level(entry))
            entry = None if self._single else entry.next
        self._next = entry
        return found

    def _level(self, entry: Stored) -> Level:
        depth = self._depth
        if not isinstance(entry, _Branch):
            levels = entry.topic.split("/", depth + 1)
            below = len(levels) > depth + 1
            return Level(levels[depth], None if below else entry, below)
        named: Stored = entry  # a branch that is no topic has children
        while not named.topic and isinstance(named, _Branch) and named.first is not None:
            named = named.first
        name = named.topic.split("/", depth + 1)[depth]
        return Level(name, entry if entry.topic else None, len(entry.children) > 0)


class TopicTree:
    """A map of valid topic names to values other than None."""

    def __init__(self) -> None:
        self._root = _Branch("", None)
        self._size = 0
        self.branches = 0  # below the root

    def __len__(self) -> int:
        return self._size

    def set(self, topic: str, value: object) -> None:
        """Store or replace the value of a topic."""
        levels = topic.split("/")
        branch = self._root
        last = len(levels) - 1
        depth = 0
        while True:
            level = levels[depth]
            child = branch.children.get(level)
            if child is None:
                branch.append(level, Stored(topic, value))
                self._size += 1
                return
            if not isinstance(child, _Branch):
                if child.topic == topic:
                    child.value = value
                    return
                child = self._split(branch, child, levels, depth)
            if depth == last:
                if not child.topic:
                    child.topic = topic
                    self._size += 1
                child.value = value
                return
            branch = child
            depth += 1

    def get(self, topic: str) -> object:
        """The value of a topic, or None."""
        branch = self._root
        for level in topic.split("/"):
            child = branch.children.get(level)
            if child is None:
                return None
            if not isinstance(child, _Branch):
                return child.value if child.topic == topic else None
            branch = child
        return branch.value

    def pop(self, topic: str) -> object | None:
        """Remove a topic and return its value, or None if it was not stored."""
        levels = topic.split("/")
        branches: list[_Branch] = [self._root]
        entry: Stored | None = None
        for level in levels:
            entry = branches[-1].children.get(level)
            if not isinstance(entry, _Branch):
                break
            branches.append(entry)
        if entry is None or entry.topic != topic:
            return None
        value = entry.value
        self._size -= 1
        if isinstance(entry, _Branch):
            entry.topic = ""
            entry.value = None
        else:
            branches[-1].remove(levels[len(branches) - 1])
        while len(branches) > 1 and not branches[-1].children and not branches[-1].topic:
            branches.pop()
            branches[-1].remove(levels[len(branches) - 1])
            self.branches -= 1
        return value

    def match(self, topic_filter: str) -> list[Stored]:
        """All topics that match a valid filter without ``$share``."""
        scan = self.scan(topic_filter)
        found: list[Stored] = []
        while not scan.done:
            found.extend(scan.read(4096))
        return found

    def scan(self, topic_filter: str) -> Scan:
        """A search for the topics that match a valid filter without ``$share``."""
        return Scan(self._root, topic_filter)

    def levels(self, prefix: str | None) -> LevelScan:
        """The levels after ``prefix`` and a slash; the first levels of all topics for None."""
        return LevelScan(self._root, [] if prefix is None else prefix.split("/"))

    def _split(self, branch: _Branch, leaf: Stored, levels: list[str], depth: int) -> _Branch:
        """Replace the leaf at ``levels[depth]`` by branches for the levels that its topic shares with ``levels``."""
        leaf_levels = leaf.topic.split("/")
        top = _Branch("", None)
        self.branches += 1
        lowest = top
        below = depth + 1
        while below < len(leaf_levels) and below < len(levels) and leaf_levels[below] == levels[below]:
            deeper = _Branch("", None)
            self.branches += 1
            lowest.append(leaf_levels[below], deeper)
            lowest = deeper
            below += 1
        if below == len(leaf_levels):
            lowest.topic = leaf.topic
            lowest.value = leaf.value
        else:
            lowest.append(leaf_levels[below], Stored(leaf.topic, leaf.value))
        branch.replace(levels[depth], top)
        return top
