"""A second, independent decoder of MQTT packets, slow and simple, for tests.

It imports nothing of the broker and copies none of its tables, so that the two agree only where both are right.

``version`` is the protocol level 3, 4 or 5. Sections are those of MQTT 5.0 unless another version is named.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

Value = int | str | bytes | tuple[str, str]

NAMES = (
    "reserved connect connack publish puback pubrec pubrel pubcomp subscribe suback unsubscribe unsuback pingreq pingresp disconnect auth"
).split()
BOTH_SEND = {"publish", "puback", "pubrec", "pubrel", "pubcomp", "disconnect", "auth"}
CLIENT_SENDS = BOTH_SEND | {"connect", "subscribe", "unsubscribe", "pingreq"}
SERVER_SENDS = BOTH_SEND | {"connack", "suback", "unsuback", "pingresp"}

# Section 2.2.2.2: identifier, type, packets.
_PROPERTIES = """
01 byte   publish will
02 four   publish will
03 text   publish will
08 text   publish will
09 binary publish will
0B varint publish subscribe
11 four   connect connack disconnect
12 text   connack
13 two    connack
15 text   connect connack auth
16 binary connect connack auth
17 byte   connect
18 four   will
19 byte   connect
1A text   connack
1C text   connack disconnect
1F text   connack puback pubrec pubrel pubcomp suback unsuback disconnect auth
21 two    connect connack
22 two    connect connack
23 two    publish
24 byte   connack
25 byte   connack
26 pair connect connack publish will puback pubrec pubrel pubcomp subscribe suback unsubscribe unsuback disconnect auth
27 four   connect connack
28 byte   connack
29 byte   connack
2A byte   connack
"""
# Section 2.4: packets, codes.
_CODES = """
connack    00 80 81 82 83 84 85 86 87 88 89 8A 8C 90 95 97 99 9A 9B 9C 9D 9F
puback     00 10 80 83 87 90 91 97 99
pubrec     00 10 80 83 87 90 91 97 99
pubrel     00 92
pubcomp    00 92
suback     00 01 02 80 83 87 8F 91 97 9E A1 A2
unsuback   00 11 80 83 87 8F 91
disconnect 00 04 80 81 82 83 87 89 8B 8C 8D 8E 8F 90 93 94 95 96 97 98 99 9A 9B 9C 9D 9E 9F A0 A1 A2
auth       00 18 19
"""
PROPERTIES = {int(row.split()[0], 16): row.split()[1:] for row in _PROPERTIES.strip().splitlines()}
CODES = {row.split()[0]: [int(code, 16) for code in row.split()[1:]] for row in _CODES.strip().splitlines()}
MAY_NOT_BE_ZERO = (0x0B, 0x21, 0x23, 0x27)


class Bad(Exception):
    """The standard forbids this packet."""


@dataclass
class Parsed:
    """One packet. Properties are sorted by identifier, and otherwise in the packet's order.

    ``lengths`` has the positions of field lengths in the body, as (offset, bytes).
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    properties: list[tuple[int, Value]] = field(default_factory=list)
    will_properties: list[tuple[int, Value]] = field(default_factory=list)
    lengths: list[tuple[int, int]] = field(default_factory=list)

    def same(self, other: Parsed) -> bool:
        """Whether two packets are equal."""
        return (self.kind, self.fields, self.properties, self.will_properties) == (
            other.kind, other.fields, other.properties, other.will_properties
        )  # fmt: skip


def split(data: bytes, position: int) -> tuple[int, bytes, int] | None:
    """First byte, body and end of the packet at ``position``; None if it is incomplete."""
    if position >= len(data):
        return None
    length, digits = 0, 0
    while True:
        if position + 1 + digits >= len(data):
            return None
        digit = data[position + 1 + digits]
        length += (digit % 128) * 128**digits
        digits += 1
        if digit < 128:
            break
        if digits == 4:
            raise Bad("Remaining Length of more than four bytes")
    if digits > 1 and digit == 0:
        raise Bad("Remaining Length is not the shortest [MQTT-1.5.5-1]")
    start = position + 1 + digits
    if len(data) < start + length:
        return None
    return data[position], data[start : start + length], start + length


