"""Long packets: few pieces, no byte lost, and the position of the payload."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqttbroker.codec.packets import Publish
from mqttbroker.codec.properties import Properties
from mqttbroker.core.packets.long_packet import MIN_PIECE, LongPacket, payload_start, total_size


@given(st.lists(st.integers(1, 3 * MIN_PIECE), min_size=1, max_size=30))
def test_the_pieces_are_few_and_make_the_packet(sizes: list[int]) -> None:
    packet = bytes(range(251)) * (sum(sizes) // 251 + 1)
    packet = packet[: sum(sizes)]
    found = LongPacket(packet[: sizes[0]], len(packet))
    position = sizes[0]
    for size in sizes[1:]:
        assert found.missing == len(packet) - position
        found.append(packet[position : position + size])
        position += size
    assert found.missing == 0
    pieces = found.finish()
    assert b"".join(pieces) == packet and total_size(pieces) == len(packet)
    assert all(len(piece) >= MIN_PIECE for piece in pieces[:-1])


def test_a_read_of_at_least_min_piece_bytes_is_not_copied() -> None:
    first, second = bytes(MIN_PIECE), bytes(2 * MIN_PIECE)
    found = LongPacket(first, 4 * MIN_PIECE)
    for part in (second, second[1:], b"x"):
        found.append(part[: found.missing])
    pieces = found.finish()
    assert pieces[0] is first and pieces[1] is second and len(pieces) == 3


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("length", [0, 100, 200, 20_000])
def test_payload_start_is_the_position_of_the_payload(version: int, qos: int, length: int) -> None:
    properties = Properties()
    properties.content_type = "x" * length if length else None
    packet = Publish("t/1", b"payload", qos, packet_id=1 if qos else 0, properties=properties).encode(version)
    body = 2
    while packet[body - 1] >= 128:
        body += 1
    start = packet.index(b"payload")
    assert payload_start(packet, body, qos, version) == start
    for size in range(body, min(start, 300)):  # the variable header is incomplete
        assert payload_start(packet[:size], body, qos, version) > size
    assert payload_start(packet[:start], body, qos, version) == start
