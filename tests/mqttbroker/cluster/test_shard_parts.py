"""Which links the core of a shard takes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.patience import PATIENCE

from mqttbroker.cluster import shard_parts
from mqttbroker.cluster.links.server import CORE, WORKER, Hello
from mqttbroker.cluster.nodes.core_control import CoreSetup
from mqttbroker.cluster.shard_parts import ShardParts
from mqttbroker.config.settings import Cluster, Settings


@pytest.fixture
def core(tmp_path: Path) -> ShardParts:
    """The core of shard 2 of 4, which serves clients."""
    cluster = Cluster(engine="kafka", bootstrap_servers=("127.0.0.1:1",), node="n", shards=4)
    setup = CoreSetup(Settings(cluster=cluster), b"cc", "n", "127.0.0.1", "d", "key")
    core = ShardParts(setup, 2, tmp_path, lambda reason: None)
    core._accepts = True
    return core


def hello(kind: str, **changes: Any) -> Hello:
    return Hello(**{"cluster": "6363", "kind": kind, "node": "m", "shard": 2, "version": "", "digest": "d", **changes})


def test_links_come_from_the_cores_of_higher_shards_only(core: ShardParts) -> None:
    assert core._refusal(hello(CORE, from_shard=3)) == ""
    for shard in (None, -1, 0, 1, 2, 4):
        assert f"a link from shard {shard}" in core._refusal(hello(CORE, from_shard=shard))


def test_links_of_workers_are_bounded_in_number(core: ShardParts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_parts, "MAX_WORKER_LINKS", 2)
    links: dict[Any, bool] = core._links_of_clients
    for number in range(2):
        assert core._refusal(hello(WORKER)) == ""
        links[number] = True
    assert "has links of 2 workers" in core._refusal(hello(WORKER))
    assert core._refusal(hello(CORE, from_shard=3)) == ""
    del links[0]
    assert core._refusal(hello(WORKER)) == ""


def test_workers_have_no_link_before_clients_are_served(core: ShardParts) -> None:
    core._accepts = False
    assert core._refusal(hello(WORKER)) == "shard 2 is not served yet"


async def test_a_defect_in_the_watch_of_commits_ends_the_core(core: ShardParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that wait for a commit whose outcome is not known would wait for ever."""
    reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(shard_parts, "LOOK_INTERVAL", 0.0)
    core._on_lost = reason.set_result
    nothing: Any = None
    core._start_watch(nothing, nothing)
    async with asyncio.timeout(PATIENCE):
        assert "AssertionError" in await reason  # there is no bus
