"""An encoder and a strict decoder of packets that share nothing with the broker's codec.

The decoder raises `Violation` for everything that a server may not send: other packet types, reason codes or properties
that the packet does not list, and lengths in more bytes than needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import ANY

NAMES = ("", "CONNECT", "CONNACK", "PUBLISH", "PUBACK", "PUBREC", "PUBREL", "PUBCOMP", "SUBSCRIBE", "SUBACK",
         "UNSUBSCRIBE", "UNSUBACK", "PINGREQ", "PINGRESP", "DISCONNECT", "AUTH")  # fmt: skip
TYPES = {name: number for number, name in enumerate(NAMES) if name}
FLAGS = {"PUBREL": 2, "SUBSCRIBE": 2, "UNSUBSCRIBE": 2}
ACKS = ("PUBACK", "PUBREC", "PUBREL", "PUBCOMP")

# The type of each property: the width of an integer, or v(arint), s(tring), b(inary), p(air).
FORMS: dict[int, int | str] = {
    0x01: 1, 0x02: 4, 0x03: "s", 0x08: "s", 0x09: "b", 0x0B: "v", 0x11: 4, 0x12: "s", 0x13: 2, 0x15: "s", 0x16: "b",
    0x17: 1, 0x18: 4, 0x19: 1, 0x1A: "s", 0x1C: "s", 0x1F: "s", 0x21: 2, 0x22: 2, 0x23: 2, 0x24: 1, 0x25: 1,
    0x26: "p", 0x27: 4, 0x28: 1, 0x29: 1, 0x2A: 1,
}  # fmt: skip
PAYLOAD_FORMAT, MESSAGE_EXPIRY, CONTENT_TYPE, RESPONSE_TOPIC, CORRELATION = 0x01, 0x02, 0x03, 0x08, 0x09
SUBSCRIPTION_ID, SESSION_EXPIRY, ASSIGNED_ID, SERVER_KEEP_ALIVE = 0x0B, 0x11, 0x12, 0x13
AUTH_METHOD, AUTH_DATA, PROBLEM_INFORMATION, WILL_DELAY, RESPONSE_REQUEST = 0x15, 0x16, 0x17, 0x18, 0x19
RESPONSE_INFORMATION, SERVER_REFERENCE, REASON, RECEIVE_MAXIMUM, ALIAS_MAXIMUM = 0x1A, 0x1C, 0x1F, 0x21, 0x22
ALIAS, MAXIMUM_QOS, RETAIN_AVAILABLE, USER, MAXIMUM_PACKET_SIZE = 0x23, 0x24, 0x25, 0x26, 0x27

# The properties (MQTT 5.0 table 2-4) and reason codes (table 2-6) of the packets that a server sends.
SERVER_PROPERTIES: dict[str, tuple[int, ...]] = {
    "CONNACK": (0x11, 0x12, 0x13, 0x15, 0x16, 0x1A, 0x1C, 0x1F, 0x21, 0x22, 0x24, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2A),
    "PUBLISH": (0x01, 0x02, 0x03, 0x08, 0x09, 0x0B, 0x23, 0x26),
    **{name: (0x1F, 0x26) for name in (*ACKS, "SUBACK", "UNSUBACK")},
    "DISCONNECT": (0x1C, 0x1F, 0x26),  # no Session Expiry Interval [MQTT-3.14.2-2]
    "AUTH": (0x15, 0x16, 0x1F, 0x26),
}
ACCEPTANCE = b"\x00\x10\x80\x83\x87\x90\x91\x97\x99"
SERVER_CODES: dict[str, bytes] = {
    "CONNACK": b"\x00\x80\x81\x82\x83\x84\x85\x86\x87\x88\x89\x8a\x8c\x90\x95\x97\x99\x9a\x9b\x9c\x9d\x9f",
    "PUBACK": ACCEPTANCE,
    "PUBREC": ACCEPTANCE,
    "PUBREL": b"\x00\x92",
    "PUBCOMP": b"\x00\x92",
    "SUBACK": b"\x00\x01\x02\x80\x83\x87\x8f\x91\x97\x9e\xa1\xa2",
    "UNSUBACK": b"\x00\x11\x80\x83\x87\x8f\x91",
    "DISCONNECT": b"\x00\x80\x81\x82\x83\x87\x89\x8b\x8c\x8d\x8e\x8f\x90\x93\x94\x95\x96\x97\x98\x99\x9a\x9b\x9c\x9d\x9e\x9f\xa0\xa1\xa2",
    "AUTH": b"\x00\x18\x19",
}

Property = tuple[int, Any]


class Violation(AssertionError):
    """The server sent something that it may not."""


def check(holds: bool, violation: str) -> None:
    if not holds:
        raise Violation(violation)


# --- writing ------------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes((value,))


def s(text: str | bytes) -> bytes:
    """A string or binary data with its two-byte length; bytes are not checked."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    return len(data).to_bytes(2, "big") + data


