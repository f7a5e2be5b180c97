"""Finds the schema files of Avro and Protobuf in a directory by their ids."""

from __future__ import annotations

import os
from collections.abc import Iterator


class UnusableSchema(ValueError):
    """A schema that cannot be read, or that cannot fill the columns; the message is one line."""


def files_by_id(directory: str, suffix: str) -> Iterator[tuple[int, str]]:
    """The ids and paths of the files ``<id><suffix>``, at least one.  Raises `UnusableSchema`."""
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise UnusableSchema(f"{directory!r}: {error.strerror}") from None
    found = set()
    for name in sorted(names):
        stem = name.removesuffix(suffix)
        if name.endswith(suffix) and stem.isascii() and stem.isdigit():
            number = int(stem)
            if number >= 1 << 32 or number in found:
                raise UnusableSchema(f"{directory!r}: {name!r} is not a new id below 2^32")
            found.add(number)
            yield number, os.path.join(directory, name)
    if not found:
        raise UnusableSchema(f"{directory!r}: there is no file like '12{suffix}', named by the id of its schema")
