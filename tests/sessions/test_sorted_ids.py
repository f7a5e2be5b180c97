"""Client identifiers in sorted order, against a plain sorted list."""

from __future__ import annotations

import random
from bisect import bisect_left, insort

from hypothesis import given
from hypothesis import strategies as st

from sessions.sorted_ids import MAX_CHUNK, SortedIds

ID = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=4)


@given(st.sets(ID), st.lists(st.tuples(st.booleans(), ID)), ID, st.integers(1, 9))
def test_changes_and_pages_are_those_of_a_sorted_list(loaded: set[str], changes: list[tuple[bool, str]], start: str, limit: int) -> None:
    ids, expected = SortedIds(), sorted(loaded)
    for client_id in loaded:
        ids.load(client_id)
    for added, client_id in changes:
        if added and client_id not in expected:
            ids.add(client_id)
            insort(expected, client_id)
        elif not added and client_id in expected:
            ids.remove(client_id)
            expected.remove(client_id)
    first = bisect_left(expected, start)
    assert ids.at_least(start, limit) == expected[first : first + limit]
    assert ids.at_least("", len(expected) + 1) == expected
    assert ids.below(start, limit) == expected[:first][::-1][:limit]
    assert ids.below("", len(expected) + 1) == expected[::-1]


def test_many_identifiers_in_any_order() -> None:
    numbers = list(range(20 * MAX_CHUNK))
    for order in (numbers, numbers[::-1], random.Random(1).sample(numbers, len(numbers))):
        ids = SortedIds()
        for number in order:
            ids.add(f"{number:06d}")
        pages, start = [], ""
        while page := ids.at_least(start, 700):
            pages.append(page)
            start = page[-1] + "\0"
        assert [client_id for page in pages for client_id in page] == [f"{number:06d}" for number in numbers]
        assert {len(page) for page in pages[:-1]} == {700}
        backward, end = [], ""
        while page := ids.below(end, 700):
            backward += page
            end = page[-1]
        assert backward == [f"{number:06d}" for number in reversed(numbers)]
        for number in order:
            ids.remove(f"{number:06d}")
        assert ids.at_least("", 1) == []
        ids.add("again")
        assert ids.at_least("", 9) == ["again"]


def test_identifiers_may_be_loaded_beside_others() -> None:
    ids = SortedIds()
    ids.add("m")
    for client_id in ("z", "a"):
        ids.load(client_id)
    assert ids.at_least("", 9) == ["a", "m", "z"]
