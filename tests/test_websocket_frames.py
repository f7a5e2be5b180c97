"""WebSocket frames told apart: however they are cut into pieces, ordinary ones are opened and others returned whole."""

from __future__ import annotations

from typing import Union

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqttbroker.websocket_frames import FrameReader, binary_header
from websockets.frames import Frame, Opcode
from websockets.utils import apply_mask

LARGEST = 70_000
SIZES = st.one_of(st.integers(0, 300), st.sampled_from((125, 126, 127, 65535, 65536, LARGEST)))
OPCODES = st.sampled_from([Opcode.BINARY] * 4 + [Opcode.CONT, Opcode.TEXT, Opcode.PING, Opcode.CLOSE])
FRAMES = st.lists(
    st.builds(lambda opcode, size, fin: Frame(opcode, bytes(size % 125 if opcode > 7 else size), fin or opcode > 7),
              OPCODES, SIZES, st.booleans()),
    max_size=8,
)  # fmt: skip


def read(reader: FrameReader, pieces: list[bytes]) -> list[Union[bytes, tuple[bytes]]]:
    """What comes of the pieces, in order: payloads, and other frames in tuples."""
    found: list[Union[bytes, tuple[bytes]]] = []
    for piece in pieces:
        reader.feed(piece)
        while True:
            payloads: list[bytes] = []
            other = reader.take(payloads, True)
            found += payloads
            if not other:
                break
            found.append((other,))
    return found


@given(frames=FRAMES, cuts=st.lists(st.integers(0, 80_000), max_size=6))
def test_frames_cut_anywhere(frames: list[Frame], cuts: list[int]) -> None:
    sent = [frame.serialize(mask=True) for frame in frames]
    data = b"".join(sent)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in zip(edges, edges[1:])]
    expected = [
        bytes(frame.data) if frame.opcode is Opcode.BINARY and frame.fin else (raw,) for frame, raw in zip(frames, sent)
    ]
    assert read(FrameReader(LARGEST, apply_mask), pieces) == expected


def test_byte_by_byte() -> None:
    data = Frame(Opcode.BINARY, bytes(range(200))).serialize(mask=True) * 3
    assert read(FrameReader(LARGEST, apply_mask), [data[i : i + 1] for i in range(len(data))]) == [bytes(range(200))] * 3


def test_inside_a_fragmented_message_nothing_is_ordinary() -> None:
    reader = FrameReader(LARGEST, apply_mask)
    frame = Frame(Opcode.BINARY, b"x").serialize(mask=True)
    reader.feed(frame)
    payloads: list[bytes] = []
    assert (reader.take(payloads, False), payloads) == (frame, [])


@pytest.mark.parametrize("start", [b"\x82\x01", b"\x82\xfe\x11\x71", b"\x82\xff" + b"\xff" * 8], ids=("unmasked", "16", "64"))
def test_what_must_be_refused_is_not_waited_for(start: bytes) -> None:
    reader = FrameReader(0x1170, apply_mask)
    data = start + bytes(20)
    reader.feed(data)
    assert reader.take([], True) == data


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 1 << 20])
def test_what_the_server_sends(size: int) -> None:
    assert binary_header(size) + bytes(size) == Frame(Opcode.BINARY, bytes(size)).serialize(mask=False)
