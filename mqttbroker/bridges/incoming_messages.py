"""The messages of a bridge from the remote to the local broker."""

from __future__ import annotations

from mqttbroker.bridges.context import LARGEST_PACKET
from mqttbroker.bridges.loop_tag import LoopTag
from mqttbroker.bridges.outgoing_messages import REFUSED_FOR_GOOD
from mqttbroker.bridges.packet_output import PacketOutput
from mqttbroker.bridges.relay_terms import Counts, RelayError, RelayTerms
from mqttbroker.codec.data_types import decode_varint, encode_varint
from mqttbroker.codec.packets import encode_fixed_header
from mqttbroker.codec.reason_codes import (
    PROTOCOL_ERROR,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    QUOTA_EXCEEDED,
    MQTTError,
    name,
)
from topic_matcher.remapping import incoming_map


class IncomingMessages:
    """Publishes PUBLISHes of the remote locally, and passes the acknowledgements of the local broker back to it.

    A message that is not published is acknowledged to the remote as if it were.
    """

    def __init__(self, terms: RelayTerms, counts: Counts, tag: LoopTag, to_remote: PacketOutput, to_local: PacketOutput) -> None:
        self._version = terms.version
        self._counts = counts
        self._tag = tag
        self._to_remote = to_remote
        self._to_local = to_local
        self._topics = incoming_map(terms.rules)
        self._answered_here: set[int] = set()  # packet ids of QoS 2 messages whose PUBREL is answered here

    def publish(self, first: int, body: bytes) -> None:
        """PUBLISH of the remote: its first byte, and the bytes after its fixed header. Raises MQTTError."""
        qos = first >> 1 & 3
        end = len(body)
        rest = 2 + (body[0] << 8 | body[1]) if end >= 2 else end + 1
        start = rest + 2 if qos else rest
        if qos == 3 or start > end:
            raise MQTTError(PROTOCOL_ERROR, "a PUBLISH of the remote is malformed")
        topic = body[2:rest]
        packet_id = body[rest] << 8 | body[rest + 1] if qos else 0
        if qos and not packet_id:
            raise MQTTError(PROTOCOL_ERROR, "packet id 0")  # [MQTT-2.2.1-3]
        properties = b""
        payload = start
        if self._version >= 5:
            length, position = decode_varint(body, start, end)
            payload = position + length
            if payload > end:
                raise MQTTError(PROTOCOL_ERROR, "the properties of a PUBLISH exceed it")
            properties = body[position:payload]
        target = self._topics.find(topic)
        if not target:
            self._drop("unmapped", qos, packet_id)
            return
        if self._tag.is_in(properties):
            self._drop("loop", qos, packet_id)
            return
        ids = packet_id.to_bytes(2, "big") if qos else b""
        head = b"".join((len(target).to_bytes(2, "big"), target, ids, encode_varint(len(properties)), properties))
        remaining = len(head) + end - payload
        if remaining + 5 > LARGEST_PACKET:
            self._drop("too_large", qos, packet_id)
            return
        self._to_local.pieces += (encode_fixed_header(first, remaining), head, body[payload:])
        self._counts.messages_in += 1
        self._counts.bytes_in += end - payload

    def _drop(self, cause: str, qos: int, packet_id: int) -> None:
        """Acknowledge a message that is not published."""
        self._counts.dropped[cause] += 1
        if qos == 1:
            self._to_remote.acknowledge(PUBACK, packet_id)
        elif qos == 2:
            self._answered_here.add(packet_id)
            self._to_remote.acknowledge(PUBREC, packet_id)

    def release(self, packet_id: int) -> None:
        """PUBREL of the remote."""
        if packet_id in self._answered_here:
            self._answered_here.remove(packet_id)
            self._to_remote.acknowledge(PUBCOMP, packet_id)
        else:
            self._to_local.acknowledge(PUBREL, packet_id)

    def acknowledged(self, kind: int, packet_id: int, code: int) -> None:
        """PUBACK, PUBREC or PUBCOMP of the local broker."""
        if kind != PUBCOMP and code >= 0x80:
            if code not in REFUSED_FOR_GOOD:
                # A closed connection leaves the message with the remote, which sends it again.
                text = "no room" if code == QUOTA_EXCEEDED else name(code)
                raise RelayError(f"the local broker does not store a message: {text}")
            self._counts.dropped["refused"] += 1
        self._to_remote.acknowledge(kind, packet_id, code)
