"""The configuration of one stream: filters, partitions, retention, sealing; and the errors of the stream log."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from bridge_spark.log.archive.location import parse_location

FORMAT_VERSION = 3
"""Of `stream.json` and the manifest.  Programs refuse a version above their own.  3: a stream has an archive."""
FORMAT_WITHOUT_ARCHIVE = 2

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


def can_seal() -> bool:
    """Whether pyarrow is installed.  Does not load it."""
    return find_spec("pyarrow") is not None


class StreamLogError(Exception):
    """The files of a stream do not agree with the configuration or the database."""


class StreamLogDamage(StreamLogError):
    """Files are damaged or missing; `bridge_spark.log.repair` repairs them."""


class StreamConfig:
    """Which messages a stream keeps, and for how long.  Raises `ValueError` for an invalid value.

    ``retention_age`` and ``segment_age`` are seconds, ``retention_bytes`` (for all partitions together) and
    ``segment_bytes`` bytes; None is unlimited.  ``seal`` rewrites closed segments as Parquet.  ``archive`` is the
    location to which sealed segments are copied, with a retention of its own; local retention keeps segments that
    are not archived.  ``definition`` are the settings of a stream that was created at run time, as they were given; it is
    kept in the stream's description.  ``compact``: sealed segments keep the last record of each key; tombstones stay for
    ``compact_tombstones`` seconds; a partition is compacted when ``compact_dirty_percent`` of its sealed bytes are not, up to
    about ``compact_keys`` keys at a time.
    """

    def __init__(
        self,
        name: str,
        filters: Sequence[str],
        partitions: int = 1,
        key: str = "topic",
        retention_age: float | None = None,
        retention_bytes: int | None = None,
        segment_bytes: int = 64 * 1024 * 1024,
        segment_age: float = 3600.0,
        seal: bool = False,
        archive: str | None = None,
        archive_retention_age: float | None = None,
        archive_retention_bytes: int | None = None,
        definition: Mapping[str, Any] | None = None,
        compact: bool = False,
        compact_tombstones: float = 86400.0,
        compact_dirty_percent: int = 50,
        compact_keys: int = 1_000_000,
    ) -> None:
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"stream name {name!r}: only letters, digits, '_', '-' and '.', no leading '.'")
        for setting, value in (
            ("partitions", partitions),
            ("segment_bytes", segment_bytes),
            ("segment_age", segment_age),
            ("retention_age", retention_age),
            ("retention_bytes", retention_bytes),
            ("archive_retention_age", archive_retention_age),
            ("archive_retention_bytes", archive_retention_bytes),
        ):
            if value is not None and value <= 0:
                raise ValueError(f"stream {name!r}: {setting} must be positive, not {value}")
        self.name = name
        self.filters = list(filters)
        self.partitions = partitions
        self.key = key
        self.retention_age = retention_age
        self.retention_bytes = retention_bytes
        self.segment_bytes = segment_bytes
        self.segment_age = segment_age
        self.seal = seal
        self.archive = None if archive is None else parse_location(archive)
        self.archive_retention_age = archive_retention_age
        self.archive_retention_bytes = archive_retention_bytes
        self.definition = definition
        self.compact = compact
        self.compact_tombstones = compact_tombstones
        self.compact_dirty_percent = compact_dirty_percent
        self.compact_keys = compact_keys


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key.  It never changes, on any machine."""
    return zlib.crc32(key) % partitions
