"""Every input of the corpora that `make fuzz-coverage` found is replayed on the build under test."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.guided.target import CORPUS, TARGETS, make

MAX_CORPUS_BYTES = 300_000


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_of_the_corpus(name: str, tmp_path: Path) -> None:
    inputs = sorted(path for path in (CORPUS / name).iterdir())
    assert inputs
    target = make(name, tmp_path)
    try:
        for path in inputs:
            try:
                target.check(path.read_bytes())
            except BaseException as error:
                error.add_note(f"in {path}")
                raise
    finally:
        target.close()


def test_corpora_are_small_and_belong_to_targets() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < MAX_CORPUS_BYTES
