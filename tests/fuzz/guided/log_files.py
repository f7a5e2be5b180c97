"""Files of the stream log: any damage is a `SegmentError`, and a batch with a right checksum is never misread."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import google_crc32c
from support.records import stored_fields
from support.sealed_log import seal_segment

from bridge_spark.log.high_watermark import decode_watermark
from bridge_spark.log.record_batch import (
    CHECKED_FROM,
    HEADER,
    HEADER_BYTES,
    SegmentError,
    decode_messages,
    encode_batch,
    encode_lost,
    iter_batches,
    scan_batches,
    timestamps,
)
from bridge_spark.log.sealed.footer import (
    KEY,
    MAGIC,
    Footer,
    RowGroup,
    encode_time_index,
    parse_footer,
    search_row_groups,
    with_checksums,
)
from bridge_spark.log.sealed.reader import SealedFile
from bridge_spark.log.sparse_index import INDEX_INTERVAL, decode_index
from fuzz.guided.target import Target
from fuzz.verdict import Finding
from sessions.message import Message

RIGHT = 1  # first byte of an input whose checksums are set to the right values


def messages(count: int, topic: str = "a/b") -> list[Message]:
    return [Message(topic, b"%d" % index, index % 3, index % 2 == 1, b"\x01\x01", "dev", 1000 + index, 0) for index in range(count)]


def with_right_checksums(data: bytes) -> bytes:
    """The data with the checksum of each batch, as far as the lengths in the headers lead."""
    changed = bytearray(data)
    position = 0
    while position + HEADER_BYTES <= len(changed):
        end = position + HEADER_BYTES + HEADER.unpack_from(changed, position)[1]
        if end > len(changed):
            break
        crc = google_crc32c.value(bytes(changed[position + CHECKED_FROM : end]))
        changed[position + 8 : position + 12] = crc.to_bytes(4, "little")
        position = end
    return bytes(changed)


class Segments(Target):
    """Segment files, their sparse indexes and high watermarks."""

    modules = ("bridge_spark.log.record_batch", "bridge_spark.log.sparse_index", "bridge_spark.log.high_watermark")
    max_bytes = 800
    words = (b"MQB1", b"MQL1", (1).to_bytes(4, "little"), (1).to_bytes(8, "little"))

    def check(self, data: bytes) -> None:
        with suppress(SegmentError):
            decode_watermark(data)
        entries = decode_index(data)
        for before, after in zip(entries, entries[1:]):
            if after.first_offset <= before.first_offset or after.position - before.position < INDEX_INTERVAL:
                raise Finding(f"entries {before} and {after} are not in order")
        if data[:1] == bytes((RIGHT,)):
            data = with_right_checksums(data[1:])
        found, failed = self._batches(data)
        scanned: list[tuple[int, int]] = []
        try:
            for position, batch, _ in scan_batches(io.BytesIO(data), 0, len(data), found[0][1] if found else 0):
                scanned.append((position, batch.first_offset))
        except SegmentError:
            if not failed:
                raise Finding(f"only a scan finds damage: {data.hex()}") from None
        if scanned != found:
            raise Finding(f"a scan finds {scanned} instead of {found}: {data.hex()}")

    def _batches(self, data: bytes) -> tuple[list[tuple[int, int]], bool]:
        """Position and first offset of the batches, and whether there is damage after them."""
        found: list[tuple[int, int]] = []
        try:
            for batch in iter_batches(data):
                found.append((batch.position, batch.first_offset))
                times = timestamps(data, batch)
                if batch.lost:
                    continue
                try:
                    decoded = decode_messages(data, batch)
                except SegmentError:
                    continue
                if len(decoded) != batch.count or [each.timestamp for each in decoded] != times.tolist():
                    raise Finding(f"{len(decoded)} records instead of {batch.count}: {data.hex()}")
                if bytes(data[batch.position : batch.end]) == encode_batch(decoded, batch.first_offset):
                    continue
                again = encode_batch(decoded, batch.first_offset)
                if [stored_fields(each) for each in decode_messages(again, next(iter_batches(again)))] != [
                    stored_fields(each) for each in decoded
                ]:
                    raise Finding(f"records change when they are written again: {data.hex()}")
        except SegmentError:
            return found, True
        return found, False

    def seeds(self) -> Iterator[bytes]:
        one, three = encode_batch(messages(1), 0), encode_batch(messages(3, "ü"), 1)
        for seed in (one, one + three, one + encode_lost(1, 5) + encode_batch(messages(1), 5)):
            yield seed
            yield bytes((RIGHT,)) + seed


class Sealed(Target):
    """Sealed segments: whole files, with `RIGHT` the JSON of a footer with right checksums, with 2 a time index."""

    modules = ("bridge_spark.log.sealed.footer", "bridge_spark.log.sealed.reader")
    max_bytes = 6000
    words = (
        b'"first_offset":',
        b'"end_offset":',
        b'"groups":[',
        b'"lost":[[',
        b"]]",
        b"null",
        b"-1",
        b"1e3",
        b"true",
        b"[[",
        b"{}",
    )

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        partition = directory / "s" / "0"
        partition.mkdir(parents=True)
        path = partition / f"{0:020d}.seg"
        path.write_bytes(encode_batch(messages(4), 0) + encode_lost(4, 6) + encode_batch(messages(2), 6))
        self.file = seal_segment(path, 8).read_bytes()
        self.footer = parse_footer(self.file[-self._footer_size() :], len(self.file))

    def _footer_size(self) -> int:
        return int.from_bytes(self.file[-8:-4], "little") + 8

    def check(self, data: bytes) -> None:
        try:
            if data[:1] == bytes((RIGHT,)):
                self._json(data[1:])
            elif data[:1] == b"\x02":
                self._times(data[1:])
            else:
                self._rows(data)
        except SegmentError as error:
            if not str(error).isprintable():
                raise Finding(f"not one line: {error}") from None

    def _rows(self, data: bytes) -> None:
        file = SealedFile(lambda position, length: data[position : position + length], len(data))
        covered = 0
        for first, end, rows in file.rows(["topic", "payload", "flags", "timestamp", "properties"], 0, 1 << 40):
            covered += end - first
            if rows is not None and rows.num_rows != end - first:
                raise Finding(f"{rows.num_rows} rows of offsets {first} to {end}")
        if covered != file.footer.end_offset - file.footer.first_offset:
            raise Finding(f"{covered} rows of {file.footer}")

    def _json(self, text: bytes) -> None:
        """The footer with another value of `KEY`."""
        value = text.decode("latin-1")
        blank = Footer.encode(self.footer)
        tail = blank[blank.rindex(',"data_crc32c"') :]
        body = b"x" * 8 + KEY.encode() + (value + tail).encode("latin-1") + b"y"
        footer = with_checksums(body + len(body).to_bytes(4, "little") + MAGIC, 0)
        size = len(footer) + 1000
        try:
            parsed = parse_footer(footer, size)
        except UnicodeEncodeError:
            return
        expected: int | object = parsed.first_offset
        for first, end in sorted([(group.first_offset, group.end_offset) for group in parsed.groups] + [*parsed.lost]):
            if first != expected or end <= first:
                raise Finding(f"a gap in {parsed}")
            expected = end
        parsed.sparse_index()
        search_row_groups(lambda position, length: b"", parsed, 0)

    def _times(self, data: bytes) -> None:
        """A time index of any bytes."""
        group = RowGroup(0, 5, 4, 100, len(data), 0, 1 << 62)
        footer = self.footer._replace(groups=(group,), lost=(), end_offset=5)
        offset = search_row_groups(lambda position, length: data, footer, 1002)
        if not 0 <= offset < 5:
            raise Finding(f"offset {offset} of a group of 5: {data.hex()}")

    def seeds(self) -> Iterator[bytes]:
        yield self.file
        encoded = Footer.encode(self.footer)
        yield bytes((RIGHT,)) + encoded[: encoded.rindex(',"data_crc32c"')].encode()
        yield b"\x02" + encode_time_index([1000, 1001, 999, 1003, 1004])

    def changed(self, data: bytes, random: Random) -> bytes:
        """One byte of a whole file: most changes of its length are found at once."""
        if len(data) != len(self.file):
            return data
        at = random.randrange(len(data))
        return data[:at] + bytes((data[at] ^ 1 << random.randrange(8),)) + data[at + 1 :]
