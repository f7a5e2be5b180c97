"""The relay of a bridge: the packets of the bridge's local client become packets to the remote broker, and vice versa.

Both sides use the same packet ids: a PUBLISH that the local session sends under an id goes to the remote under that id,
and the remote's acknowledgement to the session; a PUBLISH of the remote is published locally under its id, and is
acknowledged to the remote when the local broker acknowledges it, which is after its commit. So the session, which is
stored, holds everything that must survive, and the relay only what a lost connection may take with it.

The relay has no socket and no clock: bytes go in by `remote_received` and `local_received` and come out of
`to_remote` and `to_local`, the time by `tick`.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Deque, Dict, Final, List, Optional, Sequence, Set, Tuple, cast

from mqttbroker.bridges.frames import Frames
from mqttbroker.codec.data_types import decode_varint, encode_utf8, encode_varint
from mqttbroker.codec.packets import (
    Connack,
    Connect,
    Disconnect,
    Publish,
    Suback,
    Subscribe,
    Subscription,
    Unsubscribe,
    Will,
    decode_body,
    encode_ack,
    encode_fixed_header,
)
from mqttbroker.codec.properties import Properties, decode_properties
from mqttbroker.codec.reason_codes import (
    CONNACK,
    DISCONNECT,
    NOT_AUTHORIZED,
    PACKET_IDENTIFIER_NOT_FOUND,
    PAYLOAD_FORMAT_INVALID,
    PINGRESP,
    PROTOCOL_ERROR,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    QUOTA_EXCEEDED,
    SUBACK,
    TOPIC_NAME_INVALID,
    UNSUBACK,
    MQTTError,
    name,
)
from mqttbroker.core.topic_aliases import TopicAliases
from topic_matcher.remapping import TopicRule, incoming_map, outgoing_map

# States of a relay.
CONNECTING: Final = 0  # CONNECT was sent to the remote
JOINING: Final = 1  # the remote has accepted it, and CONNECT was sent to the local broker
RELEASING: Final = 2  # packet ids that the local session received from elsewhere are being released
PREPARING: Final = 3  # subscriptions and releases of packet ids wait for the remote; its PUBLISHes pass
RUNNING: Final = 4
CLOSED: Final = 5

TAG: Final = "mqtt-bridge"
"""The name of the user property that has the identity of each bridge that has passed a message, MQTT 5 only."""
_TAG_BYTES: Final = encode_utf8(TAG)
_USER_PROPERTY: Final = b"\x26"
MAX_PASSED: Final = 16  # bridges that may pass a message

FILTERS_PER_PACKET: Final = 50
MAX_ALIASES: Final = 1000
LONGEST_ALIASED: Final = 1000  # bytes of a topic
LARGEST_PACKET: Final = 268_435_460  # bytes, with the fixed header
NEVER: Final = 0xFFFFFFFF

NO_LOCAL: Final = 0x04
RETAIN_AS_PUBLISHED: Final = 0x08
_NEW_ONLY: Final = 0x10  # retained messages for a new subscription only

_TOPIC_ALIAS: Final = b"\x23"

# Reason codes of PUBACK and PUBREC that are about the message, so that it would be refused again.
_ABOUT_MESSAGE: Final = frozenset((NOT_AUTHORIZED, TOPIC_NAME_INVALID, PAYLOAD_FORMAT_INVALID))

_RETURN_CODES: Final = {
    1: "unacceptable protocol version",
    2: "identifier rejected",
    3: "server unavailable",
    4: "bad user name or password",
    5: "not authorized",
}


class RelayError(Exception):
    """The link must end; the text is the reason, one line.

    ``unsupported_version``: the remote does not know the protocol version. ``ended_session``: the remote has ended an
    old session, as asked, and the next relay continues without a clean start.
    """

    def __init__(self, reason: str, unsupported_version: bool = False, ended_session: bool = False) -> None:
        super().__init__(reason)
        self.unsupported_version = unsupported_version
        self.ended_session = ended_session


class Counts:
    """Counts of a bridge since it began; sizes are of payloads."""

    def __init__(self) -> None:
        self.messages_out = 0
        self.messages_in = 0
        self.bytes_out = 0
        self.bytes_in = 0
        # Messages that were acknowledged and not passed, by cause.
        self.dropped: Dict[str, int] = {"loop": 0, "refused": 0, "too_large": 0, "unmapped": 0}


class LocalState:
    """The state of the local session when its client is connected.

    ``received`` are QoS 2 packet ids of the remote that are not released; ``filters`` those that the session is
    subscribed to. ``free_ids`` takes a number and returns as many packet ids that the session does not use.
    """

    def __init__(self, received: Sequence[int], filters: Sequence[str], free_ids: Callable[[int], List[int]]) -> None:
        self.received = received
        self.filters = filters
        self.free_ids = free_ids


class RelayTerms:
    """How a bridge connects and what it passes; times in seconds, sizes in bytes.

    ``identity`` names broker and bridge in `TAG`, "" = no such property. ``private``: a version 3.1.1 CONNECT has
    Mosquitto's mark of a bridge. ``largest`` is the longest packet that the remote may send. ``clean_start`` ends
    the session that the remote may have; below version 5 the relay ends then, too, unless ``transient``, because such a
    session would end with the connection. ``notification`` is the topic of the state at the remote.
    """

    def __init__(self, client_id: str, local_client_id: str, rules: Sequence[TopicRule]) -> None:
        self.client_id = client_id
        self.local_client_id = local_client_id
        self.rules = rules
        self.identity = ""
        self.version = 5
        self.private = False
        self.clean_start = False
        self.transient = False
        self.username: Optional[str] = None
        self.password: Optional[bytes] = None
        self.keep_alive = 60
        self.session_expiry = NEVER
        self.receive_maximum = 100
        self.max_inflight = 20
        self.largest = LARGEST_PACKET
        self.outgoing_retain = True
        self.notification: Optional[str] = None


class Relay:
    """One connection to a remote broker, and the local client that belongs to it.

    ``known_elsewhere``: the session's packet ids belong to another remote than this one. ``left_behind`` are ids of
    QoS 2 messages that this remote may hold since then. ``stale_filters`` are remote filters to unsubscribe from,
    ``new_filters`` local ones whose retained messages the remote has not got.
    ``local_state`` is called once, when the local client is connected, and ``on_prepared`` before the first packet id is
    used that belongs to this remote.
    """

    def __init__(
        self,
        terms: RelayTerms,
        counts: Counts,
        local_state: Callable[[], LocalState],
        on_prepared: Callable[[], None],
        known_elsewhere: bool = False,
        left_behind: Sequence[int] = (),
        stale_filters: Sequence[str] = (),
        new_filters: Sequence[str] = (),
    ) -> None:
        self.terms = terms
        self.counts = counts
        self.state = CONNECTING
        self.to_remote: List[bytes] = []
        self.to_local: List[bytes] = []
        self.refused_filters: List[Tuple[str, int]] = []  # remote filters and the reason codes of their refusal
        self.session_present = False
        self._local_state = local_state
        self._on_prepared = on_prepared
        self._known_elsewhere = known_elsewhere
        self._left_behind = list(left_behind)
        self._stale_filters = list(stale_filters)
        self._new_filters = new_filters
        self._remote = Frames(terms.largest)
        self._local = Frames(LARGEST_PACKET)
        self._outgoing = outgoing_map(terms.rules)
        self._incoming = incoming_map(terms.rules)
        self._tag = b""
        if terms.identity and terms.version >= 5:
            self._tag = _USER_PROPERTY + _TAG_BYTES + encode_utf8(terms.identity)
        # Terms of the remote.
        self._max_qos = 2
        self._retain = terms.outgoing_retain
        self._retain_available = True
        self._max_packet = terms.largest
        self._aliases: Optional[TopicAliases] = None
        self.keep_alive = float(terms.keep_alive)
        # Answers of the remote that local packets wait for: SUBSCRIBEs and UNSUBSCRIBEs by packet id, and PUBRELs.
        self._asked: Dict[int, List[str]] = {}
        self._released: Set[int] = set()
        self._locally_released: Set[int] = set()  # PUBCOMPs of the local broker that are not for the remote
        self._held: Deque[Tuple[int, bytes]] = deque()  # local packets meanwhile, which the window bounds
        self._subscribing: Optional[LocalState] = None
        # QoS 2 messages, by packet id, that the relay receives itself: from the local session, and from the remote.
        self._taken_out: Set[int] = set()
        self._taken_in: Set[int] = set()
        self._lowered: Set[int] = set()  # QoS 2 messages of the session that were sent at QoS 1
        self.last_sent = 0.0  # monotonic time at which the owner wrote `to_remote` last
        self._last_received = 0.0
        self._pinged = False

    # -- for the owner ----------------------------------------------------------

    def start(self, now: float) -> None:
        """Begin with CONNECT; ``now`` is monotonic time in seconds."""
        terms = self.terms
        self.last_sent = self._last_received = now
        will = None if terms.notification is None else Will(terms.notification, b"0", 1, True)
        properties = Properties()
        if terms.version >= 5:
            properties.session_expiry_interval = terms.session_expiry
            properties.receive_maximum = terms.receive_maximum
            properties.maximum_packet_size = terms.largest
        packet = Connect(
            terms.client_id, terms.version, terms.clean_start, terms.keep_alive, will, terms.username, terms.password,
            properties,
        )
        packet.bridge = terms.private and terms.version < 5
        self.to_remote.append(packet.encode())

    @property
    def holds_local(self) -> bool:
        """Whether packets of the local broker wait, so that it should send no more."""
        return self.state == PREPARING

    @property
    def reads_remote(self) -> bool:
        """Whether packets of the remote are handled now; it should not be read while they are not."""
        return self.state != JOINING and self.state != RELEASING

    def remote_received(self, data: bytes, now: float) -> None:
        """The remote has sent bytes. Raises RelayError, after which nothing more is to be given to the relay."""
        self._last_received = now
        self._pinged = False
        self._remote.feed(data)
        self._run()

    def local_received(self, data: bytes) -> None:
        """The local broker has sent bytes. Raises RelayError like `remote_received`."""
        self._local.feed(data)
        self._run()

    def tick(self, now: float) -> None:
        """Keep the connection alive. Raises RelayError if the remote does not answer."""
        interval = self.keep_alive
        if self.state < JOINING or interval <= 0.0:
            return
        if self._pinged and now - self._last_received > interval * 1.5:
            raise RelayError("no answer to PINGREQ")
        if now - self.last_sent >= interval * 0.75 or (now - self._last_received >= interval and not self._pinged):
            self.to_remote.append(b"\xc0\x00")
            self._pinged = True

    def close(self, forget: bool = False) -> None:
        """Say goodbye to the remote; with ``forget`` it may end the session."""
        if self.state in (JOINING, RELEASING, PREPARING, RUNNING):
            if self.terms.notification is not None:
                self._notify(b"0")
            properties = Properties()
            if forget and self.terms.version >= 5:
                properties.session_expiry_interval = 0
            self.to_remote.append(Disconnect(0, properties).encode(self.terms.version))
        self.state = CLOSED

    # -- packets ----------------------------------------------------------------

    def _run(self) -> None:
        """Handle the packets that may be handled in this state."""
        try:
            again = True
            while again:
                again = False
                while self.reads_remote and self.state != CLOSED:
                    frame = self._remote.next()
                    if frame is None:
                        break
                    self._from_remote(frame[0], frame[1])
                    again = True
                while self.state in (JOINING, RELEASING, RUNNING):
                    if self._held and self.state == RUNNING:
                        frame = self._held.popleft()
                    else:
                        frame = self._local.next()
                    if frame is None:
                        break
                    self._from_local(frame[0], frame[1])
                    again = True
        except MQTTError as error:
            raise RelayError(str(error)) from None

    def _from_remote(self, first: int, body: bytes) -> None:
        kind = first >> 4
        version = self.terms.version
        if self.state == CONNECTING:
            if kind != CONNACK:
                raise RelayError(f"the remote answers CONNECT with packet type {kind}")
            self._connected(cast(Connack, decode_body(kind, first & 15, body, 0, len(body), version)))
        elif kind == PUBLISH:
            self._publish_in(first, body)
        elif PUBACK <= kind <= PUBCOMP:
            packet: Any = decode_body(kind, first & 15, body, 0, len(body), version)
            self._acknowledged_by_remote(kind, packet.packet_id, packet.reason_code)
        elif kind == PINGRESP:
            pass
        elif kind == SUBACK or kind == UNSUBACK:
            self._subscribed(decode_body(kind, first & 15, body, 0, len(body), version))
        elif kind == DISCONNECT and version >= 5:
            found = cast(Disconnect, decode_body(kind, first & 15, body, 0, len(body), version))
            raise RelayError(f"the remote disconnects: {_reason(found.reason_code, found.properties)}")
        else:
            raise RelayError(f"the remote sends packet type {kind}, which a server may not send")

    def _connected(self, packet: Connack) -> None:
        """CONNACK of the remote."""
        terms, code = self.terms, packet.reason_code
        if code:
            if terms.version < 5:
                raise RelayError(f"the remote refuses: {_RETURN_CODES[code]} ({code})", code == 1)
            raise RelayError(f"the remote refuses: {_reason(code, packet.properties)}", code == 0x84)
        self.session_present = packet.session_present
        if terms.clean_start and packet.session_present:
            raise MQTTError(PROTOCOL_ERROR, "session present after a clean start")  # [MQTT-3.2.2-2]
        if terms.clean_start and terms.version < 5 and not terms.transient:
            self.to_remote.append(Disconnect().encode(terms.version))
            raise RelayError("the old session at the remote is ended", ended_session=True)
        send_maximum = 65535
        if terms.version >= 5:
            properties = packet.properties
            if properties.receive_maximum > 0:
                send_maximum = properties.receive_maximum
            if properties.maximum_packet_size > 0:
                self._max_packet = properties.maximum_packet_size
            if properties.maximum_qos >= 0:
                self._max_qos = properties.maximum_qos
            if properties.retain_available == 0:
                self._retain = self._retain_available = False
            if properties.server_keep_alive >= 0:
                self.keep_alive = float(properties.server_keep_alive)  # [MQTT-3.1.2-21]
            if properties.topic_alias_maximum > 0:
                self._aliases = TopicAliases(min(properties.topic_alias_maximum, MAX_ALIASES))
        local = Properties()
        local.session_expiry_interval = NEVER
        local.receive_maximum = min(send_maximum, terms.max_inflight)
        self.to_local.append(Connect(terms.local_client_id, 5, False, 0, None, None, None, local).encode())
        self.state = JOINING

    def _from_local(self, first: int, body: bytes) -> None:
        kind = first >> 4
        if self.state == JOINING:
            if kind == CONNACK:
                self._joined(cast(Connack, decode_body(kind, first & 15, body, 0, len(body), 5)))
                return
            if kind != DISCONNECT:
                raise RelayError(f"the local broker answers CONNECT with packet type {kind}")
        elif self.state == RELEASING and kind != DISCONNECT:
            if kind == PUBCOMP:
                self._locally_released.discard(body[0] << 8 | body[1])
                self._prepare_if_released()
            else:
                self._held.append((first, body))
            return
        if kind == PUBLISH:
            self._publish_out(first, body)
        elif kind == PUBREL:
            self._release_out(body[0] << 8 | body[1])
        elif kind == PUBACK or kind == PUBREC:
            self._acknowledged_locally(kind, body[0] << 8 | body[1], body[2] if len(body) > 2 else 0)
        elif kind == PUBCOMP:
            self._send_ack(PUBCOMP, body[0] << 8 | body[1], body[2] if len(body) > 2 else 0)
        elif kind == SUBACK:
            found = cast(Suback, decode_body(kind, first & 15, body, 0, len(body), 5))
            for code in found.reason_codes:
                if code >= 0x80:
                    raise RelayError(f"the local broker refuses a subscription: {name(code)}")
        elif kind == DISCONNECT:
            ended = cast(Disconnect, decode_body(kind, first & 15, body, 0, len(body), 5))
            raise RelayError(f"the local broker disconnects: {_reason(ended.reason_code, ended.properties)}")
        elif kind != UNSUBACK:
            raise RelayError(f"the local broker sends packet type {kind}")

    def _joined(self, packet: Connack) -> None:
        """CONNACK of the local broker: release packet ids of ended sessions, and subscribe on both sides."""
        terms = self.terms
        if packet.reason_code:
            raise RelayError(f"the local broker refuses: {_reason(packet.reason_code, packet.properties)}")
        local = self._subscribing = self._local_state()
        self.state = RELEASING
        if not self.session_present or self._known_elsewhere:
            # The remote's new messages use these ids again, and must not be taken for duplicates.
            for packet_id in local.received:
                self._locally_released.add(packet_id)
                self.to_local.append(encode_ack(PUBREL, packet_id, 0, 5))
        self._prepare_if_released()

    def _prepare_if_released(self) -> None:
        local = self._subscribing
        if self._locally_released or local is None:
            return
        self._subscribing = None
        self._on_prepared()
        self.state = PREPARING
        if self.session_present:
            for packet_id in self._left_behind:
                self._released.add(packet_id)
                self.to_remote.append(encode_ack(PUBREL, packet_id, 0, self.terms.version))
        self._subscribe_remotely(local)
        self._subscribe_locally(local)
        if self.terms.notification is not None:
            self._notify(b"1")
        self._run_if_prepared()

    def _subscribe_remotely(self, local: LocalState) -> None:
        version = self.terms.version
        wanted: Dict[str, int] = {}
        for rule in self.terms.rules:
            if rule.comes_in:
                found = rule.remote.topic_filter
                wanted[found] = max(wanted.get(found, 0), rule.qos)
        old = [each for each in self._stale_filters if each not in wanted] if self.session_present else []
        filters = list(wanted)
        count = len(batches(filters)) + len(batches(old))
        free = local.free_ids(count + len(self._released))
        ids = [each for each in free if each not in self._released][:count]
        for batch in batches(filters):
            packet_id = ids.pop()
            self._asked[packet_id] = batch
            requests = []
            for topic_filter in batch:
                options = wanted[topic_filter]
                if version >= 5:
                    options |= NO_LOCAL | RETAIN_AS_PUBLISHED
                    if options & 3:
                        options |= _NEW_ONLY  # at QoS 0 the remote has not queued what it retained meanwhile
                requests.append(Subscription(topic_filter, options))
            self.to_remote.append(Subscribe(packet_id, requests).encode(version))
        for batch in batches(old):
            packet_id = ids.pop()
            self._asked[packet_id] = batch
            self.to_remote.append(Unsubscribe(packet_id, batch).encode(version))

    def _subscribe_locally(self, local: LocalState) -> None:
        wanted = outgoing_filters(self.terms.rules, self._max_qos)
        known = self.session_present and not self._known_elsewhere
        packet_id = 65535
        for batch in batches(list(wanted)):
            requests = []
            for topic_filter in batch:
                options = wanted[topic_filter] | NO_LOCAL | RETAIN_AS_PUBLISHED
                if known and wanted[topic_filter] and topic_filter not in self._new_filters:
                    options |= _NEW_ONLY
                requests.append(Subscription(topic_filter, options))
            self.to_local.append(Subscribe(packet_id, requests).encode(5))
            packet_id -= 1
        for batch in batches([each for each in local.filters if each not in wanted]):
            self.to_local.append(Unsubscribe(packet_id, batch).encode(5))
            packet_id -= 1

    def _subscribed(self, packet: Any) -> None:
        """SUBACK or UNSUBACK of the remote."""
        filters = self._asked.pop(packet.packet_id, None)
        if filters is None:
            raise RelayError(f"the remote acknowledges packet id {packet.packet_id}, which is not in use")
        if isinstance(packet, Suback):
            if len(packet.reason_codes) != len(filters):
                raise RelayError("a SUBACK of the remote has another number of codes than filters were sent")
            for topic_filter, code in zip(filters, packet.reason_codes):
                if code >= 0x80:
                    self.refused_filters.append((topic_filter, code))
        self._run_if_prepared()

    def _run_if_prepared(self) -> None:
        if self.state == PREPARING and not self._asked and not self._released:
            self.state = RUNNING

    def _notify(self, payload: bytes) -> None:
        packet = Publish(cast(str, self.terms.notification), payload, 0, self._retain_available)
        self.to_remote.append(packet.encode(self.terms.version))

    # -- from the local broker to the remote ------------------------------------

    def _publish_out(self, first: int, body: bytes) -> None:
        """Pass a PUBLISH of the local session on, under the topic and at the QoS of the remote."""
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
        target = self._outgoing.find(topic)
        if not target:
            self._take_out("unmapped", qos, packet_id)
        elif self._has_passed(properties):
            self._take_out("loop", qos, packet_id)
        else:
            self._send_publish(first, target, qos, packet_id, properties, body[payload:])

    def _send_publish(
        self, first: int, topic: bytes, qos: int, packet_id: int, properties: bytes, payload: bytes
    ) -> None:
        version = self.terms.version
        granted = min(qos, self._max_qos)
        flags = granted << 1 | (first & 1 if self._retain else 0)
        if first & 8 and self.session_present and granted:
            flags |= 8
        ids = packet_id.to_bytes(2, "big") if granted else b""
        parts = [len(topic).to_bytes(2, "big"), topic, ids]
        alias = 0
        if version >= 5:
            properties += self._tag
            if self._aliases is not None and len(topic) <= LONGEST_ALIASED:
                alias = self._aliases.find(topic)
                if alias:
                    properties += _TOPIC_ALIAS + abs(alias).to_bytes(2, "big")
                if alias > 0:
                    parts[:2] = [b"\0\0"]
            parts += [encode_varint(len(properties)), properties]
        parts.append(payload)
        remaining = sum(map(len, parts))
        header = encode_fixed_header(PUBLISH << 4 | flags, remaining)
        if len(header) + remaining > self._max_packet:  # [MQTT-3.2.2-15]
            self._take_out("too_large", qos, packet_id)
            return
        if alias < 0 and self._aliases is not None:
            self._aliases.assign(topic)
        self.to_remote.append(header)
        self.to_remote += parts
        self.counts.messages_out += 1
        self.counts.bytes_out += len(payload)
        if granted < qos:
            if granted:
                self._lowered.add(packet_id)
            else:
                self._acknowledge_out(qos, packet_id)

    def _take_out(self, cause: str, qos: int, packet_id: int) -> None:
        """Acknowledge a message of the local session that the remote does not get."""
        self.counts.dropped[cause] += 1
        self._acknowledge_out(qos, packet_id)

    def _acknowledge_out(self, qos: int, packet_id: int) -> None:
        if qos == 1:
            self.to_local.append(encode_ack(PUBACK, packet_id, 0, 5))
        elif qos == 2:
            self._taken_out.add(packet_id)
            self.to_local.append(encode_ack(PUBREC, packet_id, 0, 5))

    def _release_out(self, packet_id: int) -> None:
        """PUBREL of the local session."""
        if packet_id in self._taken_out or self._max_qos < 2:
            self._taken_out.discard(packet_id)
            self.to_local.append(encode_ack(PUBCOMP, packet_id, 0, 5))
        else:
            self._send_ack(PUBREL, packet_id, 0)

    def _acknowledged_by_remote(self, kind: int, packet_id: int, code: int) -> None:
        """PUBACK, PUBREC, PUBREL or PUBCOMP of the remote."""
        if kind == PUBREL:
            if packet_id in self._taken_in:
                self._taken_in.remove(packet_id)
                self._send_ack(PUBCOMP, packet_id, 0)
            else:
                self.to_local.append(encode_ack(PUBREL, packet_id, 0, 5))
            return
        if kind == PUBCOMP and packet_id in self._released:
            self._released.remove(packet_id)
            self._run_if_prepared()
            return
        if kind != PUBCOMP and code >= 0x80:
            if code not in _ABOUT_MESSAGE:
                # A closed connection leaves the message in the session, which sends it again.
                raise RelayError(f"the remote refuses a message: {name(code)}")
            self.counts.dropped["refused"] += 1
        if kind == PUBACK and packet_id in self._lowered:
            self._lowered.remove(packet_id)
            if code < 0x80:
                self._taken_out.add(packet_id)
            kind = PUBREC
        if kind == PUBCOMP:
            code = 0 if code != PACKET_IDENTIFIER_NOT_FOUND else code
        self.to_local.append(encode_ack(kind, packet_id, code, 5))

    # -- from the remote to the local broker ------------------------------------

    def _publish_in(self, first: int, body: bytes) -> None:
        """Publish a PUBLISH of the remote locally, under the local topic."""
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
        if self.terms.version >= 5:
            length, position = decode_varint(body, start, end)
            payload = position + length
            if payload > end:
                raise MQTTError(PROTOCOL_ERROR, "the properties of a PUBLISH exceed it")
            properties = body[position:payload]
        target = self._incoming.find(topic)
        if not target:
            self._take_in("unmapped", qos, packet_id)
            return
        if self._has_passed(properties):
            self._take_in("loop", qos, packet_id)
            return
        ids = packet_id.to_bytes(2, "big") if qos else b""
        head = b"".join((len(target).to_bytes(2, "big"), target, ids, encode_varint(len(properties)), properties))
        remaining = len(head) + end - payload
        if remaining + 5 > LARGEST_PACKET:
            self._take_in("too_large", qos, packet_id)
            return
        self.to_local.append(encode_fixed_header(first, remaining))
        self.to_local.append(head)
        self.to_local.append(body[payload:])
        self.counts.messages_in += 1
        self.counts.bytes_in += end - payload

    def _take_in(self, cause: str, qos: int, packet_id: int) -> None:
        """Acknowledge a message of the remote that is not published."""
        self.counts.dropped[cause] += 1
        if qos == 1:
            self._send_ack(PUBACK, packet_id, 0)
        elif qos == 2:
            self._taken_in.add(packet_id)
            self._send_ack(PUBREC, packet_id, 0)

    def _acknowledged_locally(self, kind: int, packet_id: int, code: int) -> None:
        """PUBACK or PUBREC of the local broker."""
        if code >= 0x80:
            if code not in _ABOUT_MESSAGE:
                # A closed connection leaves the message with the remote, which sends it again.
                text = "no room" if code == QUOTA_EXCEEDED else name(code)
                raise RelayError(f"the local broker does not store a message: {text}")
            self.counts.dropped["refused"] += 1
        self._send_ack(kind, packet_id, code)

    def _send_ack(self, kind: int, packet_id: int, code: int) -> None:
        self.to_remote.append(encode_ack(kind, packet_id, code, self.terms.version))

    # -- loops ------------------------------------------------------------------

    def _has_passed(self, properties: bytes) -> bool:
        """Whether this bridge, or too many, have passed a message with these properties already."""
        if not self.terms.identity or _TAG_BYTES not in properties:
            return False
        whole = encode_varint(len(properties)) + properties
        found, _ = decode_properties(whole, 0, len(whole), PUBLISH)
        passed = [value for key, value in found.user_properties if key == TAG]
        return self.terms.identity in passed or len(passed) >= MAX_PASSED


def outgoing_filters(rules: Sequence[TopicRule], max_qos: int) -> Dict[str, int]:
    """The QoS of the local subscriptions by filter."""
    wanted: Dict[str, int] = {}
    for rule in rules:
        if rule.goes_out:
            found = rule.local.topic_filter
            wanted[found] = max(wanted.get(found, 0), min(rule.qos, max_qos))
    return wanted


def batches(filters: List[str]) -> List[List[str]]:
    """Filters in lists of what one packet has."""
    return [filters[at : at + FILTERS_PER_PACKET] for at in range(0, len(filters), FILTERS_PER_PACKET)]


def _reason(code: int, properties: Properties) -> str:
    text = name(code)
    if properties.reason_string:
        text += f": {properties.reason_string}"
    return text
