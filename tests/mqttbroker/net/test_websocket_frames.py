"""WebSocket frames in any pieces: messages, pings and pongs are decoded, other frames returned whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.utils import apply_mask

from mqttbroker.codec.data_types import encode_varint
from mqttbroker.net.websocket_frames import FrameReader, PacketFrames, binary_header

LARGEST = 70_000


def filled(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


SIZES = st.one_of(st.integers(0, 300), st.sampled_from((125, 126, 127, 65535, 65536, LARGEST)))
OPCODES = st.sampled_from([Opcode.BINARY] * 4 + [Opcode.CONT] * 3 + [Opcode.TEXT, Opcode.PING, Opcode.PONG, Opcode.CLOSE])
FRAMES = st.lists(
    st.builds(lambda opcode, size, fin: Frame(opcode, filled(size % 125 if opcode > 7 else size), fin or opcode > 7),
              OPCODES, SIZES, st.booleans()),
    max_size=8,
)  # fmt: skip


def reader_for(short: int, largest: int = LARGEST) -> FrameReader:
    return FrameReader(largest, apply_mask, short)


def read(reader: FrameReader, pieces: list[bytes], limit: int = 1000) -> list[tuple[bytes, bytes, bytes]]:
    """The frames for the library, each with the payload and the last ping before it; then the rest."""
    found: list[tuple[bytes, bytes, bytes]] = []
    payload = ping = b""
    for piece in pieces:
        reader.feed(piece)
        while True:
            other = reader.read(limit)
            payload += reader.payload()
            ping = ping if reader.ping is None else reader.ping
            reader.ping = None
            if other:
                found.append((payload, ping, other))
                payload = ping = b""
            elif not reader.unread:
                break
    return [*found, (payload, ping, b"")]


def expected(frames: list[Frame], sent: list[bytes]) -> list[tuple[bytes, bytes, bytes]]:
    """The result of `read`, from the frames themselves."""
    found: list[tuple[bytes, bytes, bytes]] = []
    payload = ping = b""
    fragmented = False
    for frame, raw in zip(frames, sent):
        if frame.opcode is (Opcode.CONT if fragmented else Opcode.BINARY):
            payload += frame.data
            fragmented = not frame.fin
        elif frame.opcode is Opcode.PING:
            ping = bytes(frame.data)
        elif frame.opcode is not Opcode.PONG:
            found.append((payload, ping, raw))
            payload = ping = b""
    return [*found, (payload, ping, b"")]


@given(
    frames=FRAMES, cuts=st.lists(st.integers(0, 80_000), max_size=6), short=st.sampled_from((0, 256)), limit=st.sampled_from((1, 2, 1000))
)
def test_frames_cut_anywhere(frames: list[Frame], cuts: list[int], short: int, limit: int) -> None:
    sent = [frame.serialize(mask=True) for frame in frames]
    data = b"".join(sent)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in zip(edges, edges[1:])]
    assert read(reader_for(short), pieces, limit) == expected(frames, sent)


@given(payload=st.binary(max_size=300), key=st.binary(min_size=4, max_size=4))
def test_any_masking_key(payload: bytes, key: bytes) -> None:
    size = len(payload)
    head = bytes((0x82, 128 + size)) if size < 126 else bytes((0x82, 254)) + size.to_bytes(2, "big")
    for short in (0, 256):
        assert read(reader_for(short), [head + key + apply_mask(payload, key)]) == [(payload, b"", b"")]


def test_frames_byte_by_byte() -> None:
    data = Frame(Opcode.BINARY, bytes(range(200))).serialize(mask=True) * 3
    assert read(reader_for(256), [data[i : i + 1] for i in range(len(data))]) == [(bytes(range(200)) * 3, b"", b"")]


def test_whole_message_inside_a_fragmented_one_is_for_the_library() -> None:
    reader = reader_for(256)
    begin, whole, end = (
        Frame(opcode, b"x", fin).serialize(mask=True)
        for opcode, fin in ((Opcode.BINARY, False), (Opcode.BINARY, True), (Opcode.CONT, True))
    )
    assert read(reader, [begin]) == [(b"x", b"", b"")] and reader.fragmented
    assert read(reader, [whole]) == [(b"", b"", whole), (b"", b"", b"")]
    assert read(reader, [end]) == [(b"x", b"", b"")] and not reader.fragmented


def test_reading_stops_at_the_limit() -> None:
    reader = reader_for(256)
    reader.feed(Frame(Opcode.PONG, b"").serialize(mask=True) * 10)
    assert [reader.read(4), reader.unread, reader.read(4), reader.unread] == [b"", True, b"", True]
    reader.feed(Frame(Opcode.BINARY, b"behind").serialize(mask=True))
    assert (reader.read(4), reader.unread, reader.payload()) == (b"", False, b"behind")


def test_only_a_close_is_read_while_discarding() -> None:
    reader = reader_for(256)
    reader.discard()
    close = Frame(Opcode.CLOSE, b"").serialize(mask=True)
    frames = [Frame(opcode, b"x").serialize(mask=True) for opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.PING)]
    assert read(reader, [*frames, close, *frames]) == [(b"", b"", close), (b"", b"", b"")]


@pytest.mark.parametrize("start", [b"\x82\x01", b"\x82\xfe\x11\x71", b"\x82\xff" + b"\xff" * 8], ids=("unmasked", "16", "64"))
def test_an_invalid_frame_is_returned_before_it_is_complete(start: bytes) -> None:
    reader = reader_for(256, 0x1170)
    data = start + bytes(20)
    reader.feed(data)
    assert reader.read(10) == data


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 1 << 20])
def test_header_of_a_sent_message(size: int) -> None:
    assert binary_header(size) + bytes(size) == Frame(Opcode.BINARY, bytes(size)).serialize(mask=False)


@given(
    sizes=st.lists(st.sampled_from((0, 1, 10, 125, 126, 127, 128, 20_000, 70_000)), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 80_000), max_size=6),
    writes=st.lists(st.integers(0, 12), max_size=6),
)
def test_each_sent_packet_is_a_message(sizes: list[int], cuts: list[int], writes: list[int]) -> None:
    """Wherever the bytes are cut into parts, and these into writes: a message ends with its packet, or with a write."""
    packets = [b"\x30" + encode_varint(size) + bytes(size) for size in sizes]
    data = b"".join(packets)
    ends = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [memoryview(data)[start:end] for start, end in zip(ends, ends[1:])]
    bounds = sorted({0, len(parts), *(number for number in writes if number < len(parts))})
    frames = PacketFrames()
    sent = b"".join(
        b"".join(frames.frame(parts[start:end])) for start, end in zip(bounds, bounds[1:])
    )  # fmt: skip
    messages = []
    position = 0
    while position < len(sent):
        length = sent[position + 1]
        head = {126: 4, 127: 10}.get(length, 2)
        if head > 2:
            length = int.from_bytes(sent[position + 2 : position + head], "big")
        assert sent[position] == 0x82 and length
        messages.append(sent[position + head : position + head + length])
        position += head + length
    assert b"".join(messages) == data
    position, starts = 0, set()
    for message in messages:
        starts.add(position)
        position += len(message)
    packet_starts = {sum(map(len, packets[:number])) for number in range(len(packets))}
    assert packet_starts <= starts  # no packet begins inside a message
    assert len(messages) <= len(packets) + len(parts) - 1


@given(
    sizes=st.lists(st.sampled_from((0, 1, 10, 123, 124, 125, 127, 128, 17_000)), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 2000), max_size=6),
)
def test_short_packets_get_the_same_frames(sizes: list[int], cuts: list[int]) -> None:
    data = b"".join(b"\x30" + encode_varint(size) + bytes(size) for size in sizes)
    ends = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    one, other = PacketFrames(), PacketFrames()
    for start, end in zip(ends, ends[1:]):
        assert one.frame_short(data[start:end]) == b"".join(other.frame([data[start:end]]))


def test_the_rest_of_a_long_frame_is_not_kept_while_discarding() -> None:
    reader = reader_for(256)
    close = Frame(Opcode.CLOSE, b"").serialize(mask=True)
    long = Frame(Opcode.BINARY, bytes(LARGEST)).serialize(mask=True)
    assert read(reader, [long[:40_000]]) == [(b"", b"", b"")] and reader.held == 40_000
    reader.discard()
    assert reader.held == 0
    assert read(reader, [long[40_000:50_000]]) == [(b"", b"", b"")] and reader.held == 0
    assert read(reader, [long[50_000:] + long[:30_000]]) == [(b"", b"", b"")] and reader.held == 0
    assert read(reader, [long[30_000:] + close]) == [(b"", b"", close), (b"", b"", b"")]
