"""A short run of `make chaos`, and the faults that its verdict reports."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chaos.record import MISSING_1, MISSING_2, ORDER, TWICE, Record, Sent
from chaos.run import chaos
from chaos.schedule import Habits, Load, lives
from chaos.verdict import findings, judge_deliveries, table


async def test_a_broker_that_is_killed_five_times_keeps_its_promises() -> None:
    record, summary = await chaos("short", 5, 800)
    assert not findings(record), f"{summary}\n{findings(record)}"
    unused = [row for row in record.faults if not record.checked[row]]
    assert not unused, f"nothing was checked of: {unused}"
    assert record.counts["kills"] == 5


async def test_a_broker_whose_workers_are_killed_too_keeps_its_promises() -> None:
    record, summary = await chaos("workers", 3, 600, workers=2)
    assert not findings(record), f"{summary}\n{findings(record)}"
    assert record.counts["kills"] == 3 and record.counts["worker kills"] == 3


async def test_a_broker_of_which_only_workers_are_killed_keeps_its_promises() -> None:
    record, summary = await chaos("only-workers", 5, 800, workers=2, only_workers=True)
    assert not findings(record), f"{summary}\n{findings(record)}"
    assert record.counts["kills"] == 0 and record.counts["worker kills"] == 5


def test_a_seed_determines_the_schedule() -> None:
    def schedule(seed: str) -> list[object]:
        habits, load = Habits(seed, "a", 1.0, 1.0), Load(seed, "a", 3, 1.0)
        return [lives(seed, 10, 1000, 12), [habits.next() for _ in range(20)], [load.next() for _ in range(20)]]

    assert schedule("1") == schedule("1")
    assert schedule("1") != schedule("2")


Deliver = Callable[[str, Sent], None]


def nothing(deliver: Deliver, one: Sent, two: Sent, three: Sent) -> None:
    for name in ("a", "b"):
        deliver(name, one)
        deliver(name, two)
        deliver(name, one)
        deliver(name, three)


def a_loss(deliver: Deliver, one: Sent, two: Sent, three: Sent) -> None:
    nothing(deliver, one, two, one)


def a_loss_at_qos_1(deliver: Deliver, one: Sent, two: Sent, three: Sent) -> None:
    for name in ("a", "b"):
        deliver(name, two)
        deliver(name, three)


def a_loss_of_one_subscriber(deliver: Deliver, one: Sent, two: Sent, three: Sent) -> None:
    for message in (one, two, three):
        deliver("a", message)


def a_repetition(deliver: Deliver, one: Sent, two: Sent, three: Sent) -> None:
    nothing(deliver, one, two, three)
    deliver("b", two)


def a_step_back(deliver: Deliver, one: Sent, two: Sent, three: Sent) -> None:
    nothing(deliver, one, three, two)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        (nothing, []),
        (a_loss, [MISSING_2]),
        (a_loss_at_qos_1, [MISSING_1]),
        (a_loss_of_one_subscriber, [MISSING_1, MISSING_2]),
        (a_repetition, [TWICE]),
        (a_step_back, [ORDER]),
    ],
)
def test_the_verdict_reports_each_fault(history: Callable[[Deliver, Sent, Sent, Sent], None], expected: list[str]) -> None:
    record = Record()
    one, two, three = (record.send("p", "chaos/t", qos, False, 20) for qos in (1, 2, 2))
    for message in (one, two, three):
        record.acknowledge(message)
    history(lambda name, message: record.deliver(name, message, message.qos), one, two, three)
    judge_deliveries(record, "chaos/#", ["a", "b"], {})
    assert [row for row, texts in record.faults.items() if texts] == expected
    assert all(row in table(record) for row in expected)
