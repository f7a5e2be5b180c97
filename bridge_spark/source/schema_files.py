"""Reads the schema files of Avro and Protobuf, and finds them in a directory by their ids."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

MAX_BYTES = 16 * 1024 * 1024  # of a schema file


class UnusableSchema(ValueError):
    """A schema that cannot be read, or that cannot fill the columns; the message is one line."""


def read_schema(path: str) -> bytes:
    """The content of a regular file, or of one to which a symbolic link points.  Raises `UnusableSchema`."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a named pipe would wait for a writer
            raise UnusableSchema(f"{path!r}: not a regular file")
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnusableSchema(f"{path!r}: {error.strerror or 'cannot be read'}") from None
    if len(data) > MAX_BYTES:
        raise UnusableSchema(f"{path!r}: larger than {MAX_BYTES >> 20} MiB")
    return data


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
