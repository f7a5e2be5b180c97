"""The HTTP routes of consumers.

    GET    /streams/{name}/consumers              the progress of each consumer
    PUT    /streams/{name}/consumers/{consumer}   a report: {"offsets": {"0": 123, ...}}
    DELETE /streams/{name}/consumers/{consumer}   delete its report

Reports are read and written in the executor, not on the server's loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Callable, Concatenate, Dict, List, Optional, ParamSpec, TypeVar

from aiohttp import web

from bridge_spark.source.consumers import ReportError
from mqttbroker.admin.consumer_lag import Consumer, ConsumerLag, TooManyConsumers

P = ParamSpec("P")
T = TypeVar("T")


class ConsumerRoutes:
    """The handlers; ``lag`` is None if there are no streams."""

    def __init__(self, lag: Optional[ConsumerLag]) -> None:
        self._lag = lag

    def routes(self) -> List[web.RouteDef]:
        return [
            web.get("/streams/{name}/consumers", self._list),
            web.put("/streams/{name}/consumers/{consumer}", self._report),
            web.delete("/streams/{name}/consumers/{consumer}", self._forget),
        ]

    async def _call(
        self,
        method: Callable[Concatenate[ConsumerLag, str, P], T],
        request: web.Request,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method of `ConsumerLag` for the stream that the path names, in the executor."""
        name = request.match_info["name"]
        try:
            if self._lag is None:
                raise KeyError(name)
            return await asyncio.to_thread(method, self._lag, name, *args, **kwargs)
        except KeyError:
            raise web.HTTPNotFound(reason=f"no stream {name!r}") from None

    async def _list(self, request: web.Request) -> web.StreamResponse:
        found: List[Consumer] = await self._call(ConsumerLag.consumers, request)
        now = time.time()
        described = [describe(consumer, now) for consumer in found]
        return web.json_response({"stream": request.match_info["name"], "consumers": described})

    async def _report(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        try:
            await self._call(ConsumerLag.report, request, request.match_info["consumer"], body)
        except ReportError as error:
            status = 429 if isinstance(error, TooManyConsumers) else 400
            return web.json_response({"error": str(error)}, status=status)
        except OSError as error:
            return web.json_response({"error": f"the report cannot be kept: {error.strerror}"}, status=503)
        return web.Response(status=204)

    async def _forget(self, request: web.Request) -> web.StreamResponse:
        consumer = request.match_info["consumer"]
        if not await self._call(ConsumerLag.forget, request, consumer):
            raise web.HTTPNotFound(reason="no such consumer")
        return web.Response(status=204)


def describe(consumer: Consumer, now: float) -> Dict[str, Any]:
    """A consumer as JSON; times are in seconds, null if retention does not depend on age or size."""
    return {
        "consumer": consumer.name,
        "report_age_seconds": round(max(now - consumer.reported_at, 0.0), 3),
        "lag": consumer.lag,
        "lag_seconds": round(consumer.lag_seconds, 3),
        "at_risk": consumer.at_risk,
        "partitions": [
            {
                "partition": each.partition,
                "offset": each.offset,
                "lag": each.lag,
                "lag_seconds": round(each.lag_seconds, 3),
                "lost": each.lost,
                "seconds_left": None if each.seconds_left is None else round(each.seconds_left, 3),
                "bytes_left": each.bytes_left,
                "at_risk": each.at_risk,
            }
            for each in consumer.partitions
        ],
    }
