"""The messages of one table as Spark's rows: read, parsed, told apart.

The rule kept here: the same messages give the same rows, in a stream and when
they are read again; a dead letter is never taken for a duplicate or for late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Optional

from bridge_spark.tables.added_fields import new_fields, seen_fields, with_columns
from bridge_spark.tables.checkpoint import Checkpoint
from bridge_spark.tables.ingest_session import IngestError
from bridge_spark.tables.table_columns import TableColumns
from bridge_spark.tables.table_config import TableConfig

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation, SparkSession
    from pyspark.sql.types import StructType

EVENT_TIME = "_event_time"
_PLACE = "_place"
_KEY = "_key"
_STREAM_ONLY = ("startingOffsets", "maxOffsetsPerTrigger", "consumer")


@dataclass(frozen=True)
class Counted:
    """Rows that are counted when they are written."""

    rows: DataFrame
    _observation: Observation

    def result(self) -> dict[str, Any]:
        """Rows of the table, dead letters, the newest receipt in microseconds, and what `seen_fields` saw."""
        found = self._observation.get
        return {"rows": int(found["all"]) - int(found["bad"]), "bad": int(found["bad"]),
                **({} if found["newest"] is None else {"newest": int(found["newest"])}),
                **({"fields": list(found["fields"])} if "fields" in found else {})}


class MessageRows:
    """Raises `IngestError` for settings that name no column of the table."""

    def __init__(self, table: TableConfig, spark: SparkSession, where: str) -> None:
        from bridge_spark.tables.payloads import ITEM, SchemaError, table_columns, table_schema

        self._table = table
        self._payload = table.payload
        self._spark = spark
        self._where = where
        try:
            self._schema: StructType = table_schema(table.payload)
            self._columns = table_columns(table.payload, self._schema)
        except SchemaError as error:
            raise IngestError(f"{where}.schema: {error}") from None
        sink = table.sink
        self.place = ["partition", "offset", *([ITEM] if table.payload.several else [])]
        """The columns that tell one row from all others."""
        self._keys = [self.column(key, "deduplicate_by") for key in sink.deduplicate_by]
        self._event_time = None if sink.event_time is None else self.column(sink.event_time, "event_time")

    def stream(self, checkpoint: Checkpoint, part: str = "") -> DataFrame:
        """The messages as they come; ``part`` is added to the name that the broker knows this reader by."""
        needs_all = self._payload.format == "raw" and self._table.sink.watermark is not None
        options = {**self._options(part), "startingOffsets": self.beginning(checkpoint)}
        return self._spark.readStream.format("mqtt").schema(self._source_schema(needs_all)).options(**options).load()

    def beginning(self, checkpoint: Checkpoint) -> str:
        """Where the query of the checkpoint begins, as an option of the source."""
        return checkpoint.beginning(self._options())

    def batch(self, begin: dict[str, str], end: dict[str, str]) -> DataFrame:
        """The messages of a range, whose ends are options of the source."""
        own = {key: value for key, value in self._options().items() if key not in _STREAM_ONLY}
        return self._spark.read.format("mqtt").schema(self._source_schema(True)).options(**own, **begin, **end).load()

    def parsed(self, messages: DataFrame) -> DataFrame:
        """Parsed payloads, or the reason against them."""
        from bridge_spark.tables.payloads import parsed

        return parsed(messages, self._payload, self._schema)

    def timed(self, found: DataFrame) -> DataFrame:
        """With `EVENT_TIME`, NULL for dead letters, the receipt where the
        message has none.  What claims to come from further ahead than the
        watermark counts as received, or one wrong clock would make all others late."""
        from pyspark.sql import functions as F

        from bridge_spark.tables.payloads import REASON

        if self._event_time is not None:
            kind = found.select(self._event_time).schema[0].dataType.simpleString()
            if kind != "timestamp":
                raise IngestError(f"{self._where}.event_time: {self._table.sink.event_time!r} is {kind}, not timestamp")
        received = F.col("timestamp")
        ahead = received + F.expr(f"INTERVAL {self._table.sink.watermark} SECONDS")
        time = received if self._event_time is None else F.when(self._event_time <= ahead, self._event_time) \
            .otherwise(received)
        return found.withColumn(EVENT_TIME, F.when(F.col(REASON).isNull(), time))

    def deduplicated(self, found: DataFrame) -> DataFrame:
        """The first of each key within the watermark; a key with a NULL in it is nobody's duplicate."""
        keys = self._duplicate_keys()
        return self.timed(found).withColumns(keys).withWatermark(EVENT_TIME, f"{self._table.sink.watermark} seconds") \
            .dropDuplicatesWithinWatermark([*keys])

    def first_of_each(self, found: DataFrame) -> DataFrame:
        """The first received of each key, of a range that is over."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        keys = self._duplicate_keys()
        order = Window.partitionBy(*keys.values()).orderBy("timestamp", *self.place)
        return found.withColumn(_PLACE, F.row_number().over(order)).where(F.col(_PLACE) == 1)

    def _duplicate_keys(self) -> dict[str, Column]:
        from pyspark.sql import functions as F

        from bridge_spark.tables.payloads import REASON

        unique = F.col(REASON).isNotNull()
        for key in self._keys:
            unique = unique | key.isNull()
        place = F.when(unique, F.concat_ws(":", *self.place))
        return {**{f"{_KEY}{number}": key for number, key in enumerate(self._keys)}, _PLACE: place}

    @property
    def adds(self) -> bool:
        """Whether a field that the schema does not have becomes a column."""
        return self._payload.extra_fields == "add"

    def good(self, found: DataFrame, added: Mapping[str, str]) -> DataFrame:
        """The table's rows, with columns for the fields that were ``added``."""
        from bridge_spark.tables.payloads import EXTRA, good_rows

        rows = good_rows(found, self._payload, self._schema)
        if not self.adds:
            return rows
        own = {name.lower() for name, _ in self._columns}
        return with_columns(rows, EXTRA, {name: kind for name, kind in added.items() if name.lower() not in own})

    def new_fields(self, counts: Mapping[str, Any], table: TableColumns) -> dict[str, str]:
        """Columns that a batch so counted adds to those of the table."""
        if not self.adds:
            return {}
        return new_fields(counts["fields"], [name for name, _ in self._columns], table.added, table.types)

    def dead_letters(self, found: DataFrame) -> DataFrame:
        """What did not parse, with the reason."""
        from bridge_spark.tables.payloads import dead_letters

        return dead_letters(found)

    def late(self, messages: DataFrame, watermark: int) -> DataFrame:
        """Those of ``messages`` that parse and are not later than the watermark
        (milliseconds), with that as the reason against them."""
        from pyspark.sql import functions as F

        from bridge_spark.tables.payloads import REASON

        found = self.timed(self.parsed(messages))
        late = found.where(F.col(REASON).isNull() & (F.col(EVENT_TIME) <= F.timestamp_millis(F.lit(watermark))))
        until = datetime.fromtimestamp(watermark / 1000, timezone.utc).isoformat(timespec="milliseconds")
        return late.withColumn(REASON, F.lit(f"too late: the watermark was {until}"))

    def observed(self, found: DataFrame) -> Counted:
        """``found``, counted when it is written."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        from bridge_spark.tables.payloads import REASON

        counts = Observation()
        rows = found.observe(
            counts, F.count(F.lit(1)).alias("all"), F.count(F.col(REASON)).alias("bad"),
            F.unix_micros(F.max("timestamp")).alias("newest"),
            *([seen_fields(F.col("extra")).alias("fields")] if self.adds else []))
        return Counted(rows, counts)

    def column(self, name: str, key: str) -> Column:
        """The table's column ``name`` as an expression on parsed messages;
        raises `IngestError` naming the setting ``key``."""
        known = {column: expression for column, expression in self._columns}
        if name not in known:
            raise IngestError(f"{self._where}.{key}: the table has no column {name!r}; it has {', '.join(known)}")
        return known[name]

    def _options(self, part: str = "") -> dict[str, str]:
        consumer = self._table.source["consumer"] + part
        return {**self._table.source, **self._payload.source_options, "consumer": consumer}

    def _source_schema(self, payload: bool) -> StructType:
        from bridge_spark.tables.payloads import source_schema

        return source_schema(self._payload, self._schema, payload)
