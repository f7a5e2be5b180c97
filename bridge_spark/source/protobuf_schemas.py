"""Reads the Protobuf message type of payloads from descriptor files, which `protoc --descriptor_set_out` writes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bridge_spark.source.schema_files import UnusableSchema, files_by_id, read_schema

SUFFIX = ".desc"
"""Of the files of a registry's schemas; a single file may have any name."""


@dataclass(frozen=True)
class ProtobufSchemas:
    """Descriptor sets (`google.protobuf.FileDescriptorSet`, encoded): one for payloads without header, or several by
    their id in the registry.  ``message`` is the type of all payloads: a full name, or a name that only one type has.
    """

    place: str
    message: str
    alone: bytes | None = None
    by_id: Mapping[int, bytes] | None = None

    def field_names(self) -> frozenset[str]:
        """The names of all fields of the message type, in all schemas that have it."""
        found: set[str] = set()
        for data in [self.alone] if self.by_id is None else self.by_id.values():
            with suppress(UnusableSchema):
                found.update(message_type(data or b"", self.message).new.DESCRIPTOR.fields_by_name)
        return frozenset(found)


@dataclass(frozen=True)
class MessageType:
    """A message type of a descriptor set.

    ``new`` is its class.  ``path`` is its index in the last file of the set, then the index in the type before it for
    nested types, as in the registry's header; None if it is in another file.  ``paths`` are those of all types there.
    """

    new: Any
    pool: Any
    path: tuple[int, ...] | None
    paths: Mapping[tuple[int, ...], str]


def read_file(path: str, message: str) -> ProtobufSchemas:
    """Raises `UnusableSchema`, or ImportError without the package protobuf."""
    data = read_schema(path)
    try:
        message_type(data, message)
    except UnusableSchema as error:
        raise UnusableSchema(f"{path!r}: {error}") from None
    return ProtobufSchemas(path, message, data)


def read_directory(path: str, message: str) -> ProtobufSchemas:
    """The schemas of a registry, from files named ``<id>.desc``.  Raises `UnusableSchema`, or ImportError."""
    found = {}
    for number, name in files_by_id(path, SUFFIX):
        found[number] = read_schema(name)
        try:
            message_types(found[number])
        except UnusableSchema as error:
            raise UnusableSchema(f"{name!r}: {error}") from None
    return ProtobufSchemas(path, message, by_id=found)


def message_type(data: bytes, name: str) -> MessageType:
    """The type ``name`` of an encoded descriptor set.  Raises `UnusableSchema`."""
    from google.protobuf.message_factory import GetMessageClass  # type: ignore[import-untyped]

    pool, files = message_types(data)
    last = next(reversed(files))
    known = {full: file for file, types in files.items() for full in types}
    matching = [name] if name in known else [full for full in known if full.rpartition(".")[2] == name]
    if len(matching) != 1:
        own = sorted(full for full in known if not full.startswith("google.protobuf."))
        listed = ", ".join(own[:10]) + (", ..." if len(own) > 10 else "")
        count = "more than one" if matching else "no"
        raise UnusableSchema(f"there is {count} message type {name!r}; there are {listed}")
    paths = {path: full for full, path in files[last].items()}
    found = GetMessageClass(pool.FindMessageTypeByName(matching[0]))
    return MessageType(found, pool, files[last].get(matching[0]), paths)


def message_types(data: bytes) -> tuple[Any, dict[str, dict[str, tuple[int, ...]]]]:
    """The descriptor pool of an encoded descriptor set, and the path of each message type, by file and full name.

    Raises `UnusableSchema`.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet  # type: ignore[import-untyped]
    from google.protobuf.descriptor_pool import DescriptorPool  # type: ignore[import-untyped]
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        parsed = FileDescriptorSet.FromString(data)
    except DecodeError:
        parsed = None
    if parsed is None or not any(file.message_type for file in parsed.file):
        raise UnusableSchema("not a descriptor file with messages, as protoc --descriptor_set_out --include_imports writes it")
    names = {file.name for file in parsed.file}
    pool = DescriptorPool()
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for file in parsed.file:
        for needed in file.dependency:
            if needed not in names:
                raise UnusableSchema(f"{needed!r} is missing, which {file.name!r} imports: run protoc with --include_imports")
        try:
            pool.AddSerializedFile(file.SerializeToString())
        except TypeError as error:
            raise UnusableSchema(f"not a valid descriptor file: {' '.join(str(error).split())[:200]}") from None
        files[file.name] = {}
        for number, message in enumerate(file.message_type):
            _add(files[file.name], file.package, message, (number,))
    return pool, files


def _add(found: dict[str, tuple[int, ...]], scope: str, message: Any, path: tuple[int, ...]) -> None:
    name = f"{scope}.{message.name}" if scope else message.name
    found[name] = path
    for number, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            _add(found, name, nested, (*path, number))
