"""Fixtures for tests with a layer below the broker."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.memory_directory import directory_in_memory
from support.tools import lacking

from disk.layer import Layer, library


@pytest.fixture
def directory() -> Iterator[Path]:
    """An empty directory, in memory if there is space; without a C compiler the test is skipped, or fails in CI."""
    try:
        library()
    except RuntimeError as error:
        lacking(str(error))
    path = tempfile.mkdtemp(prefix="mqttbroker-disk-", dir=directory_in_memory())
    yield Path(path)
    shutil.rmtree(path)


@pytest.fixture
def layer(directory: Path) -> Layer:
    """A layer that records the calls below ``directory / "disk"``."""
    root = directory / "disk"
    root.mkdir()
    return Layer(root, directory, record=True)