def sent_again(first: int, version: int) -> int:
    """The first byte of a client's packet without the DUP flag that MQTT 3.1 allows on any packet."""
    return first - 8 if version == 3 and NAMES[first // 16] != "publish" and first % 16 >= 8 else first


def end_of(data: bytes, position: int) -> int:
    """The end of a `Bad` packet by its Remaining Length, or the position where that is invalid."""
    length = 0
    for digits in range(4):
        digit = data[position + 1 + digits]
        length += (digit % 128) * 128**digits
        if digit < 128:
            return min(len(data), position + 2 + digits + length)
    return min(len(data), position + 5)


class Reader:
    """Reads the fields of a body in order."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.position = 0
        self.lengths: list[tuple[int, int]] = []

    @property
    def left(self) -> int:
        return len(self.body) - self.position

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise Bad(f"{size} bytes wanted, {self.left} left")
        self.position += size
        return self.body[self.position - size : self.position]

    def number(self, size: int) -> int:
        total = 0
        for byte in self.take(size):
            total = total * 256 + byte
        return total

    def varint(self) -> int:
        start, total, digits = self.position, 0, 0
        while True:
            digit = self.number(1)
            total += (digit % 128) * 128**digits
            digits += 1
            if digit < 128:
                break
            if digits == 4:
                raise Bad("variable byte integer of more than four bytes")
        if digits > 1 and digit == 0:
            raise Bad("variable byte integer is not the shortest [MQTT-1.5.5-1]")
        self.lengths.append((start, digits))
        return total

    def binary(self) -> bytes:
        self.lengths.append((self.position, 2))
        return self.take(self.number(2))

    def text(self) -> str:
        raw = self.binary()
        try:
            found = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise Bad("not UTF-8 [MQTT-1.5.4-1]") from None
        for point in map(ord, found):
            if 0xD800 <= point <= 0xDFFF:
                raise Bad("a surrogate [MQTT-1.5.4-1]")
            if point < 0x20 or 0x7F <= point <= 0x9F or 0xFDD0 <= point <= 0xFDEF or point % 0x10000 >= 0xFFFE:
                raise Bad("a character that may be refused, or U+0000 [MQTT-1.5.4-2]")
        return found

    def packet_id(self) -> int:
        found = self.number(2)
        if found == 0:
            raise Bad("packet identifier 0 [MQTT-2.2.1-3]")
        return found

    def finish(self) -> None:
        if self.left:
            raise Bad(f"{self.left} bytes left over")

    def properties(self, kind: str, version: int) -> list[tuple[int, Value]]:
        """Section 2.2.2; none below version 5."""
        if version < 5:
            return []
        length = self.varint()
        if length > self.left:
            raise Bad("properties reach beyond the packet")
        inner = Reader(self.body[: self.position + length])
        inner.position = self.position
        inner.lengths = self.lengths
        found: list[tuple[int, Value]] = []
        while inner.left:
            identifier = inner.number(1)
            if identifier not in PROPERTIES or kind not in PROPERTIES[identifier][1:]:
                raise Bad(f"property {identifier:#x} in {kind}")
            repeats = identifier == 0x26 or (identifier == 0x0B and kind == "publish")
            if not repeats and any(earlier == identifier for earlier, _ in found):
                raise Bad(f"property {identifier:#x} twice")
            found.append((identifier, inner.property_value(identifier)))
        self.position = inner.position
        identifiers = [identifier for identifier, _ in found]
        if 0x16 in identifiers and 0x15 not in identifiers:
            raise Bad("Authentication Data without Authentication Method")
        return sorted(found, key=lambda item: item[0])

    def property_value(self, identifier: int) -> Value:
        form = PROPERTIES[identifier][0]
        if form == "text":
            text = self.text()
            if identifier == 0x08 and (not text or re.search("[+#]", text)):
                raise Bad("invalid Response Topic [MQTT-3.3.2-14] [MQTT-4.7.3-1]")
            return text
        if form == "binary":
            return self.binary()
        if form == "pair":
            return self.text(), self.text()
        number = self.varint() if form == "varint" else self.number({"byte": 1, "two": 2, "four": 4}[form])
        if (form == "byte" and number > 1) or (number == 0 and identifier in MAY_NOT_BE_ZERO):
            raise Bad(f"property {identifier:#x} is {number}")
        return number


def parse(first: int, body: bytes, version: int) -> Parsed:
    """The packet with this first byte and body; Bad if the standard forbids it.

    Topic filters are left to `is_filter`. CONNECT has its own version.
    """
    kind, flags = NAMES[first // 16], first % 16
    if kind == "reserved" or (kind == "auth" and version < 5):
        raise Bad(f"packet type {first // 16}")
    if kind != "publish" and flags != (2 if kind in ("pubrel", "subscribe", "unsubscribe") else 0):
        raise Bad(f"flags {flags} on {kind} [MQTT-2.1.3-1]")
    reader = Reader(body)
    parsed = Parsed(kind)
    if kind == "connect":
        _connect(reader, parsed)
    elif kind == "publish":
        _publish(reader, parsed, flags, version)
    elif kind == "connack":
        _connack(reader, parsed, version)
    elif kind in ("subscribe", "unsubscribe"):
        _filters(reader, parsed, version)
    elif kind in ("suback", "unsuback"):
        _codes(reader, parsed, version)
    elif kind not in ("pingreq", "pingresp"):
        if kind.startswith("pub"):
            parsed.fields["packet_id"] = reader.packet_id()
        _reason(reader, parsed, version)
    reader.finish()
    parsed.lengths = reader.lengths
    return parsed


def _connect(reader: Reader, parsed: Parsed) -> None:
    """Section 3.1."""
    protocol, level = reader.text(), reader.number(1) & 0x7F  # without the mark of Mosquitto's bridges
    if (protocol, level) not in (("MQIsdp", 3), ("MQTT", 4), ("MQTT", 5)):
        raise Bad("unknown protocol [MQTT-3.1.2-1] [MQTT-3.1.2-2]")
    flags = f"{reader.number(1):08b}"
    has_name, has_password, will_retain = (flag == "1" for flag in flags[:3])
    will_qos, has_will, clean = int(flags[3:5], 2), flags[5] == "1", flags[6] == "1"
    if flags[7] == "1" or will_qos == 3 or (not has_will and (will_qos or will_retain)):
        raise Bad("flags of CONNECT [MQTT-3.1.2-3] [MQTT-3.1.2-11] [MQTT-3.1.2-12] [MQTT-3.1.2-13]")
    if level < 5 and has_password and not has_name:
        raise Bad("password without user name, 3.1.1 [MQTT-3.1.2-22]")
    parsed.fields |= {"version": level, "clean": clean, "keep_alive": reader.number(2)}
    parsed.properties = reader.properties("connect", level)
    parsed.fields["client_id"] = reader.text()
    parsed.fields["will"] = None
    if has_will:
        parsed.will_properties = reader.properties("will", level)
        topic = reader.text()
        if not topic or re.search("[+#]", topic):
            raise Bad("will topic [MQTT-4.7.3-1] [MQTT-4.7.1-1]")
        parsed.fields["will"] = (topic, reader.binary(), will_qos, will_retain)
    parsed.fields["username"] = reader.text() if has_name else None
    parsed.fields["password"] = reader.binary() if has_password else None


def _publish(reader: Reader, parsed: Parsed, flags: int, version: int) -> None:
    """Section 3.3."""
    dup, qos, retain = flags // 8 == 1, flags // 2 % 4, flags % 2 == 1
    if qos == 3 or (dup and qos == 0):
        raise Bad("QoS 3, or DUP at QoS 0 [MQTT-3.3.1-2] [MQTT-3.3.1-4]")
    topic = reader.text()
    if re.search("[+#]", topic):
        raise Bad("wildcard in a topic [MQTT-3.3.2-2]")
    packet_id = reader.packet_id() if qos else 0
    parsed.properties = reader.properties("publish", version)
    if not topic and 0x23 not in dict(parsed.properties):
        raise Bad("empty topic without alias [MQTT-4.7.3-1]")
    payload = reader.take(reader.left)
    parsed.fields |= {"dup": dup, "qos": qos, "retain": retain, "packet_id": packet_id}
    parsed.fields |= {"topic": topic, "payload": payload}


def _connack(reader: Reader, parsed: Parsed, version: int) -> None:
    """Section 3.2."""
    present, code = reader.number(1), reader.number(1)
    if present > 1 or (present and code) or code not in (CODES["connack"] if version == 5 else range(6)):
        raise Bad("CONNACK [MQTT-3.2.2-1] [MQTT-3.2.2-6]")
    parsed.fields = {"present": present == 1, "code": code}
    parsed.properties = reader.properties("connack", version)


def _filters(reader: Reader, parsed: Parsed, version: int) -> None:
    """Sections 3.8 and 3.10."""
    parsed.fields["packet_id"] = reader.packet_id()
    parsed.properties = reader.properties(parsed.kind, version)
    parsed.fields["filters"] = filters = []
    while reader.left:
        topic_filter = reader.text()
        if parsed.kind == "unsubscribe":
            filters.append(topic_filter)
            continue
        options = reader.number(1)
        qos, handling = options % 4, options // 16 % 4
        if qos == 3 or handling == 3 or options >= 64 or (version < 5 and options > 3):
            raise Bad("subscription options [MQTT-3.8.3-5]")
        if options // 4 % 2 and topic_filter.startswith("$share/"):
            raise Bad("No Local on a shared subscription [MQTT-3.8.3-4]")
        filters.append((topic_filter, options))
    if not filters:
        raise Bad("no topic filter [MQTT-3.8.3-2] [MQTT-3.10.3-2]")


def _codes(reader: Reader, parsed: Parsed, version: int) -> None:
    """Sections 3.9 and 3.11."""
    parsed.fields["packet_id"] = reader.packet_id()
    parsed.properties = reader.properties(parsed.kind, version)
    codes = list(reader.take(reader.left))
    legal = CODES[parsed.kind] if version == 5 else [0, 1, 2, 0x80]
    if any(code not in legal for code in codes) or (not codes) is not (version < 5 and parsed.kind == "unsuback"):
        raise Bad("codes of an acknowledgement")
    parsed.fields["codes"] = codes


def _reason(reader: Reader, parsed: Parsed, version: int) -> None:
    """The optional reason code and properties of PUBACK, PUBREC, PUBREL, PUBCOMP, DISCONNECT and AUTH."""
    parsed.fields["code"] = 0
    whole = reader.left == 0
    if version == 5 and reader.left:
        parsed.fields["code"] = reader.number(1)
        if parsed.fields["code"] not in CODES[parsed.kind]:
            raise Bad("reason code")
        if reader.left:
            parsed.properties = reader.properties(parsed.kind, version)
    if parsed.kind == "auth" and not whole and 0x15 not in dict(parsed.properties):
        raise Bad("AUTH without Authentication Method")


def is_topic(topic: str) -> bool:
    """Section 4.7."""
    return 0 < len(topic.encode()) <= 65_535 and not re.search("[+#\0]", topic)


def is_filter(topic_filter: str) -> bool:
    """Sections 4.7.1 and 4.8.2."""
    if "\0" in topic_filter or len(topic_filter.encode()) > 65_535:
        return False
    shared = re.fullmatch(r"\$share/(.*)", topic_filter, re.DOTALL)
    if shared is not None:
        name, slash, topic_filter = shared[1].partition("/")
        if not slash or not name or re.search("[+#]", name):
            return False
    levels = topic_filter.split("/")
    if not topic_filter:
        return False
    return all(
        level == "+" or (level == "#" and number == len(levels) - 1) or not re.search("[+#]", level) for number, level in enumerate(levels)
    )
