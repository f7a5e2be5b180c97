"""Reads the rows of a sealed segment.

Only the needed columns of row groups that may match are fetched.  The checksums of the footer and of each page are
verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from bridge_spark.log.columns import row_numbers
from bridge_spark.log.predicates import Predicate
from bridge_spark.log.record_batch import RETAIN_FLAG, CorruptBatch
from bridge_spark.log.sealed.footer import MAGIC, Footer, RowGroup, fetch_footer, parse_footer

GAP_BYTES = 64 * 1024  # columns this close are fetched by one read

_PARQUET_COLUMNS = {"flags": ("qos", "retain")}


class SealedFile:
    """A sealed segment of `size` bytes, read by `read(position, length)`.  The footer is read at once.

    The constructor and the methods raise `SegmentError` on damage, and any error of `read`.
    """

    def __init__(self, read: Any, size: int) -> None:
        footer = fetch_footer(read, size)
        self.footer: Footer = parse_footer(footer, size)
        self._read = read
        self._metadata = pq.read_metadata(BytesIO(MAGIC + footer))
        self._names: list[str] = [self._metadata.schema.column(number).name for number in range(self._metadata.num_columns)]
        self._ranges = _FetchedRanges(size)
        self._file = pq.ParquetFile(self._ranges, metadata=self._metadata, page_checksum_verification=True)

    def rows(
        self,
        stored: Sequence[str],
        start: int,
        end: int,
        predicate: Predicate = Predicate(),
        with_removed: bool = False,
    ) -> Iterator[tuple[int, int, pa.RecordBatch | None]]:
        """The `stored` columns and the offsets of the rows from `start` up to `end`.

        Yields the first offset, the end offset and the rows of each row group; None as rows for offsets lost to damage.
        Row groups without a row that may match `predicate` are skipped.  Records that compaction removed are left out;
        `with_removed` they are rows whose topic is null.
        """
        compacted = self.footer.compacted_at > 0 and not with_removed
        fetched = [*stored, "topic"] if compacted and "topic" not in stored else stored
        parts = [(group.first_offset, group.end_offset, number) for number, group in enumerate(self.footer.groups)]
        parts += [(*gap, -1) for gap in self.footer.lost]
        for first, until, number in sorted(parts):
            if until <= start or end <= first:
                continue
            if number < 0:
                yield first, until, None
            elif self._may_match(number, self.footer.groups[number], predicate):
                rows = self._group(number, self.footer.groups[number], fetched)
                begin = max(start - first, 0)
                rows = rows.slice(begin, min(end, until) - first - begin)
                if compacted:
                    rows = rows.filter(pc.is_valid(rows.column("topic"))).select([*stored, "offset"])
                yield first, until, rows

    def _may_match(self, number: int, group: RowGroup, predicate: Predicate) -> bool:
        return predicate.unbounded or predicate.may_match(
            (group.first_offset, group.end_offset - 1),
            (group.first_timestamp, group.last_timestamp),
            self._topics(number),
        )

    def _topics(self, number: int) -> Any:
        found = self._metadata.row_group(number).column(self._names.index("topic")).statistics
        return (found.min, found.max) if found is not None and found.has_min_max else (None, None)

    def _group(self, number: int, group: RowGroup, stored: Sequence[str]) -> pa.RecordBatch:
        count = group.end_offset - group.first_offset
        columns = [column for name in stored for column in _PARQUET_COLUMNS.get(name, (name,))]
        arrays: dict[str, Any] = {"offset": row_numbers(count, group.first_offset)}
        if columns:
            self._ranges.replace(self._fetch(number, columns))
            try:
                read = self._file.read_row_group(number, columns, use_threads=False)
            except (OSError, pa.ArrowException) as error:
                reason = "".join(each if each.isprintable() else " " for each in str(error))
                raise CorruptBatch(group.position, " ".join(reason.split())) from None
            if read.num_rows != count:
                raise CorruptBatch(group.position, f"{read.num_rows} rows instead of {count}")
            arrays.update((name, read.column(name).combine_chunks()) for name in columns)
        if "qos" in arrays:
            bits = pc.multiply(arrays["retain"].cast(pa.uint8()), pa.scalar(RETAIN_FLAG, pa.uint8()))
            arrays["flags"] = pc.bit_wise_or(arrays["qos"].cast(pa.uint8()), bits)
        names = [*stored, "offset"]
        return pa.RecordBatch.from_arrays([arrays[name] for name in names], names=names)

    def _fetch(self, number: int, columns: Iterable[str]) -> Iterator[tuple[int, bytes]]:
        """The position and bytes of these columns; neighbouring columns in one piece."""
        group = self._metadata.row_group(number)
        spans = []
        for name in columns:
            chunk = group.column(self._names.index(name))
            first = min(page for page in (chunk.dictionary_page_offset, chunk.data_page_offset) if page)
            spans.append((first, first + chunk.total_compressed_size))
        spans.sort()
        start, end = spans[0]
        for first, last in spans[1:]:
            if first - end > GAP_BYTES:
                yield start, self._read(start, end - start)
                start = first
            end = last
        yield start, self._read(start, end - start)


class _FetchedRanges:
    """The fetched byte ranges of a file, as a file object for `pyarrow`."""

    closed = False
    mode = "rb"

    def __init__(self, size: int) -> None:
        self._size = size
        self._position = 0
        self._fetched: list[tuple[int, bytes]] = []

    def replace(self, ranges: Iterable[tuple[int, bytes]]) -> None:
        """Drop the current ranges and keep these."""
        self._fetched.clear()
        self._fetched.extend(ranges)

    def read(self, length: int = -1) -> bytes:
        for start, data in self._fetched:
            if start <= self._position and self._position + length <= start + len(data):
                at = self._position - start
                self._position += length
                return data[at : at + length]
        raise CorruptBatch(self._position, "a column is not where the footer says")

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def size(self) -> int:
        return self._size

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """Required by pyarrow; there is nothing to close."""
