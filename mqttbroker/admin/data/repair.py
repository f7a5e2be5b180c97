"""Checks and repairs a whole data directory: the database and the streams together.

A repair renames damaged files and never deletes them, keeps everything readable, and leaves database and stream log
with the same end of each partition.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
from pathlib import Path

from bridge_spark.log.archive.index import INDEX_FILE, IndexReader
from bridge_spark.log.check import check_description, check_partition, partitions
from bridge_spark.log.high_watermark import published_end
from bridge_spark.log.record_batch import SegmentError
from bridge_spark.log.repair import append_missing, repair_partition
from bridge_spark.log.stream_files import STREAMS
from bridge_spark.log.stream_log import StreamLogDamage
from sessions.store.check import TABLES, DatabaseState, check_database, is_emptied
from sessions.store.commit_log.records import StreamRecords
from sessions.store.commit_log.survey import survey
from sessions.store.database import lock_directory
from sessions.store.interface import CorruptStore, Recovered, Store, StoreError
from sessions.store.log_repair import database_identity, fold_log, logged_records
from sessions.store.recovery import LOG_DIRECTORY
from sessions.store.salvage import damaged_copies, finish_salvage, salvage, set_stream_ends

DATABASE = "mqttbroker.db"

# How often the commit log of a running broker is read again if it changed meanwhile.
LIVE_ATTEMPTS = 5
NAMED_FILES = 3  # damaged files that the report of a salvage names
REPORT_LENGTH = 600  # characters of what a repair changed, in that report; the log has all

Ends = dict[tuple[str, int], int]

log = logging.getLogger("mqttbroker.store")


class Findings:
    """The result of a check: ``lines`` describe the contents, ``problems`` the faults."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.problems: list[str] = []


def check(data_dir: Path) -> Findings:
    """Check a data directory, which a broker may be using. Raises `OSError` if it cannot be read."""
    findings = Findings()
    live = in_use(data_dir)
    database = data_dir / DATABASE
    state: DatabaseState | None = None
    if database.exists():
        state = check_database(database)
        counts = ", ".join(f"{state.counts.get(table, '?')} {noun}" for table, noun in TABLES.items())
        findings.lines.append(f"{DATABASE}: {counts}")
        findings.problems += [f"{DATABASE}: {problem}" for problem in state.problems]
    else:
        findings.lines.append(f"{DATABASE}: there is none")
    in_log = _check_log(data_dir, live, findings)
    _check_streams(data_dir / STREAMS, state.ends if state else None, in_log, live, findings)
    for path in set_aside(data_dir):
        findings.lines.append(f"{path.relative_to(data_dir)}: put aside, damaged")
    return findings


def in_use(data_dir: Path) -> bool:
    """Whether a broker holds the lock of the data directory."""
    try:
        lock = os.open(data_dir / "lock", os.O_RDONLY)
    except FileNotFoundError:
        os.listdir(data_dir)
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _check_log(data_dir: Path, live: bool, findings: Findings) -> Ends:
    """Check the commit log; returns the first offset that it has of each partition, {} if a broker uses it."""
    directory = data_dir / LOG_DIRECTORY
    for attempt in range(LIVE_ATTEMPTS):
        try:
            found = survey(directory, database_identity(data_dir / DATABASE))
            if not found.damage or not live:
                break
        except FileNotFoundError:  # a segment that a broker dropped meanwhile
            if not live or attempt == LIVE_ATTEMPTS - 1:
                raise
        except StoreError as error:
            findings.problems.append(str(error))
            return {}
    if found.segments:
        first, last = found.segments[0].first_position, found.next_position - 1
        size = sum(segment.size for segment in found.segments)
        findings.lines.append(f"{LOG_DIRECTORY}: positions {first} to {last}, {size} bytes")
    findings.problems += [f"{LOG_DIRECTORY}/{damage.path.name}: {damage.reason}" for damage in found.damage]
    starts: Ends = {}
    if not live:
        for part in logged_records(found):
            starts.setdefault((part.stream, part.partition), part.first_offset)
    return starts


