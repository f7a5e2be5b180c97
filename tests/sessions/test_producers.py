"""sessions.producers: a producer's stored numbers against a set, with failed commits and a window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sessions.producers import MAX_NUMBER, Producer, Producers

WINDOW = 8


def stored(producer: Producer, numbers: range) -> list[int]:
    return [number for number in numbers if producer.has_stored(number)]


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=60))
def test_a_number_is_stored_if_it_was_added_or_is_below_the_window(steps: list[tuple[int, bool]]) -> None:
    producer = Producers(WINDOW).create("s", ("", "p"))
    added: set[int] = set()
    greatest = -1
    for number, fails in steps:
        expected = number in added or number <= greatest - WINDOW
        assert producer.has_stored(number) == expected
        if expected:
            continue
        producer.add(number)
        greatest = max(greatest, number)
        if fails:
            producer.remove([number])
        else:
            added.add(number)
        restored = Producers(WINDOW).load(producer.row())
        expected_numbers = [n for n in range(50) if n in added or n <= greatest - WINDOW]
        assert stored(producer, range(50)) == stored(restored, range(50)) == expected_numbers


def test_a_leap_to_the_greatest_number_needs_no_more_memory_than_the_window() -> None:
    producer = Producers(WINDOW).create("s", ("", "p"))
    producer.add(3)
    producer.add(MAX_NUMBER)
    assert producer.missing < 1 << WINDOW
    assert producer.has_stored(4) and not producer.has_stored(MAX_NUMBER - 1)
    producer.remove([3, MAX_NUMBER])
    assert producer.missing < 1 << WINDOW and not producer.has_stored(MAX_NUMBER)


def test_the_producers_that_were_not_used_for_longest_are_removed() -> None:
    producers = Producers(WINDOW)
    first, second, third = (producers.create("s", ("", name)) for name in "abc")
    other = producers.create("t", ("", "a"))
    producers.use(first, 7)
    assert producers.remove_oldest("s", 3) == []
    assert producers.remove_oldest("s", 1) == [second, third]
    assert producers.find("s", ("", "a")) is first and first.used == 7
    assert producers.find("s", ("", "b")) is None and producers.find("t", ("", "a")) is other
    assert len(producers) == 2
