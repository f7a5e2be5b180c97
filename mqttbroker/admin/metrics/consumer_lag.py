"""Consumer lag: how far consumers have read the streams, and which of them retention will overtake.

It is computed from the consumers' reports (`bridge_spark.source.consumers`) and the log, both on disk, so a restart
loses nothing and consumers that read the directory are included. It runs on threads other than the event loop and the
writer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from bridge_spark.log.record_batch import SegmentError
from bridge_spark.log.segment import receipt_time
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
from mqttbroker.admin.control.groups import GroupStatus
from mqttbroker.config.settings import Consumers

log = logging.getLogger("mqttbroker.streams")

Part = dict[str, Any]
"""A partition or a segment as a manifest describes it."""


class TooManyConsumers(ReportError):
    """The stream has as many consumers as it may have."""


class PartitionLag(NamedTuple):
    """A consumer's progress in one partition."""

    partition: int
    offset: int  # the next one that it will read
    lag: int  # offsets from there to the high watermark
    lag_seconds: float  # age of the first unread record that is kept
    lost: int  # offsets that retention removed unread
    # Until retention removes unread records, at least so much time passes, or the stream grows by so many bytes.
    seconds_left: float | None  # None if retention does not depend on age
    bytes_left: int | None  # None if retention does not depend on size
    at_risk: bool


class Consumer(NamedTuple):
    """A consumer of a stream, a group (``$share/…``) or a queue (``$queue/…``); ``reported_at`` is a Unix time in seconds."""

    stream: str
    name: str
    reported_at: float
    partitions: tuple[PartitionLag, ...]

    @property
    def lag(self) -> int:
        return sum(partition.lag for partition in self.partitions)

    @property
    def lag_seconds(self) -> float:
        return max((partition.lag_seconds for partition in self.partitions), default=0.0)

    @property
    def at_risk(self) -> bool:
        return any(partition.at_risk for partition in self.partitions)


