"""The Spark data sources `mqtt.retained` and `mqtt.sessions`: the state of a running broker as tables.

They read the broker's HTTP API when a task runs, so each action sees the state of its own time.  A read has one task.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NoReturn, Optional, Union

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
from bridge_spark.source.option_values import OptionError
from bridge_spark.source.spark_workarounds import FailedStreamReader, is_writing
from bridge_spark.source.state_options import (
    RETAINED_SELECTION,
    SESSIONS_SELECTION,
    StateOptions,
    parse_state_options,
)
from bridge_spark.source.state_pages import API, StatePages, check_access
from bridge_spark.source.storage import StreamError
from bridge_spark.source.table_options import is_table, options_of, table_options, with_options

_PAIRS = ArrayType(StructType([StructField("key", StringType()), StructField("value", StringType())]))


class _StateDataSource(DataSource):
    """What both sources share: options, catalog tables and refusals."""

    format: ClassVar[str]
    options_of_format: ClassVar[tuple[str, ...]]

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._table: Optional[dict[str, str]] = table_options(options) if is_table(options) else None
        self._given: Mapping[str, str] = options if self._table is None else self._table
        self._parsed: Optional[StateOptions] = None
        # To read a catalog table, Spark passes at most the options of the query; the others are in the table's schema.
        if not is_writing() and "url" in {key.lower() for key in self._given}:
            self._parsed = self._check(self._given)

    @classmethod
    def name(cls) -> str:
        return cls.format

    def schema(self) -> Union[StructType, str]:
        options = self._options_for(None)
        schema = options.schema or StructType([StructField(*column) for column in self.columns(options)])
        return schema if self._table is None else with_options(schema, self._table)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return FailedStreamReader(StreamError(
            f"mqtt source: {self.format} is for batch reads: read a stream of the broker with format('mqtt')"))

    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:
        raise SinkError(f"{self.format} is for reading: write with format('mqtt')")

    def streamWriter(self, schema: StructType, overwrite: bool) -> NoReturn:
        raise SinkError(f"{self.format} is for reading: write with format('mqtt')")

    @classmethod
    def columns(cls, options: StateOptions) -> list[tuple[str, DataType]]:
        raise NotImplementedError

    def _options_for(self, schema: Optional[StructType]) -> StateOptions:
        if self._parsed is None:
            table = options_of(schema) if schema is not None else {}
            if table is None:
                raise OptionError("url", "missing: give the broker's HTTP address; for a table, CREATE TABLE must have "
                                         "no list of columns, as Spark drops its options then")
            self._parsed = self._check(table | {key.lower(): value for key, value in self._given.items()})
        return self._parsed

    def _check(self, given: Mapping[str, str]) -> StateOptions:
        parsed = parse_state_options(given, self.format, self.options_of_format)
        client = parsed.client(patient=False)
        try:
            check_access(client)
        finally:
            client.close()
        return parsed

    def _arrow_schema(self, options: StateOptions, schema: StructType) -> pa.Schema:
        """The Arrow schema of the selected columns; raises `StreamError` for others."""
        known = dict(self.columns(options))
        for field in schema.fields:
            kind = known.get(field.name)
            if kind is None:
                raise StreamError(f"mqtt source: there is no column {field.name!r}; the columns of {self.format} are "
                                  f"{', '.join(known)}")
            if field.dataType != kind:
                raise StreamError(f"mqtt source: column {field.name!r} is {kind.simpleString()}, "
                                  f"not {field.dataType.simpleString()}: convert it after reading")
        return to_arrow_schema(schema, timezone="UTC")


class RetainedDataSource(_StateDataSource):
    """`spark.read.format("mqtt.retained")`: the retained message of each topic."""

    format = "mqtt.retained"
    options_of_format = (*RETAINED_SELECTION, "includeUserProperties")

    @classmethod
    def columns(cls, options: StateOptions) -> list[tuple[str, DataType]]:
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

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._options_for(schema)
        return RetainedReader(options, self._arrow_schema(options, schema))


class SessionsDataSource(_StateDataSource):
    """`spark.read.format("mqtt.sessions")`: the sessions of clients, connected or not."""

    format = "mqtt.sessions"
    options_of_format = SESSIONS_SELECTION

    @classmethod
    def columns(cls, options: StateOptions) -> list[tuple[str, DataType]]:
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

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._options_for(schema)
        return SessionsReader(options, self._arrow_schema(options, schema))


class _StateReader(DataSourceReader):
    def __init__(self, options: StateOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def _batch(self, rows: list[dict[str, Any]]) -> pa.RecordBatch:
        columns = [pa.array([row[field.name] for row in rows], field.type) for field in self._schema]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


class RetainedReader(_StateReader):
    """Reads the retained messages; each topic is in one row at most."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        client = self._options.client(patient=True)
        try:
            pages = StatePages(client, f"{API}/retained", self._options.selection)
            yield from pages.batches(lambda items: self._batch([*map(_retained_row, items)]), self._schema)
        finally:
            client.close()


class SessionsReader(_StateReader):
    """Reads the sessions in the order of their client ids."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        client = self._options.client(patient=True)
        try:
            pages = StatePages(client, f"{API}/clients", self._options.selection)
            yield from pages.batches(lambda items: self._batch([*map(_session_row, items)]), self._schema)
        finally:
            client.close()


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


def _session_row(session: dict[str, Any]) -> dict[str, Any]:
    return {
        **session,
        "connected_at": _microseconds(session["connected_at"]),
        "disconnected_at": _microseconds(session["disconnected_at"]),
    }


def _microseconds(seconds: Optional[float]) -> Optional[int]:
    return None if seconds is None else round(seconds * 1_000_000)
