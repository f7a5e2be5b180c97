"""The HTTP routes of consumers.

    GET    /streams/{name}/consumers              the progress of each consumer
    PUT    /streams/{name}/consumers/{consumer}   a report: {"offsets": {"0": 123, ...}}
    DELETE /streams/{name}/consumers/{consumer}   delete its report

Reports are read and written in the executor, not on the server's loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from aiohttp import web

from bridge_spark.source.consumers import MAX_REPORT_BYTES, ReportError
from mqttbroker.admin.control.groups import GROUP_PREFIX
from mqttbroker.admin.http.access import Principal, Right
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import Answer, Parameter, Route, read_body
from mqttbroker.admin.http.schemas import BOOLEAN, INTEGER, NUMBER, TEXT, Schema, array, described, nullable, record
from mqttbroker.admin.http.streams import StreamAccess
from mqttbroker.admin.metrics.consumer_lag import Consumer, ConsumerLag, TooManyConsumers

_LAG: dict[str, Schema] = {
    "lag": described(INTEGER, "offsets up to the high watermark"),
    "lag_seconds": described(NUMBER, "age of the oldest unread record"),
    "at_risk": described(BOOLEAN, "retention removed unread records, or is about to"),
}
CONSUMERS = record(
    "Consumers",
    consumer=TEXT,
    report_age_seconds=NUMBER,
    **_LAG,
    partitions=array(
        record(
            partition=INTEGER,
            offset=described(INTEGER, "the next one that it will read"),
            **_LAG,
            lost=described(INTEGER, "offsets that retention removed unread"),
            seconds_left=described(nullable(NUMBER), "until retention removes unread records; null = no limit"),
            bytes_left=described(nullable(INTEGER), "likewise"),
        )
    ),
)
P = ParamSpec("P")
T = TypeVar("T")


class ConsumerRoutes:
    """The handlers; ``lag`` is None if there are no streams."""

    def __init__(self, lag: ConsumerLag | None, access: StreamAccess) -> None:
        self._lag = lag
        self._access = access

    def routes(self) -> list[Route]:
        name = Parameter("name", TEXT, "the name of a stream", "path", True)
        consumer = Parameter("consumer", TEXT, "the name of a consumer", "path", True)
        refused = Answer("refused", record(error=TEXT))
        errors = {401: refused, 403: refused, 404: refused, 429: refused, 503: refused}
        path, none = "/streams/{name}/consumers", Right.NONE  # each stream has readers of its own
        offsets = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}}
        report = {"type": "object", "properties": {"offsets": offsets}, "required": ["offsets"]}
        return [
            Route("GET", path, self._list, none, "The progress of each consumer of a stream",
                  {200: Answer("consumers", record(stream=TEXT, consumers=array(CONSUMERS))), **errors}, (name,),
                  tag="streams"),
            Route("PUT", path + "/{consumer}", self._report, none, "Report the next offset of each partition",
                  {204: Answer("stored"), 400: refused, 408: refused, 413: refused, **errors}, (name, consumer), report,
                  tag="streams"),
            Route("DELETE", path + "/{consumer}", self._forget, none, "Delete the report of a consumer",
                  {204: Answer("deleted"), **errors}, (name, consumer), action="forget_consumer", tag="streams"),
        ]  # fmt: skip

    async def _call(
        self,
        method: Callable[Concatenate[ConsumerLag, str, P], T],
        request: web.Request,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method of `ConsumerLag` for the stream that the path names, in the executor."""
        assert self._lag is not None
        return await asyncio.to_thread(method, self._lag, request.match_info["name"], *args, **kwargs)

    async def _list(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        self._access.check(request, principal, self._access.sees)
        found: list[Consumer] = await self._call(ConsumerLag.consumers, request)
        now = time.time()
        described = [describe(consumer, now) for consumer in found]
        return web.json_response({"stream": request.match_info["name"], "consumers": described})

    async def _report(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        self._access.check(request, principal, self._access.reads)
        if (request.content_length or 0) > MAX_REPORT_BYTES:
            raise RequestError(413, f"a report has {MAX_REPORT_BYTES} bytes at most")
        body = await read_body(request, MAX_REPORT_BYTES)
        try:
            await self._call(ConsumerLag.report, request, request.match_info["consumer"], body)
        except ReportError as error:
            status = 429 if isinstance(error, TooManyConsumers) else 400
            return web.json_response({"error": str(error)}, status=status)
        except OSError as error:
            return web.json_response({"error": f"the report cannot be kept: {error.strerror}"}, status=503)
        return web.Response(status=204)

    async def _forget(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        operates = Right.OPERATE in principal.rights
        self._access.check(request, principal, self._access.sees if operates else self._access.reads)
        consumer = request.match_info["consumer"]
        if consumer.startswith(GROUP_PREFIX):
            raise RequestError(404, f"{consumer} is a group: delete it at /api/v1/streams/NAME/groups/GROUP")
        if consumer.startswith("$queue/"):
            raise RequestError(404, f"{consumer} is a queue of the configuration")
        if not await self._call(ConsumerLag.forget, request, consumer):
            raise RequestError(404, "no such consumer")
        return web.Response(status=204)


def describe(consumer: Consumer, now: float) -> dict[str, Any]:
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
