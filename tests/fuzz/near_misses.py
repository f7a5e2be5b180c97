"""Packets with one small fault: a wrong length, a missing or additional byte, or a changed bit.

Most have a Remaining Length that matches, so that the fault is inside a complete packet.
"""

from __future__ import annotations

from random import Random

from fuzz.generator import Generator
from fuzz.reference import PROPERTIES, Bad, parse, split
from mqttbroker.codec.data_types import encode_varint
from mqttbroker.codec.packets import encode_fixed_header

OFF_BY = (-4, -3, -2, -1, 1, 2, 3, 4)
LONGER_FORMS = (b"\x80\x00", b"\x80\x80\x00", b"\x80\x80\x80\x80\x00", b"\xff\xff\xff\x7f")


def near_miss(generator: Generator, packet: bytes, version: int) -> bytes:
    """``packet``, which may be any bytes, with one change."""
    random = generator.random
    found = None
    try:
        found = split(packet, 0)
    except Bad:
        pass
    if found is None:
        return packet
    first, body, _ = found
    changed = bytearray(body)
    how = random.choices(("length", "cut", "more", "byte", "flags", "property", "header"), (8, 3, 2, 3, 1, 2, 1))[0]
    if how == "length":
        _lengthen(random, first, changed, version)
    elif how == "cut":
        del changed[random.randrange(len(changed) + 1) :]
    elif how == "more":
        changed += random.randbytes(random.choice((1, 1, 2, 3)))
    elif how == "byte" and changed:
        at = random.randrange(min(len(changed), 40))
        changed[at] = random.choice((0, 1, 255, changed[at] ^ 1 << random.randrange(8)))
    elif how == "flags":
        first ^= 1 << random.randrange(4)
    elif how == "property" and version >= 5:
        _insert_property(generator, first, changed)
    elif how == "header":
        return bytes((first,)) + random.choice((_overlong(len(body)), *LONGER_FORMS)) + body
    return encode_fixed_header(first, len(changed)) + bytes(changed)


def _lengths(first: int, body: bytes, version: int) -> list[tuple[int, int]]:
    try:
        return parse(first, body, version).lengths
    except Bad:
        return []


def _lengthen(random: Random, first: int, body: bytearray, version: int) -> None:
    """Change a field's length: by a little, or to the end of the packet, or beyond it."""
    lengths = _lengths(first, bytes(body), version)
    if not lengths:
        return
    at, width = random.choice(lengths)
    if width == 2 and body[at] < 128:
        length = int.from_bytes(body[at : at + 2], "big")
        left = len(body) - at - 2
        length = max(0, random.choice((length, length, left)) + random.choice(OFF_BY))
        body[at : at + 2] = (length % 65_536).to_bytes(2, "big")
    elif width == 1:
        left = len(body) - at - 1
        number = max(0, random.choice((body[at], body[at], left)) + random.choice(OFF_BY))
        body[at : at + 1] = random.choice((encode_varint(number), encode_varint(number), _overlong(body[at])))


def _overlong(number: int) -> bytes:
    """A variable byte integer in one byte more than needed."""
    shortest = bytearray(encode_varint(number))
    shortest[-1] |= 128
    return bytes(shortest) + b"\x00"


def _insert_property(generator: Generator, first: int, body: bytearray) -> None:
    """Insert any property, legal or not, as the packet's first."""
    lengths = _lengths(first, bytes(body), 5)
    sections = [at for at, width in lengths if width == 1 and body[at] < 60 and at + 1 + body[at] <= len(body)]
    if not sections:
        return
    identifier = generator.random.choice((*PROPERTIES, 0x00, 0x7F))
    value = generator.value(identifier) if identifier in PROPERTIES else b"\x00"
    if len(value) < 60:
        at = generator.random.choice(sections)
        body[at : at + 1] = bytes((body[at] + 1 + len(value), identifier)) + value
