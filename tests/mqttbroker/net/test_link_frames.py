"""Frames of a link, cut at every byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mqttbroker.net.link_frames import HEADER_BYTES, FrameHandler, FrameReader, FrameWriter, data_prefix

Frame = tuple[int, int, bytes]

FRAMES = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 0xFFFFFFFF), st.one_of(st.binary(max_size=40), st.just(bytes(70_000)))),
    max_size=6,
)


class Received(FrameHandler):
    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def handle(self, kind: int, number: int, data: bytes, start: int, end: int) -> None:
        self.frames.append((kind, number, data[start:end]))


def encoded(frames: list[Frame]) -> bytes:
    writer = FrameWriter()
    for kind, number, body in frames:
        writer.add(kind, number, body)
    return b"".join(writer.take())


@given(FRAMES, st.data())
def test_frames_in_any_pieces(frames: list[Frame], choices: st.DataObject) -> None:
    data = encoded(frames)
    cuts = sorted(choices.draw(st.lists(st.integers(0, len(data)), max_size=8)))
    received = Received()
    reader = FrameReader(received)
    for start, end in zip([0, *cuts], [*cuts, len(data)]):
        reader.feed(data[start:end])
        while reader.read(2):
            pass
    assert received.frames == frames


def test_frames_cut_at_every_byte() -> None:
    frames = [(1, 2, b"abc"), (3, 0xFFFFFFFF, b""), (255, 0, b"x" * 300)]
    data = encoded(frames)
    for cut in range(len(data) + 1):
        received = Received()
        reader = FrameReader(received)
        for piece in (data[:cut], data[cut:]):
            reader.feed(piece)
            assert not reader.read(100)
        assert received.frames == frames


def test_reading_in_turns() -> None:
    received = Received()
    reader = FrameReader(received)
    reader.feed(encoded([(1, number, b"") for number in range(5)]))
    assert reader.read(2) and len(received.frames) == 2
    reader.feed(encoded([(1, 5, b"late")]))
    assert reader.read(3) and len(received.frames) == 5
    assert not reader.read(3) and received.frames[-1] == (1, 5, b"late")


def test_pieces_of_one_body() -> None:
    writer = FrameWriter()
    writer.add_pieces(data_prefix(1, 7), [b"ab", b"", b"cde"], 5)
    data = b"".join(writer.take())
    assert len(data) == HEADER_BYTES + 5 and writer.take() == [b""]
    received = Received()
    FrameReader(received).feed(data)
    reader = FrameReader(received)
    reader.feed(data)
    reader.read(1)
    assert received.frames == [(1, 7, b"abcde")]
