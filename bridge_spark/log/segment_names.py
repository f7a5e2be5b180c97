"""File names in a partition's directory: `<first offset, 20 digits>.seg`, `.idx` and `.parquet`.

Each compaction of a sealed segment writes another file, `<first offset>.<generation>.parquet`, so that a reader never takes one
for the other.

In an archive a sealed segment is `<first offset>-<end offset>.parquet`, so that a listing says which offsets it has.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

SEGMENT_SUFFIX = ".seg"
INDEX_SUFFIX = ".idx"
SEALED_SUFFIX = ".parquet"
UNFINISHED_SUFFIX = ".sealing"  # of a sealed segment that is still being written

_ARCHIVED_FILE = re.compile(r"(\d{20})-(\d{20})\.parquet")
_SEGMENT_FILE = re.compile(r"(\d{20})\.(?:seg|(?:(\d{1,9})\.)?parquet)")


def segment_file_name(first_offset: int) -> str:
    return f"{first_offset:020d}{SEGMENT_SUFFIX}"


def sealed_file_name(first_offset: int) -> str:
    return f"{first_offset:020d}{SEALED_SUFFIX}"


def compacted_file_name(first_offset: int, generation: int) -> str:
    """The file of a sealed segment after so many compactions."""
    return f"{first_offset:020d}.{generation}{SEALED_SUFFIX}" if generation else sealed_file_name(first_offset)


def generation_of(file: str) -> int:
    """How often the sealed segment with this file name was compacted."""
    match = _SEGMENT_FILE.fullmatch(file)
    return 0 if match is None else int(match[2] or 0)


def sealed_file_in(directory: Path, first_offset: int) -> str:
    """The name of the sealed file of a segment; that of one that was never compacted if there is none."""
    name = sealed_file_name(first_offset)
    if (directory / name).exists():
        return name
    others = [path.name for path in directory.glob(f"{first_offset:020d}.*{SEALED_SUFFIX}")]
    return max(others, key=generation_of, default=name)


def archived_file_name(first_offset: int, end_offset: int) -> str:
    return f"{first_offset:020d}-{end_offset:020d}{SEALED_SUFFIX}"


def archived_offsets(file: str) -> tuple[int, int] | None:
    """First and end offset of the archived segment with this file name; None if it is none."""
    match = _ARCHIVED_FILE.fullmatch(file)
    return None if match is None else (int(match[1]), int(match[2]))


def first_offset_of(file: str) -> int | None:
    """The first offset of the segment, sealed or not, with this file name; None if the file is no segment."""
    match = _SEGMENT_FILE.fullmatch(file)
    return None if match is None else int(match[1])


def is_sealed(file: str) -> bool:
    """Whether the file name is that of a sealed segment."""
    return file.endswith(SEALED_SUFFIX)


def segment_offsets(directory: Path) -> list[int]:
    """The first offsets of the segments in a partition's directory, sealed or not, ascending."""
    return sorted({first for name in os.listdir(directory) if (first := first_offset_of(name)) is not None})
