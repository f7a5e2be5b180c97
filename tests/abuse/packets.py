"""Packets as bytes, made without checks, and a reader of the broker's answers."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

from mqttbroker.codec.data_types import encode_varint
from mqttbroker.codec.reason_codes import name

PINGREQ = b"\xc0\0"
DISCONNECT = b"\xe0\0"
CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK = 2, 3, 4, 5, 6, 7, 9, 11
SERVER_DISCONNECT, AUTH = 14, 15
WEBSOCKET, OTHER = -1, -2  # in the place of a protocol version
NAMES = {CONNACK: "CONNACK", PUBACK: "PUBACK", PUBREC: "PUBREC", PUBREL: "PUBREL", PUBCOMP: "PUBCOMP",
         SUBACK: "SUBACK", UNSUBACK: "UNSUBACK", SERVER_DISCONNECT: "DISCONNECT", AUTH: "AUTH"}  # fmt: skip
V3_CONNACK = {1: "wrong version", 2: "identifier rejected", 3: "unavailable", 4: "bad credentials", 5: "not authorized"}


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return len(data).to_bytes(2, "big") + data


def framed(first: int, body: bytes) -> bytes:
    return bytes((first,)) + encode_varint(len(body)) + body


def connect(
    client_id: str | bytes,
    version: int = 4,
    clean: bool = True,
    expiry: int = 0,
    keep_alive: int = 0,
    will: tuple[str, bytes, int] | None = None,
    will_delay: int = 0,
    login: tuple[str, str] | None = None,
    properties: bytes = b"",
) -> bytes:
    """A CONNECT; ``will`` is topic, payload and QoS. ``expiry`` and ``will_delay`` are in seconds, of version 5."""
    flags = 2 * clean
    body = b""
    if will is not None:
        flags |= 4 | will[2] << 3
        if version == 5:
            body += b"\x05\x18" + struct.pack(">I", will_delay) if will_delay else b"\0"
        body += text(will[0]) + text(will[1])
    if login is not None:
        flags |= 0xC0
        body += text(login[0]) + text(login[1])
    head = text("MQTT") + bytes((version, flags)) + keep_alive.to_bytes(2, "big")
    if version == 5:
        if expiry:
            properties += b"\x11" + struct.pack(">I", expiry)
        head += encode_varint(len(properties)) + properties
    return framed(0x10, head + text(client_id) + body)


def publish(
    topic: str | bytes,
    payload: bytes = b"",
    qos: int = 0,
    packet_id: int = 1,
    retain: bool = False,
    version: int = 4,
    properties: bytes = b"",
) -> bytes:
    body = text(topic) + (packet_id.to_bytes(2, "big") if qos else b"")
    if version == 5:
        body += encode_varint(len(properties)) + properties
    return framed(0x30 | qos << 1 | retain, body + payload)


def subscribe(filters: list[str], qos: int = 0, packet_id: int = 1, version: int = 4, properties: bytes = b"") -> bytes:
    head = packet_id.to_bytes(2, "big")
    if version == 5:
        head += encode_varint(len(properties)) + properties
    return framed(0x82, head + b"".join(text(found) + bytes((qos,)) for found in filters))


def unsubscribe(filters: list[str], packet_id: int = 1, version: int = 4) -> bytes:
    head = packet_id.to_bytes(2, "big") + (b"\0" if version == 5 else b"")
    return framed(0xA2, head + b"".join(text(found) for found in filters))


def acknowledgement(kind: int, packet_id: int) -> bytes:
    return bytes((kind << 4 | (2 if kind == PUBREL else 0), 2)) + packet_id.to_bytes(2, "big")


def split(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """The complete packets, as first byte and body, and the bytes behind them."""
    found = []
    position, end = 0, len(data)
    while end - position >= 2:
        size = shift = 0
        body = position + 1
        while body < end:
            byte = data[body]
            size |= (byte & 127) << shift
            shift += 7
            body += 1
            if byte < 128:
                break
        else:
            break
        if byte >= 128 or body + size > end:
            break
        found.append((data[position], data[body : body + size]))
        position = body + size
    return found, data[position:]


def websocket_answers(data: bytes) -> tuple[list[str], bytes]:
    """The contents of the broker's WebSocket frames, and the bytes behind the last complete one."""
    found = []
    while len(data) >= 2:
        size, start = data[1] & 127, 2
        if size == 126:
            size, start = int.from_bytes(data[2:4], "big"), 4
        if len(data) < start + size:
            break
        payload = data[start : start + size]
        if data[0] & 15 == 8:
            found.append(f"WebSocket close {int.from_bytes(payload[:2], 'big')}")
        elif data[0] & 15 == 10:
            found.append("WebSocket pong")
        data = data[start + size :]
    return found, data


def mqtt_answers(packets: list[tuple[int, bytes]], version: int) -> Iterator[str]:
    """The types of the packets from the broker, without PUBLISH and PINGRESP, with the reason code if it is an error."""
    for first, body in packets:
        kind = first >> 4
        if kind not in NAMES:
            continue
        code = 0
        if kind == CONNACK and len(body) > 1:
            code = body[1]
            if version < 5 and code:
                yield f"CONNACK {code} ({V3_CONNACK.get(code, '')})"
                continue
        elif kind in (SERVER_DISCONNECT, AUTH) and body:
            code = body[0]
        elif kind in (PUBACK, PUBREC, PUBREL, PUBCOMP) and len(body) > 2:
            code = body[2]
        elif kind in (SUBACK, UNSUBACK) and len(body) > 3:
            code = max(body[3:]) if max(body[3:]) >= 0x80 else 0
        yield f"{NAMES[kind]} {name(code)}" if code else NAMES[kind]


class Answered:
    """Counts the broker's answers to one kind of abuse."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._left: WeakKeyDictionary[socket.socket, bytes] = WeakKeyDictionary()  # received parts of a packet

    def note(self, what: str, count: int = 1) -> None:
        self.counts[what] += count

    def read(self, line: socket.socket, version: int = 4, wait: float = 0.0) -> bool:
        """Count what has arrived, waiting up to ``wait`` seconds for the first bytes; false if the broker has closed
        the connection. ``version`` is that of MQTT, `WEBSOCKET`, or `OTHER` for bytes without a known form."""
        line.settimeout(wait or 0.0)
        data = b""
        still_open = True
        try:
            while len(data) < 1 << 20:
                part = line.recv(1 << 16)
                if not part:
                    still_open = False
                    break
                data += part
                line.settimeout(0.0)
        except (BlockingIOError, TimeoutError):
            pass
        except OSError:
            still_open = False
        finally:
            if line.fileno() >= 0:
                line.settimeout(5.0)
        data = self._left.get(line, b"") + data
        found: Iterable[str] = ()
        if version == WEBSOCKET:
            found, data = websocket_answers(data)
        elif version != OTHER:
            packets, data = split(data)
            found = mqtt_answers(packets, version)
        else:
            data = b""
        self._left[line] = data
        for answer in found:
            self.note(answer)
        if not still_open:
            self.note("closed")
        return still_open

    def summary(self) -> str:
        """The most frequent answers first."""
        return ", ".join(f"{count} × {what}" for what, count in self.counts.most_common(5)) or "nothing"
