"""The messages of a bridge from the local session to the remote."""

from __future__ import annotations

from typing import Final

from mqttbroker.bridges.loop_tag import LoopTag
from mqttbroker.bridges.packet_output import PacketOutput
from mqttbroker.bridges.relay_terms import Counts, RelayError, RelayTerms
from mqttbroker.bridges.remote_broker import LONGEST_ALIASED, RemoteBroker
from mqttbroker.codec.data_types import decode_varint, encode_varint
from mqttbroker.codec.packets import encode_fixed_header
from mqttbroker.codec.reason_codes import (
    NOT_AUTHORIZED,
    PACKET_IDENTIFIER_NOT_FOUND,
    PAYLOAD_FORMAT_INVALID,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    TOPIC_NAME_INVALID,
    name,
)
from topic_matcher.remapping import outgoing_map

REFUSED_FOR_GOOD: Final = frozenset((NOT_AUTHORIZED, TOPIC_NAME_INVALID, PAYLOAD_FORMAT_INVALID))
"""Reason codes of PUBACK and PUBREC that are about the message, so that it would be refused again."""

_TOPIC_ALIAS: Final = b"\x23"


class OutgoingMessages:
    """Passes PUBLISHes of the local session on, and the acknowledgements of the remote back to it.

    For a message that the remote does not get, or at a lower QoS, it takes the remote's part in the exchange.
    """

    def __init__(
        self,
        terms: RelayTerms,
        counts: Counts,
        remote: RemoteBroker,
        tag: LoopTag,
        to_remote: PacketOutput,
        to_local: PacketOutput,
    ) -> None:
        self._terms = terms
        self._counts = counts
        self._remote = remote
        self._tag = tag
        self._to_remote = to_remote
        self._to_local = to_local
        self._topics = outgoing_map(terms.rules)
        # Packet ids of QoS 2 messages: those whose PUBREL is answered here, and those sent to the remote at QoS 1.
        self._answered_here: set[int] = set()
        self._lowered: set[int] = set()

    def publish(self, first: int, body: bytes) -> None:
        """PUBLISH of the local session: its first byte, and the bytes after its fixed header."""
        size = body[0] << 8 | body[1]
        topic = body[2 : 2 + size]
        rest = 2 + size
        qos = first >> 1 & 3
        packet_id = 0
        if qos:
            packet_id = body[rest] << 8 | body[rest + 1]
            rest += 2
        length, start = decode_varint(body, rest, len(body))
        payload = start + length
        properties = body[start:payload]
        target = self._topics.find(topic)
        if not target:
            self._drop("unmapped", qos, packet_id)
        elif self._tag.is_in(properties):
            self._drop("loop", qos, packet_id)
        else:
            self._send(first, target, qos, packet_id, properties, body[payload:])

    def _send(self, first: int, topic: bytes, qos: int, packet_id: int, properties: bytes, payload: bytes) -> None:
        remote = self._remote
        granted = min(qos, remote.max_qos)
        flags = granted << 1
        if self._terms.outgoing_retain and remote.retain_available:
            flags |= first & 1
        if first & 8 and remote.session_present and granted:
            flags |= 8
        ids = packet_id.to_bytes(2, "big") if granted else b""
        parts = [len(topic).to_bytes(2, "big"), topic, ids]
        alias = 0
        if self._terms.version >= 5:
            properties += self._tag.encoded
            if remote.aliases is not None and len(topic) <= LONGEST_ALIASED:
                alias = remote.aliases.find(topic)
                if alias:
                    properties += _TOPIC_ALIAS + abs(alias).to_bytes(2, "big")
                if alias > 0:
                    parts[:2] = [b"\0\0"]
            parts += [encode_varint(len(properties)), properties]
        parts.append(payload)
        remaining = sum(map(len, parts))
        header = encode_fixed_header(PUBLISH << 4 | flags, remaining)
        if len(header) + remaining > remote.max_packet_size:  # [MQTT-3.2.2-15]
            self._drop("too_large", qos, packet_id)
            return
        if alias < 0 and remote.aliases is not None:
            remote.aliases.assign(topic)
        self._to_remote.pieces.append(header)
        self._to_remote.pieces += parts
        self._counts.messages_out += 1
        self._counts.bytes_out += len(payload)
        if granted < qos:
            if granted:
                self._lowered.add(packet_id)
            else:
                self._acknowledge(qos, packet_id)

    def _drop(self, cause: str, qos: int, packet_id: int) -> None:
        """Acknowledge a message that the remote does not get."""
        self._counts.dropped[cause] += 1
        self._acknowledge(qos, packet_id)

    def _acknowledge(self, qos: int, packet_id: int) -> None:
        if qos == 1:
            self._to_local.acknowledge(PUBACK, packet_id)
        elif qos == 2:
            self._answered_here.add(packet_id)
            self._to_local.acknowledge(PUBREC, packet_id)

    def release(self, packet_id: int) -> None:
        """PUBREL of the local session."""
        if packet_id in self._answered_here or self._remote.max_qos < 2:
            self._answered_here.discard(packet_id)
            self._to_local.acknowledge(PUBCOMP, packet_id)
        else:
            self._to_remote.acknowledge(PUBREL, packet_id)

    def acknowledged(self, kind: int, packet_id: int, code: int) -> None:
        """PUBACK, PUBREC or PUBCOMP of the remote."""
        if kind != PUBCOMP and code >= 0x80:
            if code not in REFUSED_FOR_GOOD:
                # A closed connection leaves the message in the session, which sends it again.
                raise RelayError(f"the remote refuses a message: {name(code)}")
            self._counts.dropped["refused"] += 1
        if kind == PUBACK and packet_id in self._lowered:
            self._lowered.remove(packet_id)
            if code < 0x80:
                self._answered_here.add(packet_id)
            kind = PUBREC
        if kind == PUBCOMP and code != PACKET_IDENTIFIER_NOT_FOUND:
            code = 0
        self._to_local.acknowledge(kind, packet_id, code)
