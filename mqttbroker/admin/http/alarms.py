"""Alarms over HTTP."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.events.alarms import MAX_CLEARED, Alarms
from mqttbroker.admin.http.access import Right
from mqttbroker.admin.http.operations import Call, route
from mqttbroker.admin.http.parameters import Field, Word
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import Route
from mqttbroker.admin.http.schemas import BOOLEAN, NUMBER, TEXT, array, described, nullable, record

ALARM = record(
    "Alarm",
    name=described(TEXT, "the topic below $SYS/broker/alarms/"),
    active=BOOLEAN,
    reason=TEXT,
    since=described(NUMBER, "Unix time in seconds"),
    cleared=described(nullable(NUMBER), "Unix time in seconds; null = active"),
    acknowledged_by=described(nullable(TEXT), "the sender of the request; null = nobody"),
    acknowledged_at=described(nullable(NUMBER), "Unix time in seconds"),
)
ALARMS = record(
    "Alarms",
    active=described(array(ALARM), "the oldest first"),
    cleared=described(array(ALARM), f"the last {MAX_CLEARED} that ended, the newest first"),
)
_NAME = Field("name", Word(1), "the name of an alarm, percent-encoded")


class AlarmRoutes:
    """The routes of alarms."""

    def __init__(self, alarms: Alarms, runner: ControlRunner) -> None:
        self._alarms = alarms
        self._runner = runner

    def routes(self) -> list[Route]:
        return [
            route("GET", "/alarms", self._list_alarms, Right.LIST, "Alarms", ALARMS, tag="broker"),
            route("POST", "/alarms/{name}/acknowledge", self._acknowledge_alarm, Right.OPERATE,
                  "Mark an active alarm as known, until it ends", ALARM, [_NAME], action="acknowledge_alarm",
                  tag="broker", errors=(404,)),
        ]  # fmt: skip

    async def _list_alarms(self, call: Call) -> dict[str, Any]:
        def both() -> dict[str, Any]:
            return {
                "active": [alarm.to_json() for alarm in self._alarms.active],
                "cleared": [alarm.to_json() for alarm in self._alarms.cleared],
            }

        return await asyncio.wrap_future(self._runner.call(both))

    async def _acknowledge_alarm(self, call: Call) -> dict[str, Any]:
        name: str = call["name"]
        acknowledge = self._alarms.acknowledge
        alarm = await asyncio.wrap_future(self._runner.call(acknowledge, name, call.principal.name, time.time()))
        if alarm is None:
            raise RequestError(404, f"no alarm {name!r} is active", "name")
        return alarm.to_json()
