"""Streams over HTTP: listed, created, altered and deleted. The files of a stream are below /streams (`streams`)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.control.stream_changes import StreamChanges, StreamRefused
from mqttbroker.admin.http.access import Right
from mqttbroker.admin.http.operations import Call, route
from mqttbroker.admin.http.parameters import Field, Filter, Word
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import Answer, Route
from mqttbroker.admin.http.schemas import BOOLEAN, INTEGER, NUMBER, TEXT, Schema, array, described, nullable, record
from mqttbroker.admin.http.streams import StreamAccess
from mqttbroker.config.in_force import shown_value
from mqttbroker.config.setting_kinds import (
    Automatic,
    Boolean,
    Duration,
    Filters,
    Integer,
    Kind,
    OrNone,
    PartitionKey,
    Size,
)
from mqttbroker.config.settings import Stream
from mqttbroker.config.stream_definition import FIXED, settable

MAX_FILTERS = 1000  # of one request

PARTITION = record("Partition", partition=INTEGER, log_start_offset=INTEGER, high_watermark=INTEGER, segments=INTEGER, bytes=INTEGER)
_KINDS: dict[type[Any], Schema] = {Integer: INTEGER, Boolean: BOOLEAN, Duration: NUMBER, Size: INTEGER}


class SettingText(Word):
    """A duration, a size or a word, as the configuration file has it; the kind of the setting decides."""

    def __init__(self, kind: Kind[Any]) -> None:
        self._kind = kind
        super().__init__(1, 300, _pattern(kind))

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("must be a string")
        self._kind.read(value)
        return value


SEAL: Schema = {"anyOf": [BOOLEAN, {"type": "string", "enum": ["auto"]}]}


class SealSetting(Kind[object]):
    """``true``, ``false`` or "auto"."""

    def read(self, value: object) -> object:
        Automatic().read(value)
        return value

    @property
    def schema(self) -> Schema:
        return {**SEAL, "description": "true needs pyarrow"}


class FilterList(Kind[list[str]]):
    """The filters of a stream."""

    def read(self, value: object) -> list[str]:
        if isinstance(value, list) and len(value) > MAX_FILTERS:
            raise ValueError(f"must be at most {MAX_FILTERS} filters")
        return list(Filters().read(value))

    @property
    def schema(self) -> Schema:
        return {"type": "array", "items": Filter().schema, "minItems": 1, "maxItems": MAX_FILTERS}


def _pattern(kind: Kind[Any]) -> str:
    """A pattern of values that are certainly in range; more are accepted."""
    if isinstance(kind, PartitionKey):
        return "^(topic|client|user-property:[A-Za-z0-9_-]{1,100})$"
    inner = kind.kind if isinstance(kind, OrNone) else kind
    text = "[1-9][0-9]{0,2}d" if isinstance(inner, Duration) else "[1-9][0-9]{0,2}MiB"
    return f"^({text}|{kind.word})$" if isinstance(kind, OrNone) else f"^{text}$"


def _kind_of(name: str, kind: Kind[Any]) -> Kind[Any]:
    if name == "filters":
        return FilterList()
    if isinstance(kind, Automatic):
        return SealSetting()
    return kind if isinstance(kind, (Integer, Boolean)) else SettingText(kind)


def _shown(kind: Kind[Any]) -> Schema:
    """The schema of a setting in an answer: durations are seconds, sizes bytes, null stands for unlimited or none."""
    if isinstance(kind, OrNone):
        return nullable(_shown(kind.kind))
    if isinstance(kind, Filters):
        return array(TEXT)
    return next((schema for each, schema in _KINDS.items() if isinstance(kind, each)), TEXT)


def _settings_schema() -> Schema:
    found: dict[str, Schema] = {}
    for field in dataclasses.fields(Stream):
        if "kind" in field.metadata:
            kind = field.metadata["kind"]
            shown = SEAL if isinstance(kind, Automatic) else nullable(TEXT) if field.name == "archive" else _shown(kind)
            found[field.name] = shown
    return record("StreamSettings", **found)


STREAM = record(
    "Stream",
    name=TEXT,
    source=described(TEXT, "file: of the configuration file; created: at run time"),
    filters=array(TEXT),
    past_filters=described(array(TEXT), "filters that it had before; it may have their messages"),
    settings=described(_settings_schema(), "seconds and bytes; null = unlimited or none"),
    partitions=array(PARTITION),
)
NAME = Field("name", Word(1), "the name of a stream")
NEW_NAME = Field("name", Word(1, 64, "^[A-Za-z0-9][A-Za-z0-9_-]*$", "1-64 of A-Z a-z 0-9 _ -"), "its name")
_ABOUT = {
    "filters": "topic filters whose messages it stores", "partitions": "how many; never changes",
    "key": "topic, client or user-property:NAME; never changes", "retention_age": "such as 7d, or unlimited",
    "retention_bytes": "such as 10GiB, or unlimited", "segment_bytes": "such as 64MiB", "segment_age": "such as 1h",
    "seal": "rewrite closed segments as Parquet", "dedup": "recognise repeats of producers",
    "dedup_producers": "the most producers", "compact": "keep the last record of each key in sealed segments",
    "compact_tombstones": "how long tombstones stay, such as 24h", "compact_dirty_percent": "when to compact",
    "compact_keys": "the most keys in memory",
}  # fmt: skip


def _fields(optional: bool) -> list[Field]:
    """The settings as keys of a body; those that never change only if none is ``optional``."""
    known = {name: field.metadata["kind"] for name, field in settable().items() if not (optional and name in FIXED)}
    return [
        Field(name, _kind_of(name, kind), _ABOUT.get(name, "as in the configuration file"))
        if name == "filters" and not optional
        else Field(name, _kind_of(name, kind), _ABOUT.get(name, "as in the configuration file"), None)
        for name, kind in known.items()
    ]


class StreamAdminRoutes:
    """The operations. Their methods run on the HTTP server's thread, the changes on the event loop."""

    def __init__(self, logs: StreamLogs, changes: StreamChanges, access: StreamAccess, runner: ControlRunner) -> None:
        self._logs = logs
        self._changes = changes
        self._access = access
        self._runner = runner

    def routes(self) -> list[Route]:
        """All operations."""
        errors = (404, 409)
        return [
            route("GET", "/streams", self._list_streams, Right.NONE, "Streams and their partitions",
                  record(items=array(STREAM)), tag="streams"),
            route("POST", "/streams", self._create_stream, Right.ADMINISTER, "Create a stream", STREAM,
                  body=[NEW_NAME, *_fields(False)], action="create_stream", tag="streams", errors=(409,)),
            route("GET", "/streams/{name}", self._show_stream, Right.NONE, "One stream", STREAM, [NAME], tag="streams",
                  errors=(404,)),
            route("PATCH", "/streams/{name}", self._alter_stream, Right.ADMINISTER,
                  "Change settings of a stream that was created at run time, for what comes after", STREAM, [NAME],
                  body=_fields(True), action="alter_stream", tag="streams", errors=errors),
            route("DELETE", "/streams/{name}", self._delete_stream, Right.ADMINISTER,
                  "Delete a stream that was created at run time, with its records", None,
                  [NAME, Field("confirm", Word(1), "the name once more")], done=Answer("done"), action="delete_stream",
                  tag="streams", errors=errors),
        ]  # fmt: skip

    async def _list_streams(self, call: Call) -> Any:
        seen = [name for name in self._logs.streams() if self._access.sees(call.principal, name)]
        return {"items": [found for name in seen if (found := self._stream(name)) is not None]}

    async def _show_stream(self, call: Call) -> Any:
        name = self._access.check_name(call["name"], call.principal, self._access.sees)
        return self._existing(name)

    async def _create_stream(self, call: Call) -> Any:
        name: str = call["name"]
        await self._change(lambda: self._changes.create(name, _given(call, "name")))
        return self._existing(name)

    async def _alter_stream(self, call: Call) -> Any:
        name: str = call["name"]
        changes = _given(call, "name")
        await self._change(lambda: self._changes.alter(name, changes))
        return self._existing(name)

    async def _delete_stream(self, call: Call) -> None:
        name: str = call["name"]
        if call["confirm"] != name:
            raise RequestError(409, "confirm: must be the name of the stream once more", "confirm")
        await self._change(lambda: self._changes.delete(name))

    async def _change(self, begin: Callable[[], Any]) -> None:
        try:
            await asyncio.wrap_future(self._runner.start(begin))
        except StreamRefused as refusal:
            raise RequestError(404 if refusal.missing else 409, str(refusal), refusal.key) from None

    def _existing(self, name: str) -> dict[str, Any]:
        found = self._stream(name)
        if found is None:
            raise RequestError(404, f"no stream {name!r}", "name")
        return found

    def _stream(self, name: str) -> dict[str, Any] | None:
        """A stream as `STREAM` describes it; None if it was deleted meanwhile."""
        stream = self._changes.streams.get(name)
        try:
            manifest = self._logs.manifest(name)
        except KeyError:
            return None
        if stream is None:
            return None
        settings = {
            field.name: shown_value(field.name, getattr(stream, field.name))
            for field in dataclasses.fields(stream)
            if "kind" in field.metadata
        }
        return {
            "name": name,
            "source": "created" if self._changes.is_created(name) else "file",
            "filters": list(stream.filters),
            "past_filters": [each for each in self._logs.stored_filters(name) if each not in stream.filters],
            "settings": settings,
            "partitions": [
                {
                    "partition": part["partition"],
                    "log_start_offset": part["log_start_offset"],
                    "high_watermark": part["high_watermark"],
                    "segments": len(part["segments"]),
                    "bytes": sum(segment["bytes"] for segment in part["segments"]),
                }
                for part in manifest["partitions"]
            ],
        }


def _given(call: Call, *but: str) -> dict[str, object]:
    """The settings of a request, without those that it does not have."""
    return {name: value for name, value in call.values.items() if value is not None and name not in but}
