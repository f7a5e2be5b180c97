"""Operations of the HTTP API: values of a request's parameters and body, the answer, the line of the audit log."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from mqttbroker.admin.control.runner import BrokerStopping
from mqttbroker.admin.control.slices import MAX_PAGE, ControlError
from mqttbroker.admin.http.access import Principal, Right
from mqttbroker.admin.http.admission import log_action
from mqttbroker.admin.http.parameters import MAX_BODY, Field, Word, read_json, read_texts, read_values
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import API, PROBLEM, PROBLEM_SCHEMA, Answer, Parameter, Route, read_body
from mqttbroker.admin.http.schemas import TEXT, Schema, array, described, nullable, record
from mqttbroker.config.setting_kinds import Integer

DEFAULT_PAGE = 100

# Parameters and keys that the audit log has.
_TARGETS = (
    "client_id", "topic", "pattern", "access", "filter", "retain", "protocol", "address", "username", "scram",
    "seconds", "reason", "name", "level", "area", "file", "consumer", "filters", "partitions", "key", "retention_age",
    "retention_bytes", "segment_bytes", "segment_age", "seal", "compact", "compact_tombstones",
    "compact_dirty_percent", "compact_keys", "dedup", "dedup_producers",
)  # fmt: skip
_PAYLOADS = ("payload", "payload_base64")  # keys of which a body has one at most
_PATTERN_OR_USER = ("pattern", "username")  # no user's rule is a pattern
_BAN_KEY = ("address", "username", "client_id")  # of which it has one at least

LIMIT = Field("limit", Integer(1, MAX_PAGE), "the most entries of a page", DEFAULT_PAGE)
CURSOR = Field("cursor", Word(1), "where the page begins: next_cursor of the page before", None)


@dataclass(frozen=True)
class Call:
    """One request: its sender, and the values of its parameters and of the keys of its body."""

    principal: Principal
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


Operation = Callable[[Call], Awaitable[Any]]


def page(items: Schema) -> Schema:
    """A page of a list."""
    title = f"{items['title']}Page" if "title" in items else ""
    return record(title, items=array(items), next_cursor=described(nullable(TEXT), "of the next page; null = none follows"))


def route(
    method: str,
    path: str,
    operation: Operation,
    right: Right,
    summary: str,
    schema: Schema | None,
    parameters: Sequence[Field] = (),
    body: Sequence[Field] | None = None,
    done: Answer | None = None,
    action: str = "",
    tag: str = "",
    errors: Sequence[int] = (),
) -> Route:
    """The route of an operation below /api/v1, which answers with JSON of ``schema``, or with 204 and ``done``.

    ``parameters`` are those of path and query, ``body`` the keys of the body; ``errors`` are statuses that only some
    operations have. A change has an ``action``, its name in the audit log.
    """
    problem = Answer("refused", PROBLEM_SCHEMA, PROBLEM)
    statuses = {400, 401, 403, 421, 429, 503, *errors, *(() if body is None else (408, 413))}
    answers = {status: problem for status in sorted(statuses)}
    answers = {204: done, **answers} if done is not None else {200: Answer("the result", schema), **answers}
    placed = [Parameter(each.name, each.schema, each.description, *_place(each, path)) for each in parameters]
    return Route(
        method, API + path, functools.partial(_run, operation, tuple(parameters), body, action), right,
        summary, answers, tuple(placed), None if body is None else _body_schema(body), tag=tag,
        operation_id=getattr(operation, "__name__").strip("_"),
    )  # fmt: skip


async def _run(
    operation: Operation,
    parameters: Sequence[Field],
    body: Sequence[Field] | None,
    action: str,
    request: web.Request,
    principal: Principal,
) -> web.StreamResponse:
    texts = {**request.query, **request.match_info}
    values = read_texts(parameters, texts, [*request.query, *request.match_info])
    if body is not None:
        values = {**values, **read_values(body, read_json(await read_body(request, MAX_BODY)))}
    try:
        result = await operation(Call(principal, values))
    except BrokerStopping:
        raise
    except ControlError as error:
        raise RequestError(400, str(error)) from None
    if action:
        log_action(action, _target(values), request, principal)
    return web.Response(status=204) if result is None else web.json_response(result)


def _target(values: Mapping[str, Any]) -> str:
    """The target of a change, for the audit log: no content of messages."""
    return " ".join(f"{name}={values[name]}" for name in _TARGETS if values.get(name) not in (None, ""))


def _place(field: Field, path: str) -> tuple[str, bool]:
    return ("path", True) if f"{{{field.name}}}" in path else ("query", field.required)


def _body_schema(fields: Sequence[Field]) -> Schema:
    names = {each.name for each in fields}
    together: Schema = {}
    # Generators of clients take anyOf and oneOf beside properties for types of their own.
    if names.issuperset(_BAN_KEY):
        together = {"not": _none_of(_BAN_KEY)}
    elif names.issuperset(_PAYLOADS) and "retain" in names:
        together = {"not": {"required": list(_PAYLOADS)}}
    elif names.issuperset(_PAYLOADS):
        together = {"not": {"anyOf": [_none_of(_PAYLOADS), {"required": list(_PAYLOADS)}]}}
    elif names.issuperset(_PATTERN_OR_USER):
        together = {"not": {"required": list(_PATTERN_OR_USER), "properties": {"pattern": {"const": True}}}}
    return {
        **together,
        "type": "object",
        "properties": {each.name: {**each.schema, "description": each.description} for each in fields},
        "required": [each.name for each in fields if each.required],
        "additionalProperties": False,
    }


def _none_of(names: Sequence[str]) -> Schema:
    """Objects that have none of these keys."""
    return {"properties": {name: {"not": {}} for name in names}}


def page_of(items: Any, cursor: str | None) -> dict[str, Any]:
    """A page as `page` describes it."""
    return {"items": list(items), "next_cursor": cursor}
