"""The reads of its own log by the owner of a shard."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
from support.memory_log import MemoryTopic, memory_store
from support.patience import PATIENCE
from support.store_model import RandomCommits
from support.store_writer import Writer

pytestmark = pytest.mark.one_build


def test_an_owner_reads_its_log_only_when_another_node_wrote_to_it(tmp_path: Path) -> None:
    memory, commits = MemoryTopic(), RandomCommits(5)
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    first = memory_store(memory, tmp_path / "first", "first", reasons.put)
    first.recover()
    writer = Writer(first)  # type: ignore[arg-type]
    for _ in range(50):
        write_set = commits.next()
        write_set.stream_messages = {}
        assert writer.outcome(write_set) is None
    assert memory.read <= 2  # of the takeover, and of the first commit while it began to serve
    second = memory_store(memory, tmp_path / "second", "second", lambda reason: None)
    second.recover()
    assert "another node has taken the shard over" in reasons.get(timeout=PATIENCE)
    first.stop()
    second.start(lambda write_set, error: None, lambda write_set, pages: None)
    second.stop()