def _check_streams(directory: Path, ends: Ends | None, in_log: Ends, live: bool, findings: Findings) -> None:
    """Check the partitions up to their ends in the database, or to the first record that the commit log has: the next
    start appends what is missing from there on."""
    found = partitions(directory) if directory.is_dir() else []
    for stream in sorted({stream for stream, _ in found}):
        problem = check_description(directory / stream)
        if problem is not None:
            findings.problems.append(f"{STREAMS}/{stream}/{problem}")
    for stream, number in found:
        where = f"{STREAMS}/{stream}/{number}"
        path = directory / stream / str(number)
        end = None if ends is None else ends.get((stream, number), published_end(path))
        if end is not None and (stream, number) in in_log:
            end = min(end, in_log[stream, number])
        state = check_partition(path, end, live or (stream, number) in in_log)
        findings.lines.append(f"{where}: {state.end - state.start} offsets from {state.start} to {state.end}, {state.segments} segments")
        _check_archive(path, where, state.start, findings)
        for first, last in state.lost:
            findings.lines.append(f"{where}: offsets {first} to {last - 1} were given up by a repair")
        findings.problems += [f"{where}/{problem}" for problem in state.problems]
    for stream, number in sorted((ends or {}).keys() - set(found)):
        end = (ends or {})[stream, number]
        findings.problems.append(f"{STREAMS}/{stream}/{number}: is missing; the database ends at offset {end}")


def _check_archive(directory: Path, where: str, local_start: int, findings: Findings) -> None:
    """Check the index of a partition's archive, not the archive."""
    try:
        archive = IndexReader(directory / INDEX_FILE).check()
    except SegmentError as error:
        findings.problems.append(f"{where}/{INDEX_FILE}: {error}")
        return
    if archive.segments:
        findings.lines.append(
            f"{where}: archived are the offsets {archive.start} to {archive.end - 1}, {archive.segments} segments of"
            f" {archive.size} bytes; they are not read"
        )
        if archive.end < local_start:
            findings.lines.append(f"{where}: offsets {archive.end} to {local_start - 1} were removed without an archive")


def set_aside(data_dir: Path) -> list[Path]:
    """The damaged files that repairs renamed."""
    segments = (data_dir / STREAMS).glob("*/*/*.damaged-*")
    logs = (data_dir / LOG_DIRECTORY).glob("*.damaged-*")
    return [*damaged_copies(data_dir / DATABASE), *sorted(logs), *sorted(segments)]


class SalvageReport:
    """What a repair changed at this start, ``done`` ("" = there was none), and the damaged files that are set aside in ``data_dir``.

    An operator who has looked at the files moves or deletes them. The report of a repair without files lasts until the next start.
    """

    def __init__(self, data_dir: Path, done: str) -> None:
        self._data_dir = data_dir
        self._done = done
        self.files = set_aside(data_dir)
        self._had_files = bool(self.files)

    def look(self) -> None:
        """Forget the files that are gone; this may take long."""
        self.files = [path for path in self.files if path.exists()]

    @property
    def reason(self) -> str:
        """One line for the operator; "" if there is nothing to look at."""
        files = self.files
        if self._had_files and not files:
            return ""
        names = ", ".join(str(path.relative_to(self._data_dir)) for path in files[:NAMED_FILES])
        more = f" and {len(files) - NAMED_FILES} more" if len(files) > NAMED_FILES else ""
        kept = f"damaged files are kept: {names}{more}; move or delete them to end this" if files else ""
        return "; ".join(filter(None, (self._done, kept)))


def repair(data_dir: Path, reason: str = "") -> list[str]:
    """Repair a data directory that no broker uses; returns one line per change.

    ``reason`` names the damage of the database; without it the database is checked first. Raises `StoreError` if
    the directory is in use, `OSError` or `sqlite3.Error` if something cannot be written.
    """
    lock = lock_directory(data_dir)
    try:
        return _repair(data_dir, reason, stamp(time.time()))
    finally:
        os.close(lock)


