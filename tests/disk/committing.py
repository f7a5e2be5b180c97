"""A process that commits to a store of its own, and what must be there of its commits after a power loss.

It says in the file ``reported`` what it submits and hears, in lines of a commit's number, the attempt, and ``sent``,
``ok`` or ``failed``. A write set that was refused is submitted again as another attempt, so that one that was refused
and is there all the same is detected.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

from support.store_writer import Writer, message, retained

from bridge_spark.log.record_batch import decode_messages, read_batch, scan_batches
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from sessions.message import Message
from sessions.row_kinds import RETAINED, SESSIONS, SUBSCRIPTIONS
from sessions.rows import SessionRow, SubscriptionRow, received_key
from sessions.store import writer as store_module
from sessions.store.interface import StoreError
from sessions.store.writer import SqliteStore
from sessions.write_set import WriteSet

DATABASE = "mqttbroker.db"
REPORTED = "reported"
PARTITIONS = 2
ENTRIES = 4  # of each commit
KEPT = 5  # commits whose entries stay; the first entry of each is deleted by the next commit
SEGMENT_BYTES = 16 << 10
GIVE_UP = 15.0  # seconds for one commit

Attempt = tuple[int, int]


def open_store(data: Path) -> tuple[SqliteStore, StreamLogs]:
    """A store and its streams, with small segments, so that they are closed, dropped and used again all the time."""
    store_module.LEAST_SEGMENT_BYTES = SEGMENT_BYTES
    logs = StreamLogs(data / "streams", [StreamConfig("s", ["a/#"], PARTITIONS, segment_bytes=SEGMENT_BYTES)])
    log_bytes = store_module.LOG_SEGMENTS * SEGMENT_BYTES
    return SqliteStore(data / DATABASE, "commit", logs, log_bytes=log_bytes, apply_interval=0.02), logs


def payload(number: int, attempt: int) -> bytes:
    text = b"%d:%d:" % (number, attempt)
    return text + Random(f"{number}:{attempt}").randbytes(Random(number).choice((10, 100, 700, 3000)))


def attempt_of(data: bytes) -> Attempt:
    number, attempt, _ = data.split(b":", 2)
    return int(number), int(attempt)


def commit(number: int, attempt: int) -> WriteSet:
    made = WriteSet()
    keys = range(number * ENTRIES, (number + 1) * ENTRIES)
    made.saved(SESSIONS).append(SessionRow(1, "victim", 5, 3600, float(number), None, None, None, None))
    made.saved(SUBSCRIPTIONS).append(SubscriptionRow(1, f"a/{number % 7}", 1, 1, number))
    content = payload(number, attempt)
    made.messages = [message(key + 1, "a/b", content, timestamp=key) for key in keys]
    size = made.messages[0].size
    made.entries = [(1, key + 1, key + 1, 0, 1, 0, b"", 0, 0, size, 0) for key in keys]
    made.received.append(received_key(1, number % 60000 + 1))
    made.saved(RETAINED).append(retained("last", content, timestamp=number))
    made.stream_messages = {("s", number % PARTITIONS): [Message("a/b", content, 1, False, b"", "p", number, 0)]}
    if number > 0:
        made.deleted_received.append(received_key(1, (number - 1) % 60000 + 1))
        first = (number - 1) * ENTRIES
        made.deleted_entries.append((1, first + 1, first + 1, 0))
        made.entry_updates = [(key % 60000 + 1, 2, 1, key + 1) for key in range(first + 1, first + ENTRIES)]
    if number >= KEPT:
        first = (number - KEPT) * ENTRIES
        made.deleted_entries += [(1, key + 1, key + 1, 0) for key in range(first + 1, first + ENTRIES)]
    made.after_failure = attempt > 0
    return made


def entries_after(number: int) -> list[int]:
    """The keys that are queued after a commit."""
    return [
        commit_number * ENTRIES + place
        for commit_number in range(max(0, number - KEPT + 1), number + 1)
        for place in range(ENTRIES)
        if place > 0 or commit_number == number
    ]


# -- the process ------------------------------------------------------------------------------------------------------


def main(root: str, runs: str, commits: str) -> None:
    """Start, commit and stop so many times."""
    report = os.open(f"{root}/{REPORTED}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    number = 0
    for _ in range(int(runs)):
        store, logs = started(Path(root) / "data")
        writer = Writer(store)
        for _ in range(int(commits)):
            give_up = time.monotonic() + GIVE_UP
            attempt = 0
            while True:
                os.write(report, b"%d %d sent\n" % (number, attempt))
                error = writer.outcome(commit(number, attempt))
                os.write(report, b"%d %d %s\n" % (number, attempt, b"ok" if error is None else b"failed"))
                if error is None:
                    break
                if time.monotonic() > give_up:
                    raise SystemExit(f"commit {number} failed {attempt + 1} times, at last: {error}")
                attempt += 1
                time.sleep(0.01)
            number += 1
        store.stop()
        logs.close()


def started(data: Path) -> tuple[SqliteStore, StreamLogs]:
    """A store that may need some attempts to open, where its disk fails now and then."""
    give_up = time.monotonic() + GIVE_UP
    while True:
        store, logs = open_store(data)
        try:
            store.recover()
            return store, logs
        except StoreError:
            logs.close()
            if time.monotonic() > give_up:
                raise


# -- what it leaves ---------------------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """The commits that were reported as done, by number; the attempt without an answer, if there is one."""

    done: list[Attempt]
    open: Attempt | None


def expected(report: bytes) -> Expected:
    done: list[Attempt] = []
    waiting: Attempt | None = None
    for line in report.decode().splitlines():
        number, attempt, outcome = line.split()
        waiting = (int(number), int(attempt)) if outcome == "sent" else None
        if outcome == "ok":
            done.append((int(number), int(attempt)))
    return Expected(done, waiting)


def check(data: Path, wanted: Expected) -> None:
    """Recover a data directory; AssertionError unless it has each reported commit, and nothing that was refused."""
    store, logs = open_store(data)
    recovered = store.recover()
    writer = Writer(store)
    try:
        found = [attempt_of(row.payload) for row in recovered.rows(RETAINED)]
        done = wanted.done
        assert found in (done[-1:], [wanted.open]), f"last is {found}, reported was {done[-1:]}, open {wanted.open}"
        if found and found != done[-1:]:
            done = [*done, *found]
        if not done:
            return
        last = done[-1][0]
        assert recovered.rows(SESSIONS) == commit(last, 0).saved(SESSIONS)
        assert len(recovered.rows(SUBSCRIPTIONS)) == min(last + 1, 7)
        page = writer.page(1)
        assert page.error is None
        assert [row.seq - 1 for row in page.rows] == entries_after(last)
        for row in page.rows:
            assert row.payload == payload(*done[(row.seq - 1) // ENTRIES]), f"entry {row.seq} has another payload"
            assert row.state == (0 if (row.seq - 1) // ENTRIES == last else 2)
        assert page.received == [last % 60000 + 1]
        streamed = records(data, logs)
        for partition in range(PARTITIONS):
            assert streamed[partition] == [one for one in done if one[0] % PARTITIONS == partition]
    finally:
        store.stop()
        logs.close()


def check_repaired(data: Path, wanted: Expected) -> None:
    """Recover a data directory whose database was repaired; AssertionError unless the streams have each commit."""
    store, logs = open_store(data)
    store.recover()
    try:
        streamed = records(data, logs)
        for partition in range(PARTITIONS):
            done = [one for one in wanted.done if one[0] % PARTITIONS == partition]
            found = streamed[partition]
            assert found[: len(done)] == done, f"partition {partition} has {found}, not {done}"
    finally:
        store.stop()
        logs.close()


def records(data: Path, logs: StreamLogs) -> dict[int, list[Attempt]]:
    """What readers find in the stream, by partition; every payload is whole."""
    found: dict[int, list[Attempt]] = {}
    for view in logs.manifest("s")["partitions"]:
        rows = found.setdefault(view["partition"], [])
        for part in view["segments"]:
            with open(data / "streams" / "s" / str(view["partition"]) / part["file"], "rb") as file:
                for _, batch, raw in scan_batches(file, 0, part["bytes"], part["first_offset"]):
                    for one in decode_messages(raw, read_batch(raw)):
                        assert one.payload == payload(*attempt_of(one.payload))
                        rows.append(attempt_of(one.payload))
        assert len(rows) == view["high_watermark"], f"partition {view} has {rows}"
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
