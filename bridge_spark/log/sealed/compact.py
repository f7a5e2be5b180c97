"""Compaction of sealed segments: the last record of each key survives.

A pass reads the segments that no pass has read, oldest first, until it knows `most_keys` keys, and writes the segments up to
there again.  A removed record keeps its offset and a row, whose topic is null and whose other columns take next to no room: so
segments, row groups and checks stay as they are, and readers leave these rows out.

A tombstone, a record with an empty payload, is removed like any other by a later record of its key, or when its segment was
compacted longer ago than tombstones are kept: since then no older record of its key is there.  A reader that is not further
behind than that sees each deletion.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from bridge_spark.log.columns import PropertyError, decode_properties
from bridge_spark.log.record_batch import CorruptBatch
from bridge_spark.log.sealed.footer import GAPS_ONLY, KEY, Footer, RowGroup, encode_time_index, load_footer, verify_file
from bridge_spark.log.sealed.writer import (
    DICTIONARIES,
    ENCODINGS,
    SCHEMA,
    STATISTICS,
    ZSTD_LEVEL,
    ChecksummedFile,
)
from bridge_spark.log.segment_names import UNFINISHED_SUFFIX, compacted_file_name, generation_of

SCHEMA_OF_COMPACTED = pa.schema([field.with_nullable(True) if field.name == "topic" else field for field in SCHEMA])
_KEY_COLUMNS = {"topic": "topic", "client": "client_id"}
_EMPTY = {"payload": b"", "qos": 0, "retain": False, "client_id": "", "properties": b""}  # of removed records
DIGEST_BYTES = 16  # of a key, as Kafka's cleaner has it

Keys = dict[bytes, int]


class Compacted(NamedTuple):
    """A file that was written: its name, and the unfinished file that is to get it."""

    file: str
    unfinished: str
    removed: int


def compact(files: Sequence[Path], key: str, tombstones_before: int, now: int, most_keys: int) -> list[Compacted]:
    """Compact the sealed segments of a partition, which are all from the first one on, without a gap; sync the new files.

    `key` is that of the stream, `now` in microseconds.  Tombstones go if their segment was compacted before
    `tombstones_before`.  The caller renames the files in their order, so that a crash leaves a prefix of them.  Raises
    `SegmentError` or `OSError`; unfinished files may remain.
    """
    footers = [load_footer(path) for path in files]
    # Segments behind one that is not compacted count as not compacted: a restored copy may have mixed old and new files.
    dirty = next((number for number, footer in enumerate(footers) if footer.compacted_at <= GAPS_ONLY), len(files))
    keys: Keys = {}
    end = dirty
    while end < len(files) and (end == dirty or len(keys) < most_keys):
        for offset, digest in _keys(files[end], key):
            if digest is not None:
                keys[digest] = offset
        end += 1
    found = []
    for number in range(end):
        footer = footers[number]
        if number < dirty:
            drop_tombstones = footer.compacted_at < tombstones_before
            written = _rewrite(files[number], footer, key, keys, drop_tombstones, footer.compacted_at)
        else:
            written = _rewrite(files[number], footer._replace(compacted_at=0), key, keys, False, now)
        if written is not None:
            found.append(written)
    return found


def _keys(path: Path, key: str) -> Iterator[tuple[int, bytes | None]]:
    """The offset and key of each record that was not removed."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        column = _KEY_COLUMNS.get(key, "properties")
        for number in range(file.num_row_groups):
            rows = file.read_row_group(number, sorted({"offset", "topic", column}), use_threads=False)
            rows = rows.filter(pc.is_valid(rows.column("topic")))
            yield from zip(rows.column("offset").to_pylist(), _digests(rows.column(column), key))


def _digests(column: Any, key: str) -> list[bytes | None]:
    """The digest of each record's key; None for a record without one, which is never removed."""
    distinct = column.combine_chunks().dictionary_encode()
    digests = [_digest(value, key) for value in distinct.dictionary.to_pylist()]
    return [digests[index] for index in distinct.indices.to_pylist()]


def _digest(value: Any, key: str) -> bytes | None:
    if key in _KEY_COLUMNS:
        text = value.encode()
    else:
        try:
            pairs = dict(reversed(decode_properties(value).user_properties))  # the first of a repeated name
        except PropertyError:
            return None
        text = pairs.get(key.removeprefix("user-property:"), "").encode()
    return blake2b(text, digest_size=DIGEST_BYTES).digest() if text else None


