"""Record batches, the sparse index and the high watermark: round trips and damage."""

from __future__ import annotations

import io
import mmap
import struct
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.records import stored_fields

from bridge_spark.log import record_batch
from bridge_spark.log.high_watermark import WATERMARK_BYTES, Watermark, decode_watermark, encode_watermark
from bridge_spark.log.record_batch import (
    HEADER_BYTES,
    BatchTooLarge,
    CorruptBatch,
    SegmentError,
    TornBatch,
    decode_columns,
    decode_messages,
    encode_batch,
    encode_batches,
    iter_batches,
    read_batch,
    scan_batches,
    timestamps,
)
from bridge_spark.log.sparse_index import INDEX_ENTRY, INDEX_INTERVAL, IndexEntry, decode_index
from sessions.message import Message


def record(index: int, payload: bytes = b"21.5") -> Message:
    return Message(f"sensors/{index}", payload, 1, False, b"", f"dev{index}", 1_000_000 + index, 0)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
records = st.lists(
    st.builds(
        Message,
        topic=texts,
        payload=st.binary(max_size=40),
        qos=st.integers(0, 2),
        retain=st.booleans(),
        properties=st.one_of(st.just(b""), st.binary(max_size=20)),
        publisher=texts,
        timestamp=st.integers(-(2**63), 2**63 - 1),
        expires_at=st.integers(0, 2**62),
    ),
    min_size=1,
    max_size=20,
)


@given(records, st.integers(0, 2**64 - 32), st.integers(0, 9))
def test_encoded_records_decode_to_themselves(messages: list[Message], first_offset: int, shift: int) -> None:
    data = bytes(shift) + encode_batch(messages, first_offset)
    (batch,) = iter_batches(data, shift)
    assert (batch.first_offset, batch.end_offset) == (first_offset, first_offset + len(messages))
    assert batch.end == len(data)
    assert list(map(stored_fields, decode_messages(data, batch))) == list(map(stored_fields, messages))
    assert timestamps(data, batch).tolist() == [message.timestamp for message in messages]


@given(records)
def test_columns_are_aligned_and_fill_the_body(messages: list[Message]) -> None:
    data = encode_batch(messages, 0)
    batch = read_batch(data)
    columns = decode_columns(data, batch)
    spans = [getattr(columns, name) for name in columns.__slots__[1:]]
    position = HEADER_BYTES
    for start, length in spans:
        assert start == position and start % 8 == 0
        padded = (length + 7) & -8
        assert data[start + length : start + padded] == bytes(padded - length)
        position = start + padded
    assert position == len(data)


def test_the_layout_is_as_documented() -> None:
    message = Message("a/b", b"xyz", 2, True, b"\x01\x00", "c", 7, 99)
    body = (
        struct.pack("<q", 7)
        + b"\x06".ljust(8, b"\0")
        + struct.pack("<2i", 0, 3) + b"a/b".ljust(8, b"\0")
        + struct.pack("<2i", 0, 3) + b"xyz".ljust(8, b"\0")
        + struct.pack("<2i", 0, 1) + b"c".ljust(8, b"\0")
        + struct.pack("<2i", 0, 2) + b"\x01\x00".ljust(8, b"\0")
    )  # fmt: skip
    data = encode_batch([message], 5)
    assert data[32:] == body
    assert data[:8] == b"MQB1" + struct.pack("<I", len(body))
    assert data[12:32] == struct.pack("<IQII", 1, 5, 1, 0)
    assert struct.unpack_from("<I", data, 8)[0] == crc32c(data[12:])


