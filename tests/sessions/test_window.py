"""The in-flight window against a dictionary: packet ids and their states, for acknowledgements in any order."""

from __future__ import annotations

import sys

from hypothesis import given, settings
from hypothesis import strategies as st
from support.null_connection import NullConnection

from sessions.context import SessionContext, SessionLimits
from sessions.deliveries import ACCEPTED, REPEATED, UNEXPECTED, UNKNOWN, Deliveries
from sessions.journal import Journal
from sessions.window import SharedInFlight

GROUP = object()


def connected() -> Deliveries:
    deliveries = Deliveries(SessionContext(Journal(True), SessionLimits()), 0)
    deliveries.attach(NullConnection(), 65535)
    return deliveries


def shared(number: int) -> SharedInFlight:
    return SharedInFlight("t", b"head%d" % number, 4, b"", "p", 0, 0, GROUP)


KINDS = ["QoS 1", "QoS 2", "shared"]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(KINDS), st.integers(1, 90)),
        st.tuples(st.sampled_from(["first", "last", "middle", "each"]), st.integers(1, 90)),
        st.tuples(st.sampled_from(["unexpected", "refused"]), st.integers(1, 3)),
    ),
    max_size=30,
)
# The state of a packet id; of a shared in-flight message it is the message's number.
AWAIT_PUBREC, AWAIT_PUBCOMP, AWAIT_PUBACK = -1, -2, -3


class Client:
    """The states of the packet ids in flight, oldest first."""

    def __init__(self, deliveries: Deliveries) -> None:
        self.deliveries = deliveries
        self.in_flight: dict[int, int] = {}

    def receive(self, kind: str, number: int) -> None:
        deliveries = self.deliveries
        if kind == "shared":
            packet_id = deliveries.allocate_shared(shared(number))
        else:
            packet_id = deliveries.allocate_unpersisted(2 if kind == "QoS 2" else 1)
        assert 0 < packet_id < 65536 and packet_id not in self.in_flight
        self.in_flight[packet_id] = {"QoS 1": AWAIT_PUBACK, "QoS 2": AWAIT_PUBREC, "shared": number}[kind]

    def acknowledge(self, packet_id: int) -> None:
        """Send the acknowledgement that the packet id awaits."""
        deliveries, state = self.deliveries, self.in_flight[packet_id]
        if state == AWAIT_PUBREC:
            assert deliveries.publish_received(packet_id) == ACCEPTED
            self.in_flight[packet_id] = AWAIT_PUBCOMP
            return
        done = deliveries.complete if state == AWAIT_PUBCOMP else deliveries.acknowledge
        assert done(packet_id) == ACCEPTED
        del self.in_flight[packet_id]

    def acknowledge_unexpectedly(self, packet_id: int) -> None:
        """Send every acknowledgement that the packet id does not await."""
        deliveries, state = self.deliveries, self.in_flight[packet_id]
        if state in (AWAIT_PUBREC, AWAIT_PUBCOMP):
            assert deliveries.acknowledge(packet_id) == UNEXPECTED
        else:
            assert deliveries.publish_received(packet_id) == UNEXPECTED
        if state == AWAIT_PUBCOMP:
            assert deliveries.publish_received(packet_id) == REPEATED
        else:
            assert deliveries.complete(packet_id) == UNEXPECTED

    def refuse(self, packet_id: int) -> None:
        """Send a PUBREC with an error."""
        if self.in_flight[packet_id] == AWAIT_PUBREC:
            assert self.deliveries.publish_refused(packet_id) == ACCEPTED
            del self.in_flight[packet_id]
        else:
            assert self.deliveries.publish_refused(packet_id) == UNEXPECTED


@settings(deadline=None, max_examples=300)
@given(STEPS, st.sampled_from([0, 65_400]))
def test_packet_ids_are_unique_and_freed_once(steps: list[tuple[str, int]], before: int) -> None:
    deliveries = connected()
    deliveries.window.last_packet_id = before
    client = Client(deliveries)
    for number, (step, times) in enumerate(steps):
        if step == "each":
            for packet_id in list(client.in_flight)[:times]:
                client.acknowledge(packet_id)
            continue
        for _ in range(times):
            if step in KINDS:
                client.receive(step, number)
                continue
            if not client.in_flight:
                break
            ids = list(client.in_flight)
            packet_id = {"first": ids[0], "last": ids[-1]}.get(step, ids[len(ids) // 2])
            other = {"unexpected": client.acknowledge_unexpectedly, "refused": client.refuse}
            other.get(step, client.acknowledge)(packet_id)
            if packet_id not in client.in_flight:
                assert deliveries.acknowledge(packet_id) == deliveries.publish_received(packet_id) == UNKNOWN
        assert deliveries.packet_ids_in_use == deliveries.queued_messages == len(client.in_flight)
    redeliverable = [(entry.packet_id, int(entry.message.payload)) for entry in deliveries.shared_entries()]
    assert redeliverable == [(packet_id, number) for packet_id, number in client.in_flight.items() if number >= 0]
    while client.in_flight:
        for packet_id in list(client.in_flight):
            client.acknowledge(packet_id)
    assert deliveries.packet_ids_in_use == deliveries.queued_messages == deliveries.queue.byte_count == 0


def test_shared_messages_are_redelivered_in_order() -> None:
    deliveries = connected()
    for number in range(200):
        deliveries.allocate_shared(shared(number))
    for packet_id in [*range(1, 100), 150]:
        deliveries.acknowledge(packet_id)
    found = [int(entry.message.payload) for entry in deliveries.shared_entries()]
    assert found == [number for number in range(99, 200) if number != 149]


def test_acknowledged_shared_messages_take_no_memory() -> None:
    deliveries = connected()
    messages = [shared(number) for number in range(3)]
    counts = [sys.getrefcount(one) for one in messages]
    for one in messages:
        deliveries.allocate_shared(one)
    del one
    for packet_id in (1, 2, 3):
        deliveries.acknowledge(packet_id)
    assert [sys.getrefcount(one) for one in messages] == counts


def test_disconnecting_clears_the_window() -> None:
    deliveries = connected()
    deliveries.allocate_shared(shared(1))
    deliveries.allocate_unpersisted(1)
    deliveries.detach()
    assert deliveries.packet_ids_in_use == 0 and deliveries.shared_entries() == []
