"""Bridges over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.http.access import Right
from mqttbroker.admin.http.operations import Call, route
from mqttbroker.admin.http.routes import Route
from mqttbroker.admin.http.schemas import INTEGER, NUMBER, TEXT, array, described, nullable, record
from mqttbroker.bridges.context import BridgeStatus

BRIDGE = record(
    "Bridge",
    name=TEXT,
    state=described(TEXT, "connected, connecting, waiting (for the next attempt) or disabled"),
    address=described(TEXT, "of the remote, or of the last one that was tried"),
    addresses=array(TEXT),
    version=described(TEXT, "of MQTT"),
    client_id=described(TEXT, "at the remote"),
    since=described(NUMBER, "Unix time in seconds at which the state began"),
    reason=described(nullable(TEXT), "why the last link ended or could not be made"),
    failures=described(INTEGER, "attempts that failed and links that ended"),
    connects=INTEGER,
    messages_out=INTEGER,
    messages_in=INTEGER,
    bytes_out=described(INTEGER, "of payloads"),
    bytes_in=described(INTEGER, "of payloads"),
    dropped=described(
        record(loop=INTEGER, refused=INTEGER, too_large=INTEGER, unmapped=INTEGER),
        "messages that were acknowledged and not passed, by cause",
    ),
    queued_messages=described(INTEGER, "QoS 1 and 2 messages that the remote has not acknowledged"),
    queued_bytes=INTEGER,
    refused_filters=described(array(TEXT), "that the remote does not let the bridge subscribe to"),
)
BRIDGES = record("Bridges", items=described(array(BRIDGE), "in the order of the configuration"))


class BridgeRoutes:
    """The routes of bridges."""

    def __init__(self, statuses: Callable[[], Sequence[BridgeStatus]], runner: ControlRunner) -> None:
        self._statuses = statuses
        self._runner = runner

    def routes(self) -> list[Route]:
        return [route("GET", "/bridges", self._list_bridges, Right.LIST, "Bridges", BRIDGES, tag="broker")]

    async def _list_bridges(self, call: Call) -> dict[str, Any]:
        found = await asyncio.wrap_future(self._runner.call(self._statuses))
        return {"items": [_json_of(one) for one in found]}


def _json_of(status: BridgeStatus) -> dict[str, Any]:
    values = status._asdict()
    del values["down_since"]
    values.update(
        since=round(status.since, 3),
        reason=status.reason or None,
        dropped=dict(status.dropped),
        addresses=list(status.addresses),
        refused_filters=list(status.refused_filters),
    )
    return values