class ConsumerLag:
    """The consumers of all streams of ``logs``.

    ``clock`` returns Unix time in seconds, ``groups`` the groups of each stream. ``latest`` is the result of the last `update`. `start` and `stop` are for
    the owner's thread, the other methods for any thread.
    """

    def __init__(
        self,
        logs: StreamLogs,
        settings: Consumers,
        clock: Callable[[], float] = time.time,
        groups: Callable[[], dict[str, list[GroupStatus]]] = dict,
    ) -> None:
        self.latest: tuple[Consumer, ...] = ()
        self._groups = groups
        self._logs = logs
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._times: dict[tuple[str, int, int], int] = {}
        self._next_warning: dict[tuple[str, ...], float] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start a thread that calls `update` at every interval of the settings."""
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
                self.update()
            except Exception:
                # A defect must not end the warnings for all consumers.
                log.exception("event=defect in=consumers")
            self._stopping.wait(self._settings.interval)

    # -- requests ---------------------------------------------------------------

    def report(self, stream: str, name: str, data: bytes) -> None:
        """Store a consumer's report. Raises ReportError, KeyError if the stream is unknown, and OSError."""
        check_name(name, self._settings.max_name_length)
        decode_report(data, self._logs.config(stream).partitions)
        directory = self._directory(stream)
        with self._lock:
            if not (directory / f"{name}{SUFFIX}").exists():
                if len(_report_files(directory)) >= self._settings.max_consumers:
                    raise TooManyConsumers(f"stream {stream!r} has {self._settings.max_consumers} consumers already")
            write_report(directory, name, data)

    def forget(self, stream: str, name: str) -> bool:
        """Delete a consumer's report; False if there is none. Raises OSError."""
        try:
            check_name(name, self._settings.max_name_length)
            (self._directory(stream) / f"{name}{SUFFIX}").unlink()
        except (ReportError, FileNotFoundError):
            return False
        return True

    def consumers(self, stream: str) -> list[Consumer]:
        """The consumers of a stream now, sorted by name. Raises KeyError if the stream is unknown."""
        config = self._logs.config(stream)
        groups = self._groups().get(stream, [])
        with self._lock:
            return self._consumers(config, self._clock(), groups)

    def update(self) -> None:
        """Compute ``latest``, delete the reports that are too old, and log a warning for each consumer at risk."""
        now = self._clock()
        groups = self._groups()
        with self._lock:
            known, self._times = self._times, {}
            found: list[Consumer] = []
            for config in self._logs.configs():
                self._delete_old(self._directory(config.name), now)
                with suppress(KeyError):  # the stream was deleted meanwhile
                    found += self._consumers(config, now, groups.get(config.name, []), known)
        self.latest = tuple(found)
        self._next_warning = {key: at for key, at in self._next_warning.items() if at > now}
        for consumer in found:
            self._warn(consumer, now)

    # -- reports ----------------------------------------------------------------

    def _directory(self, stream: str) -> Path:
        return self._logs.directory / stream / DIRECTORY

    def _delete_old(self, directory: Path, now: float) -> None:
        """Delete reports, and temporary files of reports, that are too old."""
        try:
            names = os.listdir(directory)
        except OSError:
            return
        for name in names:
            if name.endswith(SUFFIX) or name.startswith("."):
                try:
                    if now - os.lstat(directory / name).st_mtime > self._settings.forget_after:
                        os.unlink(directory / name)
                except OSError:
                    continue

    def _reports(self, config: StreamConfig, now: float) -> list[tuple[str, float, dict[int, int]]]:
        """The reports of a stream as (consumer, time, offsets by partition), sorted by consumer."""
        directory = self._directory(config.name)
        found = []
        for file in _report_files(directory):
            name = file.removesuffix(SUFFIX)
            try:
                check_name(name, self._settings.max_name_length)
                data, written = _read(directory / file)
                if now - written <= self._settings.forget_after:
                    found.append((name, written, decode_report(data, config.partitions)))
            except FileNotFoundError:
                continue
            except (OSError, ReportError) as error:
                if self._may_warn(("report", config.name, name), now):
                    log.warning("event=consumer_unreadable file=%s reason=%s", directory / file, error)
        most = self._settings.max_consumers
        if len(found) > most:
            if self._may_warn(("many", config.name), now):
                log.warning("event=consumers_too_many stream=%s consumers=%d shown=%d", config.name, len(found), most)
            found = sorted(found, key=lambda report: -report[1])[:most]
        return sorted(found)

    # -- lag --------------------------------------------------------------------

    def _consumers(
        self,
        config: StreamConfig,
        now: float,
        groups: list[GroupStatus],
        known: dict[tuple[str, int, int], int] | None = None,
    ) -> list[Consumer]:
        reports = self._reports(config, now)
        reports += [(group.name, now, group.offsets) for group in groups]
        if not reports:
            return []
        parts: list[Part] = self._logs.manifest(config.name)["partitions"]
        retention = _Retention(config, parts, now, self._logs)
        return [
            Consumer(
                config.name,
                name,
                written,
                tuple(
                    self._partition_lag(config.name, parts[number], offset, retention, now, known or {})
                    for number, offset in sorted(offsets.items())
                    if number < len(parts)
                ),
            )
            for name, written, offsets in reports
        ]

    def _partition_lag(
        self,
        stream: str,
        part: Part,
        offset: int,
        retention: _Retention,
        now: float,
        known: dict[tuple[str, int, int], int],
    ) -> PartitionLag:
        number, start, end = part["partition"], part["log_start_offset"], part["high_watermark"]
        unread = max(offset, start)
        lag, lost = max(end - offset, 0), max(start - offset, 0)
        segment = self._archived_segment(stream, part, unread)
        if segment is None:
            segment = next((s for s in part["segments"] if unread < s["end_offset"]), None)
        if segment is None:
            return PartitionLag(number, offset, lag, 0.0, lost, None, None, lost > 0)
        key = stream, number, unread
        received = self._times.get(key) or known.get(key) or self._received_at(stream, number, segment, unread)
        self._times[key] = received
        seconds, size = retention.left(number, segment)
        near = retention.is_near(seconds, size, self._settings)
        age = max(now - received / 1e6, 0.0)
        return PartitionLag(number, offset, lag, age, lost, seconds, size, near or lost > 0)

    def _archived_segment(self, stream: str, part: Part, offset: int) -> Part | None:
        """The segment of an offset that only the archive has; None if the data directory has it."""
        local_start = part["segments"][0]["first_offset"] if part["segments"] else part["high_watermark"]
        if "archive" not in part or offset >= local_start:
            return None
        try:
            found = self._logs.archived(stream, part["partition"], offset, local_start, 1)
        except (OSError, SegmentError):
            return None
        return (
            None
            if not found
            else {
                "file": found[0].file,
                "first_offset": found[0].first_offset,
                "end_offset": found[0].end_offset,
                "first_timestamp_us": found[0].first_timestamp,
                "last_timestamp_us": found[0].last_timestamp,
            }
        )

    def _received_at(self, stream: str, partition: int, segment: Part, offset: int) -> int:
        """When a record was received, in µs since the Unix epoch.

        If its batch cannot be read, the time is interpolated between the segment's first and last record.
        """
        file: str = segment["file"]
        try:
            path, size = self._logs.committed_file(stream, partition, file)
            if path.suffix == ".seg":
                return receipt_time(path, size, segment["first_offset"], offset)
        except (OSError, KeyError, SegmentError):
            pass
        first, last = segment["first_timestamp_us"], segment["last_timestamp_us"]
        count = segment["end_offset"] - segment["first_offset"]
        return int(first + (last - first) * (offset - segment["first_offset"]) / count)

    # -- warnings ---------------------------------------------------------------

    def _may_warn(self, key: tuple[str, ...], now: float) -> bool:
        if self._next_warning.get(key, 0.0) > now:
            return False
        self._next_warning[key] = now + self._settings.warning_interval
        return True

    def _warn(self, consumer: Consumer, now: float) -> None:
        """Log one line for a consumer at risk, about the partition where most is lost or least is left."""
        at_risk = [partition for partition in consumer.partitions if partition.at_risk]
        if not at_risk:
            return
        worst = max(at_risk, key=lambda each: (each.lost, -_or_infinity(each.seconds_left), -_or_infinity(each.bytes_left)))
        if not self._may_warn(("lost" if worst.lost else "risk", consumer.stream, consumer.name), now):
            return
        if worst.lost:
            log.warning(
                "event=consumer_overtaken stream=%s consumer=%s partition=%d offset=%d lost=%d partitions_at_risk=%d",
                consumer.stream,
                consumer.name,
                worst.partition,
                worst.offset,
                worst.lost,
                len(at_risk),
            )
        else:
            log.warning(
                "event=consumer_at_risk stream=%s consumer=%s partition=%d offset=%d lag=%d seconds_left=%s"
                " bytes_left=%s partitions_at_risk=%d",
                consumer.stream,
                consumer.name,
                worst.partition,
                worst.offset,
                worst.lag,
                "any" if worst.seconds_left is None else int(worst.seconds_left),
                "any" if worst.bytes_left is None else worst.bytes_left,
                len(at_risk),
            )


