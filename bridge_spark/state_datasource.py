"""The Spark data sources `mqtt.retained` and `mqtt.sessions`: the state of a running broker as tables.

They read the broker's HTTP API when a task runs, so each action sees the state of its own time.  A read has one task.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from bridge_spark.sink.errors import SinkError
from bridge_spark.source.known_columns import check_column
from bridge_spark.source.spark_workarounds import FailedStreamReader, is_writing
from bridge_spark.source.state_options import (
    RETAINED_SELECTION,
    SESSIONS_SELECTION,
    StateOptions,
    parse_state_options,
)
from bridge_spark.source.state_pages import API, StatePages, check_access
from bridge_spark.source.storage import StreamError
from bridge_spark.source.table_options import GivenOptions

_PAIRS = ArrayType(StructType([StructField("key", StringType()), StructField("value", StringType())]))


@dataclass(frozen=True)
class StateFormat:
    """One of the two formats: its options beside the common ones, the path of its list, its columns and rows."""

    name: str
    options: tuple[str, ...]
    path: str
    columns: Callable[[StateOptions], Sequence[tuple[str, DataType]]]
    row: Callable[[dict[str, Any]], dict[str, Any]]


class StateReader(DataSourceReader):
    """Reads a list of the HTTP API, page by page: retained messages by topic, sessions by client id."""

    def __init__(
        self,
        options: StateOptions,
        path: str,
        row: Callable[[dict[str, Any]], dict[str, Any]],
        schema: pa.Schema,
    ) -> None:
        self._options = options
        self._path = path
        self._row = row
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        client = self._options.client(patient=True)
        try:
            pages = StatePages(client, self._path, self._options.selection)
            yield from pages.batches(self._batch, self._schema)
        finally:
            client.close()

    def _batch(self, items: list[dict[str, Any]]) -> pa.RecordBatch:
        rows = [*map(self._row, items)]
        columns = [pa.array([row[field.name] for row in rows], field.type) for field in self._schema]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _retained_columns(options: StateOptions) -> list[tuple[str, DataType]]:
    found: list[tuple[str, DataType]] = [
        ("topic", StringType()),
        ("payload", BinaryType()),
        ("qos", ByteType()),
        ("timestamp", TimestampType()),
        ("expires_at", TimestampType()),
        ("client_id", StringType()),
        ("payload_format_indicator", ByteType()),
        ("content_type", StringType()),
        ("response_topic", StringType()),
        ("correlation_data", BinaryType()),
        ("user_properties", MapType(StringType(), StringType())),
    ]
    return [*found, ("user_property_list", _PAIRS)] if options.include_user_properties else found


def _retained_row(message: dict[str, Any]) -> dict[str, Any]:
    correlation, pairs = message["correlation_data_base64"], message["user_properties"]
    return {
        **message,
        "payload": base64.b64decode(message["payload_base64"]),
        "timestamp": message["timestamp_us"],
        "expires_at": message["expires_at_us"],
        "correlation_data": None if correlation is None else base64.b64decode(correlation),
        "user_properties": [*dict(pairs).items()],
        "user_property_list": [{"key": key, "value": value} for key, value in pairs],
    }


def _session_columns(_: StateOptions) -> list[tuple[str, DataType]]:
    return [
        ("client_id", StringType()),
        ("username", StringType()),
        ("protocol", StringType()),
        ("persistent", BooleanType()),
        ("connected", BooleanType()),
        ("address", StringType()),
        ("listener", StringType()),
        ("connected_at", TimestampType()),
        ("disconnected_at", TimestampType()),
        ("expiry_interval", LongType()),
        ("subscriptions", LongType()),
        ("queued_messages", LongType()),
        ("queued_bytes", LongType()),
        ("in_flight", LongType()),
    ]


def _session_row(session: dict[str, Any]) -> dict[str, Any]:
    return {
        **session,
        "connected_at": _microseconds(session["connected_at"]),
        "disconnected_at": _microseconds(session["disconnected_at"]),
    }


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1_000_000)


_RETAINED = StateFormat(
    "mqtt.retained", (*RETAINED_SELECTION, "includeUserProperties"), f"{API}/retained", _retained_columns, _retained_row
)
_SESSIONS = StateFormat("mqtt.sessions", SESSIONS_SELECTION, f"{API}/clients", _session_columns, _session_row)


class StateDataSource(DataSource):
    """The data source of a format with the options of one read.  Subclasses name the format, as Spark makes a source by
    its class."""

    format: ClassVar[StateFormat]

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._given = GivenOptions(options)
        self._parsed: StateOptions | None = None
        if not is_writing() and self._given.has("url"):
            self._parsed = self._check(self._given.of_query())

    @classmethod
    def name(cls) -> str:
        return cls.format.name

    def schema(self) -> StructType | str:
        """The schema that the user gave, or all columns."""
        options = self._options_for(None)
        columns = self.format.columns(options)
        return self._given.keep_in(options.schema or StructType([StructField(*column) for column in columns]))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._options_for(schema)
        known = dict(self.format.columns(options))
        for field in schema.fields:
            check_column(field, known, known)
        return StateReader(options, self.format.path, self.format.row, to_arrow_schema(schema, timezone="UTC"))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A reader whose first call raises: these sources are for batch reads only."""
        return FailedStreamReader(
            StreamError(f"mqtt source: {self.format.name} is for batch reads: read a stream of the broker with format('mqtt')")
        )

    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:
        raise SinkError(f"{self.format.name} is for reading: write with format('mqtt')")

    def streamWriter(self, schema: StructType, overwrite: bool) -> NoReturn:
        self.writer(schema, overwrite)

    def _options_for(self, schema: StructType | None) -> StateOptions:
        if self._parsed is None:
            self._parsed = self._check(
                self._given.for_schema(
                    schema,
                    "url",
                    "give the broker's HTTP address; for a table, CREATE TABLE must have no list of columns, as "
                    "Spark drops its options then",
                )
            )
        return self._parsed

    def _check(self, given: Mapping[str, str]) -> StateOptions:
        parsed = parse_state_options(given, self.format.name, self.format.options)
        client = parsed.client(patient=False)
        try:
            check_access(client)
        finally:
            client.close()
        return parsed


class RetainedDataSource(StateDataSource):
    """`spark.read.format("mqtt.retained")`: the retained message of each topic, in one row at most."""

    format = _RETAINED


class SessionsDataSource(StateDataSource):
    """`spark.read.format("mqtt.sessions")`: the sessions of clients, connected or not."""

    format = _SESSIONS
