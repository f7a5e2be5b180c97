"""Checks of the record and the broker's files, one row per guarantee.

Every row counts its checks beside its findings, so that a run without checks does not pass.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from chaos.log_reader import LogReader, StoredRecord
from chaos.record import (
    LEFT,
    LOG_CHANGED,
    LOG_MISSING,
    LOG_ORDER,
    LOG_READERS,
    LOG_TWICE,
    MISSING_1,
    MISSING_2,
    ORDER,
    TWICE,
    Record,
    Sent,
)
from topic_matcher.filters import matches

NAMED = 10  # printed findings per row


def judge_deliveries(record: Record, subscribed: str, subscribers: Iterable[str], groups: dict[str, list[str]]) -> None:
    """Check that each subscriber, and each group together, received all acknowledged messages of the filter."""
    expected = [message for message in record.all_acknowledged() if matches(subscribed, message.topic)]
    seen = {name: record.seen.get(name, set()) for name in subscribers}
    for group, members in groups.items():
        seen[group] = set().union(*(record.seen.get(member, set()) for member in members))
        together = [delivery for member in members for delivery in record.deliveries.get(member, [])]
        _judge_once(record, group, together)
    for name, numbers in seen.items():
        for message in expected:
            row = MISSING_1 if message.qos == 1 else MISSING_2
            record.checked[row] += 1
            if message.number not in numbers:
                record.fault(row, f"{name} did not receive {message}")
    in_groups = {member for members in groups.values() for member in members}
    for name, deliveries in record.deliveries.items():
        if name not in in_groups:
            _judge_once(record, name, deliveries)
            since = record.since.get(name, 0)
            _judge_order(record, ORDER, name, [number for number, _ in deliveries if number > since])


def _judge_once(record: Record, name: str, deliveries: list[tuple[int, int]]) -> None:
    times = Counter(number for number, qos in deliveries if qos == 2)
    record.checked[TWICE] += len(times)
    for number, count in times.items():
        if count > 1:
            record.fault(TWICE, f"{name} received {record.sent[number]} {count} times")


def _judge_order(record: Record, row: str, name: str, numbers: Iterable[int]) -> None:
    """Check that first deliveries per publisher, topic and QoS are in order [MQTT-4.6.0-5]."""
    last: dict[tuple[str, str, int], Sent] = {}
    seen: set[int] = set()
    for number in numbers:
        if number in seen:
            continue
        seen.add(number)
        message = record.sent[number]
        key = (message.publisher, message.topic, message.qos)
        before = last.get(key)
        record.checked[row] += 1
        if before is not None and before.number > number:
            record.fault(row, f"{name} received {before} before {message}")
        else:
            last[key] = message


def judge_log(record: Record, reader: LogReader, filters: Sequence[str], early_reads: list[StoredRecord]) -> None:
    """Check the stream of these filters; ``early_reads`` are records that were read during the run."""
    stored = reader.records()
    by_offset = {(found.partition, found.offset): found for found in stored}
    record.checked[LOG_READERS] += len(stored)
    for one, other in zip(stored, arrow := reader.arrow_records()):
        if one != other:
            record.fault(LOG_READERS, f"partition {one.partition}, offset {one.offset}: {one} and {other}")
    if len(stored) != len(arrow):
        record.fault(LOG_READERS, f"{len(stored)} and {len(arrow)} records")
    record.checked[LOG_CHANGED] += len(early_reads)
    for early in early_reads:
        now = by_offset.get((early.partition, early.offset))
        if now != early:
            record.fault(LOG_CHANGED, f"partition {early.partition}, offset {early.offset}: {early}, then {now}")
    numbers: list[int] = []
    for found in stored:
        message = record.identify("the stream log", found.topic, found.payload, found.qos)
        if message is not None:
            numbers.append(message.number)
            if (message.publisher, message.qos) != (found.client_id, found.qos):
                record.fault(LOG_CHANGED, f"{message} is in the log as {found}")
    times = Counter(numbers)
    for message in record.all_acknowledged():
        if any(matches(topic_filter, message.topic) for topic_filter in filters):
            record.checked[LOG_MISSING] += 1
            if not times[message.number]:
                record.fault(LOG_MISSING, f"{message} is not in the log")
    for number, count in times.items():
        if record.sent[number].qos == 2:
            record.checked[LOG_TWICE] += 1
            if count > 1:
                record.fault(LOG_TWICE, f"{record.sent[number]} is in the log {count} times")
    _judge_order(record, LOG_ORDER, "the stream log", numbers)


def left(database: Path) -> dict[str, int]:
    """The number of rows for messages that are not delivered or not acknowledged yet, by table."""
    connection = sqlite3.connect(database)
    try:
        return {name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("queue", "messages", "received")}
    finally:
        connection.close()


def judge_database(record: Record, database: Path) -> None:
    """Check that no rows are left after everything was delivered and acknowledged."""
    for name, count in left(database).items():
        record.checked[LEFT] += 1
        if count:
            record.fault(LEFT, f"{count} rows in {name}")


def table(record: Record) -> str:
    """A line per row: the number of checks and of findings."""
    lines = [f"{'':64}{'checked':>10}{'found':>8}"]
    for row in record.rows:
        lines.append(f"{row:64}{record.checked[row]:>10,}{len(record.faults[row]):>8,}")
    return "\n".join(lines)


def findings(record: Record) -> str:
    """The findings by row; "" if there are none."""
    lines: list[str] = []
    for row, texts in record.faults.items():
        if texts:
            lines.append(f"{row}:")
            lines += [f"  {text}" for text in texts[:NAMED]]
            if len(texts) > NAMED:
                lines.append(f"  and {len(texts) - NAMED} more")
    return "\n".join(lines)