class _Retention:
    """When retention removes the segments of one stream: that of the archive if there is one."""

    def __init__(self, config: StreamConfig, parts: Sequence[Part], now: float, logs: StreamLogs) -> None:
        self._stream = config.name
        self._archives: StreamLogs | None = None if config.archive is None else logs
        self._age = config.retention_age if self._archives is None else config.archive_retention_age
        self._bytes = config.retention_bytes if self._archives is None else config.archive_retention_bytes
        self._now = now
        closed = sorted((s["last_timestamp_us"], s["bytes"]) for part in parts for s in part["segments"][:-1])
        self._ends = [end for end, _ in closed]
        self._sizes = [0]
        for _, size in closed:
            self._sizes.append(self._sizes[-1] + size)
        self._total = sum(s["bytes"] for part in parts for s in part["segments"])
        if self._archives is not None:
            self._total = sum(part["archive"]["bytes"] for part in parts if "archive" in part)

    def left(self, partition: int, segment: Part) -> tuple[float | None, int | None]:
        """The seconds, and the bytes written to the stream, after which a segment is removed at the earliest."""
        last: int = segment["last_timestamp_us"]
        seconds = None if self._age is None else max(last / 1e6 + self._age - self._now, 0.0)
        if self._bytes is None:
            return seconds, None
        if self._archives is None:
            older = self._sizes[bisect_right(self._ends, last - 1)]
        else:  # at least; those of other partitions may be older, too
            older = self._archives.partition(self._stream, partition).archive.size_before(segment["first_offset"])
        return seconds, max(self._bytes - self._total + older, 0)

    def is_near(self, seconds: float | None, size: int | None, settings: Consumers) -> bool:
        """Whether less is left than the settings allow without a warning."""
        if seconds is not None and self._age is not None and seconds < min(settings.retention_warning, self._age / 2):
            return True
        return size is not None and self._bytes is not None and (size < self._bytes * settings.retention_warning_percent / 100)


def _or_infinity(left: float | None) -> float:
    return float("inf") if left is None else left


def _report_files(directory: Path) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if name.endswith(SUFFIX) and not name.startswith(".")]
    except OSError:
        return []


def _read(path: Path) -> tuple[bytes, float]:
    """A report and when it was written. Other users may be able to write to the directory: follow no link."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        return file.read(MAX_REPORT_BYTES + 1), os.fstat(fd).st_mtime
