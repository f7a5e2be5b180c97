"""Describes the plan of a read as text."""

from __future__ import annotations

from collections.abc import Sequence

from bridge_spark.source.options import SourceOptions, row_selection
from bridge_spark.source.plan import Slice
from bridge_spark.source.storage import Archive, Manifest


def explain_plan(options: SourceOptions, manifest: Manifest, tasks: Sequence[Sequence[Slice]]) -> str:
    """A line per partition: offsets, files and bytes that are read, of those that are kept."""
    slices = [part for task in tasks for part in task]
    where = ",".join(options.kafka.servers) if options.kafka is not None else options.url or options.path
    lines = [
        f"mqtt source: stream {options.stream!r} of {where!r}: "
        f"{_count(len(tasks), 'task')}, {sum(part.end_offset - part.start_offset for part in slices):,} offsets"
    ]
    for number, state in sorted(manifest.items()):
        found = [part for part in slices if part.partition == number]
        kept = f"of {state.log_start} to {state.high_watermark}"
        archive = state.archive or Archive(0, 0)
        size = archive.size + sum(segment.size for segment in state.segments)
        count = archive.segments + len(state.segments)
        if not found:
            lines.append(f"  partition {number}: nothing {kept}")
            continue
        files, read = {part.file for part in found}, sum(part.end_position - part.position for part in found)
        lines.append(
            f"  partition {number}: offsets {found[0].start_offset} to {found[-1].end_offset} {kept}, "
            f"{len(files)} of {_count(count, 'file')}, at most {read:,} of {size:,} bytes"
        )
    for name, value in row_selection(options).items():
        lines.append(f"  rows by {name} {value!r}; row groups of sealed segments without such rows are not read")
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
