"""The messages of one table as Spark rows: reading, parsing, event time, duplicates.

The same messages give the same rows, in a stream and when they are read again.  Dead letters never count as duplicates
or as late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import Column, DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from bridge_spark.source.payload_options import payload_options
from bridge_spark.source.payload_reader import PayloadReader, PayloadSchemaError
from bridge_spark.source.spark_types import UnusableType, arrow_schema
from bridge_spark.tables.checkpoint import Checkpoint
from bridge_spark.tables.ingest_config import TableConfig
from bridge_spark.tables.ingest_session import IngestError
from bridge_spark.tables.output.column_limits import refusal
from bridge_spark.tables.recorded_columns import NO_COLUMNS, AddedColumns, RecordedColumns
from bridge_spark.tables.rows import payloads
from bridge_spark.tables.rows.added_fields import new_fields, seen_fields, with_columns
from bridge_spark.tables.rows.payloads import EXTRA, ITEM, REASON, SchemaError

EVENT_TIME = "_event_time"
_PLACE = "_place"
_KEY = "_key"
_STREAM_ONLY = ("startingOffsets", "maxOffsetsPerTrigger", "consumer")


@dataclass(frozen=True)
class CountedRows:
    """Rows that are counted while they are written."""

    rows: DataFrame
    _observation: Observation

    def counts(self) -> dict[str, Any]:
        """After writing: "rows", "bad", "newest" (latest receipt in microseconds) and "fields" (of `seen_fields`)."""
        found = self._observation.get
        return {
            "rows": int(found["all"]) - int(found["bad"]),
            "bad": int(found["bad"]),
            **({} if found["newest"] is None else {"newest": int(found["newest"])}),
            **({"fields": list(found["fields"])} if "fields" in found else {}),
        }


class MessageRows:
    """The messages of ``table``.  Raises `IngestError` for settings that name an unknown column.

    ``key_columns`` identify a row.
    """

    def __init__(self, table: TableConfig, spark: SparkSession, where: str) -> None:
        self._table = table
        self._payload = table.payload
        self._spark = spark
        self._where = where
        try:
            self._schema: StructType = payloads.payload_schema(table.payload)
            self._columns = payloads.table_columns(table.payload, self._schema)
        except SchemaError as error:
            raise IngestError(f"{where}.schema: {error}") from None
        self._check_types()
        sink = table.sink
        self.key_columns = ["partition", "offset", *([ITEM] if table.payload.several else [])]
        self._keys = [self.column(key, "deduplicate_by") for key in sink.deduplicate_by]
        self._event_time = None if sink.event_time is None else self.column(sink.event_time, "event_time")

    def stream(self, checkpoint: Checkpoint, suffix: str = "") -> DataFrame:
        """The stream of messages; ``suffix`` is added to the consumer name."""
        needs_all = self._payload.format == "raw" and self._table.sink.watermark is not None
        options = {**self._options(suffix), "startingOffsets": self.starting_offsets(checkpoint)}
        return self._spark.readStream.format("mqtt").schema(self._source_schema(needs_all)).options(**options).load()

    def starting_offsets(self, checkpoint: Checkpoint) -> str:
        """The `startingOffsets` of the checkpoint's query."""
        return checkpoint.starting_offsets(self._options())

    def batch(self, begin: dict[str, str], end: dict[str, str]) -> DataFrame:
        """The messages of a range; ``begin`` and ``end`` are options of the source."""
        options = {key: value for key, value in self._options().items() if key not in _STREAM_ONLY}
        return self._spark.read.format("mqtt").schema(self._source_schema(True)).options(**options, **begin, **end).load()

    def parse(self, messages: DataFrame) -> DataFrame:
        """As `payloads.parse`."""
        return payloads.parse(messages, self._payload)

    def with_event_time(self, found: DataFrame) -> DataFrame:
        """Add the column `EVENT_TIME`: NULL for dead letters, the time of receipt for messages without event time.

        An event time that is later than the receipt by more than the watermark counts as the receipt too; otherwise one
        wrong clock would make all other messages late.
        """
        if self._event_time is not None:
            kind = found.select(self._event_time).schema[0].dataType.simpleString()
            if kind != "timestamp":
                raise IngestError(f"{self._where}.event_time: {self._table.sink.event_time!r} is {kind}, not timestamp")
        received = F.col("timestamp")
        ahead = received + F.expr(f"INTERVAL {self._table.sink.watermark} SECONDS")
        time = received if self._event_time is None else F.when(self._event_time <= ahead, self._event_time).otherwise(received)
        return found.withColumn(EVENT_TIME, F.when(F.col(REASON).isNull(), time))

    def deduplicated(self, found: DataFrame) -> DataFrame:
        """The first message of each key within the watermark.  A key with a NULL has no duplicates."""
        keys = self._duplicate_keys()
        timed = self.with_event_time(found).withColumns(keys)
        return timed.withWatermark(EVENT_TIME, f"{self._table.sink.watermark} seconds").dropDuplicatesWithinWatermark([*keys])

    def first_of_each(self, found: DataFrame) -> DataFrame:
        """The message of each key that was received first, in a batch."""
        keys = self._duplicate_keys()
        order = Window.partitionBy(*keys.values()).orderBy("timestamp", *self.key_columns)
        return found.withColumn(_PLACE, F.row_number().over(order)).where(F.col(_PLACE) == 1)

    def _duplicate_keys(self) -> dict[str, Column]:
        unique = F.col(REASON).isNotNull()
        for key in self._keys:
            unique = unique | key.isNull()
        place = F.when(unique, F.concat_ws(":", *self.key_columns))
        return {**{f"{_KEY}{number}": key for number, key in enumerate(self._keys)}, _PLACE: place}

    @property
    def adds_columns(self) -> bool:
        """Whether fields that are not in the schema become columns."""
        return self._payload.extra_fields == "add"

    def table_rows(self, found: DataFrame, added: AddedColumns) -> DataFrame:
        """The table's rows, including the columns ``added`` for fields that are not in the schema."""
        rows = payloads.table_rows(found, self._payload, self._schema)
        if not self.adds_columns:
            return rows
        in_schema = {name.lower() for name in self._used_names()}
        return with_columns(
            rows,
            EXTRA,
            AddedColumns(
                {name: kind for name, kind in added.types.items() if name.lower() not in in_schema},
                {field: name for field, name in added.spellings.items() if name.lower() not in in_schema},
            ),
        )

    def new_columns(self, counts: Mapping[str, Any], recorded: RecordedColumns) -> AddedColumns:
        """The columns that a batch with these ``counts`` adds to the table."""
        if not self.adds_columns:
            return NO_COLUMNS
        return new_fields(counts["fields"], self._used_names(), recorded.added, recorded.types)

    def _used_names(self) -> list[str]:
        """The names that no added column can have: of the table's columns, and of the payload's fields, under which
        `EXTRA` has what their structs do not."""
        return [*(name for name, _ in self._columns), *self._schema.fieldNames()]

    def late(self, messages: DataFrame, watermark: int) -> DataFrame:
        """The rows of ``messages`` that parse and whose event time is not after the watermark (milliseconds).

        Their dead letters have this reason.
        """
        found = self.with_event_time(self.parse(messages))
        late = found.where(F.col(REASON).isNull() & (F.col(EVENT_TIME) <= F.timestamp_millis(F.lit(watermark))))
        until = datetime.fromtimestamp(watermark / 1000, UTC).isoformat(timespec="milliseconds")
        return late.withColumn(REASON, F.lit(f"too late: the watermark was {until}"))

    def counted(self, found: DataFrame) -> CountedRows:
        """``found``, counted while it is written."""
        counts = Observation()
        rows = found.observe(
            counts,
            F.count(F.lit(1)).alias("all"),
            F.count(F.col(REASON)).alias("bad"),
            F.unix_micros(F.max("timestamp")).alias("newest"),
            *([seen_fields(F.col("extra")).alias("fields")] if self.adds_columns else []),
        )
        return CountedRows(rows, counts)

    def column(self, name: str, key: str) -> Column:
        """The table's column ``name`` as an expression on parsed messages.

        Raises `IngestError` that names the setting ``key``.
        """
        known = {column: expression for column, expression in self._columns}
        if name not in known:
            raise IngestError(f"{self._where}.{key}: the table has no column {name!r}; it has {', '.join(known)}")
        return known[name]

    def _check_types(self) -> None:
        """Raise `IngestError` for a field that the payload's format or the table's cannot hold."""
        source = self._source_schema(False)
        try:
            if self._payload.format != "raw":
                parsed = StructType([field for field in source.fields if field.name not in self._payload.levels])
                PayloadReader(arrow_schema(parsed), payload_options(self._payload.source_options), None)
        except (PayloadSchemaError, UnusableType) as error:
            raise IngestError(f"{self._where}.schema: {error}") from None
        rows = self.table_rows(self.parse(self._spark.createDataFrame([], source)), NO_COLUMNS)
        reason = refusal(self._table.sink.table_format, rows.schema)
        if reason is not None:
            raise IngestError(f"{self._where}.schema: {reason}: leave it out in 'fields', or give it another type or name")

    def _options(self, suffix: str = "") -> dict[str, str]:
        consumer = self._table.source["consumer"] + suffix
        return {**self._table.source, **self._payload.source_options, "consumer": consumer}

    def _source_schema(self, payload: bool) -> StructType:
        return payloads.source_schema(self._payload, self._schema, payload)
