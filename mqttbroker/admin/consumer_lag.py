"""Consumer lag: how far the readers of streams that say so have come, and whom retention will overtake.

The rule kept here: what is known stands in the consumers' own reports
(`bridge_spark.source.consumers`) and in the log, so nothing is lost with a restart
and a reader of the directory is seen like one over HTTP; looking at it costs
neither the event loop nor the writer anything.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from bisect import bisect_right
from operator import attrgetter
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from bridge_spark.log.record_batch import SegmentError, scan_batches, timestamps
from bridge_spark.log.sparse_index import decode_index
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from bridge_spark.source.consumers import (
    DIRECTORY,
    MAX_REPORT_BYTES,
    SUFFIX,
    ReportError,
    check_name,
    decode_report,
    write_report,
)
from mqttbroker.config.settings import Consumers

log = logging.getLogger("mqttbroker")

Part = Dict[str, Any]
"""A partition or a segment as a manifest describes it."""


class TooManyConsumers(ReportError):
    """There is no room for another consumer."""


class Place(NamedTuple):
    """Where a consumer stands in one partition: ``offset`` is the next that it will read.

    ``lag`` counts the offsets from there to the end and ``lag_seconds`` is the
    age of the first of them that is kept; ``lost`` were removed unread.  Until
    retention removes more that is unread, it takes at least ``seconds_left`` and
    ``bytes_left`` more bytes in the stream, None where it does not go by that.
    """

    partition: int
    offset: int
    lag: int
    lag_seconds: float
    lost: int
    seconds_left: Optional[float]
    bytes_left: Optional[int]
    at_risk: bool


class Consumer(NamedTuple):
    """A reader and when it last reported, in seconds since the epoch."""

    stream: str
    name: str
    reported_at: float
    places: Tuple[Place, ...]

    @property
    def lag(self) -> int:
        return sum(place.lag for place in self.places)

    @property
    def lag_seconds(self) -> float:
        return max((place.lag_seconds for place in self.places), default=0.0)

    @property
    def at_risk(self) -> bool:
        return any(place.at_risk for place in self.places)


class ConsumerLag:
    """The consumers of `logs`, whose streams are `configs`; `clock` gives seconds since the epoch.

    ``latest`` is what the last look found.  Every method may be called on any
    thread, `start` and `stop` by the owner's.
    """

    def __init__(
        self,
        logs: StreamLogs,
        configs: Sequence[StreamConfig],
        wanted: Consumers,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.latest: Tuple[Consumer, ...] = ()
        self._logs = logs
        self._configs = {config.name: config for config in configs}
        self._wanted = wanted
        self._clock = clock
        self._lock = threading.Lock()
        self._times: Dict[Tuple[str, int, int], int] = {}
        self._silent_until: Dict[Tuple[str, ...], float] = {}
        self._stopping = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def start(self) -> None:
        """Look every now and then, on a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="consumers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; without effect unless started."""
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.look()
            except Exception:
                # A defect must not end the warnings of retention for everybody.
                log.exception("event=defect in=consumers")
            self._stopping.wait(self._wanted.interval)

    # -- what consumers and operators ask for -----------------------------------

    def report(self, stream: str, name: str, data: bytes) -> None:
        """Keep a consumer's report; raises `ReportError`, `KeyError` for an unknown stream, and `OSError`."""
        check_name(name, self._wanted.max_name_length)
        decode_report(data, self._configs[stream].partitions)
        directory = self._directory(stream)
        with self._lock:
            if not (directory / f"{name}{SUFFIX}").exists():
                if len(_report_files(directory)) >= self._wanted.max_consumers:
                    raise TooManyConsumers(f"stream {stream!r} has {self._wanted.max_consumers} consumers already")
            write_report(directory, name, data)

    def forget(self, stream: str, name: str) -> bool:
        """Forget a consumer until it reports again; False if there is none.  Raises `OSError`."""
        try:
            check_name(name, self._wanted.max_name_length)
            (self._directory(stream) / f"{name}{SUFFIX}").unlink()
        except (ReportError, FileNotFoundError):
            return False
        return True

    def table(self, stream: str) -> List[Consumer]:
        """Where the consumers of a stream stand now, by name; raises `KeyError` for an unknown stream."""
        config = self._configs[stream]
        with self._lock:
            return self._table(config, self._clock())

    def look(self) -> None:
        """Take ``latest`` anew, forget who has been silent for long, and warn of who is at risk."""
        now = self._clock()
        with self._lock:
            known, self._times = self._times, {}
            for config in self._configs.values():
                self._clean(self._directory(config.name), now)
            found = [consumer for config in self._configs.values() for consumer in self._table(config, now, known)]
        self.latest = tuple(found)
        self._silent_until = {key: until for key, until in self._silent_until.items() if until > now}
        for consumer in found:
            self._warn(consumer, now)

    # -- reports ----------------------------------------------------------------

    def _directory(self, stream: str) -> Path:
        return self._logs.directory / stream / DIRECTORY

    def _clean(self, directory: Path, now: float) -> None:
        """Remove reports, and what was to become one, that are too old."""
        try:
            names = os.listdir(directory)
        except OSError:
            return
        for name in names:
            if name.endswith(SUFFIX) or name.startswith("."):
                try:
                    if now - os.lstat(directory / name).st_mtime > self._wanted.forget_after:
                        os.unlink(directory / name)
                except OSError:
                    continue

    def _reports(self, config: StreamConfig, now: float) -> List[Tuple[str, float, Dict[int, int]]]:
        """Name, time and offsets of the stream's consumers, by name."""
        directory = self._directory(config.name)
        found = []
        for file in _report_files(directory):
            name = file.removesuffix(SUFFIX)
            try:
                check_name(name, self._wanted.max_name_length)
                data, written = _read(directory / file)
                if now - written <= self._wanted.forget_after:
                    found.append((name, written, decode_report(data, config.partitions)))
            except FileNotFoundError:
                continue
            except (OSError, ReportError) as error:
                if self._may_warn(("report", config.name, name), now):
                    log.warning("event=consumer_unreadable file=%s reason=%s", directory / file, error)
        most = self._wanted.max_consumers
        if len(found) > most:
            if self._may_warn(("many", config.name), now):
                log.warning("event=consumers_too_many stream=%s consumers=%d shown=%d", config.name, len(found), most)
            found = sorted(found, key=lambda report: -report[1])[:most]
        return sorted(found)

    # -- lag --------------------------------------------------------------------

    def _table(
        self, config: StreamConfig, now: float, known: Optional[Dict[Tuple[str, int, int], int]] = None
    ) -> List[Consumer]:
        reports = self._reports(config, now)
        if not reports:
            return []
        parts: List[Part] = self._logs.manifest(config.name)["partitions"]
        retention = _Retention(config, parts, now)
        return [
            Consumer(config.name, name, written, tuple(
                self._place(config.name, parts[number], offset, retention, now, known or {})
                for number, offset in sorted(offsets.items())
            ))
            for name, written, offsets in reports
        ]

    def _place(
        self, stream: str, part: Part, offset: int, retention: _Retention, now: float,
        known: Dict[Tuple[str, int, int], int],
    ) -> Place:
        number, start, end = part["partition"], part["log_start_offset"], part["high_watermark"]
        unread = max(offset, start)
        lag, lost = max(end - offset, 0), max(start - offset, 0)
        segment = next((s for s in part["segments"] if unread < s["end_offset"]), None)
        if segment is None:
            return Place(number, offset, lag, 0.0, lost, None, None, lost > 0)
        key = stream, number, unread
        received = self._times.get(key) or known.get(key) or self._received_at(stream, number, segment, unread)
        self._times[key] = received
        seconds, size = retention.left(segment)
        near = retention.is_near(seconds, size, self._wanted)
        return Place(number, offset, lag, max(now - received / 1e6, 0.0), lost, seconds, size, near or lost > 0)

    def _received_at(self, stream: str, partition: int, segment: Part, offset: int) -> int:
        """When a record was received, in microseconds; estimated between the segment's first and last where
        its bytes do not tell."""
        file: str = segment["file"]
        try:
            path, size = self._logs.committed_file(stream, partition, file)
            if path.suffix == ".seg":
                return _recorded_time(path, size, segment["first_offset"], offset)
        except (OSError, KeyError, SegmentError):
            pass
        first, last = segment["first_timestamp_us"], segment["last_timestamp_us"]
        count = segment["end_offset"] - segment["first_offset"]
        return int(first + (last - first) * (offset - segment["first_offset"]) / count)

    # -- warnings ---------------------------------------------------------------

    def _may_warn(self, key: Tuple[str, ...], now: float) -> bool:
        if self._silent_until.get(key, 0.0) > now:
            return False
        self._silent_until[key] = now + self._wanted.warning_interval
        return True

    def _warn(self, consumer: Consumer, now: float) -> None:
        """One line for a consumer at risk, of the partition where it is worst."""
        risky = [place for place in consumer.places if place.at_risk]
        if not risky:
            return
        place = max(risky, key=lambda place: (place.lost, -_most(place.seconds_left), -_most(place.bytes_left)))
        if not self._may_warn(("lost" if place.lost else "risk", consumer.stream, consumer.name), now):
            return
        if place.lost:
            log.warning(
                "event=consumer_overtaken stream=%s consumer=%s partition=%d offset=%d lost=%d partitions_at_risk=%d",
                consumer.stream, consumer.name, place.partition, place.offset, place.lost, len(risky),
            )
        else:
            log.warning(
                "event=consumer_at_risk stream=%s consumer=%s partition=%d offset=%d lag=%d seconds_left=%s bytes_left=%s"
                " partitions_at_risk=%d",
                consumer.stream, consumer.name, place.partition, place.offset, place.lag,
                "any" if place.seconds_left is None else int(place.seconds_left),
                "any" if place.bytes_left is None else place.bytes_left, len(risky),
            )


