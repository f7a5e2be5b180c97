"""Reads the Avro schemas of payloads from files.  The package fastavro checks them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge_spark.source.schema_files import UnusableSchema, files_by_id, read_schema

SUFFIX = ".avsc"
MAX_DEPTH = 64
"""Most levels of types within each other."""


@dataclass(frozen=True)
class AvroSchemas:
    """The schemas of payloads, as parsed JSON: one without header, or several by their id in the registry."""

    place: str
    alone: Any = None
    by_id: Mapping[int, Any] | None = None

    def field_names(self) -> frozenset[str]:
        """The names of all fields of the records."""
        schemas = [self.alone] if self.by_id is None else self.by_id.values()
        return frozenset(field["name"] for schema in schemas for field in schema.get("fields", ()))


def read_file(path: str) -> AvroSchemas:
    """The schema in a file.  Named types that it does not define are read from ``<full name>.avsc`` beside it.

    Raises `UnusableSchema`, or ImportError without fastavro.
    """
    return AvroSchemas(path, _read(path))


def read_directory(path: str) -> AvroSchemas:
    """The schemas of a registry, from files named ``<id>.avsc``.  Raises `UnusableSchema`, or ImportError."""
    return AvroSchemas(path, by_id={number: _read(file) for number, file in files_by_id(path, SUFFIX)})


def _read(path: str) -> Any:
    from fastavro.repository.base import SchemaRepositoryError
    from fastavro.schema import SchemaParseException, UnknownType, load_schema

    if not path.endswith(SUFFIX):
        raise UnusableSchema(f"{path!r}: the name of a schema file ends with {SUFFIX}")
    try:
        if not isinstance(json.loads(read_schema(path)), dict):
            raise UnusableSchema(f"{path!r}: not the schema of a record")
        return load_schema(path)
    except OSError as error:
        reason = error.strerror or "cannot be read"
    except (UnicodeDecodeError, json.JSONDecodeError):
        reason = "not JSON"
    except UnknownType as error:
        reason = f"type {error.name!r} is defined neither here nor in '{error.name}{SUFFIX}' beside it"
    except UnusableSchema:
        raise
    except (SchemaParseException, SchemaRepositoryError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = "not an Avro schema: " + " ".join(str(error).split())[:200]
    except RecursionError:
        reason = f"types are nested deeper than {MAX_DEPTH}"
    raise UnusableSchema(f"{path!r}: {reason}")
