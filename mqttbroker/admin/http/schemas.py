"""JSON Schemas of the HTTP API."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}


def described(schema: Schema, description: str) -> Schema:
    """A schema with a description."""
    return {**schema, "description": description}


def nullable(schema: Schema) -> Schema:
    """A schema that null satisfies, too."""
    return {**schema, "type": [schema["type"], "null"]}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def record(title: str = "", /, **properties: Schema) -> Schema:
    """An object that has exactly these properties. The OpenAPI document has one with a ``title`` as a component of that name."""
    return {
        **({"title": title} if title else {}),
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
