"""The arguments of a relay: terms of its connections, the states of its sessions here and at the remote, and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from mqttbroker.bridges.context import LARGEST_PACKET
from topic_matcher.remapping import TopicRule

NEVER: Final = 0xFFFFFFFF  # a session expiry


class RelayError(Exception):
    """The link must end; the text is the reason, one line.

    ``unsupported_version``: the remote does not know the protocol version. ``ended_session``: the remote has ended an
    old session, as asked, and the next relay continues without a clean start. ``first_answers``: the bridge leaves this
    remote for that of its first address.
    """

    def __init__(
        self,
        reason: str,
        unsupported_version: bool = False,
        ended_session: bool = False,
        first_answers: bool = False,
    ) -> None:
        super().__init__(reason)
        self.unsupported_version = unsupported_version
        self.ended_session = ended_session
        self.first_answers = first_answers


class Counts:
    """Counts of a bridge since it began; sizes are of payloads."""

    def __init__(self) -> None:
        self.messages_out = 0
        self.messages_in = 0
        self.bytes_out = 0
        self.bytes_in = 0
        # Messages that were acknowledged and not passed on, by cause.
        self.dropped: dict[str, int] = {"loop": 0, "refused": 0, "too_large": 0, "unmapped": 0}


class LocalState:
    """The state of the local session when its client is connected.

    ``received`` are QoS 2 packet ids of the remote that are not released; ``filters`` those that the session is
    subscribed to. ``free_ids`` takes a number and returns as many packet ids that the session does not use.
    """

    def __init__(self, received: Sequence[int], filters: Sequence[str], free_ids: Callable[[int], list[int]]) -> None:
        self.received = received
        self.filters = filters
        self.free_ids = free_ids


class RemoteHistory(NamedTuple):
    """The state that earlier links have left.

    ``ids_elsewhere``: the session's packet ids belong to another remote than this one. ``left_behind`` are ids of QoS 2
    messages that this remote may hold since then. ``stale_filters`` are remote filters to unsubscribe from,
    ``new_filters`` local ones whose retained messages the remote has not got.
    """

    ids_elsewhere: bool = False
    left_behind: Sequence[int] = ()
    stale_filters: Sequence[str] = ()
    new_filters: Sequence[str] = ()


class RelayTerms:
    """How a bridge connects, and which messages it passes on; times in seconds, sizes in bytes.

    ``identity`` names broker and bridge in the user property of `LoopTag`, "" = no such property. ``private``: a
    version 3.1.1 CONNECT has Mosquitto's mark of a bridge. ``max_packet_size`` is that of the packets of the remote.
    ``clean_start`` ends the session that the remote may have; below version 5 the relay ends then, too, unless
    ``transient``, because such a session would end with the connection. ``notification`` is the topic of the state at
    the remote.
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
        self.username: str | None = None
        self.password: bytes | None = None
        self.keep_alive = 60
        self.session_expiry = NEVER
        self.receive_maximum = 100
        self.max_inflight = 20
        self.max_packet_size = LARGEST_PACKET
        self.outgoing_retain = True
        self.notification: str | None = None
