"""support.file_order: long test files begin first, and files that share Spark or Kafka are run by one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.file_order import LONG, SHARED, TESTS, part_of, place_of

pytestmark = pytest.mark.one_build


def test_the_named_files_are_there_and_first() -> None:
    assert [place_of(TESTS / name) for name in LONG if (TESTS / name).is_file()] == list(range(len(LONG)))
    assert place_of(Path(__file__)) == len(LONG)


def test_a_file_of_each_part_is_among_the_first() -> None:
    assert [part_of(TESTS / name) for name in LONG[: len(SHARED)]] == list(SHARED)
    assert part_of(TESTS / LONG[len(SHARED)]) is None and part_of(TESTS / "cluster/test_nodes.py") is None
