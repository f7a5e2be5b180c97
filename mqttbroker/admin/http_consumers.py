"""The consumers of streams over HTTP.

The rule kept here: a report is taken or refused at once and waits for no disk;
what it costs to look at lag is paid on a thread of its own.

    GET    /streams/{name}/consumers              where each consumer stands
    PUT    /streams/{name}/consumers/{consumer}   a report: {"offsets": {"0": 123, ...}}
    DELETE /streams/{name}/consumers/{consumer}   forget it until it reports again
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Dict, List, Optional

from aiohttp import web

from bridge_spark.source.consumers import ReportError
from mqttbroker.admin.consumer_lag import Consumer, ConsumerLag, TooManyConsumers


class ConsumerRoutes:
    """The handlers; without `lag` there are no streams."""

    def __init__(self, lag: Optional[ConsumerLag]) -> None:
        self._lag = lag

    def routes(self) -> List[web.RouteDef]:
        return [
            web.get("/streams/{name}/consumers", self._list),
            web.put("/streams/{name}/consumers/{consumer}", self._report),
            web.delete("/streams/{name}/consumers/{consumer}", self._forget),
        ]

    async def _call(self, request: web.Request, method: str, *arguments: Any) -> Any:
        """Call a method of `ConsumerLag` for the stream of the path, off the loop."""
        name = request.match_info["name"]
        try:
            if self._lag is None:
                raise KeyError(name)
            call = getattr(self._lag, method)
            return await asyncio.get_running_loop().run_in_executor(None, call, name, *arguments)
        except KeyError:
            raise web.HTTPNotFound(reason=f"no stream {name!r}") from None

    async def _list(self, request: web.Request) -> web.StreamResponse:
        found: List[Consumer] = await self._call(request, "table")
        now = time.time()
        described = [describe(consumer, now) for consumer in found]
        return web.json_response({"stream": request.match_info["name"], "consumers": described})

    async def _report(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        try:
            await self._call(request, "report", request.match_info["consumer"], body)
        except ReportError as error:
            status = 429 if isinstance(error, TooManyConsumers) else 400
            return web.json_response({"error": str(error)}, status=status)
        except OSError as error:
            return web.json_response({"error": f"the report cannot be kept: {error.strerror}"}, status=503)
        return web.Response(status=204)

    async def _forget(self, request: web.Request) -> web.StreamResponse:
        consumer = request.match_info["consumer"]
        if not await self._call(request, "forget", consumer):
            raise web.HTTPNotFound(reason="no such consumer")
        return web.Response(status=204)


def describe(consumer: Consumer, now: float) -> Dict[str, Any]:
    """A consumer as JSON; times in seconds, null where retention does not go by time or size."""
    return {
        "consumer": consumer.name,
        "report_age_seconds": round(max(now - consumer.reported_at, 0.0), 3),
        "lag": consumer.lag,
        "lag_seconds": round(consumer.lag_seconds, 3),
        "at_risk": consumer.at_risk,
        "partitions": [
            {
                "partition": place.partition,
                "offset": place.offset,
                "lag": place.lag,
                "lag_seconds": round(place.lag_seconds, 3),
                "lost": place.lost,
                "seconds_left": None if place.seconds_left is None else round(place.seconds_left, 3),
                "bytes_left": place.bytes_left,
                "at_risk": place.at_risk,
            }
            for place in consumer.places
        ],
    }
