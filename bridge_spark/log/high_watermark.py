"""The file `high_watermark` of a partition: the end of the committed records, which may be read."""

from __future__ import annotations

from pathlib import Path
from struct import Struct
from typing import NamedTuple

import google_crc32c

from bridge_spark.log.record_batch import CorruptBatch, SegmentError, TornBatch

WATERMARK_FILE = "high_watermark"
WATERMARK_MAGIC = b"MQHW"
_WATERMARK = Struct("<4sI4Q")
_VALUES = Struct("<4Q")
WATERMARK_BYTES = _WATERMARK.size
READ_ATTEMPTS = 3


class Watermark(NamedTuple):
    """The readable part of a partition: offsets from `log_start_offset` up to, not including, `high_watermark`.

    Those are all segments before the one whose first offset is `segment`, and the first `position` bytes of that one.
    """

    high_watermark: int
    segment: int
    position: int
    log_start_offset: int


def encode_watermark(watermark: Watermark) -> bytes:
    crc: int = google_crc32c.value(_VALUES.pack(*watermark))
    return _WATERMARK.pack(WATERMARK_MAGIC, crc, *watermark)


def decode_watermark(data: bytes) -> Watermark:
    """Raises `SegmentError` if the file is damaged or was read while it was written; readers then read it again."""
    if len(data) != WATERMARK_BYTES:
        raise TornBatch(0, f"a high watermark has {WATERMARK_BYTES} bytes, not {len(data)}")
    magic, crc, *values = _WATERMARK.unpack(data)
    if magic != WATERMARK_MAGIC or google_crc32c.value(data[8:]) != crc:
        raise CorruptBatch(0, "damaged high watermark")
    return Watermark(*values)


def read_watermark(directory: Path) -> Watermark:
    """The high watermark of a partition, zeros if it has none.  Raises `SegmentError` if the file is damaged."""
    for attempt in range(READ_ATTEMPTS):
        try:
            return decode_watermark((directory / WATERMARK_FILE).read_bytes())
        except FileNotFoundError:
            break
        except SegmentError:
            if attempt == READ_ATTEMPTS - 1:
                raise
    return Watermark(0, 0, 0, 0)


def published_end(directory: Path) -> int:
    """The end offset that readers of a partition have seen, 0 if unknown."""
    try:
        return read_watermark(directory).high_watermark
    except SegmentError:
        return 0
