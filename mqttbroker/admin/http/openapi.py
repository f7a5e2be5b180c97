"""The OpenAPI 3.1 document of the HTTP server, made of its routes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mqttbroker import __version__
from mqttbroker.admin.http.access import Right, role_for
from mqttbroker.admin.http.routes import Answer, Route

PATH = "/api/v1/openapi.json"
_DESCRIPTION = "Administration of a broker. docs/http.md explains roles, errors and pages."


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The document of these routes."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for route in routes:
        if not route.documented:
            continue
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    schemes = {
        "token": {"type": "http", "scheme": "bearer"},
        "certificate": {"type": "mutualTLS"},
    }
    return {
        "openapi": "3.1.0",
        "servers": [{"url": "/", "description": "the broker that this document comes from"}],
        "info": {"title": "mqttbroker", "version": __version__, "description": _DESCRIPTION},
        "security": [{"token": []}, {"certificate": []}],
        "paths": paths,
        "components": {"schemas": dict(sorted(schemas.items())), "securitySchemes": schemes},
    }


def _component(schema: Mapping[str, Any], schemas: dict[str, Any], name: str = "") -> dict[str, Any]:
    """The schema, with references to ``schemas``, to which those with a title or this ``name`` are added."""
    inner: dict[str, Any] = dict(schema)
    if "properties" in inner:
        inner["properties"] = {key: _component(each, schemas) for key, each in inner["properties"].items()}
    if "items" in inner:
        inner["items"] = _component(inner["items"], schemas)
    title = str(inner.get("title", name))
    types = inner.get("type")
    if not title or "properties" not in inner:
        return inner
    description = {"description": inner.pop("description")} if "description" in inner else {}
    component = {**inner, "title": title, "type": "object"}
    if schemas.setdefault(title, component) != component:
        raise ValueError(f"two schemas have the title {title}")
    reference: dict[str, Any] = {"$ref": f"#/components/schemas/{title}"}
    if isinstance(types, list):
        return {"anyOf": [reference, {"type": "null"}], **description}
    return {**reference, **description}


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    name = route.operation_id or _identifier(route)
    title = "".join(word.capitalize() for word in name.split("_"))
    parameters = [
        {
            "name": each.name,
            "in": each.place,
            "required": each.required or each.place == "path",
            "description": each.description,
            "schema": dict(each.schema),
        }
        for each in route.parameters
    ]
    found: dict[str, Any] = {
        "operationId": name,
        "tags": [route.tag],
        "summary": route.summary,
        "description": _access(route),
        "responses": {
            str(status): _response(answer, schemas, f"{title}Answer" if status < 300 else "") for status, answer in route.answers.items()
        },
    }
    if parameters:
        found["parameters"] = parameters
    if route.body is not None:
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _component(route.body, schemas, f"{title}Request")}},
        }
    if route.right is None:
        found["security"] = []
    return found


def _access(route: Route) -> str:
    if route.right is None:
        return "Needs no credentials."
    if route.right == Right.NONE:
        return "The answer has only items that its sender may see."
    return f"Needs role {role_for(route.right)} or higher."


def _response(answer: Answer, schemas: dict[str, Any], name: str) -> dict[str, Any]:
    if answer.schema is None:
        return {"description": answer.description}
    schema = _component(answer.schema, schemas, name)
    return {"description": answer.description, "content": {answer.media_type: {"schema": schema}}}


def _identifier(route: Route) -> str:
    words = re.findall(r"[A-Za-z0-9]+", route.path)
    return "_".join([route.method.lower(), *words])
