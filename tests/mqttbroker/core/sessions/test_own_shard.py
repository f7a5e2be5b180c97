"""Client ids of a core in a cluster: those that the broker assigns belong to its own shard, and no others are accepted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.core import Core

from mqttbroker.codec.packets import Connack
from mqttbroker.codec.reason_codes import CLIENT_IDENTIFIER_NOT_VALID
from mqttbroker.core.sessions.own_shard import OwnShard, shard_of

SHARDS = 8


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    with Core(tmp_path, durability="off") as core:
        core.broker.connect_handler.own_shard = OwnShard(3, SHARDS)
        yield core


@pytest.mark.parametrize("shards", [1, 8, 2048])
def test_an_assigned_client_id_is_fitted_to_each_shard(shards: int) -> None:
    for number in {0, shards // 2, shards - 1}:
        own = OwnShard(number, shards)
        fitted = own.fitted("häuser")
        assert own.owns(fitted) and fitted.startswith("häuser") and len(fitted) < 16
        assert own.fitted(fitted) == fitted and shard_of(fitted, shards) == number


def connack(core: Core, client_id: str) -> Connack:
    return core.client(5).connect(client_id)


def test_a_client_without_client_id_gets_one_of_the_shard(core: Core) -> None:
    for pattern in (None, "device-*"):
        core.terms.client_id_pattern = pattern
        for _ in range(20):
            answer = connack(core, "")
            assigned = answer.properties.assigned_client_identifier
            assert answer.reason_code == 0 and assigned is not None
            assert shard_of(assigned, SHARDS) == 3 and core.broker.registry.get(assigned) is not None


def test_a_client_id_of_another_shard_is_refused(core: Core) -> None:
    """Also one that the listener makes of a name: the client was sent to this core without it."""
    own = OwnShard(3, SHARDS)
    names = [f"c{number}" for number in range(50)]
    for name in names:
        assert connack(core, name).reason_code == (0 if own.owns(name) else CLIENT_IDENTIFIER_NOT_VALID)
        core.terms.client_id_pattern = name
        assert connack(core, "").reason_code == (0 if own.owns(name) else CLIENT_IDENTIFIER_NOT_VALID)
        core.terms.client_id_pattern = None