def crc32c(data: bytes) -> int:
    """CRC-32C bit by bit, to check the library's polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def segment_bytes() -> tuple[bytes, list[int]]:
    """Three small batches, and the end position of each."""
    batches = [
        encode_batch([record(0), record(1)], 0),
        encode_batch([record(2, b"")], 2),
        encode_batch([record(3), record(4, b"\xff" * 9)], 3),
    ]
    ends = [0]
    for batch in batches:
        ends.append(ends[-1] + len(batch))
    return b"".join(batches), ends


def good_prefix(data: bytes) -> int:
    end = 0
    try:
        for batch in iter_batches(data):
            end = batch.end
    except SegmentError as error:
        assert error.position == end
    return end


def test_truncation_leaves_the_batches_before_it() -> None:
    data, ends = segment_bytes()
    for cut in range(len(data) + 1):
        assert good_prefix(data[:cut]) == max(end for end in ends if end <= cut)
        if cut not in ends:
            with pytest.raises(TornBatch):
                list(iter_batches(data[:cut]))


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_damage_leaves_the_batches_before_it(flip: int) -> None:
    data, ends = segment_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= flip
        assert good_prefix(bytes(damaged)) == max(end for end in ends if end <= position)


def test_zeros_are_not_a_batch() -> None:
    data, ends = segment_bytes()
    assert good_prefix(data + bytes(4096)) == ends[-1]


def test_a_gap_in_the_offsets_is_damage() -> None:
    data = encode_batch([record(0)], 0) + encode_batch([record(1)], 2)
    with pytest.raises(CorruptBatch, match="offset 2 where 1 comes next"):
        list(iter_batches(data))
    with pytest.raises(CorruptBatch, match="offset 2 where 1 comes next"):
        list(scan_batches(io.BytesIO(data), 0, len(data), 0))


def test_iteration_stops_at_the_given_end() -> None:
    data, ends = segment_bytes()
    assert [batch.first_offset for batch in iter_batches(data, ends[1], ends[2])] == [2]
    with pytest.raises(TornBatch):
        list(iter_batches(data, ends[1], ends[2] + 40))


def test_scan_agrees_with_iteration() -> None:
    data, ends = segment_bytes()
    found = list(scan_batches(io.BytesIO(data), 0, len(data), 0))
    assert [position for position, _, _ in found] == ends[:-1]
    assert b"".join(chunk for _, _, chunk in found) == data
    with pytest.raises(TornBatch) as caught:
        list(scan_batches(io.BytesIO(data), ends[1], ends[2] + 7, 2))
    assert caught.value.position == ends[2]


def test_any_read_only_buffer_decodes() -> None:
    data, _ = segment_bytes()
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            for buffer in (data, memoryview(data), mapped):
                read = [m.topic for b in iter_batches(buffer) for m in decode_messages(buffer, b)]
                assert read == [f"sensors/{index}" for index in range(5)]


def test_columns_that_do_not_fill_the_body_are_damage() -> None:
    data = bytearray(encode_batch([record(0)], 0))
    for position, value in ((48, 1), (52, 9999), (52, -1), (52, 1)):
        damaged = bytearray(data)
        struct.pack_into("<i", damaged, position, value)
        struct.pack_into("<I", damaged, 8, crc32c(bytes(damaged[12:])))
        batch = read_batch(bytes(damaged))
        with pytest.raises(CorruptBatch, match="columns"):
            decode_columns(bytes(damaged), batch)


def test_records_too_large_for_one_batch_become_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_batch, "BATCH_BYTES", 2000)
    messages = [record(index, bytes(300)) for index in range(20)] + [record(20, bytes(5000))]
    with pytest.raises(BatchTooLarge):
        encode_batch(messages, 7)
    batches = encode_batches(messages, 7)
    data = b"".join(batches)
    found = list(iter_batches(data))
    assert [stored_fields(m) for b in found for m in decode_messages(data, b)] == [stored_fields(m) for m in messages]
    assert found[0].first_offset == 7 and len(found) == len(batches) > 3
    assert all(batch.body_length < 2000 or batch.count == 1 for batch in found)


def test_a_record_too_large_for_the_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_batch, "MAX_BODY_BYTES", 1000)
    with pytest.raises(BatchTooLarge):
        encode_batches([record(0, bytes(1000))], 0)
    with pytest.raises(ValueError):
        encode_batch([], 0)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 9), st.integers(0, 99)), max_size=9))
def test_an_index_is_read_back(steps: list[tuple[int, int, int]]) -> None:
    entries: list[IndexEntry] = []
    offset = position = time = 0
    for records_between, more, later in steps:
        entries.append(IndexEntry(offset, position, time))
        offset += records_between
        position += INDEX_INTERVAL + more
        time += later
    data = b"".join(INDEX_ENTRY.pack(*entry) for entry in entries)
    assert decode_index(data) == entries
    assert decode_index(data + bytes(7)) == entries
    if entries:
        assert decode_index(data + bytes(4 * INDEX_ENTRY.size)) == entries


def test_an_index_that_does_not_begin_with_the_segment_is_ignored() -> None:
    assert decode_index(INDEX_ENTRY.pack(5, 70_000, 0)) == []


def test_a_damaged_watermark_is_an_error() -> None:
    watermark = Watermark(100, 60, 4096, 20)
    data = encode_watermark(watermark)
    assert len(data) == WATERMARK_BYTES == 40
    assert decode_watermark(data) == watermark
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(SegmentError):
            decode_watermark(bytes(damaged))
        with pytest.raises(SegmentError):
            decode_watermark(data[:position])
