"""The relay of a bridge: the packets of the bridge's local client become packets to the remote broker, and vice versa.

Both sides use the same packet ids, so an acknowledgement of one side is passed on to the other as it is. The local
broker acknowledges after its commit. So its session holds everything that must be stored, and the relay holds only what
may be lost with the connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

from mqttbroker.bridges.context import LARGEST_PACKET
from mqttbroker.bridges.frames import Frames
from mqttbroker.bridges.incoming_messages import IncomingMessages
from mqttbroker.bridges.keep_alive import KeepAlive
from mqttbroker.bridges.loop_tag import LoopTag
from mqttbroker.bridges.outgoing_messages import OutgoingMessages
from mqttbroker.bridges.packet_output import PacketOutput
from mqttbroker.bridges.relay_terms import (
    NEVER,
    Counts,
    LocalState,
    RelayError,
    RelayTerms,
    RemoteHistory,
)
from mqttbroker.bridges.remote_broker import RemoteBroker, reason_text
from mqttbroker.bridges.session_setup import SessionSetup
from mqttbroker.codec.packets import Connack, Connect, Disconnect, Pingreq, Publish, Suback, Will, decode_body
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import (
    CONNACK,
    DISCONNECT,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    UNSUBACK,
    MQTTError,
    name,
)

# States of a relay.
CONNECTING: Final = 0  # CONNECT was sent to the remote
JOINING: Final = 1  # the remote has accepted it, and CONNECT was sent to the local broker
RELEASING: Final = 2  # the local broker releases packet ids of an ended session
SUBSCRIBING: Final = 3  # SUBSCRIBEs and PUBRELs wait for answers of the remote; its PUBLISHes pass
RUNNING: Final = 4
CLOSED: Final = 5

PACKETS_AT_ONCE: Final = 500  # of the remote in one iteration of the event loop


class Relay:
    """One connection to a remote broker, and the local client that belongs to it, without sockets.

    Bytes go in by `remote_received` and `local_received`, and come out of ``to_remote`` and ``to_local``. Times are
    monotonic, in seconds. ``local_state`` is called once, when the local client is connected, and ``before_first_id``
    before the first packet id of this remote is used.
    """

    def __init__(
        self,
        terms: RelayTerms,
        counts: Counts,
        local_state: Callable[[], LocalState],
        before_first_id: Callable[[], None],
        history: RemoteHistory,
    ) -> None:
        self.terms = terms
        self.state = CONNECTING
        self.unfinished = False  # there are packets of the remote for `proceed`
        self.to_remote = PacketOutput(terms.version)
        self.to_local = PacketOutput(5)
        self.remote = RemoteBroker(terms)
        self.setup = SessionSetup(terms, self.remote, history, self.to_remote, self.to_local)
        self._local_state = local_state
        self._before_first_id = before_first_id
        self._remote_frames = Frames(terms.max_packet_size)
        self._local_frames = Frames(LARGEST_PACKET)
        self._early: deque[tuple[int, bytes]] = deque()  # local packets before RUNNING, bounded by the window
        self._joined: LocalState | None = None  # from JOINING to SUBSCRIBING
        self._keep_alive = KeepAlive()
        tag = LoopTag(terms.identity, terms.version)
        self._outgoing = OutgoingMessages(terms, counts, self.remote, tag, self.to_remote, self.to_local)
        self._incoming = IncomingMessages(terms, counts, tag, self.to_remote, self.to_local)

    # -- for the owner ----------------------------------------------------------

    def start(self, now: float) -> None:
        """Begin with CONNECT."""
        terms = self.terms
        self._keep_alive.start(now)
        will = None if terms.notification is None else Will(terms.notification, b"0", 1, True)
        properties = Properties()
        if terms.version >= 5:
            properties.session_expiry_interval = terms.session_expiry
            properties.receive_maximum = terms.receive_maximum
            properties.maximum_packet_size = terms.max_packet_size
        packet = Connect(
            terms.client_id,
            terms.version,
            terms.clean_start,
            terms.keep_alive,
            will,
            terms.username,
            terms.password,
            properties,
        )
        packet.bridge = terms.private and terms.version < 5
        self.to_remote.send(packet)

    @property
    def pauses_local(self) -> bool:
        """Whether the local broker should send nothing now."""
        return self.state == SUBSCRIBING

    @property
    def reads_remote(self) -> bool:
        """Whether packets of the remote are handled now; it should not be read while they are not."""
        return self.state != JOINING and self.state != RELEASING

    def remote_received(self, data: bytes, now: float) -> None:
        """The remote has sent bytes. Raises RelayError, after which the relay must get no more bytes."""
        self._keep_alive.received(now)
        self._remote_frames.feed(data)
        self._run()

    def proceed(self) -> None:
        """Handle more packets that the remote has sent. Raises RelayError like `remote_received`."""
        self._run()

    def local_received(self, data: bytes) -> None:
        """The local broker has sent bytes. Raises RelayError like `remote_received`."""
        self._local_frames.feed(data)
        self._run()

    def remote_written(self, now: float) -> None:
        """`to_remote` was written to the socket."""
        self._keep_alive.sent(now)

    def tick(self, now: float) -> None:
        """Keep the connection alive. Raises RelayError if the remote does not answer."""
        if self._keep_alive.is_lost(now):
            raise RelayError("no answer to PINGREQ")
        if self._keep_alive.ping_is_due(now):
            self.to_remote.send(Pingreq())

    def stopped(self, seconds: float) -> None:
        """The process did not run for so long."""
        self._keep_alive.stopped(seconds)

    def close(self, forget: bool = False) -> None:
        """Disconnect from the remote; with ``forget`` it may end the session."""
        if self.state in (JOINING, RELEASING, SUBSCRIBING, RUNNING):
            self._notify(b"0")
            properties = Properties()
            if forget and self.terms.version >= 5:
                properties.session_expiry_interval = 0
            self.to_remote.send(Disconnect(0, properties))
        self.state = CLOSED

    # -- packets ----------------------------------------------------------------

    def _run(self) -> None:
        """Handle the packets that may be handled in this state, of the remote at most `PACKETS_AT_ONCE`."""
        left = PACKETS_AT_ONCE
        try:
            again = True
            while again:
                again = False
                while left and self.reads_remote and self.state != CLOSED:
                    frame = self._remote_frames.next()
                    if frame is None:
                        break
                    self._from_remote(frame[0], frame[1])
                    left -= 1
                    again = True
                while self.state in (JOINING, RELEASING, RUNNING):
                    if self._early and self.state == RUNNING:
                        frame = self._early.popleft()
                    else:
                        frame = self._local_frames.next()
                    if frame is None:
                        break
                    self._from_local(frame[0], frame[1])
                    again = True
            self.unfinished = not left
        except MQTTError as error:
            raise RelayError(str(error)) from None

    def _from_remote(self, first: int, body: bytes) -> None:
        kind = first >> 4
        version = self.terms.version
        if self.state == CONNECTING:
            if kind != CONNACK:
                raise RelayError(f"the remote answers CONNECT with packet type {kind}")
            self._remote_accepts(cast(Connack, decode_body(kind, first & 15, body, 0, len(body), version)))
        elif kind == PUBLISH:
            self._incoming.publish(first, body)
        elif PUBACK <= kind <= PUBCOMP:
            packet: Any = decode_body(kind, first & 15, body, 0, len(body), version)
            self._acknowledged_by_remote(kind, packet.packet_id, packet.reason_code)
        elif kind == PINGRESP:
            pass
        elif kind == SUBACK or kind == UNSUBACK:
            self.setup.remote_answered(decode_body(kind, first & 15, body, 0, len(body), version))
            self._run_when_set_up()
        elif kind == DISCONNECT and version >= 5:
            found = cast(Disconnect, decode_body(kind, first & 15, body, 0, len(body), version))
            raise RelayError(f"the remote disconnects: {reason_text(found.reason_code, found.properties)}")
        else:
            raise RelayError(f"the remote sends packet type {kind}, which a server may not send")

    def _acknowledged_by_remote(self, kind: int, packet_id: int, code: int) -> None:
        if kind == PUBREL:
            self._incoming.release(packet_id)
        elif kind == PUBCOMP and self.setup.remote_completed(packet_id):
            self._run_when_set_up()
        else:
            self._outgoing.acknowledged(kind, packet_id, code)

    def _from_local(self, first: int, body: bytes) -> None:
        kind = first >> 4
        if self.state == JOINING:
            if kind == CONNACK:
                self._local_accepts(cast(Connack, decode_body(kind, first & 15, body, 0, len(body), 5)))
                return
            if kind != DISCONNECT:
                raise RelayError(f"the local broker answers CONNECT with packet type {kind}")
        elif self.state == RELEASING and kind != DISCONNECT:
            if kind == PUBCOMP:
                self.setup.released_locally(body[0] << 8 | body[1])
                self._subscribe_when_released()
            else:
                self._early.append((first, body))
            return
        if kind == PUBLISH:
            self._outgoing.publish(first, body)
        elif kind == PUBREL:
            self._outgoing.release(body[0] << 8 | body[1])
        elif kind == PUBACK or kind == PUBREC or kind == PUBCOMP:
            self._incoming.acknowledged(kind, body[0] << 8 | body[1], body[2] if len(body) > 2 else 0)
        elif kind == SUBACK:
            found = cast(Suback, decode_body(kind, first & 15, body, 0, len(body), 5))
            for code in found.reason_codes:
                if code >= 0x80:
                    raise RelayError(f"the local broker refuses a subscription: {name(code)}")
        elif kind == DISCONNECT:
            ended = cast(Disconnect, decode_body(kind, first & 15, body, 0, len(body), 5))
            raise RelayError(f"the local broker disconnects: {reason_text(ended.reason_code, ended.properties)}")
        elif kind != UNSUBACK:
            raise RelayError(f"the local broker sends packet type {kind}")

    # -- from CONNECT to RUNNING ------------------------------------------------

    def _remote_accepts(self, packet: Connack) -> None:
        """CONNACK of the remote: connect the local client, with the limits of the remote."""
        terms = self.terms
        self.remote.accept(packet)
        if terms.clean_start and terms.version < 5 and not terms.transient:
            self.to_remote.send(Disconnect())
            raise RelayError("the old session at the remote is ended", ended_session=True)
        self._keep_alive.interval = self.remote.keep_alive
        local = Properties()
        local.session_expiry_interval = NEVER
        local.receive_maximum = min(self.remote.receive_maximum, terms.max_inflight)
        self.to_local.send(Connect(terms.local_client_id, 5, False, 0, None, None, None, local))
        self.state = JOINING

    def _local_accepts(self, packet: Connack) -> None:
        """CONNACK of the local broker."""
        if packet.reason_code:
            raise RelayError(f"the local broker refuses: {reason_text(packet.reason_code, packet.properties)}")
        self._joined = self._local_state()
        self.state = RELEASING
        self.setup.release_locally(self._joined)
        self._subscribe_when_released()

    def _subscribe_when_released(self) -> None:
        local = self._joined
        if local is None or not self.setup.released_all_locally:
            return
        self._joined = None
        self._before_first_id()
        self.state = SUBSCRIBING
        self.setup.subscribe(local)
        self._notify(b"1")
        self._run_when_set_up()

    def _run_when_set_up(self) -> None:
        if self.state == SUBSCRIBING and self.setup.done:
            self.state = RUNNING

    def _notify(self, payload: bytes) -> None:
        """Publish the state of the bridge at the remote, if it is to be published there."""
        if self.terms.notification is not None:
            self.to_remote.send(Publish(self.terms.notification, payload, 0, self.remote.retain_available))