class _Retention:
    """What retention will do to the segments of one stream."""

    def __init__(self, config: StreamConfig, parts: Sequence[Part], now: float) -> None:
        self._age = config.retention_age
        self._bytes = config.retention_bytes
        self._now = now
        closed = sorted((s["last_timestamp_us"], s["bytes"]) for part in parts for s in part["segments"][:-1])
        self._ends = [end for end, _ in closed]
        self._sizes = [0]
        for _, size in closed:
            self._sizes.append(self._sizes[-1] + size)
        self._total = sum(s["bytes"] for part in parts for s in part["segments"])

    def left(self, segment: Part) -> Tuple[Optional[float], Optional[int]]:
        """Seconds, and bytes to be written to the stream, until a segment may be removed at the earliest."""
        last: int = segment["last_timestamp_us"]
        seconds = None if self._age is None else max(last / 1e6 + self._age - self._now, 0.0)
        if self._bytes is None:
            return seconds, None
        older = self._sizes[bisect_right(self._ends, last - 1)]
        return seconds, max(self._bytes - self._total + older, 0)

    def is_near(self, seconds: Optional[float], size: Optional[int], wanted: Consumers) -> bool:
        """Whether so little is left that an operator should know."""
        if seconds is not None and self._age is not None and seconds < min(wanted.retention_warning, self._age / 2):
            return True
        return size is not None and self._bytes is not None and (
            size < self._bytes * wanted.retention_warning_percent / 100)


def _most(left: Optional[float]) -> float:
    return float("inf") if left is None else left


def _report_files(directory: Path) -> List[str]:
    try:
        return [name for name in os.listdir(directory) if name.endswith(SUFFIX) and not name.startswith(".")]
    except OSError:
        return []


def _read(path: Path) -> Tuple[bytes, float]:
    """A report and when it was written.  Whoever may write to the directory could have put anything there."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        return file.read(MAX_REPORT_BYTES + 1), os.fstat(fd).st_mtime


def _recorded_time(path: Path, size: int, first_offset: int, offset: int) -> int:
    """The time of a record, from its batch, which the index leads to; raises `SegmentError` and `OSError`."""
    entries = [entry for entry in decode_index(path.with_suffix(".idx").read_bytes()) if entry.position < size]
    place = bisect_right(entries, offset, key=attrgetter("first_offset")) - 1
    position, first = (entries[place].position, entries[place].first_offset) if place >= 0 else (0, first_offset)
    with open(path, "rb") as file:
        for _, batch, data in scan_batches(file, position, size, first):
            if offset < batch.end_offset and not batch.lost:
                return timestamps(data, batch)[offset - batch.first_offset]
    raise SegmentError(size, f"offset {offset} is not there")
