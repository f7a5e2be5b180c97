"""Rows of a sealed segment as a segment file would give them.

The rule kept here: only what is asked for is fetched, and every byte that a row is made of was checked.  The footer has
a checksum and so has each page; of a row group that may hold a wanted row the needed columns are fetched, of the others
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from typing import Any, Optional

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from bridge_spark.log.predicates import Wanted
from bridge_spark.log.sealed import MAGIC, Group, Sealed, parse_footer, read_footer
from bridge_spark.log.segment import RETAIN_FLAG, CorruptBatch

GAP_BYTES = 64 * 1024  # so much between two columns is rather read than asked around

_COLUMNS_OF = {"flags": ("qos", "retain")}


class SealedFile:
    """A sealed segment of `size` bytes whose bytes `read` gives.  Its footer is read at once.

    Raises `SegmentError` on damage, here and later, and whatever `read` raises.
    """

    def __init__(self, read: Any, size: int) -> None:
        footer = read_footer(read, size)
        self.sealed: Sealed = parse_footer(footer, size)
        self._read = read
        self._metadata = pq.read_metadata(BytesIO(MAGIC + footer))
        self._names: list[str] = [self._metadata.schema.column(number).name for number in range(self._metadata.num_columns)]
        self._pieces = _Pieces(size)
        self._file = pq.ParquetFile(self._pieces, metadata=self._metadata, page_checksum_verification=True)

    def rows(
        self, stored: Sequence[str], start: int, end: int, wanted: Wanted = Wanted()
    ) -> Iterator[tuple[int, int, Optional[pa.RecordBatch]]]:
        """The `stored` columns and the offset of the rows from `start` up to `end`: by row group the first offset,
        the one after the last, and the rows; no rows for offsets that damage took.

        Of a row group that holds nothing `wanted` there is nothing.
        """
        parts = [(group.first_offset, group.end_offset, number) for number, group in enumerate(self.sealed.groups)]
        parts += [(*gap, -1) for gap in self.sealed.lost]
        for first, until, number in sorted(parts):
            if until <= start or end <= first:
                continue
            if number < 0:
                yield first, until, None
            elif self._may_hold(number, self.sealed.groups[number], wanted):
                rows = self._group(number, self.sealed.groups[number], stored)
                begin = max(start - first, 0)
                yield first, until, rows.slice(begin, min(end, until) - first - begin)

    def _may_hold(self, number: int, group: Group, wanted: Wanted) -> bool:
        return wanted.everything or wanted.may_hold(
            (group.first_offset, group.end_offset - 1), (group.first_timestamp, group.last_timestamp), self._topics(number)
        )

    def _topics(self, number: int) -> Any:
        found = self._metadata.row_group(number).column(self._names.index("topic")).statistics
        return (found.min, found.max) if found is not None and found.has_min_max else (None, None)

    def _group(self, number: int, group: Group, stored: Sequence[str]) -> pa.RecordBatch:
        count = group.end_offset - group.first_offset
        columns = [column for name in stored for column in _COLUMNS_OF.get(name, (name,))]
        made: dict[str, Any] = {"offset": pa.array(range(group.first_offset, group.end_offset), pa.int64())}
        if columns:
            self._pieces.hold(self._fetch(number, columns))
            try:
                read = self._file.read_row_group(number, columns, use_threads=False)
            except (OSError, pa.ArrowException) as error:
                raise CorruptBatch(group.position, " ".join(str(error).split())) from None
            if read.num_rows != count:
                raise CorruptBatch(group.position, f"{read.num_rows} rows where {count} should be")
            made.update((name, read.column(name).combine_chunks()) for name in columns)
        if "qos" in made:
            bits = pc.multiply(made["retain"].cast(pa.uint8()), pa.scalar(RETAIN_FLAG, pa.uint8()))
            made["flags"] = pc.bit_wise_or(made["qos"].cast(pa.uint8()), bits)
        names = [*stored, "offset"]
        return pa.RecordBatch.from_arrays([made[name] for name in names], names=names)

    def _fetch(self, number: int, columns: Iterable[str]) -> Iterator[tuple[int, bytes]]:
        """The bytes of these columns, neighbours together."""
        group = self._metadata.row_group(number)
        spans = []
        for name in columns:
            chunk = group.column(self._names.index(name))
            places = [place for place in (chunk.dictionary_page_offset, chunk.data_page_offset) if place]
            spans.append((min(places), min(places) + chunk.total_compressed_size))
        spans.sort()
        start, end = spans[0]
        for first, last in spans[1:]:
            if first - end > GAP_BYTES:
                yield start, self._read(start, end - start)
                start = first
            end = last
        yield start, self._read(start, end - start)


class _Pieces:
    """The parts of a file that were fetched, as a file for `pyarrow`."""

    closed = False
    mode = "rb"

    def __init__(self, size: int) -> None:
        self._size = size
        self._position = 0
        self._held: list[tuple[int, bytes]] = []

    def hold(self, pieces: Iterable[tuple[int, bytes]]) -> None:
        """Forget what was held before."""
        self._held.clear()
        self._held.extend(pieces)

    def read(self, length: int = -1) -> bytes:
        for start, data in self._held:
            if start <= self._position and self._position + length <= start + len(data):
                at = self._position - start
                self._position += length
                return data[at:at + length]
        raise CorruptBatch(self._position, "a column lies elsewhere than the footer says")

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
        """Nothing is open."""

