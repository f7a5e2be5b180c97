"""The subscriptions of a bridge on both sides."""

from __future__ import annotations

from typing import Dict, Final, List, Sequence

from topic_matcher.remapping import TopicRule

FILTERS_PER_PACKET: Final = 50

# Retain Handling in the subscription options (section 3.8.3.1).
RETAINED_IF_NEW: Final = 0x10
NO_RETAINED: Final = 0x20


def outgoing_filters(rules: Sequence[TopicRule], max_qos: int) -> Dict[str, int]:
    """The QoS of the subscriptions at the local broker by filter."""
    wanted: Dict[str, int] = {}
    for rule in rules:
        if rule.goes_out:
            found = rule.local.topic_filter
            wanted[found] = max(wanted.get(found, 0), min(rule.qos, max_qos))
    return wanted


def incoming_filters(rules: Sequence[TopicRule]) -> Dict[str, int]:
    """The QoS of the subscriptions at the remote by filter."""
    wanted: Dict[str, int] = {}
    for rule in rules:
        if rule.comes_in:
            found = rule.remote.topic_filter
            wanted[found] = max(wanted.get(found, 0), rule.qos)
    return wanted


def batches(filters: List[str]) -> List[List[str]]:
    """Filters in lists of one packet each."""
    return [filters[at : at + FILTERS_PER_PACKET] for at in range(0, len(filters), FILTERS_PER_PACKET)]
