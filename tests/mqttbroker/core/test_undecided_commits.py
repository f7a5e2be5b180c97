"""Connections that wait for a commit whose outcome nobody knows are closed; others, and the commit, stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.core import Core
from support.properties import session_expiry

from mqttbroker.codec.packets import Disconnect, Publish


@pytest.mark.parametrize("version", [4, 5])
def test_only_clients_that_wait_for_an_acknowledgement_are_closed(tmp_path: Path, version: int) -> None:
    with Core(tmp_path) as core:
        kept = core.connect("kept", properties=session_expiry())
        kept.subscribe("t", options=1)
        publisher, bystander = core.connect("publisher", version), core.connect("bystander", version)
        core.eager = False
        publisher.send(Publish("t", b"x", 1, packet_id=7))
        assert core.take() is not None
        bystander.send(Publish("t", b"x", 0))
        core.broker.commits.undecided()
        found = publisher.arrived()
        assert publisher.closed and not bystander.closed and not kept.closed
        assert [type(one) for one in found] == ([Disconnect] if version == 5 else [])
        if version == 5:
            assert found[0].reason_code == 0x80
        core.commit()
        core.eager = True
        core.settle()
        assert [one.payload for one in kept.arrived() if isinstance(one, Publish)] == [b"x", b"x"]
