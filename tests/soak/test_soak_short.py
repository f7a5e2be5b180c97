"""A short `make soak`, and a test of its check."""

from __future__ import annotations

from pathlib import Path

from support.core import wait_until
from support.metric_samples import samples

from soak.run import Soak, growth


def test_memory_does_not_grow_with_time(tmp_path: Path) -> None:
    soak = Soak("1", tmp_path)
    try:
        soak.step(3_000)
        first = soak.sample()
        soak.step(15_000)
        last = soak.sample()
        found = growth(first, last)
        assert not found, "\n".join(found)
        # What is counted towards `max_memory` does not drift: without clients, only cached routes are left.
        wait_until(lambda: parts_held(soak) <= {"route_cache"})
        assert min(soak.counts.values()) > 10, soak.counts
    finally:
        soak.close()


def parts_held(soak: Soak) -> set[str]:
    prefix = "mqttbroker_memory_part_bytes/"
    found = samples(soak.broker.get("/metrics"))
    return {name.removeprefix(prefix) for name, value in found.items() if name.startswith(prefix) and value != 0}


def test_growth_is_found() -> None:
    first = {"blocks": 100_000, "resident": 50 << 20, "types": {"Session": 10}}
    assert not growth(first, first)
    for name, value in (("blocks", 104_000), ("resident", 70 << 20), ("types", {"Session": 300})):
        (found,) = growth(first, {**first, name: value})
        assert "at the end" in found
