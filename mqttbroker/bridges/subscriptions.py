"""The subscriptions of a bridge on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from topic_matcher.remapping import TopicRule

FILTERS_PER_PACKET: Final = 50

# Retain Handling in the subscription options (section 3.8.3.1).
RETAINED_IF_NEW: Final = 0x10
NO_RETAINED: Final = 0x20


def outgoing_filters(rules: Sequence[TopicRule], max_qos: int) -> dict[str, int]:
    """The QoS of the subscriptions at the local broker by filter."""
    wanted: dict[str, int] = {}
    for rule in rules:
        if rule.goes_out:
            found = rule.local.topic_filter
            wanted[found] = max(wanted.get(found, 0), min(rule.qos, max_qos))
    return wanted


def incoming_filters(rules: Sequence[TopicRule]) -> dict[str, int]:
    """The QoS of the subscriptions at the remote by filter."""
    wanted: dict[str, int] = {}
    for rule in rules:
        if rule.comes_in:
            found = rule.remote.topic_filter
            wanted[found] = max(wanted.get(found, 0), rule.qos)
    return wanted


def batches(filters: list[str]) -> list[list[str]]:
    """Filters in lists of one packet each."""
    return [filters[at : at + FILTERS_PER_PACKET] for at in range(0, len(filters), FILTERS_PER_PACKET)]
