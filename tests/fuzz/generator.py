"""Conversations of faulty clients: valid packets, damaged packets and random bytes.

The same seed gives the same conversations in the same chunks on every machine.
"""

from __future__ import annotations

import json
from random import Random

from support.paths import VECTORS

from mqttbroker.codec.data_types import encode_binary, encode_utf8, encode_varint
from mqttbroker.codec.frames import FLAGS, encode_frame
from mqttbroker.codec.packets import encode_fixed_header
from mqttbroker.codec.properties import BINARY, BYTE, FOUR_BYTES, PROPERTIES, STRING_PAIR, TWO_BYTES, VARINT, WILL
from mqttbroker.codec.reason_codes import (
    AUTH,
    CODES,
    CONNACK,
    CONNECT,
    DISCONNECT,
    PINGREQ,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
)

CLIENT_IDS = ["", *(f"fuzz-{number}" for number in range(8))]
TOPICS = ["fuzz/a", "fuzz/a", "fuzz/b", "fuzz/a/b", "fuzz/ü/\U0001f600", "fuzz//", "$fuzz/x"]
BAD_TOPICS = ["", "fuzz/#", "fuzz/+/b", "$SYS/broker/uptime", "fuzz/" + "x/" * 200, "x" * 65_535]
FILTERS = ["fuzz/a", "fuzz/#", "fuzz/+", "#", "+/+/b", "$fuzz/#", "$share/g/fuzz/#", "$share/h/fuzz/+", "$SYS/#"]
BAD_FILTERS = ["", "fuzz/#/a", "fuzz/a+", "a#", "$share//x", "$share/g", "$share/g/", "$share/+/x", "/" * 300]
BAD_TEXT = [b"\xed\xa0\x80", b"\x00", b"a\x00b", b"\xc0\x80", b"\xff\xfe", b"\xf4\x90\x80\x80", b"\xe2\x82"]
METHODS = [b"SCRAM-SHA-256", b"M", b""]
PAYLOADS = [b"", b"1", b"\x00\xff", b"text", b"x" * 127, b"x" * 128, b"x" * 20_000]
BOUNDARIES = (127, 128, 16_383, 16_384)  # where a Remaining Length takes one byte more
NUMBERS = {
    BYTE: (1, 0, 1, 2, 255),
    TWO_BYTES: (1, 2, 10, 0, 11, 65_535),
    FOUR_BYTES: (60, 200, 10_000, 0xFFFFFFFF, 1, 0),
}  # ordinary values first
KINDS = {row.identifier: row.kind for row in PROPERTIES}
SUBSCRIPTION_IDS = (1, 127, 128, 16_384, 268_435_455, 0)
AUTHENTICATION = (0x15, 0x16)  # the properties because of which most CONNECTs are refused


class Conversation:
    """The bytes that one connection sends, ``data``, and the chunks in which it sends them, ``pieces``."""

    def __init__(self, data: bytes, pieces: list[bytes]) -> None:
        self.data = data
        self.pieces = pieces


