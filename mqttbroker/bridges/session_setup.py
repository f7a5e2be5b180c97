"""The requests that both brokers must answer before a relay passes messages on: packet ids and subscriptions.

Packet ids that belong to ended sessions are released, first at the local broker, then at the remote. Then the
subscriptions on both sides are made those of the bridge.
"""

from __future__ import annotations

from typing import Any

from mqttbroker.bridges.packet_output import PacketOutput
from mqttbroker.bridges.relay_terms import LocalState, RelayError, RelayTerms, RemoteHistory
from mqttbroker.bridges.remote_broker import RemoteBroker
from mqttbroker.bridges.subscriptions import RETAINED_IF_NEW, batches, incoming_filters, outgoing_filters
from mqttbroker.codec.packets import Suback, Subscribe, Subscription, Unsubscribe
from mqttbroker.codec.reason_codes import PUBREL
from sessions.session import NO_LOCAL, RETAIN_AS_PUBLISHED


class SessionSetup:
    """First `release_locally`, then, when `released_all_locally`, `subscribe`; the end is `done`."""

    def __init__(
        self,
        terms: RelayTerms,
        remote: RemoteBroker,
        history: RemoteHistory,
        to_remote: PacketOutput,
        to_local: PacketOutput,
    ) -> None:
        self.refused_filters: list[tuple[str, int]] = []  # remote filters and the reason codes of their refusal
        self._terms = terms
        self._remote = remote
        self._history = history
        self._to_remote = to_remote
        self._to_local = to_local
        # Requests without an answer.
        self._local_releases: set[int] = set()
        self._remote_releases: set[int] = set()
        self._remote_requests: dict[int, list[str]] = {}  # filters by packet id, of SUBSCRIBEs and UNSUBSCRIBEs

    @property
    def released_all_locally(self) -> bool:
        return not self._local_releases

    @property
    def done(self) -> bool:
        return not self._remote_requests and not self._remote_releases

    def release_locally(self, local: LocalState) -> None:
        """Release the QoS 2 packet ids that the local session has received from a session that is no longer."""
        if self._remote.session_present and not self._history.ids_elsewhere:
            return
        # The remote's new messages use these ids again, and must not be taken for duplicates.
        for packet_id in local.received:
            self._local_releases.add(packet_id)
            self._to_local.acknowledge(PUBREL, packet_id)

    def released_locally(self, packet_id: int) -> None:
        """PUBCOMP of the local broker."""
        self._local_releases.discard(packet_id)

    def subscribe(self, local: LocalState) -> None:
        """Subscribe on both sides, after the release of the packet ids that this remote may hold."""
        if self._remote.session_present:
            for packet_id in self._history.left_behind:
                self._remote_releases.add(packet_id)
                self._to_remote.acknowledge(PUBREL, packet_id)
        self._subscribe_at_remote(local)
        self._subscribe_locally(local)

    def _subscribe_at_remote(self, local: LocalState) -> None:
        wanted = incoming_filters(self._terms.rules)
        filters = batches(list(wanted))
        stale = self._history.stale_filters if self._remote.session_present else ()
        removed = batches([each for each in stale if each not in wanted])
        count = len(filters) + len(removed)
        free = local.free_ids(count + len(self._remote_releases))
        ids = [each for each in free if each not in self._remote_releases][:count]
        for batch in filters:
            requests = [Subscription(each, self._remote_options(wanted[each])) for each in batch]
            self._ask_remote(Subscribe(ids.pop(), requests), batch)
        for batch in removed:
            self._ask_remote(Unsubscribe(ids.pop(), batch), batch)

    def _remote_options(self, qos: int) -> int:
        if self._terms.version < 5:
            return qos
        # At QoS 0 the remote has queued nothing while there was no link, and sends what it retained meanwhile.
        retained = RETAINED_IF_NEW if qos else 0
        return qos | NO_LOCAL | RETAIN_AS_PUBLISHED | retained

    def _ask_remote(self, packet: Subscribe | Unsubscribe, filters: list[str]) -> None:
        self._remote_requests[packet.packet_id] = filters
        self._to_remote.send(packet)

    def _subscribe_locally(self, local: LocalState) -> None:
        wanted = outgoing_filters(self._terms.rules, self._remote.max_qos)
        same_remote = self._remote.session_present and not self._history.ids_elsewhere
        packet_id = 65535
        for batch in batches(list(wanted)):
            requests = []
            for topic_filter in batch:
                options = wanted[topic_filter] | NO_LOCAL | RETAIN_AS_PUBLISHED
                if same_remote and wanted[topic_filter] and topic_filter not in self._history.new_filters:
                    options |= RETAINED_IF_NEW
                requests.append(Subscription(topic_filter, options))
            self._to_local.send(Subscribe(packet_id, requests))
            packet_id -= 1
        for batch in batches([each for each in local.filters if each not in wanted]):
            self._to_local.send(Unsubscribe(packet_id, batch))
            packet_id -= 1

    def remote_completed(self, packet_id: int) -> bool:
        """PUBCOMP of the remote; returns whether it answers a release of this set-up."""
        if packet_id not in self._remote_releases:
            return False
        self._remote_releases.remove(packet_id)
        return True

    def remote_answered(self, packet: Any) -> None:
        """SUBACK or UNSUBACK of the remote."""
        filters = self._remote_requests.pop(packet.packet_id, None)
        if filters is None:
            raise RelayError(f"the remote acknowledges packet id {packet.packet_id}, which is not in use")
        if isinstance(packet, Suback):
            if len(packet.reason_codes) != len(filters):
                raise RelayError("a SUBACK of the remote has another number of codes than filters were sent")
            for topic_filter, code in zip(filters, packet.reason_codes):
                if code >= 0x80:
                    self.refused_filters.append((topic_filter, code))
