"""The OpenAPI 3.1 document of the HTTP server, made of its routes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Dict

from mqttbroker import __version__
from mqttbroker.admin.access import Right, role_for
from mqttbroker.admin.http_routes import Answer, Route

PATH = "/api/v1/openapi.json"
_DESCRIPTION = "Administration of a broker. docs/http.md explains roles, errors and pages."


def document(routes: Sequence[Route]) -> Dict[str, Any]:
    """The document of these routes."""
    paths: Dict[str, Any] = {}
    for route in routes:
        if not route.documented:
            continue
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    schemes = {
        "token": {"type": "http", "scheme": "bearer"},
        "certificate": {"type": "mutualTLS"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "mqttbroker", "version": __version__, "description": _DESCRIPTION},
        "security": [{"token": []}, {"certificate": []}],
        "paths": paths,
        "components": {"securitySchemes": schemes},
    }


def _operation(route: Route) -> Dict[str, Any]:
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
    found: Dict[str, Any] = {
        "operationId": route.operation_id or _identifier(route),
        "tags": [route.tag],
        "summary": route.summary,
        "description": _access(route),
        "responses": {str(status): _response(answer) for status, answer in route.answers.items()},
    }
    if parameters:
        found["parameters"] = parameters
    if route.body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": dict(route.body)}}}
    if route.right is None:
        found["security"] = []
    return found


def _access(route: Route) -> str:
    if route.right is None:
        return "Needs no credentials."
    if route.right == Right.NONE:
        return "The answer has only items that its sender may see."
    return f"Needs role {role_for(route.right)} or higher."


def _response(answer: Answer) -> Dict[str, Any]:
    if answer.schema is None:
        return {"description": answer.description}
    return {"description": answer.description, "content": {answer.media_type: {"schema": dict(answer.schema)}}}


def _identifier(route: Route) -> str:
    words = re.findall(r"[A-Za-z0-9]+", route.path)
    return "_".join([route.method.lower(), *words])
