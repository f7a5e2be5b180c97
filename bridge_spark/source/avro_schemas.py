"""Reads the Avro schemas of payloads from files.  The package fastavro checks them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

SUFFIX = ".avsc"
MAX_DEPTH = 64
"""Most levels of types within each other."""


class AvroSchemaError(ValueError):
    """A schema that cannot be used; the message is one line."""


@dataclass(frozen=True)
class AvroSchemas:
    """The schemas of payloads, as parsed JSON: one without header, or several by their id in the registry."""

    place: str
    alone: Any = None
    by_id: Optional[Mapping[int, Any]] = None


def read_file(path: str) -> AvroSchemas:
    """The schema in a file.  Named types that it does not define are read from ``<full name>.avsc`` beside it.

    Raises `AvroSchemaError`, or ImportError without fastavro.
    """
    return AvroSchemas(path, _read(path))


def read_directory(path: str) -> AvroSchemas:
    """The schemas of a registry, from files named ``<id>.avsc``.  Raises `AvroSchemaError`, or ImportError."""
    try:
        names = os.listdir(path)
    except OSError as error:
        raise AvroSchemaError(f"{path!r}: {error.strerror}") from None
    found = {}
    for name in sorted(names):
        stem = name.removesuffix(SUFFIX)
        if name.endswith(SUFFIX) and stem.isascii() and stem.isdigit():
            number = int(stem)
            if number >= 1 << 32 or number in found:
                raise AvroSchemaError(f"{path!r}: {name!r} is not a new id below 2^32")
            found[number] = _read(os.path.join(path, name))
    if not found:
        raise AvroSchemaError(f"{path!r}: there is no file like '12{SUFFIX}', named by the id of its schema")
    return AvroSchemas(path, by_id=found)


def _read(path: str) -> Any:
    from fastavro.repository.base import SchemaRepositoryError
    from fastavro.schema import SchemaParseException, UnknownType, load_schema

    if not path.endswith(SUFFIX):
        raise AvroSchemaError(f"{path!r}: the name of a schema file ends with {SUFFIX}")
    try:
        with open(path, "rb") as file:
            if not isinstance(json.load(file), dict):
                raise AvroSchemaError(f"{path!r}: not the schema of a record")
        return load_schema(path)
    except OSError as error:
        reason = error.strerror or "cannot be read"
    except (UnicodeDecodeError, json.JSONDecodeError):
        reason = "not JSON"
    except UnknownType as error:
        reason = f"type {error.name!r} is defined neither here nor in '{error.name}{SUFFIX}' beside it"
    except AvroSchemaError:
        raise
    except (SchemaParseException, SchemaRepositoryError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = "not an Avro schema: " + " ".join(str(error).split())[:200]
    except RecursionError:
        reason = f"types are nested deeper than {MAX_DEPTH}"
    raise AvroSchemaError(f"{path!r}: {reason}")
