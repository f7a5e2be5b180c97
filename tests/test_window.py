"""The window against a plain dictionary: ids, and what is beneath them, whatever the order of acknowledgements."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sessions.delivery import Outlet
from sessions.journal import Journal
from sessions.session import ACCEPTED, UNKNOWN, Session
from sessions.shelf import Limits, Shelf
from sessions.window import Loan

GROUP = object()


def connected() -> Session:
    session = Session(Shelf(Journal(True), Limits(65535, 1_000_000, 10**9, 1000, 10**9)), 0, "c")
    session.attach(Outlet(), 65535)
    return session


def loan(number: int) -> Loan:
    return Loan("t", b"head%d" % number, 4, b"", "p", 0, 0, GROUP)


STEPS = st.lists(st.one_of(
    st.tuples(st.sampled_from(["pass", "lend"]), st.integers(1, 90)),
    st.tuples(st.sampled_from(["first", "last", "middle"]), st.integers(1, 90)),
), max_size=30)


@settings(deadline=None, max_examples=200)
@given(STEPS, st.sampled_from([0, 65_400]))
def test_ids_are_given_and_taken_back_once(steps: list[tuple[str, int]], before: int) -> None:
    session = connected()
    session.last_packet_id = before
    model: dict[int, int] = {}  # packet id -> number of its loan, -1 for what only passed through
    for number, (what, times) in enumerate(steps):
        for _ in range(times):
            if what in ("pass", "lend"):
                packet_id = session.pass_through(1) if what == "pass" else session.lend(loan(number))
                assert 0 < packet_id < 65536 and packet_id not in model
                model[packet_id] = -1 if what == "pass" else number
            elif model:
                ids = list(model)
                packet_id = {"first": ids[0], "last": ids[-1], "middle": ids[len(ids) // 2]}[what]
                del model[packet_id]
                assert session.acknowledge(packet_id) == ACCEPTED
                assert session.acknowledge(packet_id) == UNKNOWN
        assert session.under_way == session.queued_messages == len(model)
    lent = [(entry.packet_id, int(entry.message.payload)) for entry in session.shared_entries()]
    assert lent == [(packet_id, number) for packet_id, number in model.items() if number >= 0]
    for packet_id in model:
        assert session.acknowledge(packet_id) == ACCEPTED
    assert session.under_way == session.queued_messages == session.queued_bytes == 0


def test_what_is_lent_leaves_in_its_order() -> None:
    session = connected()
    for number in range(200):
        session.lend(loan(number))
    for packet_id in [*range(1, 100), 150]:
        session.acknowledge(packet_id)
    found = [int(entry.message.payload) for entry in session.shared_entries()]
    assert found == [number for number in range(99, 200) if number != 149]


def test_a_client_that_leaves_takes_its_window_along() -> None:
    session = connected()
    session.lend(loan(1))
    session.pass_through(1)
    session.detach(1.0)
    assert session.under_way == 0 and session.shared_entries() == []
