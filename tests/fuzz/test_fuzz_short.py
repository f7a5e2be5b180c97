"""A few fixed rounds of `make fuzz`, and tests of its checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuzz.core_target import CoreTarget
from fuzz.generator import VECTORS, Generator
from fuzz.network_target import NetworkTarget
from fuzz.packet_target import CodecTarget, ExchangeTarget
from fuzz.reference import Bad, parse, split
from fuzz.verdict import Finding, judge, offence
from mqttbroker.codec.packets import Connack, Connect, Disconnect, Pingreq, Pingresp, Puback

HELLO = Connect("c", 5).encode(5)
WELCOME = Connack(False, 0).encode(5)
PONG = Pingresp().encode(5)
ILLEGAL = HELLO + b"\xc1\x00"
WHY = Disconnect(0x81).encode(5)


@pytest.mark.parametrize("kind", ["good", "malformed"])
def test_the_reference_agrees_with_the_vectors(kind: str) -> None:
    for vector in json.loads((VECTORS / f"packets_{kind}.json").read_text(encoding="utf-8"))["vectors"]:
        data, good = bytes.fromhex(vector["hex"]), True
        try:
            found = split(data, 0)
            if found is not None:
                parse(found[0], found[1], vector["version"])
        except Bad:
            good = False
        assert good is (kind == "good"), vector["name"]


def test_codec_and_reference_agree() -> None:
    target = CodecTarget()
    for number in range(5):
        target.round(f"short:{number}")
    assert target.packets > target.taken > target.packets // 4


def test_core_and_reference_agree(tmp_path: Path) -> None:
    target = ExchangeTarget(tmp_path)
    for number in range(3):
        target.round(f"short:{number}")
    assert target.messages > target.packets // 2


@pytest.mark.parametrize("durability", ["off", "commit"])
def test_the_core_survives(tmp_path: Path, durability: str) -> None:
    target = CoreTarget(tmp_path, durability)
    try:
        for number in range(6):
            target.round(f"short:{number}")
    finally:
        target.close()


def test_a_broker_survives() -> None:
    target = NetworkTarget()
    try:
        for number in range(2):
            target.round(f"short:{number}")
        target.expect_no_sessions()
    finally:
        target.close()


def test_the_same_seed_gives_the_same_conversations() -> None:
    first, second = (Generator("seed") for _ in range(2))
    for _ in range(50):
        assert first.conversation().pieces == second.conversation().pieces


@pytest.mark.parametrize(
    ("sent", "end"),
    [
        (HELLO + b"\xc0\x00", None),
        (ILLEGAL, len(ILLEGAL)),
        (HELLO + b"\xc1", None),
        (b"\xc0\x00", 2),
        (HELLO + HELLO, 2 * len(HELLO)),
        (HELLO + b"\xc0\x80\x80\x80\x80\x80", len(HELLO) + 5),
        (HELLO + Disconnect().encode(5) + b"\xff", None),
    ],
)
def test_the_first_forbidden_packet(sent: bytes, end: object) -> None:
    assert offence(sent) == end


def test_allowed_answers() -> None:
    judge(HELLO + Pingreq().encode(5), WELCOME + PONG, closed=False)
    judge(ILLEGAL, WELCOME + WHY, closed=True)
    judge(b"\x00", b"", closed=True)


@pytest.mark.parametrize(
    ("sent", "received", "closed"),
    [
        (ILLEGAL, WELCOME, False),  # no answer
        (ILLEGAL, WELCOME, True),  # no reason code
        (ILLEGAL, WELCOME + WHY + PONG, True),  # a packet after DISCONNECT
        (ILLEGAL, WELCOME + WHY, False),  # not closed after DISCONNECT
        (HELLO, PONG + WELCOME, False),  # a packet before CONNACK
        (HELLO, WELCOME + WELCOME, False),
        (HELLO, WELCOME + b"\xe0\x02\x86\x00", True),  # a reason code that is not legal in DISCONNECT
        (HELLO, WELCOME + Disconnect(0x04).encode(5), True),  # a reason code of clients
        (HELLO, WELCOME + Puback(1, 0x10).encode(5)[:-1], True),  # an incomplete packet
        (HELLO, Connack(False, 0).encode(4) + WHY, True),  # DISCONNECT to a 3.1.1 client
        (HELLO, WELCOME + HELLO, False),  # a packet that only clients send
        (HELLO, WELCOME + b"\x30\x06\x00\x00\x03\x23\x00\x01", False),  # an alias before its topic
    ],
)
def test_findings(sent: bytes, received: bytes, closed: bool) -> None:
    with pytest.raises(Finding):
        judge(sent, received, closed)
