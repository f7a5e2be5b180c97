"""The clients after a power loss: each continues from its state at that moment, with a broker on the remaining files.

In the end every message sent at QoS 2 has reached every QoS 2 subscriber exactly once, and every one at QoS 1 at least
once, in the order of each topic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from support.broker_process import BrokerProcess
from support.raw_client import RawClient, describe

from disk.workload import History, Ident, Publication, ident_of, open_session
from mqttbroker.codec.packets import Puback, Pubcomp, Publish, Pubrec, Pubrel

LAST = ("last-5-1", "last-5-2")  # publish the last message at QoS 1 and at QoS 2


class Resumption:
    """``moment`` is the time of the power loss, on the recorder's clock."""

    def __init__(self, broker: BrokerProcess, history: History, moment: int) -> None:
        self.broker = broker
        self.history = history
        self.moment = moment
        self.sent = {p.ident: p for p in history.all_publications() if p.sent < moment}

    def run(self) -> None:
        """AssertionError describes a fault."""
        repeated = {ident for ident, publication in self.sent.items() if publication.repeated}
        for client_id, publications in self.history.publications.items():
            repeated |= self._publish_again(client_id, [p for p in publications if p.sent < self.moment])
        for client_id in LAST:
            with open_session(self.broker.port, client_id)[0] as client:
                assert client.publish("load/last", f"{client_id}:0:".encode(), int(client_id[-1])) == 0
        if not self.sent:
            return
        for client_id in ("away-4-2", "away-5-2"):
            self._check(client_id, self._drain(client_id, {}), repeated)
        deliveries = [d for d in self.history.deliveries["online-5-2"] if d.came < self.moment]
        # It has the messages that it answered; those without a PUBREL may be sent again under their packet ids.
        had = {d.packet_id: d.ident for d in deliveries if d.qos == 2 and d.answered < self.moment <= d.completed}
        freed = {d.packet_id for d in deliveries if d.released < self.moment <= d.completed}
        before = [d.ident for d in deliveries if d.answered < self.moment]
        # A subscriber does not learn whether its PUBACK is on disk.
        repeated = {publication.ident for publication in self.sent.values() if publication.qos == 1}
        self._check("online-5-2", before + self._drain("online-5-2", had, freed), repeated)

    def _publish_again(self, client_id: str, publications: list[Publication]) -> set[Ident]:
        """Send unacknowledged messages again (section 4.4 of the standards); returns their identities."""
        client, present = open_session(self.broker.port, client_id)
        assert present or not any(p.acked < self.moment for p in publications), f"the session of {client_id} is lost"
        open_ids: set[int] = set()
        again: set[Ident] = set()
        with client:
            for publication in publications:
                if publication.acked >= self.moment:
                    client.send(publication.packet(dup=True))
                    again.add(publication.ident)
                elif publication.qos == 2 and publication.completed >= self.moment and publication.reason < 0x80:
                    client.send(Pubrel(publication.packet_id))
                else:
                    continue
                open_ids.add(publication.packet_id)
            while open_ids:
                packet = client.receive()
                assert isinstance(packet, (Puback, Pubrec, Pubcomp)) and packet.packet_id in open_ids, describe(packet)
                if isinstance(packet, Pubrec):
                    assert packet.reason_code == 0
                    client.send(Pubrel(packet.packet_id))
                else:
                    open_ids.remove(packet.packet_id)
        return again

    def _drain(self, client_id: str, had: dict[int, Ident], freed: Set[int] = frozenset()) -> list[Ident]:
        """Receive and complete messages until the last ones; returns those that the subscriber did not have."""
        client, present = open_session(self.broker.port, client_id)
        assert present, f"the session of {client_id} is lost"
        got: list[Ident] = []
        had, left = dict(had), set(LAST)
        with client:
            while left or had:
                packet = client.receive()
                if isinstance(packet, Pubrel):
                    had.pop(packet.packet_id, None)
                    client.send(Pubcomp(packet.packet_id))
                    continue
                assert isinstance(packet, Publish), describe(packet)
                self._receive(client, packet, had, got, freed)
                left.discard(ident_of(packet.payload)[0])
            client.expect_nothing()
        return [ident for ident in got if ident[0] not in LAST]

    @staticmethod
    def _receive(client: RawClient, packet: Publish, had: dict[int, Ident], got: list[Ident], freed: Set[int]) -> None:
        ident = ident_of(packet.payload)
        if packet.qos == 1:
            client.send(Puback(packet.packet_id))
            got.append(ident)
            return
        if packet.packet_id in had:
            assert had[packet.packet_id] == ident and packet.dup, f"packet id {packet.packet_id} came with {ident}"
            assert packet.packet_id not in freed, f"{ident} came again after its PUBREL"
        else:
            got.append(ident)
            had[packet.packet_id] = ident
        client.send(Pubrec(packet.packet_id))

    def _check(self, client_id: str, got: list[Ident], repeated: set[Ident]) -> None:
        counts = Counter(got)
        for ident, count in counts.items():
            exact = self.sent[ident].qos == 2 or ident not in repeated
            assert count == 1 or not exact, f"{client_id} got {ident} {count} times"
        for ident, publication in self.sent.items():
            if publication.reason < 0x80:
                assert ident in counts, f"{client_id} never got {ident}"
        last: dict[str, int] = {}
        for ident in dict.fromkeys(got):
            publication = self.sent[ident]
            before = last.get(publication.topic, -1)
            assert before < ident[1] or publication.repeated, f"{client_id} got {ident} out of order"
            last[publication.topic] = max(before, ident[1])
