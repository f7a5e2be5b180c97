"""Makes the local session of a bridge and its subscriptions, so that messages wait there before the first link."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from mqttbroker.bridges.context import LARGEST_PACKET
from mqttbroker.bridges.frames import Frames
from mqttbroker.bridges.local_client import LocalTransport
from mqttbroker.bridges.relay_terms import NEVER, RelayError
from mqttbroker.bridges.subscriptions import NO_RETAINED, batches, outgoing_filters
from mqttbroker.codec.packets import (
    Connack,
    Connect,
    Disconnect,
    Suback,
    Subscribe,
    Subscription,
    Unsubscribe,
    decode_body,
)
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import CONNACK, SUBACK, UNSUBACK, MQTTError, name
from mqttbroker.net.wire import Endpoint, Wire
from sessions.session import NO_LOCAL, RETAIN_AS_PUBLISHED
from topic_matcher.remapping import TopicRule


class LocalSessionUpdate:
    """A short connection of the bridge's local client. ``done`` gets "", or the reason why it failed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        endpoint: Endpoint,
        peer: str,
        client_id: str,
        rules: Sequence[TopicRule],
        known_filters: Sequence[str],
    ) -> None:
        self.done: asyncio.Future[str] = loop.create_future()
        self._loop = loop
        self._endpoint = endpoint
        self._client_id = client_id
        self._local = LocalTransport(self, loop.call_soon, peer)
        self._frames = Frames(LARGEST_PACKET)
        self._wanted: dict[str, int] = outgoing_filters(rules, 2)
        self._known = known_filters
        self._unanswered = 0  # SUBSCRIBEs and UNSUBSCRIBEs

    def start(self) -> None:
        properties = Properties()
        properties.session_expiry_interval = NEVER
        properties.receive_maximum = 1
        self._local.open(Wire(self._endpoint))
        self._send([Connect(self._client_id, 5, False, 0, None, None, None, properties).encode()])

    def _send(self, packets: list[bytes]) -> None:
        wire = self._local.wire
        if wire is not None:
            wire.data_received(b"".join(packets))

    def local_wrote(self, data: bytes) -> None:
        # Not in the call of a flush.
        self._loop.call_soon(self._received, data)

    def _received(self, data: bytes) -> None:
        self._frames.feed(data)
        try:
            frame = self._frames.next()
            while frame is not None and not self.done.done():
                self._packet(frame[0], frame[1])
                frame = self._frames.next()
        except (MQTTError, RelayError) as error:
            self._finish(str(error))

    def _packet(self, first: int, body: bytes) -> None:
        kind = first >> 4
        if kind not in (CONNACK, SUBACK, UNSUBACK):
            return  # a message of the session, which is not acknowledged
        packet: Any = decode_body(kind, first & 15, body, 0, len(body), 5)
        if kind == CONNACK:
            if cast(Connack, packet).reason_code:
                raise RelayError(f"the local broker refuses: {name(packet.reason_code)}")
            self._subscribe()
        else:
            for code in cast(Suback, packet).reason_codes if kind == SUBACK else ():
                if code >= 0x80:
                    raise RelayError(f"the local broker refuses a subscription: {name(code)}")
            self._unanswered -= 1
        if self._unanswered == 0:
            self._send([Disconnect(0).encode(5)])
            self._finish("")

    def _subscribe(self) -> None:
        packets: list[bytes] = []
        flags = NO_LOCAL | RETAIN_AS_PUBLISHED | NO_RETAINED  # the relay asks for retained messages
        for batch in batches(list(self._wanted)):
            requests = [Subscription(each, self._wanted[each] | flags) for each in batch]
            packets.append(Subscribe(65535 - len(packets), requests).encode(5))
        for batch in batches([each for each in self._known if each not in self._wanted]):
            packets.append(Unsubscribe(65535 - len(packets), batch).encode(5))
        self._unanswered = len(packets)
        if packets:
            self._send(packets)

    def _finish(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_result(reason)
        self._local.lose(reason)

    def local_reading_changed(self) -> None:
        """Ignored: a few packets are sent in all."""

    def local_lost(self) -> None:
        self._finish("the local broker closes the connection")

    @property
    def unsent(self) -> int:
        return 0