def prop(identifier: int, value: Any) -> bytes:
    form = FORMS[identifier]
    head = bytes((identifier,))
    if isinstance(form, int):
        return head + int(value).to_bytes(form, "big")
    if form == "v":
        return head + varint(value)
    return head + (s(value[0]) + s(value[1]) if form == "p" else s(value))


def props(values: Sequence[Property]) -> bytes:
    body = b"".join(prop(identifier, value) for identifier, value in values)
    return varint(len(body)) + body


class Packet:
    """A packet by its fields: to send, received, or expected.

    A field of an expected packet may be ``ANY`` or a function. ``props`` are pairs in the packet's order; if a case
    does not set them, an expected PUBLISH has none and other packets may have any.
    """

    def __init__(self, kind: str, **fields: Any) -> None:
        self.kind = kind
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={value!r}' for name, value in self.fields.items())})"

    def fits(self, received: Packet, version: int) -> bool:
        """Whether the received packet ``received`` is as expected."""
        if received.kind != self.kind:
            return False
        for name, wanted in self.fields.items():
            if version < 5 and (name == "props" or (name == "codes" and self.kind == "UNSUBACK")):
                continue
            if name == "props" and wanted is None:
                wanted = [] if self.kind == "PUBLISH" else ANY
            if version < 5 and name == "code" and self.kind in ACKS:
                continue
            value = getattr(received, name)
            if not (wanted(value) if callable(wanted) and wanted is not ANY else wanted == value):
                return False
        return True

    def encode(self, version: int, own: Callable[[str], str]) -> bytes:
        """The packet's bytes; ``own`` adds the case's prefix to names."""
        five = version >= 5
        fields = self.fields
        tail = props([(i, own(v) if i == RESPONSE_TOPIC else v) for i, v in fields.get("props") or ()]) if five else b""
        number = fields["id"].to_bytes(2, "big") if fields.get("id") is not None else b""
        flags = FLAGS.get(self.kind, 0)
        if self.kind == "CONNECT":
            body = self._connect(version, own, tail)
        elif self.kind == "PUBLISH":
            flags = self.dup << 3 | self.qos << 1 | self.retain
            body = s(own(self.topic)) + (number if self.qos else b"") + tail + self.payload
        elif self.kind in ACKS or self.kind in ("DISCONNECT", "AUTH"):
            code = bytes((self.code,)) + tail
            body = number + (code if five and code != b"\0\0" else b"")
        elif self.kind == "SUBSCRIBE":
            body = number + tail + b"".join(s(own(name)) + bytes((options,)) for name, options in self.filters)
        elif self.kind == "UNSUBSCRIBE":
            body = number + tail + b"".join(s(own(name)) for name in self.filters)
        else:
            body = b""
        return bytes((TYPES[self.kind] << 4 | flags,)) + varint(len(body)) + body

    def _connect(self, version: int, own: Callable[[str], str], tail: bytes) -> bytes:
        will: Packet | None = self.will
        flags = 2 * self.clean
        rest = s(own(self.client) if isinstance(self.client, str) else self.client)
        if will is not None:
            flags |= 4 | will.qos << 3 | will.retain << 5
            rest += (props(will.props or ()) if version >= 5 else b"") + s(own(will.topic)) + s(will.payload)
        if self.user is not None:
            flags |= 0x80
            rest += s(self.user)
        if self.password is not None:
            flags |= 0x40
            rest += s(self.password)
        keep_alive: int = self.keep_alive
        return s("MQTT") + bytes((version, flags)) + keep_alive.to_bytes(2, "big") + tail + rest


class Raw:
    """Bytes to send; parts that depend on the version are functions of it."""

    def __init__(self, *parts: bytes | Callable[[int], bytes], head: int | None = None) -> None:
        self.parts = parts
        self.head = head

    def encode(self, version: int, own: Callable[[str], str]) -> bytes:
        body = b"".join(part if isinstance(part, bytes) else part(version) for part in self.parts)
        return body if self.head is None else bytes((self.head,)) + varint(len(body)) + body


def frame(head: int, *parts: bytes | Callable[[int], bytes]) -> Raw:
    """A packet with this first byte around any body."""
    return Raw(*parts, head=head)


def none(version: int) -> bytes:
    """No properties: a property length of 0 in version 5, no bytes in version 4."""
    return b"\0" if version >= 5 else b""


# --- reading ------------------------------------------------------------------------------------------------------


