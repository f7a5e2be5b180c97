"""The recent past of the broker over HTTP, for charts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.http.access import Right
from mqttbroker.admin.http.operations import Call, route
from mqttbroker.admin.http.parameters import Field, Instant
from mqttbroker.admin.http.routes import Route
from mqttbroker.admin.http.schemas import NUMBER, Schema, array, described, nullable, record
from mqttbroker.admin.metrics.history import STREAM, Sampler, Samples

_TIME = described(NUMBER, "Unix time in seconds")


def _by_series(values: Schema, description: str) -> Schema:
    return {"type": "object", "additionalProperties": values, "description": description}


HISTORY = record(
    "History",
    interval=described(NUMBER, "seconds between two samples"),
    length=described(NUMBER, "seconds that a sample is kept"),
    times=array(_TIME),
    series=_by_series(array(nullable(NUMBER)), "for each series a value at each time; null = it has none"),
    now=_TIME,
    values=_by_series(NUMBER, "the values at this moment, without latencies"),
)


class HistoryRoutes:
    """The route of the samples; ``interval`` and ``length`` are seconds."""

    def __init__(self, sampler: Sampler, runner: ControlRunner, interval: float, length: float) -> None:
        self._sampler = sampler
        self._runner = runner
        self._interval = interval
        self._length = length

    def routes(self) -> list[Route]:
        since = Field("since", Instant(), "samples that are later than this Unix time in seconds", 0.0)
        return [
            route("GET", "/history", self._history, Right.STATUS,
                  "Samples of counters, gauges and 99th percentiles of latencies since the broker started", HISTORY,
                  [since], tag="broker")
        ]  # fmt: skip

    async def _history(self, call: Call) -> dict[str, Any]:
        def read() -> tuple[Samples, float, dict[str, float]]:
            return self._sampler.history.since(call["since"]), time.time(), self._sampler.present()

        samples, now, values = await asyncio.wrap_future(self._runner.call(read))
        found = {"interval": self._interval, "length": self._length, **samples.to_json(), "now": round(now, 3),
                 "values": values}  # fmt: skip
        if Right.LIST not in call.principal.rights:
            for key in ("series", "values"):
                found[key] = {name: each for name, each in found[key].items() if not name.startswith(STREAM)}
        return found
