"""The window against a plain dictionary: ids, and what is beneath them, whatever the order of acknowledgements."""

from __future__ import annotations

import sys

from hypothesis import given, settings
from hypothesis import strategies as st
from support.null_connection import NullConnection

from sessions.context import SessionContext, SessionLimits
from sessions.journal import Journal
from sessions.session import ACCEPTED, REPEATED, UNEXPECTED, UNKNOWN, Session
from sessions.window import SharedInFlight

GROUP = object()


def connected() -> Session:
    session = Session(SessionContext(Journal(True), SessionLimits()), 0, "c")
    session.attach(NullConnection(), 65535)
    return session


def loan(number: int) -> SharedInFlight:
    return SharedInFlight("t", b"head%d" % number, 4, b"", "p", 0, 0, GROUP)


STEPS = st.lists(st.one_of(
    st.tuples(st.sampled_from(["once", "exactly", "lend"]), st.integers(1, 90)),
    st.tuples(st.sampled_from(["first", "last", "middle", "each"]), st.integers(1, 90)),
    st.tuples(st.sampled_from(["wrong", "refused"]), st.integers(1, 3)),
), max_size=30)
SENT, HALF, PLAIN = -1, -2, -3  # QoS 2 before and after PUBREC, QoS 1; anything else is the number of a loan


class Client:
    """A client's view: what it was sent under which id, oldest first, and has not done with."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.has: dict[int, int] = {}

    def take(self, what: str, number: int) -> None:
        session = self.session
        packet_id = session.allocate_shared(loan(number)) if what == "lend" else session.allocate_unpersisted(1 + (what == "exactly"))
        assert 0 < packet_id < 65536 and packet_id not in self.has
        self.has[packet_id] = {"once": PLAIN, "exactly": SENT, "lend": number}[what]

    def go_on(self, packet_id: int) -> None:
        """The next acknowledgement that the id waits for."""
        session, state = self.session, self.has[packet_id]
        if state == SENT:
            assert session.publish_received(packet_id) == ACCEPTED
            self.has[packet_id] = HALF
            return
        done = session.complete if state == HALF else session.acknowledge
        assert done(packet_id) == ACCEPTED
        del self.has[packet_id]

    def err(self, packet_id: int) -> None:
        """Every acknowledgement that the id does not wait for."""
        session, state = self.session, self.has[packet_id]
        if state in (SENT, HALF):
            assert session.acknowledge(packet_id) == UNEXPECTED
        else:
            assert session.publish_received(packet_id) == UNEXPECTED
        if state == HALF:
            assert session.publish_received(packet_id) == REPEATED
        else:
            assert session.complete(packet_id) == UNEXPECTED

    def refuse(self, packet_id: int) -> None:
        """PUBREC with an error."""
        if self.has[packet_id] == SENT:
            assert self.session.publish_refused(packet_id) == ACCEPTED
            del self.has[packet_id]
        else:
            assert self.session.publish_refused(packet_id) == UNEXPECTED


@settings(deadline=None, max_examples=300)
@given(STEPS, st.sampled_from([0, 65_400]))
def test_ids_are_given_and_taken_back_once(steps: list[tuple[str, int]], before: int) -> None:
    session = connected()
    session.window.last_packet_id = before
    client = Client(session)
    for number, (what, times) in enumerate(steps):
        if what == "each":
            for packet_id in list(client.has)[:times]:
                client.go_on(packet_id)
            continue
        for _ in range(times):
            if what in ("once", "exactly", "lend"):
                client.take(what, number)
                continue
            if not client.has:
                break
            ids = list(client.has)
            packet_id = {"first": ids[0], "last": ids[-1]}.get(what, ids[len(ids) // 2])
            {"wrong": client.err, "refused": client.refuse}.get(what, client.go_on)(packet_id)
            if packet_id not in client.has:
                assert session.acknowledge(packet_id) == session.publish_received(packet_id) == UNKNOWN
        assert session.packet_ids_in_use == session.queued_messages == len(client.has)
    lent = [(entry.packet_id, int(entry.message.payload)) for entry in session.shared_entries()]
    assert lent == [(packet_id, number) for packet_id, number in client.has.items() if number >= 0]
    while client.has:
        for packet_id in list(client.has):
            client.go_on(packet_id)
    assert session.packet_ids_in_use == session.queued_messages == session.queue.byte_count == 0


def test_what_is_lent_leaves_in_its_order() -> None:
    session = connected()
    for number in range(200):
        session.allocate_shared(loan(number))
    for packet_id in [*range(1, 100), 150]:
        session.acknowledge(packet_id)
    found = [int(entry.message.payload) for entry in session.shared_entries()]
    assert found == [number for number in range(99, 200) if number != 149]


def test_what_came_back_takes_no_memory() -> None:
    session = connected()
    lent = [loan(number) for number in range(3)]
    tails = [sys.getrefcount(one) for one in lent]
    for one in lent:
        session.allocate_shared(one)
    del one
    for packet_id in (1, 2, 3):
        session.acknowledge(packet_id)
    assert [sys.getrefcount(one) for one in lent] == tails


def test_a_client_that_leaves_takes_its_window_along() -> None:
    session = connected()
    session.allocate_shared(loan(1))
    session.allocate_unpersisted(1)
    session.detach(1.0)
    assert session.packet_ids_in_use == 0 and session.shared_entries() == []