class Reader:
    """Reads the fields of one packet."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        check(self.at + size <= len(self.data), f"the packet ends inside a field: {self.data.hex(' ')}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def varint(self) -> int:
        value, shift = 0, 0
        while True:
            byte = self.number(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                check(byte != 0 or shift == 7, "a variable byte integer in more bytes than it needs [MQTT-1.5.5-1]")
                return value
            check(shift < 28, "a variable byte integer of more than four bytes")

    def binary(self) -> bytes:
        return self.take(self.number(2))

    def text(self) -> str:
        data = self.binary()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            raise Violation(f"not UTF-8: {data!r}") from None
        check("\0" not in text, "U+0000 in a string")
        return text

    def rest(self) -> bytes:
        return self.take(len(self.data) - self.at)

    def props(self, kind: str) -> list[Property]:
        size = self.varint()
        inner = Reader(self.take(size))
        found: list[Property] = []
        while inner.at < size:
            identifier = inner.number(1)
            check(identifier in SERVER_PROPERTIES[kind], f"property {identifier:#04x} in a server's {kind}")
            repeats = identifier == USER or (kind == "PUBLISH" and identifier == SUBSCRIPTION_ID)
            check(repeats or identifier not in dict(found), f"property {identifier:#04x} twice in {kind}")
            found.append((identifier, inner.value(FORMS[identifier])))
        return found

    def value(self, form: int | str) -> Any:
        if isinstance(form, int):
            return self.number(form)
        if form == "v":
            return self.varint()
        if form == "p":
            return self.text(), self.text()
        return self.text() if form == "s" else self.binary()


def read(buffer: bytes, version: int) -> tuple[Packet | None, int]:
    """The first packet of received bytes and its size; (None, 0) if it is incomplete."""
    if len(buffer) < 2:
        return None, 0
    at = next((i for i in range(1, min(5, len(buffer))) if buffer[i] < 128), 0)
    if at == 0:
        check(len(buffer) < 5, "Remaining Length of more than four bytes")
        return None, 0
    size = at + 1 + Reader(buffer[1 : at + 1]).varint()
    if size > len(buffer):
        return None, 0
    number, flags = buffer[0] >> 4, buffer[0] & 15
    kind = NAMES[number]
    check(kind in SERVER_CODES or kind in ("PUBLISH", "PINGRESP"), f"a server sent packet type {number}")
    check(version >= 5 or kind not in ("DISCONNECT", "AUTH"), f"{kind} to a client of version {version}")
    check(kind == "PUBLISH" or flags == FLAGS.get(kind, 0), f"{kind} with flags {flags:04b}")
    reader = Reader(buffer[at + 1 : size])
    packet = _publish(reader, flags, version) if kind == "PUBLISH" else _other(reader, kind, version)
    check(reader.at == len(reader.data), f"{kind} is longer than its fields")
    packet.fields["size"] = size
    packet.fields["bytes"] = buffer[:size]
    return packet, size


def _publish(reader: Reader, flags: int, version: int) -> Packet:
    qos = flags >> 1 & 3
    check(qos < 3, "PUBLISH with QoS 3 [MQTT-3.3.1-4]")
    check(qos > 0 or not flags & 8, "PUBLISH with QoS 0 and DUP [MQTT-3.3.1-2]")
    topic = reader.text()
    check("+" not in topic and "#" not in topic, "PUBLISH to a wildcard [MQTT-3.3.2-2]")
    number = reader.number(2) if qos else None
    check(number != 0, "PUBLISH with packet id 0 [MQTT-2.2.1-4]")
    found = reader.props("PUBLISH") if version >= 5 else []
    check(topic != "" or ALIAS in dict(found), "PUBLISH without a topic [MQTT-4.7.3-1]")
    check(dict(found).get(ALIAS) != 0, "topic alias 0 [MQTT-3.3.2-8]")
    return Packet("PUBLISH", topic=topic, payload=reader.rest(), qos=qos, retain=flags & 1, dup=flags >> 3, id=number,
                  props=found)  # fmt: skip


def _other(reader: Reader, kind: str, version: int) -> Packet:
    fields: dict[str, Any] = {}
    if kind == "CONNACK":
        flags = reader.number(1)
        check(flags < 2, f"CONNACK flags {flags:08b} [MQTT-3.2.2-1]")
        fields["session"] = flags
    if kind in ACKS or kind in ("SUBACK", "UNSUBACK"):
        fields["id"] = reader.number(2)
    if kind in ("SUBACK", "UNSUBACK"):
        fields["props"] = reader.props(kind) if version >= 5 else []
        fields["codes"] = list(reader.rest())
    elif kind != "PINGRESP":
        short = kind != "CONNACK" and reader.at == len(reader.data)
        fields["code"] = 0 if short else reader.number(1)
        done = reader.at == len(reader.data) and (short or kind != "CONNACK" or version < 5)
        fields["props"] = [] if done else reader.props(kind)
    legal = SERVER_CODES.get(kind, b"")
    if version < 5:
        legal = {"CONNACK": b"\0\1\2\3\4\5", "SUBACK": b"\0\1\2\x80"}.get(kind, b"\0")
        check(kind not in ACKS or len(reader.data) == 2, f"{kind} with more than a packet id")
    for code in [fields["code"]] if "code" in fields else fields.get("codes", ()):
        check(code in legal, f"{kind} with code {code:#04x}")
    check(kind != "CONNACK" or not (fields["code"] and fields["session"]), "session present on a refusal [MQTT-3.2.2-6]")
    return Packet(kind, **fields)
