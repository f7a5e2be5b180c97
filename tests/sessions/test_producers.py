"""sessions.producers: a producer's stored numbers against a set, with failed commits and a window."""

from __future__ import annotations

from collections import Counter

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
    assert producers.remove_excess("s", 3) == []
    assert producers.remove_excess("s", 1) == [second, third]
    assert producers.find("s", ("", "a")) is first and first.used == 7
    assert producers.find("s", ("", "b")) is None and producers.find("t", ("", "a")) is other
    assert len(producers) == 2


@given(st.lists(st.tuples(st.sampled_from("uvwxy"), st.integers(0, 6)), max_size=80), st.integers(1, 9))
def test_the_user_with_the_most_producers_loses_one(uses: list[tuple[str, int]], limit: int) -> None:
    producers = Producers(WINDOW)
    known: list[tuple[str, str]] = []  # in the order of their last use
    for now, (user, number) in enumerate(uses):
        key = (user, str(number))
        producer = producers.find("s", key)
        assert (producer is None) == (key not in known)
        if producer is None:
            producer = producers.create("s", key)
        else:
            known.remove(key)
        producers.use(producer, now)
        known.append(key)
        removed = [producer.key for producer in producers.remove_excess("s", limit)]
        if len(known) <= limit:
            assert removed == []
            continue
        counts = Counter(user for user, _ in known)
        assert [counts[user] for user, _ in removed] == [max(counts.values())]
        assert removed[0] == next(key for key in known if key[0] == removed[0][0]) and removed[0] != key
        known.remove(removed[0])
        assert len(producers) == len(known) == limit


def test_the_producers_of_one_user_replace_none_of_another() -> None:
    producers = Producers(WINDOW)
    kept = [producers.create("s", ("spark", str(number))) for number in range(3)]
    for number in range(100):
        producers.use(producers.create("s", ("", str(number))), number)
        producers.remove_excess("s", 10)
    assert [producers.find("s", producer.key) for producer in kept] == kept and len(producers) == 10
