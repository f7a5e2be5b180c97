"""Seals segments in the test's own process."""

from __future__ import annotations

import os
from pathlib import Path

from bridge_spark.log.sealed.writer import ClosedSegment, seal
from bridge_spark.log.segment_names import SEALED_SUFFIX, UNFINISHED_SUFFIX, sealed_file_name


def seal_segment(path: Path, end_offset: int, keep: bool = False) -> Path:
    """Seal the closed segment file `path`, which ends at `end_offset`; remove the unsealed file unless `keep`."""
    first = int(path.stem)
    target = path.with_name(sealed_file_name(first))
    source = ClosedSegment(path, path.parent.parent.name, int(path.parent.name), first, end_offset, path.stat().st_size)
    unfinished = target.with_name(target.name + UNFINISHED_SUFFIX)
    seal(source, unfinished)
    os.rename(unfinished, target)
    if not keep:
        path.unlink()
        path.with_suffix(".idx").unlink(missing_ok=True)
    return target


def seal_closed(partition: Path) -> list[Path]:
    """Seal all segments of a partition but the last."""
    firsts = sorted(int(path.stem) for path in partition.glob("*.seg"))
    return [seal_segment(partition / f"{first:020d}.seg", end) for first, end in zip(firsts, firsts[1:])]


def sealed_files(partition: Path) -> list[Path]:
    return sorted(partition.glob(f"*{SEALED_SUFFIX}"))