class Generator:
    """Generates conversations; ``wildness`` is the probability that a packet is damaged."""

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)
        self.wildness = 0.0
        self.vectors: list[bytes] = []
        for name in ("packets_good", "packets_malformed"):
            vectors = json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))["vectors"]
            self.vectors += [bytes.fromhex(vector["hex"]) for vector in vectors]

    def conversation(self) -> Conversation:
        random = self.random
        self.wildness = random.choice((0.0, 0.02, 0.1, 0.5))
        version = random.choice((3, 4, 4, 5, 5, 5, 5))
        packets: list[bytes] = []
        if random.random() < 0.95:
            connect = self.connect(version)
            packets.append(self.mutated(connect) if random.random() < 0.1 else connect)
        packets += [self.any_packet(version) for _ in range(random.choice((0, 1, 3, 10, 40)))]
        data = b"".join(packets)
        if random.random() < 0.2:
            data = data[: random.randrange(len(data) + 1)]
        return Conversation(data, self.pieces(data))

    def pieces(self, data: bytes) -> list[bytes]:
        """``data`` in random chunks."""
        largest = self.random.choice((1, 5, 50, 2000, 1 << 20))
        if largest < 50 and len(data) > 4000:
            largest = 500
        pieces: list[bytes] = []
        position = 0
        while position < len(data):
            size = self.random.randint(1, largest)
            pieces.append(data[position : position + size])
            position += size
        return pieces

    def any_packet(self, version: int) -> bytes:
        random = self.random
        wild = random.random() < self.wildness
        if not wild:
            return self.client_packet(version)
        how = random.randrange(6)
        if how == 0:
            return random.choice(self.vectors)
        if how == 1:
            return self.mutated(random.choice(self.vectors))
        if how == 2:
            return self.server_packet(version)
        if how == 3:
            size = random.choice((0, 1, 2, 5, 30, 300))
            body = random.randbytes(size)
            return encode_fixed_header(random.randrange(256), len(body)) + body
        if how == 4:
            return random.randbytes(random.choice((1, 2, 7, 60)))
        return self.mutated(self.client_packet(version))

    # --- packets of a client --------------------------------------------------------------------------------------

    def client_packet(self, version: int) -> bytes:
        random = self.random
        kind = random.choices(
            (PUBLISH, SUBSCRIBE, UNSUBSCRIBE, PUBACK, PUBREC, PUBREL, PUBCOMP, PINGREQ, DISCONNECT, AUTH, CONNECT),
            (40, 12, 5, 10, 8, 10, 8, 4, 1, 0.5, 0.5),
        )[0]
        if kind == PUBLISH:
            return self.publish(version)
        if kind == SUBSCRIBE:
            return self.subscribe(version)
        if kind == UNSUBSCRIBE:
            filters = b"".join(self.topic_filter() for _ in range(random.randint(1, 3)))
            return encode_frame(kind, self.packet_id() + self.properties(kind, version) + filters)
        if PUBACK <= kind <= PUBCOMP:
            return self.acknowledgement(kind, version)
        if kind == CONNECT:
            return self.connect(version)
        if kind == PINGREQ or version < 5:
            return encode_frame(kind, b"")
        return encode_frame(kind, bytes((random.choice(sorted(CODES[kind])),)) + self.properties(kind, version))

    def connect(self, version: int) -> bytes:
        random = self.random
        flags = random.choice((0, 2, 2))
        name = b"\x00\x06MQIsdp" if version == 3 else b"\x00\x04MQTT"
        client_id = random.choice(CLIENT_IDS)
        if version < 5 and not client_id and random.random() < 0.9:
            client_id, flags = ("fuzz-v3", flags) if version == 3 else ("", 2)
        payload = encode_utf8(client_id)
        if random.random() < 0.4:
            flags |= 4 | random.choice((0, 0, 8, 16)) | random.choice((0, 0, 32))
            payload += self.properties(WILL, version) + self.topic() + encode_binary(random.choice(PAYLOADS))
        if random.random() < 0.2:
            flags |= 128
            payload += self.text("user")
        if (version >= 5 or flags & 128) and random.random() < 0.2:
            flags |= 64
            payload += encode_binary(b"secret")
        keep_alive = random.choice((0, 60, 65_535)).to_bytes(2, "big")
        head = name + bytes((version, flags)) + keep_alive + self.properties(CONNECT, version)
        return encode_frame(CONNECT, head + payload)

    def publish(self, version: int) -> bytes:
        random = self.random
        qos = random.randrange(3)
        flags = qos << 1 | (random.random() < 0.15) | (8 if qos and random.random() < 0.1 else 0)
        topic, properties = self.topic(), self.properties(PUBLISH, version)
        if version >= 5 and random.random() < 0.15:
            topic, properties = random.choice((topic, b"\x00\x00")), b"\x03\x23\x00" + random.choice((b"\x01", b"\x02"))
        body = topic + (self.packet_id() if qos else b"") + properties
        payload = random.choice(PAYLOADS)
        if random.random() < 0.05:
            payload = bytes(max(0, random.choice(BOUNDARIES) - len(body)))
        body += payload
        return encode_fixed_header(PUBLISH << 4 | flags, len(body)) + body

    def subscribe(self, version: int) -> bytes:
        random = self.random
        body = self.packet_id() + self.properties(SUBSCRIBE, version)
        for _ in range(random.choice((1, 1, 2, 5))):
            options = random.randrange(3)
            if version >= 5:
                options |= random.choice((0, 0, 8)) | random.randrange(3) << 4
            if self._faulty():
                options = random.randrange(256)
            body += self.topic_filter() + bytes((options,))
        return encode_frame(SUBSCRIBE, body)

    def acknowledgement(self, kind: int, version: int) -> bytes:
        body = self.packet_id()
        if version >= 5 and self.random.random() < 0.3:
            body += bytes((self.random.choice(sorted(CODES[kind])),))
            if self.random.random() < 0.5:
                body += self.properties(kind, version)
        return encode_frame(kind, body)

    def server_packet(self, version: int) -> bytes:
        """A packet that only a server may send."""
        kind = self.random.choice((CONNACK, SUBACK, UNSUBACK, PINGRESP))
        if kind == PINGRESP:
            return encode_frame(kind, b"")
        head = b"\x00\x00" if kind == CONNACK else self.packet_id()
        codes = b"" if kind == CONNACK else b"\x00"
        return encode_frame(kind, head + self.properties(kind, version) + codes)

    # --- their parts ----------------------------------------------------------------------------------------------

    def _faulty(self) -> bool:
        """Whether to make this part invalid or a limit value."""
        return self.random.random() < self.wildness / 10

    def packet_id(self) -> bytes:
        """A small one, so that it may equal one that the broker assigns."""
        number = 0 if self._faulty() else self.random.choice((1, 1, 2, 2, 3, 4, 5, 6, 7, 65_535))
        return number.to_bytes(2, "big")

    def text(self, usual: str) -> bytes:
        return encode_binary(self.random.choice(BAD_TEXT)) if self._faulty() else encode_utf8(usual)

    def topic(self) -> bytes:
        return self.text(self.random.choice(BAD_TOPICS if self._faulty() else TOPICS))

    def topic_filter(self) -> bytes:
        return self.text(self.random.choice(BAD_FILTERS if self.random.random() < 0.03 else FILTERS))

    def properties(self, packet_type: int, version: int) -> bytes:
        """Encoded properties with their length; empty below version 5."""
        if version < 5:
            return b""
        random = self.random
        wanted: list[int] = []
        if random.random() < 0.4:
            legal = [row.identifier for row in PROPERTIES if packet_type in row.packets]
            if packet_type == CONNECT and random.random() < 0.9:
                legal = [identifier for identifier in legal if identifier not in AUTHENTICATION]
            if packet_type == PUBLISH and random.random() < 0.95:
                legal.remove(0x0B)  # only servers send subscription identifiers
            wanted = random.sample(legal, random.randint(1, min(3, len(legal))))
        if packet_type == AUTH and not self._faulty():
            wanted = list(AUTHENTICATION)
        if self._faulty():
            wanted.append(random.choice(wanted or list(KINDS)))
        block = b"".join(bytes((identifier,)) + self.value(identifier) for identifier in wanted)
        if self._faulty():
            return random.choice((encode_varint(len(block) + 1), b"\xff\xff\xff\xff\x7f", b"")) + block
        return encode_varint(len(block)) + block

    def value(self, identifier: int) -> bytes:
        kind = KINDS[identifier]
        random = self.random
        if identifier == 0x15:
            return encode_binary(random.choice(METHODS))
        if kind in NUMBERS:
            numbers = NUMBERS[kind]
            if not self._faulty():
                numbers = numbers[: 2 if kind == BYTE else 3]
            return random.choice(numbers).to_bytes(kind, "big")
        if kind == VARINT:
            return encode_varint(random.choice(SUBSCRIPTION_IDS if self._faulty() else SUBSCRIPTION_IDS[:-1]))
        if kind == BINARY:
            return encode_binary(random.choice(PAYLOADS))
        if kind == STRING_PAIR:
            return self.text("name") + self.text(random.choice(("", "value")))
        return self.text(random.choice(("fuzz/answer", "x" * 300)))

    # --- damage ---------------------------------------------------------------------------------------------------

    def mutated(self, packet: bytes) -> bytes:
        """The packet, damaged; half of the time with a matching Remaining Length."""
        random = self.random
        start = 1
        while start < len(packet) and packet[start] & 128:
            start += 1
        body = bytearray(packet[start + 1 :])
        first = packet[0] if packet else 0
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            self._damage(body)
        if random.random() < 0.1:
            first = random.choice((first ^ 1 << random.randrange(8), first & 0xF0 | FLAGS[first >> 4]))
        if random.random() < 0.5:
            return encode_fixed_header(first, len(body)) + bytes(body)
        if random.random() < 0.1:
            return bytes((first, *random.choice((b"\xff\xff\xff\xff", b"\x80\x80\x80\x00", b"\x82\x00", b"\xff\xff\xff\x7f"))))
        return bytes((first,)) + packet[1 : start + 1] + bytes(body)

    def _damage(self, body: bytearray) -> None:
        random = self.random
        at = random.randrange(len(body) + 1)
        how = random.randrange(7)
        if how == 0:
            del body[at : at + random.choice((1, 2, 10, 1000))]
        elif how == 1:
            body[at:at] = random.choice((b"\x00", b"\xff\xff", b"\x26\x00\x00\x00\x00", random.randbytes(4), *BAD_TEXT))
        elif how == 2:
            body[at:at] = body[at : at + 20]
        elif how == 3 and len(body) > 1:
            # Most bodies begin with a string: let its length end a little before or beyond it.
            body[1] = (body[1] + random.choice((-2, -1, 1, 2, 3, len(body) - 3 - body[1], len(body) - body[1]))) % 256
        elif at < len(body):
            body[at] = random.choice((0, 1, 127, 128, 255, body[at] ^ 1 << random.randrange(8), random.randrange(256)))
