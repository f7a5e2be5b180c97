"""Routes of the HTTP server: right, parameters and answers of each. The OpenAPI document is made of the same table.

Errors below /api are problem details (RFC 9457), elsewhere {"error": "..."}.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

from aiohttp import web

from mqttbroker.admin.http.access import Principal, Right
from mqttbroker.admin.http.connections import HttpConnections
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.schemas import INTEGER, TEXT, described

Handler = Callable[[web.Request, Principal], Awaitable[web.StreamResponse]]
Schema = Mapping[str, Any]  # JSON Schema, as in OpenAPI 3.1

API = "/api/v1"
CONNECTIONS = web.AppKey("connections", HttpConnections)
BODY_TIMEOUT = 30.0  # seconds for receiving the body of a request
PROBLEM = "application/problem+json"
PROBLEM_SCHEMA = {
    "title": "Problem",
    "type": "object",
    "properties": {
        "type": TEXT,
        "title": TEXT,
        "status": INTEGER,
        "detail": described(TEXT, "one line"),
        "field": described(TEXT, "the parameter or key that is wrong"),
    },
    "required": ["type", "title", "status", "detail"],
    "additionalProperties": False,
}


class Parameter(NamedTuple):
    """A parameter in the path or the query. One without default may be missing unless it is required."""

    name: str
    schema: Schema
    description: str
    place: str = "query"
    required: bool = False


class Answer(NamedTuple):
    """A response: JSON of a schema, or another media type."""

    description: str
    schema: Schema | None = None
    media_type: str = "application/json"


@dataclass(frozen=True)
class Route:
    """One operation. ``right`` is needed to call it; None = no credentials either.

    ``action`` names it in the audit log, if it changes something. The OpenAPI document has it if ``documented``.
    """

    method: str
    path: str
    handler: Handler
    right: Right | None
    summary: str
    answers: Mapping[int, Answer]
    parameters: tuple[Parameter, ...] = ()
    body: Schema | None = None
    action: str = ""
    description: str = ""
    tag: str = ""
    operation_id: str = field(default="")
    documented: bool = True


def error(
    request: web.Request,
    status: int,
    reason: str,
    headers: Mapping[str, str] | None = None,
    field: str = "",
) -> web.Response:
    """An error in the form of the request's path; ``field`` names the parameter or key that is wrong."""
    if not request.path.startswith("/api/"):
        return web.json_response({"error": reason}, status=status, headers=headers)
    body: dict[str, Any] = {
        "type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": reason
    }  # fmt: skip
    if field:
        body["field"] = field
    return web.json_response(body, status=status, headers=headers, content_type=PROBLEM)


async def read_body(request: web.Request, maximum: int) -> bytes:
    """The body of a request. Raises RequestError, 408, if it takes too long, and `web.HTTPException`, 413, if it has more
    than ``maximum`` bytes."""
    connections, transport = request.app[CONNECTIONS], request.transport
    if transport is not None:
        connections.body_awaited(transport)
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            return await request.clone(client_max_size=maximum).read()
    except TimeoutError:
        raise RequestError(408, f"the body was not received in {BODY_TIMEOUT:g} s") from None
    finally:
        if transport is not None:
            connections.body_received(transport)
