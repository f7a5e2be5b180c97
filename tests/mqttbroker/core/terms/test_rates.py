"""Rates of connects, messages and bytes, by a clock that the tests set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqttbroker.core.terms.rates import BURST, MAX_KEYS, ConnectRates, Rate, Throttle


def rate(messages: int, size: int) -> Rate:
    made = Rate("messages", "bytes")
    made.limit(messages, size)
    return made


def throttle(*rates: Rate) -> Throttle:
    made = Throttle()
    made.rates += rates
    return made


def test_connects_per_second() -> None:
    rates = ConnectRates()
    assert [rates.connect("a", 2, 0.0) for _ in range(22)] == [True] * 20 + [False] * 2  # ten seconds' worth at once
    assert rates.connect("b", 2, 0.0)
    assert [rates.connect("a", 2, 1.0) for _ in range(3)] == [True, True, False]
    assert [rates.connect("a", 2, 100.0) for _ in range(21)] == [True] * 20 + [False]


def test_the_table_of_connects_is_bounded() -> None:
    rates = ConnectRates()
    for number in range(1000):
        rates.connect(f"a{number}", 1, number / 1000)
    assert len(rates.due) == 1000
    for number in range(600):
        rates.connect(f"b{number}", 1, 50.0)
    assert len(rates.due) <= 601  # full buckets are forgotten
    for number in range(MAX_KEYS + 1000):
        rates.connect(f"c{number}", 1, 50.0)
    assert len(rates.due) == MAX_KEYS


def test_messages_and_bytes_of_one_client() -> None:
    found = throttle(rate(10, 0))
    assert found.count(10, 1 << 30, 5.0) == pytest.approx(0)
    assert found.count(5, 0, 5.0) == pytest.approx(0.5)
    assert found.count(0, 1000, 5.5) == pytest.approx(0)
    found = throttle(rate(0, 1000))
    assert found.count(1000, 3000, 5.0) == pytest.approx(2)
    assert found.wait(7.0) == pytest.approx(0) and found.wait(70.0) < 0


def test_the_slowest_of_several_rates_holds() -> None:
    shared = rate(0, 100)
    one, two = throttle(rate(5, 0), shared), throttle(rate(50, 0), shared)
    assert one.count(10, 50, 0.0) == pytest.approx(1.0) and one.reached(0.0) == "messages"
    assert two.count(1, 350, 0.0) == pytest.approx(3.0) and two.reached(0.0) == "bytes"
    assert one.wait(0.0) == pytest.approx(3.0) and one.reached(0.0) == "bytes"
    shared.limit(0, 0)
    assert one.wait(0.0) == pytest.approx(1.0) and two.wait(0.0) < 0 and not shared.limited


@given(
    st.integers(1, 50),
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 3), st.integers(0, 20), st.integers(0, 500)), max_size=60),
)
def test_never_more_passes_than_the_rate_and_its_burst(messages: int, size: int, events: list[tuple[float, int, int]]) -> None:
    """A client that stops while it has to wait passes at most the rate, the burst and the excess of one event."""
    found, now, passed, waited = throttle(rate(messages, size)), 0.0, [0, 0], 0.0
    for pause, count, octets in events:
        now += max(pause, waited)
        before = list(passed)
        waited = found.count(count, octets, now)
        passed = [before[0] + count, before[1] + octets]
        assert before[0] <= messages * (now + BURST) + 1e-6 and before[1] <= size * (now + BURST) + 1e-6
        assert waited <= max(passed[0] / messages, passed[1] / size)  # and it never waits longer than that takes
