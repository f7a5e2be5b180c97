"""What one stream is: its filters, its partitions, and how long it keeps what.

The rule kept here: a configuration that cannot work is refused before anything is written.
"""

from __future__ import annotations

import re
import zlib
from importlib.util import find_spec
from typing import Optional, Sequence

FORMAT_VERSION = 2
"""Of a stream's description and of its manifest: who knows a lower one refuses.  2: segments may be sealed."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


def can_seal() -> bool:
    """Whether pyarrow is installed; it is not loaded."""
    return find_spec("pyarrow") is not None


class StreamLogError(Exception):
    """The files of a stream are not what the configuration or the database says."""


class StreamLogDamage(StreamLogError):
    """Files are damaged or missing; `bridge_spark.log.log_repair` mends that."""


class StreamConfig:
    """What one stream keeps and for how long; raises `ValueError` on impossible values.

    ``retention_age`` and ``segment_age`` are seconds, ``retention_bytes`` (of the
    stream, all partitions) and ``segment_bytes`` bytes; None keeps for ever.
    ``seal`` rewrites closed segments as Parquet.
    """

    def __init__(
        self,
        name: str,
        filters: Sequence[str],
        partitions: int = 1,
        key: str = "topic",
        retention_age: Optional[float] = None,
        retention_bytes: Optional[int] = None,
        segment_bytes: int = 64 * 1024 * 1024,
        segment_age: float = 3600.0,
        seal: bool = False,
    ) -> None:
        if _NAME.fullmatch(name) is None:
            raise ValueError(
                f"stream name {name!r}: letters, digits, '_', '-' and '.', no leading '.'"
            )
        for what, value in (
            ("partitions", partitions),
            ("segment_bytes", segment_bytes),
            ("segment_age", segment_age),
            ("retention_age", retention_age),
            ("retention_bytes", retention_bytes),
        ):
            if value is not None and value <= 0:
                raise ValueError(f"stream {name!r}: {what} must be positive, not {value}")
        self.name = name
        self.filters = list(filters)
        self.partitions = partitions
        self.key = key
        self.retention_age = retention_age
        self.retention_bytes = retention_bytes
        self.segment_bytes = segment_bytes
        self.segment_age = segment_age
        self.seal = seal


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key, the same on every start and machine."""
    return zlib.crc32(key) % partitions
