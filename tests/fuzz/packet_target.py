"""Single packets, most of them with a small fault: the codec and a broker core against the reference decoder.

Both refuse exactly the packets that the reference refuses, decode the others to the same fields, and subscribers
receive exactly the published messages. Most packets are followed by a valid one, which must not be affected.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from support.core import Core, CoreClient

from fuzz.generator import Generator
from fuzz.near_misses import near_miss
from fuzz.reference import (
    CLIENT_SENDS,
    NAMES,
    PROPERTIES,
    Bad,
    Parsed,
    Value,
    is_filter,
    is_topic,
    parse,
    sent_again,
    split,
)
from fuzz.verdict import TOPIC_ALIAS, Finding, Replies
from mqttbroker.codec.packets import Connect, Packet, Pingreq, Puback, Publish, decode
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import MQTTError
from mqttbroker.core.client.connection import CLOSED

SAMPLES = 400  # packets of a round, for codec and core each
MAX_PACKET = 80_000
MAX_ALIAS = 10
MAX_LEVELS = 128
EXPIRY = 0x02
FORMAT = 0x01
SUBSCRIPTION_ID = 0x0B
LAST = 60_000  # packet id of the valid PUBLISH after each packet
VERSIONS = (3, 4, 4, 5, 5, 5, 5)


class Sampler:
    """Generates the packets of one seed."""

    def __init__(self, seed: str) -> None:
        self.generator = Generator(seed)
        self.random: Random = self.generator.random

    def packet(self, version: int, server: bool = False) -> bytes:
        generator, random = self.generator, self.random
        generator.wildness = random.choice((0.0, 0.3, 1.0))
        how = random.random()
        if server and how < 0.4:
            packet = generator.server_packet(version)
        elif how < 0.5:
            packet = generator.publish(version)
        elif how < 0.6:
            packet = generator.connect(version)
        elif how < 0.65:
            packet = random.choice(generator.vectors)
        else:
            packet = generator.client_packet(version)
        for _ in range(random.choice((0, 1, 1, 1, 2))):
            packet = near_miss(generator, packet, version)
        return packet


# --- the codec ----------------------------------------------------------------------------------------------------


class CodecTarget:
    """`packets.decode`, and `encode` of its result."""

    def __init__(self) -> None:
        self.packets = 0
        self.taken = 0

    def round(self, seed: str) -> None:
        sampler = Sampler(f"codec:{seed}")
        for _ in range(SAMPLES):
            version = sampler.random.choice(VERSIONS)
            packet = sampler.packet(version, server=True)
            before = sampler.random.choice((b"", b"\x30", b"\xff\xff\xff"))
            behind = sampler.random.choice((b"", b"\xc0\x00", b"\x00\x00\x00\x00\x00", b"aaaaaaaa"))
            self.compare(packet, version, before, behind)

    def compare(self, packet: bytes, version: int, before: bytes = b"", behind: bytes = b"") -> int:
        """Raises Finding unless codec and reference agree; returns the size of the packet, 0 if it is not a whole one."""
        self.packets += 1
        data, start = before + packet + behind, len(before)
        context = f"version {version}, {packet[:300].hex()}, then {behind.hex()}"
        expected, end, reason = _read(data, start, version)
        try:
            decoded, after = decode(data, version, start)
        except MQTTError as error:
            if expected is not None or not reason:
                raise Finding(f"refused as {error}, but the standard allows it: {context}") from None
            return 0
        if reason:
            raise Finding(f"accepted, but {reason}: {context}")
        if after != end or (decoded is None) is not (expected is None):
            raise Finding(f"ended at {after - start} instead of {end - start}: {context}")
        if decoded is None or expected is None:
            return 0
        self.taken += 1
        if not described(decoded).same(expected):
            raise Finding(f"read as {described(decoded)} instead of {expected}: {context}")
        again, _, reason = _read(decoded.encode(version), 0, version)
        if again is None or not again.same(expected):
            raise Finding(f"written as {again} {reason} instead of {expected}: {context}")
        return after - start


def _read(data: bytes, start: int, version: int) -> tuple[Parsed | None, int, str]:
    """The result of the reference: packet, position after it, and the fault."""
    try:
        found = split(data, start)
        if found is None:
            return None, start, ""
        first, body, end = found
        return parse(first, body, version), end, ""
    except Bad as error:
        return None, start, str(error)


def described(packet: Packet) -> Parsed:
    """A packet of the codec in the form of the reference."""
    given: Any = packet
    kind = type(packet).__name__.lower()
    fields: dict[str, Any] = {}
    will: list[tuple[int, Value]] = []
    if kind == "connect":
        fields = {"version": given.version, "clean": given.clean_start, "keep_alive": given.keep_alive}
        fields |= {name: getattr(given, name) for name in ("client_id", "username", "password")}
        left = given.will
        fields["will"] = None if left is None else (left.topic, left.payload, left.qos, left.retain)
        will = [] if left is None else _listed(left.properties)
    elif kind == "publish":
        fields = {name: getattr(given, name) for name in ("dup", "qos", "retain", "packet_id", "topic", "payload")}
    elif kind == "connack":
        fields = {"present": given.session_present, "code": given.reason_code}
    elif kind == "subscribe":
        filters = [(each.topic_filter, each.options) for each in given.subscriptions]
        fields = {"packet_id": given.packet_id, "filters": filters}
    elif kind == "unsubscribe":
        fields = {"packet_id": given.packet_id, "filters": given.topic_filters}
    elif kind in ("suback", "unsuback"):
        fields = {"packet_id": given.packet_id, "codes": given.reason_codes}
    elif not kind.startswith("ping"):
        fields = {"packet_id": given.packet_id} if kind.startswith("pub") else {}
        fields["code"] = given.reason_code
    properties = _listed(given.properties) if hasattr(given, "properties") else []
    return Parsed(kind, fields, properties, will)


ATTRIBUTES = {
    0x01: "payload_format_indicator", 0x02: "message_expiry_interval", 0x03: "content_type", 0x08: "response_topic",
    0x09: "correlation_data", 0x0B: "subscription_identifiers", 0x11: "session_expiry_interval",
    0x12: "assigned_client_identifier", 0x13: "server_keep_alive", 0x15: "authentication_method",
    0x16: "authentication_data", 0x17: "request_problem_information", 0x18: "will_delay_interval",
    0x19: "request_response_information", 0x1A: "response_information", 0x1C: "server_reference",
    0x1F: "reason_string", 0x21: "receive_maximum", 0x22: "topic_alias_maximum", 0x23: "topic_alias",
    0x24: "maximum_qos", 0x25: "retain_available", 0x26: "user_properties", 0x27: "maximum_packet_size",
    0x28: "wildcard_subscription_available", 0x29: "subscription_identifier_available",
    0x2A: "shared_subscription_available",
}  # fmt: skip


def _listed(properties: Properties) -> list[tuple[int, Value]]:
    found: list[tuple[int, Value]] = []
    for identifier in PROPERTIES:
        value = getattr(properties, ATTRIBUTES[identifier])
        values = value if isinstance(value, list) else [value]
        found += [(identifier, each) for each in values if each is not None and each != -1]
    return sorted(found, key=lambda item: item[0])


# --- a core -------------------------------------------------------------------------------------------------------


class Expectation:
    """The expected effects of the bytes that a connected client sends.

    ``answers`` are types and packet ids of the packets sent to it, without PUBLISH; ``messages`` are those that
    subscribers of all topics receive. After a SUBSCRIBE an acknowledgement may be one that a message in flight forbids:
    ``may_close``.
    """

    def __init__(self, data: bytes, version: int) -> None:
        self.version = version
        self.closed = False
        self.may_close = False
        self.answers: list[tuple[str, int]] = []
        self.messages: list[Parsed] = []
        self._aliases: dict[object, str] = {}
        self._unreleased: set[int] = set()  # packet ids of QoS 2 messages
        self._subscribed = False
        position = 0
        while not self.closed and position < len(data):
            try:
                found = split(data, position)
                if found is None:
                    self.closed = _refused_early(data, position)
                    return
                first, body, after = found
                if after - position > MAX_PACKET:
                    raise Bad("larger than the broker's maximum")
                self._packet(parse(sent_again(first, version), body, version))
            except Bad:
                self.closed = True
                return
            position = after

    def _packet(self, packet: Parsed) -> None:
        kind, fields = packet.kind, packet.fields
        self.may_close = self.may_close or (self._subscribed and kind in ("puback", "pubrec", "pubcomp"))
        if kind not in CLIENT_SENDS or kind == "connect":
            raise Bad("not now")
        if kind in ("disconnect", "auth"):
            self.closed = True
        elif kind == "pingreq":
            self.answers.append(("pingresp", 0))
        elif kind == "publish":
            self._publish(packet)
        elif kind in ("subscribe", "unsubscribe"):
            wanted = [each if isinstance(each, str) else each[0] for each in fields["filters"]]
            if not all(map(is_filter, wanted)):
                raise Bad("topic filter")
            self._subscribed = self._subscribed or kind == "subscribe"
            self.answers.append(("suback" if kind == "subscribe" else "unsuback", fields["packet_id"]))
        elif kind == "pubrec" and fields["code"] < 0x80:
            self.answers.append(("pubrel", fields["packet_id"]))
        elif kind == "pubrel":
            self._unreleased.discard(fields["packet_id"])
            self.answers.append(("pubcomp", fields["packet_id"]))

    def _publish(self, packet: Parsed) -> None:
        fields, properties = packet.fields, dict(packet.properties)
        topic: str = fields["topic"]
        if SUBSCRIPTION_ID in properties:
            raise Bad("subscription identifier from a client [MQTT-3.3.4-6]")
        if properties.get(FORMAT) == 1:
            try:
                fields["payload"].decode()
            except UnicodeDecodeError:
                raise Bad("payload is not UTF-8") from None
        alias = properties.get(TOPIC_ALIAS)
        if alias is not None:
            if not isinstance(alias, int) or alias > MAX_ALIAS or not (topic or alias in self._aliases):
                raise Bad("topic alias [MQTT-3.3.2-9]")
            topic = self._aliases[alias] = topic or self._aliases[alias]
        if not is_topic(topic) or topic.count("/") >= MAX_LEVELS:
            raise Bad("topic")
        if fields["qos"]:
            self.answers.append(("puback" if fields["qos"] == 1 else "pubrec", fields["packet_id"]))
        if fields["qos"] == 2:
            if fields["packet_id"] in self._unreleased:
                return
            self._unreleased.add(fields["packet_id"])
        if topic[0] != "$" or f"{topic}/".startswith("$fuzz/"):
            kept = [item for item in packet.properties if item[0] != TOPIC_ALIAS]
            self.messages.append(Parsed("publish", {**fields, "topic": topic}, kept))


def _refused_early(data: bytes, position: int) -> bool:
    """Whether an incomplete packet is refused already."""
    if len(data) - position > 1 and NAMES[data[position] // 16] not in CLIENT_SENDS - {"connect"}:
        return True
    length = 0
    for digits in range(min(4, len(data) - position - 1)):
        digit = data[position + 1 + digits]
        length += (digit % 128) * 128**digits
        if digit < 128:
            return digits + 2 + length > MAX_PACKET
    return False


class Witness:
    """A subscriber of all topics that records its messages; ``qos`` is 0 or 1."""

    def __init__(self, core: Core, version: int, qos: int) -> None:
        self.version = version
        self.qos = qos
        self.client: CoreClient = core.connect(f"witness-{version}-{qos}", version)
        self.client.subscribe("#", "$fuzz/#", options=qos | (8 if version == 5 else 0))

    def take(self) -> list[Parsed]:
        messages: list[Parsed] = []
        data, position = self.client.connection.outbox.drain(), 0
        while position < len(data):
            packet, position, reason = _read(data, position, self.version)
            if packet is None:
                raise Finding(f"a subscriber got {data[position:][:100].hex()}: {reason}")
            if packet.kind == "publish":
                messages.append(packet)
                if packet.fields["qos"]:
                    self.client.send(Puback(packet.fields["packet_id"]))
        return messages

    def expect(self, messages: list[Parsed]) -> None:
        got = [_told(message) for message in self.take()]
        expected: list[tuple[object, ...]] = []
        for message in messages:
            seen = self._seen(message)
            # Messages that expire at once may be delivered or not.
            if dict(message.properties).get(EXPIRY) != 0 or got[len(expected) : len(expected) + 1] == [seen]:
                expected.append(seen)
        if got != expected:
            raise Finding(f"a version {self.version} subscriber got {got} instead of {expected}")

    def _seen(self, message: Parsed) -> tuple[object, ...]:
        fields = message.fields
        properties = message.properties if self.version == 5 else []
        retain = fields["retain"] and self.version == 5
        return fields["topic"], fields["payload"], min(fields["qos"], self.qos), retain, properties


def _told(message: Parsed) -> tuple[object, ...]:
    fields = message.fields
    return fields["topic"], fields["payload"], fields["qos"], fields["retain"], message.properties


class Exchange:
    """A broker core and its witnesses; each `send` is a connection of its own."""

    def __init__(self, directory: Path) -> None:
        self.core = Core(directory, "off", max_packet_size=MAX_PACKET, topic_alias_maximum=MAX_ALIAS)
        self.witnesses = [Witness(self.core, 4, 0), Witness(self.core, 5, 0), Witness(self.core, 5, 1)]

    def send(self, version: int, tested: bytes, pieces: list[bytes]) -> int:
        """Send ``pieces``, which begin with the ``tested`` packets; returns how many messages the witnesses got."""
        data = b"".join(pieces)
        client = self.core.client(version)
        client.send(Connect("exchange", version))
        client.connection.outbox.drain()
        for piece in pieces:
            client.send(piece)
        context = f"version {version}, {tested[:300].hex()}{', and more' if len(data) > len(tested) else ''}"
        try:
            expected = Expectation(data, version)
            if expected.may_close and client.connection.state == CLOSED:
                expected.messages.clear()  # it may have been closed before these
                for witness in self.witnesses:
                    witness.take()
            else:
                self._check(client, expected)
            for witness in self.witnesses:
                witness.expect(expected.messages)
        except Finding as finding:
            raise Finding(f"{finding}: {context}") from None
        client.close()
        self.core.clients.remove(client)
        return len(expected.messages)

    def _check(self, client: CoreClient, expected: Expectation) -> None:
        closed = client.connection.state == CLOSED
        if closed is not expected.closed:
            raise Finding("closed the connection after a valid packet" if closed else "did not close the connection")
        welcome = b"\x20\x03\x00\x00\x00" if expected.version == 5 else b"\x20\x02\x00\x00"
        replies = Replies(welcome + client.connection.outbox.drain())
        got = [(packet.kind, packet.fields.get("packet_id", 0)) for packet in replies.packets[1:]]
        got = [answer for answer in got if answer[0] not in ("publish", "disconnect")]
        missing = Counter(expected.answers) - Counter(got)
        unexpected = Counter(got) - Counter(expected.answers)
        if unexpected or (missing and not closed):  # answers that wait for a commit are not sent to a closed connection
            raise Finding(f"answered {got} instead of {expected.answers}")


class ExchangeTarget:
    """Sampled packets for an `Exchange`, each followed by a valid one in most cases."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rounds = 0
        self.packets = 0
        self.messages = 0

    def round(self, seed: str) -> None:
        sampler = Sampler(f"exchange:{seed}")
        self.rounds += 1
        directory = self.directory / str(self.rounds)
        directory.mkdir()
        exchange = Exchange(directory)
        with exchange.core:
            for _ in range(SAMPLES):
                version = sampler.random.choice(VERSIONS)
                tested = sampler.packet(version)
                data = tested + (valid_end(version) if sampler.random.random() < 0.9 else b"")
                self.packets += 1
                self.messages += exchange.send(version, tested, _pieces(sampler.random, data))


def valid_end(version: int) -> bytes:
    """Packets that must not be affected by those before them."""
    return Publish("fuzz/last", b"last", 1, packet_id=LAST).encode(version) + Pingreq().encode(version)


def _pieces(random: Random, data: bytes) -> list[bytes]:
    """Mostly one chunk, so that the core sees the bytes after a packet; else two."""
    if random.random() < 0.8:
        return [data]
    at = random.randrange(len(data))
    return [piece for piece in (data[:at], data[at:]) if piece]
