"""A broker core for the tests of its controls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.core import Core


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    with Core(tmp_path) as made:
        yield made