def _rewrite(path: Path, footer: Footer, key: str, keys: Keys, drop_tombstones: bool, compacted_at: int) -> Compacted | None:
    """Write a segment without the records that are superseded; None if it is compacted, and has none."""
    with pq.ParquetFile(path, page_checksum_verification=True) as source:
        kept = [
            _kept(source.read_row_group(number, use_threads=False), key, keys, drop_tombstones) for number in range(source.num_row_groups)
        ]
        removed = sum(count for _, count in kept)
        if not removed and footer.compacted_at:
            return None
        name = compacted_file_name(footer.first_offset, generation_of(path.name) + 1)
        target = path.with_name(f"{name}.{os.getpid()}{UNFINISHED_SUFFIX}")
        fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            written = _write(source, footer, [mask for mask, _ in kept], compacted_at, ChecksummedFile(fd))
            os.fsync(fd)
        finally:
            os.close(fd)
    found = verify_file(target)
    if found != written._replace(size=found.size, data_bytes=found.data_bytes, data_crc=found.data_crc):
        raise CorruptBatch(0, "the footer read back differs from the one written")
    return Compacted(name, str(target), removed)


def _kept(rows: Any, key: str, keys: Keys, drop_tombstones: bool) -> tuple[Any, int]:
    """Which rows of a row group survive, and how many do not that did before."""
    there = pc.is_valid(rows.column("topic")).to_pylist()
    offsets = rows.column("offset").to_pylist()
    empty = pc.equal(pc.binary_length(rows.column("payload")), 0).to_pylist()
    column = rows.column(_KEY_COLUMNS.get(key, "properties"))
    if column.null_count:
        column = pc.fill_null(column, "")
    kept = []
    removed = 0
    for present, offset, tombstone, digest in zip(there, offsets, empty, _digests(column, key)):
        survives = present and (digest is None or (keys.get(digest, -1) <= offset and not (tombstone and drop_tombstones)))
        removed += present and not survives
        kept.append(survives)
    return pa.array(kept, pa.bool_()), removed


def _write(source: Any, footer: Footer, kept: Sequence[Any], compacted_at: int, sink: ChecksummedFile) -> Footer:
    groups: list[RowGroup] = []
    file = pa.PythonFile(sink, "w")
    with pq.ParquetWriter(
        file,
        SCHEMA_OF_COMPACTED,
        compression="zstd",
        compression_level=ZSTD_LEVEL,
        use_dictionary=DICTIONARIES,
        column_encoding=ENCODINGS,
        write_statistics=STATISTICS,
        write_page_index=True,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        for number, (group, mask) in enumerate(zip(footer.groups, kept)):
            rows = _without_removed(source.read_row_group(number, use_threads=False), mask, group.first_timestamp)
            position = file.tell()
            writer.write_table(rows)
            index = encode_time_index(rows.column("timestamp").cast(pa.int64()).to_pylist())
            end = file.tell()
            file.write(index)
            groups.append(group._replace(position=position, times_position=end, times_bytes=len(index)))
        written = footer._replace(groups=tuple(groups), compacted_at=compacted_at)
        writer.add_key_value_metadata({KEY: written.encode()})
        sink.hold_footer()
    sink.finish()
    return written


def _without_removed(rows: Any, kept: Any, timestamp: int) -> Any:
    """The row group with nulls, or the same small values, in the rows that are removed."""
    places = pa.array(range(rows.num_rows), pa.int64())
    taken = rows.take(pc.if_else(kept, places, pa.scalar(None, pa.int64())))
    columns = []
    for field in SCHEMA_OF_COMPACTED:
        column = taken.column(field.name).combine_chunks()
        if field.name in ("partition", "offset", "stream"):
            column = rows.column(field.name).combine_chunks()
        elif field.name == "timestamp":
            column = pc.fill_null(column, pa.scalar(timestamp, field.type))
        elif field.name in _EMPTY:
            column = pc.fill_null(column, pa.scalar(_EMPTY[field.name], field.type))
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=SCHEMA_OF_COMPACTED)