def stamp(now: float) -> str:
    """A time (Unix seconds) for use in file names."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))


def _repair(data_dir: Path, reason: str, now: str) -> list[str]:
    database = data_dir / DATABASE
    finish_salvage(database)
    lines: list[str] = []
    ends: Ends = {}
    if is_emptied(database):
        database.touch()
    known = database.exists()
    if known:
        state = check_database(database)
        reason = reason or "; ".join(state.problems[:1])
        if reason:
            salvaged = salvage(database, now, reason)
            lines += [f"{DATABASE}: {line}" for line in salvaged.lines]
        lines += fold_log(
            database,
            data_dir / LOG_DIRECTORY,
            bool(reason),
            now,
            lambda records: _append_missing(data_dir / STREAMS, records, now),
        )
        ends = check_database(database).ends or {}
    changed = _repair_streams(data_dir / STREAMS, ends, known and not reason, now, lines)
    if changed and known:
        set_stream_ends(database, changed)
    return lines


def _append_missing(directory: Path, logged: dict[tuple[str, int], list[StreamRecords]], now: str) -> list[str]:
    """Append the records that the commit log has and a stream has not."""
    lines: list[str] = []
    for (stream, number), parts in logged.items():
        path = directory / stream / str(number)
        for line in append_missing(path, [(part.first_offset, part.messages) for part in parts], now):
            lines.append(f"{STREAMS}/{stream}/{number}/{line}")
    return lines


def _repair_streams(directory: Path, ends: Ends, trusted: bool, now: str, lines: list[str]) -> Ends:
    """Repair the partitions; returns the ends that differ from the database's, which is ``trusted`` if undamaged."""
    found = partitions(directory) if directory.is_dir() else []
    for stream in sorted({stream for stream, _ in found}):
        path = directory / stream / "stream.json"
        problem = check_description(path.parent)
        if problem is not None and path.exists():
            os.rename(path, path.with_name(f"{path.name}.damaged-{now}"))
            lines.append(f"{STREAMS}/{stream}/{problem}; put aside, the next start writes another")
    changed: Ends = {}
    for stream, number in sorted({*found, *ends}):
        path = directory / stream / str(number)
        end = ends.get((stream, number), published_end(path) if trusted else 0)
        result = repair_partition(path, end if trusted else None, end, now)
        lines += [f"{STREAMS}/{stream}/{number}/{line}" for line in result.lines]
        if result.end != end:
            changed[stream, number] = result.end
            lines.append(f"{STREAMS}/{stream}/{number}: ends at offset {result.end}, not {end}")
    return changed


def recover(store: Store, data_dir: Path, on_corrupt_store: str) -> tuple[Recovered, str]:
    """Open the store; if it is damaged, repair it first, or refuse it if ``on_corrupt_store`` is ``refuse``.

    Returns what the repair changed, too, "" if there was none. Raises the errors of `Store.recover` and `repair`.
    """
    try:
        return store.recover(), ""
    except (CorruptStore, StreamLogDamage) as error:
        if on_corrupt_store == "refuse":
            raise CorruptStore(f"{error}; run mqttbroker repair-store {data_dir}") from None
        log.error("event=store_corrupt reason=%s", error)
        try:
            lines = repair(data_dir, str(error) if isinstance(error, CorruptStore) else "")
        except sqlite3.Error as failure:
            raise CorruptStore(f"{error}; the repair failed: {failure}") from None
        for line in lines:
            log.warning("event=store_repaired what=%s", line)
        done = f"repaired at this start: {'; '.join(lines) or error}"
        if len(done) > REPORT_LENGTH:
            done = f"{done[:REPORT_LENGTH]}… (event=store_repaired in the log has the rest)"
        return store.recover(), done
