"""The syntax of topic names and topic filters, and matching (section 4.7).

Characters are compared without normalisation [MQTT-4.7.3-4].
"""

from __future__ import annotations

from typing import Final

MAX_BYTES: Final = 65_535  # of UTF-8 [MQTT-4.7.3-3]

_SHARE: Final = "$share/"


def _fits(text: str) -> bool:
    """Whether the text has a valid length and no U+0000."""
    size = len(text)
    if size == 0 or "\0" in text:  # [MQTT-4.7.3-1] [MQTT-4.7.3-2]
        return False
    # A character takes at most four bytes, so short texts need no encoding.
    return size <= MAX_BYTES // 4 or len(text.encode("utf-8", "surrogatepass")) <= MAX_BYTES


def is_valid_topic(topic: str) -> bool:
    """Whether ``topic`` is a valid topic name (section 4.7.3)."""
    return _fits(topic) and not has_wildcard(topic)  # [MQTT-4.7.0-1]


def is_valid_filter(topic_filter: str) -> bool:
    """Whether ``topic_filter`` is a valid topic filter, with or without ``$share``."""
    if not _is_well_formed(topic_filter):
        return False
    if not topic_filter.startswith(_SHARE):
        return True
    try:
        parse_shared(topic_filter)
    except ValueError:
        return False
    return True


def _is_well_formed(topic_filter: str) -> bool:
    if not _fits(topic_filter):
        return False
    last = len(topic_filter) - 1
    position = topic_filter.find("#")
    if position >= 0:  # [MQTT-4.7.1-1]
        if position != last or (position > 0 and topic_filter[position - 1] != "/"):
            return False
    position = topic_filter.find("+")
    while position >= 0:  # [MQTT-4.7.1-2]
        if position > 0 and topic_filter[position - 1] != "/":
            return False
        if position < last and topic_filter[position + 1] != "/":
            return False
        position = topic_filter.find("+", position + 1)
    return True


def has_wildcard(topic_filter: str) -> bool:
    """Whether the text contains ``+`` or ``#``."""
    return "+" in topic_filter or "#" in topic_filter


def text_bytes(text: str) -> int:
    """An upper estimate of the memory of a text, in bytes."""
    return len(text) + 50 if text.isascii() else 4 * len(text) + 80


def parse_shared(topic_filter: str) -> tuple[str, str] | None:
    """(group, filter) of ``$share/<group>/<filter>``; None for other filters.

    Raises ValueError for an invalid shared filter (section 4.8.2).
    """
    if not topic_filter.startswith(_SHARE):
        return None
    slash = topic_filter.find("/", len(_SHARE))
    if slash < 0:
        raise ValueError("shared filter without a topic filter")  # [MQTT-4.8.2-2]
    group = topic_filter[len(_SHARE) : slash]
    if group == "":
        raise ValueError("shared filter without a share name")  # [MQTT-4.8.2-1]
    if has_wildcard(group):
        raise ValueError("wildcard in a share name")  # [MQTT-4.8.2-2]
    inner = topic_filter[slash + 1 :]
    if not _is_well_formed(inner):
        raise ValueError("shared filter with an invalid topic filter")
    return group, inner


def matches(topic_filter: str, topic: str) -> bool:
    """Whether a valid filter without ``$share`` matches a valid topic name (section 4.7)."""
    if topic[0] == "$" and (topic_filter[0] == "+" or topic_filter[0] == "#"):
        return False  # [MQTT-4.7.2-1]
    return matches_from(topic_filter, 0, topic, 0)


def matches_from(topic_filter: str, at: int, topic: str, pos: int) -> bool:
    """`matches` for the levels that begin at ``at`` in the filter and at ``pos`` in the topic, without the ``$`` rule.

    A position of length + 1 means that no level is left.
    """
    filter_size = len(topic_filter)
    topic_size = len(topic)
    while at <= filter_size:
        stop = topic_filter.find("/", at)
        if stop < 0:
            stop = filter_size
        size = stop - at
        if size == 1 and topic_filter[at] == "#":
            return True
        if pos > topic_size:
            return False
        end = topic.find("/", pos)
        if end < 0:
            end = topic_size
        if size != 1 or topic_filter[at] != "+":
            if end - pos != size or topic_filter[at:stop] != topic[pos:end]:
                return False
        at = stop + 1
        pos = end + 1
    return pos > topic_size


def covers(wide: str, narrow: str) -> bool:
    """Whether every topic that matches the filter ``narrow`` also matches ``wide``."""
    if narrow.startswith("$") and not wide.startswith("$"):
        return False
    outer = wide.split("/")
    inner = narrow.split("/")
    index: int = 0
    while index < len(outer):
        if outer[index] == "#":
            return True
        if index >= len(inner) or inner[index] == "#":
            return False
        if outer[index] != "+" and outer[index] != inner[index]:
            return False
        index += 1
    return len(inner) == len(outer)


def overlap(one: str, other: str) -> bool:
    """Whether a topic may match both filters."""
    if one.startswith("$") != other.startswith("$"):
        return False
    left = one.split("/")
    right = other.split("/")
    index: int = 0
    while True:
        if index < len(left) and left[index] == "#" or index < len(right) and right[index] == "#":
            return True
        if index >= len(left) or index >= len(right):
            return len(left) == len(right)
        if left[index] != right[index] and left[index] != "+" and right[index] != "+":
            return False
        index += 1
