"""The description of a node's cores."""

from __future__ import annotations

import pytest

from mqttbroker.cluster.core_control import OWNER, Status, decode_status, encode_line
from mqttbroker.cluster.core_processes import FOLLOW, SERVE, ShardCore

pytestmark = pytest.mark.one_build


def test_missing_links_and_a_failure_of_streams_are_warnings_of_an_owner_that_stays_ready() -> None:
    core = ShardCore(3, str, lambda: None, lambda: 1.0, lambda _: None)
    assert core.warnings() == []
    core.role = SERVE
    assert core.warnings() == []
    core.status = decode_status(encode_line(Status(OWNER, links_missing=[1, 4], stream_problem="mqtt.stream.a: no leader")))
    assert core.warnings() == ["shard 3: no link to the cores of shards 1, 4", "shard 3: streams: mqtt.stream.a: no leader"]
    assert core.unready() == ""
    core.role = FOLLOW
    assert core.warnings() == []
    core.role, core.status = SERVE, Status(OWNER)
    assert core.warnings() == []
