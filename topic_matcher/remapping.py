"""Topics on both sides of a bridge: the filters to subscribe to, and the name of a topic on the other side.

A rule is a filter with a prefix for each side, or a pattern for each side, whose named levels may change places:
``plant/{line}/{machine}/#`` ↔ ``site/{machine}/{line}/#``. The first rule that matches a topic decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from topic_matcher.filters import is_valid_filter, is_valid_topic, matches

IN: Final = "in"
OUT: Final = "out"

MAX_CACHED: Final = 1_048_576  # bytes of topics whose names on the other side are remembered, per direction
_CACHED_BYTES: Final = 200  # memory of one beside the names

_NAMED_LEVEL: Final = re.compile(r"\{([A-Za-z0-9_]+)\}")


class TopicRule:
    """Messages that a bridge passes: ``direction`` in, out or both, at a QoS of at most ``qos``."""

    def __init__(self, local: Side, remote: Side, direction: str, qos: int) -> None:
        self.local = local
        self.remote = remote
        self.direction = direction
        self.qos = qos

    @property
    def goes_out(self) -> bool:
        return self.direction != IN

    @property
    def comes_in(self) -> bool:
        return self.direction != OUT


class Side:
    """One side of a rule. ``parts`` are taken from a matching topic by `take`, and put into one by `put`."""

    def __init__(self, topic_filter: str) -> None:
        self.topic_filter = topic_filter

    def take(self, topic: str) -> tuple[str, ...] | None:
        raise NotImplementedError

    def put(self, parts: tuple[str, ...]) -> str | None:
        raise NotImplementedError


class PrefixSide(Side):
    """A prefix in front of a filter that both sides share. An empty filter stands for the prefix alone."""

    def __init__(self, prefix: str, shared_filter: str) -> None:
        super().__init__(prefix + shared_filter)
        self._prefix = prefix

    def take(self, topic: str) -> tuple[str, ...] | None:
        prefix = self._prefix
        if not matches(self.topic_filter, topic):
            return None
        if topic.startswith(prefix):
            return (topic[len(prefix) :],)
        return ()  # "a/#" matches "a", which has less than the prefix "a/"

    def put(self, parts: tuple[str, ...]) -> str | None:
        if not parts:
            return self._prefix[:-1] if self._prefix.endswith("/") else None
        return self._prefix + parts[0]


class PatternSide(Side):
    """A pattern of levels: fixed ones, ``{name}`` for any one level, and ``#`` at the end for any further levels.

    ``order`` has the names in the order of `take`; a ``#`` is called "#".
    """

    def __init__(self, pattern: str, order: Sequence[str]) -> None:
        self._levels = pattern.split("/")
        self._order = list(order)
        super().__init__("/".join("+" if _NAMED_LEVEL.fullmatch(level) else level for level in self._levels))

    def take(self, topic: str) -> tuple[str, ...] | None:
        if not matches(self.topic_filter, topic):
            return None
        found: dict[str, str] = {}
        levels = topic.split("/")
        for index, level in enumerate(self._levels):
            name = _NAMED_LEVEL.fullmatch(level)
            if level == "#":
                # None of the further levels, or all of them with the slash before.
                found["#"] = "".join("/" + each for each in levels[index:])
            elif name is not None:
                found[name[1]] = levels[index]
        return tuple(found[name] for name in self._order)

    def put(self, parts: tuple[str, ...]) -> str | None:
        values = dict(zip(self._order, parts))
        levels: list[str] = []
        for level in self._levels:
            name = _NAMED_LEVEL.fullmatch(level)
            if level == "#":
                return "/".join(levels) + values["#"] if levels else values["#"][1:]
            levels.append(level if name is None else values[name[1]])
        return "/".join(levels)


def prefix_rule(topic_filter: str, direction: str, qos: int, local_prefix: str, remote_prefix: str) -> TopicRule:
    """The rule of a filter with prefixes. Raises ValueError with the reason if a side is no filter."""
    rule = TopicRule(PrefixSide(local_prefix, topic_filter), PrefixSide(remote_prefix, topic_filter), direction, qos)
    for name, side in (("local", rule.local), ("remote", rule.remote)):
        _check_filter(name, side.topic_filter)
    return rule


def pattern_rule(local: str, remote: str, direction: str, qos: int) -> TopicRule:
    """The rule of two patterns. Raises ValueError with the reason if they cannot be converted into each other."""
    order = _names("local", local)
    if sorted(_names("remote", remote)) != sorted(order):
        raise ValueError("local and remote must have the same names in braces, and both or neither a # at the end")
    rule = TopicRule(PatternSide(local, order), PatternSide(remote, order), direction, qos)
    for name, side in (("local", rule.local), ("remote", rule.remote)):
        _check_filter(name, side.topic_filter)
    return rule


def _names(where: str, pattern: str) -> list[str]:
    names: list[str] = []
    for level in pattern.split("/"):
        found = _NAMED_LEVEL.fullmatch(level)
        if level == "#":
            names.append("#")
        elif found is not None:
            names.append(found[1])
        elif "{" in level or "}" in level or "+" in level:
            raise ValueError(f"{where}: a level must be a name in braces, # at the end, or text, got {level!r}")
    if len(set(names)) != len(names):
        raise ValueError(f"{where}: a name stands there twice")
    return names


def _check_filter(where: str, topic_filter: str) -> None:
    if not is_valid_filter(topic_filter) or topic_filter.startswith("$share/"):
        raise ValueError(f"the {where} topic filter is invalid: {topic_filter!r}")


def overlap(one: str, other: str) -> bool:
    """Whether some topic matches both filters."""
    mine, theirs = one.split("/"), other.split("/")
    for index in range(max(len(mine), len(theirs))):
        if index >= len(mine) or index >= len(theirs):
            longer = theirs if index >= len(mine) else mine
            return longer[index] == "#"
        if mine[index] == "#" or theirs[index] == "#":
            # Wildcards at the first level do not match topics that begin with $ [MQTT-4.7.2-1].
            other_level = theirs[0] if mine[index] == "#" else mine[0]
            return not (index == 0 and other_level.startswith("$"))
        if mine[index] != theirs[index]:
            if mine[index] != "+" and theirs[index] != "+":
                return False
            if index == 0 and (mine[0].startswith("$") or theirs[0].startswith("$")):
                return False
    return True


def echoed(rules: Sequence[TopicRule]) -> str | None:
    """A remote filter under which messages that go out come back in without No Local; None if there is none."""
    for sent in rules:
        for received in rules:
            if sent.goes_out and received.comes_in and overlap(sent.remote.topic_filter, received.remote.topic_filter):
                return received.remote.topic_filter
    return None


class TopicMap:
    """The names of topics on the other side, in one direction."""

    def __init__(self, sides: Sequence[tuple[Side, Side]]) -> None:
        self._sides = list(sides)
        self._known: dict[bytes, bytes] = {}  # b"" = no rule matches
        self.cached = 0  # bytes

    def find(self, topic: bytes) -> bytes:
        """The topic on the other side; empty if no rule matches or the name would be invalid.

        ``topic`` is the topic's name in UTF-8; one that is not is an invalid name.
        """
        known = self._known.get(topic)
        if known is None:
            known = self._find(topic)
            self.cached += len(topic) + len(known) + _CACHED_BYTES
            if self.cached > MAX_CACHED:
                self._known.clear()
                self.cached = len(topic) + len(known) + _CACHED_BYTES
            self._known[topic] = known
        return known

    def _find(self, encoded: bytes) -> bytes:
        try:
            topic = encoded.decode("utf-8")
        except UnicodeDecodeError:
            return b""
        if not is_valid_topic(topic):
            return b""
        for source, target in self._sides:
            parts = source.take(topic)
            if parts is not None:
                name = target.put(parts)
                return name.encode("utf-8") if name is not None and is_valid_topic(name) else b""
        return b""


def outgoing_map(rules: Sequence[TopicRule]) -> TopicMap:
    return TopicMap([(rule.local, rule.remote) for rule in rules if rule.goes_out])


def incoming_map(rules: Sequence[TopicRule]) -> TopicMap:
    return TopicMap([(rule.remote, rule.local) for rule in rules if rule.comes_in])
