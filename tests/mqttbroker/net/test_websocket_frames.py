"""WebSocket frames told apart: however they are cut into pieces, ordinary ones are opened and others returned whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.utils import apply_mask

from mqttbroker.net.websocket_frames import FrameReader, binary_header

LARGEST = 70_000


def filled(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


SIZES = st.one_of(st.integers(0, 300), st.sampled_from((125, 126, 127, 65535, 65536, LARGEST)))
OPCODES = st.sampled_from([Opcode.BINARY] * 4 + [Opcode.CONT, Opcode.TEXT, Opcode.PING, Opcode.CLOSE])
FRAMES = st.lists(
    st.builds(lambda opcode, size, fin: Frame(opcode, filled(size % 125 if opcode > 7 else size), fin or opcode > 7),
              OPCODES, SIZES, st.booleans()),
    max_size=8,
)  # fmt: skip


def reader_for(short: int, largest: int = LARGEST) -> FrameReader:
    return FrameReader(largest, apply_mask, short)


def read(reader: FrameReader, pieces: list[bytes]) -> list[tuple[bytes, bytes]]:
    """What comes of the pieces: payload and the other frame that followed it, again and again."""
    found: list[tuple[bytes, bytes]] = []
    payload = b""
    for piece in pieces:
        reader.feed(piece)
        while True:
            other = reader.take(True)
            payload += reader.payload()
            if not other:
                break
            found.append((payload, other))
            payload = b""
    return found + [(payload, b"")]


@given(frames=FRAMES, cuts=st.lists(st.integers(0, 80_000), max_size=6), short=st.sampled_from((0, 256)))
def test_frames_cut_anywhere(frames: list[Frame], cuts: list[int], short: int) -> None:
    sent = [frame.serialize(mask=True) for frame in frames]
    data = b"".join(sent)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in zip(edges, edges[1:])]
    expected: list[tuple[bytes, bytes]] = []
    payload = b""
    for frame, raw in zip(frames, sent):
        if frame.opcode is Opcode.BINARY and frame.fin:
            payload += frame.data
        else:
            expected.append((payload, raw))
            payload = b""
    assert read(reader_for(short), pieces) == [*expected, (payload, b"")]


@given(payload=st.binary(max_size=300), key=st.binary(min_size=4, max_size=4))
def test_any_key(payload: bytes, key: bytes) -> None:
    size = len(payload)
    head = bytes((0x82, 128 + size)) if size < 126 else bytes((0x82, 254)) + size.to_bytes(2, "big")
    for short in (0, 256):
        assert read(reader_for(short), [head + key + apply_mask(payload, key)]) == [(payload, b"")]


def test_byte_by_byte() -> None:
    data = Frame(Opcode.BINARY, bytes(range(200))).serialize(mask=True) * 3
    assert read(reader_for(256), [data[i : i + 1] for i in range(len(data))]) == [(bytes(range(200)) * 3, b"")]


def test_inside_a_fragmented_message_nothing_is_ordinary() -> None:
    reader = reader_for(256)
    frame = Frame(Opcode.BINARY, b"x").serialize(mask=True)
    reader.feed(frame)
    assert (reader.take(False), reader.payload()) == (frame, b"")
    reader.add(b"found")
    assert (reader.take(True), reader.payload(), reader.payload()) == (b"", b"found", b"")


@pytest.mark.parametrize("start", [b"\x82\x01", b"\x82\xfe\x11\x71", b"\x82\xff" + b"\xff" * 8], ids=("unmasked", "16", "64"))
def test_what_must_be_refused_is_not_waited_for(start: bytes) -> None:
    reader = reader_for(256, 0x1170)
    data = start + bytes(20)
    reader.feed(data)
    assert reader.take(True) == data


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 1 << 20])
def test_what_the_server_sends(size: int) -> None:
    assert binary_header(size) + bytes(size) == Frame(Opcode.BINARY, bytes(size)).serialize(mask=False)
