"""Judges the bytes that were sent and received on a connection, with the reference decoder.

After any input, the broker's output is a sequence of packets that the standard lets a server send to a client of that
version, and the first packet that the standard forbids closes the connection.
"""

from __future__ import annotations

from fuzz.reference import CLIENT_SENDS, SERVER_SENDS, Bad, Parsed, end_of, parse, sent_again, split

CONNACK_AND_TWO = b"\x20\x02"  # a CONNACK without properties, of 3.1.1
TOPIC_ALIAS = 0x23


class Finding(AssertionError):
    """The broker violated the standard, or failed."""


def offence(data: bytes) -> int | None:
    """The end of the first packet that a server must refuse; None if there is none before DISCONNECT."""
    version = 0
    position = 0
    while True:
        try:
            found = split(data, position)
            if found is None:
                return None
            first, body, after = found
            packet = parse(sent_again(first, version), body, version or 5)
        except Bad:
            return end_of(data, position)
        if packet.kind == "disconnect":
            return None
        if version == 0:
            if packet.kind != "connect":
                return after
            version = packet.fields["version"]
        elif packet.kind == "connect" or packet.kind not in CLIENT_SENDS:
            return after
        position = after


class Replies:
    """The packets that a broker sent on one connection; Finding if the standard does not allow them."""

    def __init__(self, data: bytes, whole: bool = True) -> None:
        self.packets: list[Parsed] = []
        self.version = 4 if data[:2] == CONNACK_AND_TWO else 5
        self.aliases: set[object] = set()
        position = 0
        while True:
            try:
                found = split(data, position)
                if found is None:
                    break
                first, body, after = found
                packet = parse(first, body, self.version)
            except Bad as error:
                raise Finding(f"sent {data[position : position + 40].hex()}, which is not a packet: {error}") from None
            self._next(packet)
            position = after
        if whole and position != len(data):
            raise Finding(f"closed inside a packet: {data[position : position + 40].hex()}")

    def _next(self, packet: Parsed) -> None:
        last = self.packets[-1] if self.packets else None
        if packet.kind not in SERVER_SENDS:
            raise Finding(f"sent {packet.kind}")
        if last is not None and (last.kind == "disconnect" or (last.kind == "connack" and last.fields["code"])):
            raise Finding(f"sent {packet.kind} after {last.kind}")
        if packet.kind in ("disconnect", "auth") and self.version < 5:
            raise Finding(f"sent {packet.kind} to a 3.1.1 client")
        if packet.kind == "connack":
            if any(earlier.kind == "connack" for earlier in self.packets):
                raise Finding("sent connack twice")
        elif not self.connected and packet.kind != "auth":
            raise Finding(f"sent {packet.kind} before connack")
        if packet.kind == "disconnect" and packet.fields["code"] < 0x80:
            raise Finding(f"sent disconnect with {packet.fields['code']:#x}")
        if packet.kind == "publish":
            self._alias(packet)
        self.packets.append(packet)

    def _alias(self, packet: Parsed) -> None:
        alias = dict(packet.properties).get(TOPIC_ALIAS)
        if not packet.fields["topic"] and alias not in self.aliases:
            raise Finding(f"sent topic alias {alias!r} before its topic")
        self.aliases.add(alias)

    @property
    def connected(self) -> bool:
        return any(packet.kind == "connack" and not packet.fields["code"] for packet in self.packets)

    @property
    def gave_reason(self) -> bool:
        """Whether the last packet was DISCONNECT or a refusing CONNACK."""
        last = self.packets[-1] if self.packets else None
        return last is not None and (last.kind == "disconnect" or (last.kind == "connack" and last.fields["code"] != 0))


def judge(sent: bytes, received: bytes, closed: bool, whole: bool = True) -> Replies:
    """Raises Finding unless a server may answer ``sent`` with ``received``; ``closed``: it then closed."""
    replies = Replies(received, whole)
    if offence(sent) is not None and not closed:
        raise Finding("a packet that the standard forbids did not close the connection")
    if replies.gave_reason and not closed:
        raise Finding("did not close after DISCONNECT")
    if closed and whole and replies.connected and replies.version == 5 and offence(sent) is not None:
        if not replies.gave_reason:
            raise Finding("a 5.0 client got no reason for the end of its connection")
    return replies


def shown(data: bytes) -> str:
    """The last bytes of a stream, where most findings are, as hex."""
    return ("... " if len(data) > 1000 else "") + data[-1000:].hex()
