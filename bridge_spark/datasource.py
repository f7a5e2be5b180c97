"""The Spark data source `mqtt`: batch and streaming reads of a stream, and writes to any MQTT broker.

The same range of offsets always gives the same rows, and only committed ones.  The state of a streaming query is in
Spark's checkpoint alone.

No reader implements `pushFilters`: Spark 4.2 and 4.3 keep the result of a push-down per table, so a DataFrame that is
used twice would give the rows of another filter (docs/spark-issue-filter-pushdown.md).  The option `where` takes its
place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from bridge_spark.log.columns import ColumnBuilder
from bridge_spark.sink import options as sink_options
from bridge_spark.sink.errors import SinkError
from bridge_spark.sink.writer import BatchWriter, StreamWriter
from bridge_spark.source import offsets, read_range
from bridge_spark.source.errors import SourceError
from bridge_spark.source.explain import explain_plan
from bridge_spark.source.kafka_options import SERVERS
from bridge_spark.source.known_columns import check_column
from bridge_spark.source.offsets import Offsets
from bridge_spark.source.open_storage import open_storage
from bridge_spark.source.options import (
    OptionError,
    SourceOptions,
    check_for_batch,
    check_for_stream,
    parse_options,
    row_selection,
)
from bridge_spark.source.payload_reader import PAYLOAD_COLUMNS, PayloadReader, PayloadSchemaError
from bridge_spark.source.plan import MIN_TASK_BYTES, PARSED_TASK_BYTES, Planner, Slice
from bridge_spark.source.rate_limit import RateLimit
from bridge_spark.source.slice_reader import read_slices
from bridge_spark.source.spark_types import UnusableType, arrow_schema
from bridge_spark.source.spark_workarounds import (
    FailedStreamReader,
    acknowledge_at_once,
    freeze_worker,
    is_writing,
)
from bridge_spark.source.storage import Manifest, Storage, StreamError
from bridge_spark.source.table_options import GivenOptions

_COLUMNS = (
    ("topic", StringType()),
    ("payload", BinaryType()),
    ("qos", ByteType()),
    ("retain", BooleanType()),
    ("partition", IntegerType()),
    ("offset", LongType()),
    ("timestamp", TimestampType()),
    ("client_id", StringType()),
    ("content_type", StringType()),
    ("response_topic", StringType()),
    ("correlation_data", BinaryType()),
    ("user_properties", MapType(StringType(), StringType())),
    ("stream", StringType()),
)
_USER_PROPERTY_LIST = (
    "user_property_list",
    ArrayType(StructType([StructField("key", StringType()), StructField("value", StringType())])),
)
_OPTIONAL = {"content_type", "response_topic", "correlation_data"}
_IGNORED = (
    "mqtt source: option 'pushDownFilters' is ignored: Spark would give rows of another filter when a DataFrame is "
    "used twice; give the condition as option 'where'"
)

logger = logging.getLogger(__name__)


class SliceTask(InputPartition):
    """The slices that one Spark task reads."""

    def __init__(self, slices: list[Slice]) -> None:
        super().__init__(None)
        self.slices = slices


class MqttDataSource(DataSource):
    """`spark.read.format("mqtt")` and `spark.readStream.format("mqtt")`, `df.write` and `df.writeStream`.

    Bad options and unknown streams raise `OptionError` or `StreamError` at load time, and `SinkError` when a write
    starts.  A schema given by the user selects columns; others are not read.
    """

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._given = GivenOptions(options)
        self._parsed: SourceOptions | None = None
        if is_writing() or sink_options.are_for_writing(options):
            return
        if self._given.has("path", "url", "stream", SERVERS):
            self._parsed = _check(self._given.of_query())

    @classmethod
    def name(cls) -> str:
        return "mqtt"

    def schema(self) -> StructType | str:
        options = self._options_for(None)
        columns = [*_COLUMNS, _USER_PROPERTY_LIST] if options.include_user_properties else _COLUMNS
        return self._given.keep_in(options.schema or StructType([StructField(name, kind, name in _OPTIONAL) for name, kind in columns]))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._options_for(schema)
        check_for_batch(options)
        return MqttReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        try:
            return MqttStreamReader(self._options_for(schema), schema)
        except SourceError as error:
            return FailedStreamReader(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if self._given.table is not None or not self.options:
            raise SinkError("a table of the catalog is for reading: write with df.write.format('mqtt')")
        if overwrite:
            raise SinkError("mode 'overwrite': published messages cannot be replaced: use mode('append')")
        return BatchWriter(sink_options.parse_options(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return StreamWriter(sink_options.parse_options(self.options), schema)

    def _options_for(self, schema: StructType | None) -> SourceOptions:
        if self._parsed is None:
            self._parsed = _check(
                self._given.for_schema(
                    schema,
                    "path",
                    "give 'path', 'url' or 'kafka.bootstrap.servers'; for a table, CREATE TABLE must have no list of columns, as Spark "
                    "drops its options then: use the option 'schema'",
                )
            )
        return self._parsed


class MqttReader(DataSourceReader):
    """One batch read.  Its end is fixed by `partitions`, which Spark calls once per loaded DataFrame."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._payloads = _payload_reader(options, schema)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        acknowledge_at_once()

    def partitions(self) -> list[InputPartition]:
        options = self._options
        storage = open_storage(options, patient=True)
        try:
            manifest, start, end = _range(options, storage)
            return [*_tasks(options, Planner(storage), manifest, start, end)]
        finally:
            storage.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, self._payloads, partition)


class MqttStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read with rate limits (`maxOffsetsPerTrigger`, `minOffsetsPerTrigger`)."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_for_stream(options)
        self._options = options
        self._payloads = _payload_reader(options, schema)
        self._selection = row_selection(options)
        self._selection_is_checked = False
        self._rate_limit = RateLimit(options.min_offsets_per_trigger, options.max_trigger_delay_ms)
        self._storage: Storage | None = None
        self._planner: Planner | None = None
        self._manifest: Manifest | None = None
        self._target: Offsets | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        acknowledge_at_once()

    def initialOffset(self) -> dict[str, int]:
        manifest = self._fetch()
        start = read_range.starting(self._options, self._open(), manifest, offsets.latest(manifest))
        self._selection_is_checked = True
        return self._document(start, manifest)

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_offsets_per_trigger is not None:
            return ReadMaxRows(self._options.max_offsets_per_trigger)
        if self._options.min_offsets_per_trigger is not None:
            return ReadMinRows(self._options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = offsets.latest(self._fetch())

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        self._check_selection(start)
        manifest = self._fetch()
        self._check_stream(start, manifest)
        begin = offsets.from_json(start)
        if self._options.consumer is not None:
            # The batch before ``start`` is committed; Spark calls commit() only after the next batch.
            self._open().report(self._options.consumer, begin)
        end = dict(self._target) if self._target is not None else offsets.latest(manifest)
        for partition in begin:
            end.setdefault(partition, begin[partition])
        begin, end = offsets.check_kept(begin, end, manifest, self._options.fail_on_data_loss)
        max_rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        complete = self._target is not None or isinstance(limit, ReadAllAvailable)
        return self._document(self._rate_limit.batch_end(begin, end, max_rows, complete), manifest)

    def reportLatestOffset(self) -> dict[str, int] | None:
        return None if self._manifest is None else self._document(offsets.latest(self._manifest), self._manifest)

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        self._check_selection(end)
        begin, until = offsets.from_json(start), offsets.from_json(end)
        manifest = self._manifest
        if manifest is None or any(
            partition not in manifest or offset > manifest[partition].high_watermark for partition, offset in until.items()
        ):
            manifest = self._fetch()
        self._check_stream(end, manifest)
        self._open()
        assert self._planner is not None
        begin, until = offsets.check_kept(begin, until, manifest, self._options.fail_on_data_loss)
        return [*_tasks(self._options, self._planner, manifest, begin, until)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, self._payloads, partition)

    def stop(self) -> None:
        if self._storage is not None:
            self._storage.close()

    def _check_selection(self, document: dict[str, int]) -> None:
        if not self._selection_is_checked:
            offsets.check_selection(document, self._selection)
            self._selection_is_checked = True

    def _check_stream(self, document: dict[str, int], manifest: Manifest) -> None:
        offsets.check_stream(document, self._options.stream, manifest, self._options.accept_incarnation)

    def _document(self, reached: Offsets, manifest: Manifest) -> dict[str, int]:
        return offsets.to_json(reached, {**self._selection, **offsets.of_stream(self._options.stream, manifest)})

    def _open(self) -> Storage:
        if self._storage is None:
            self._storage = open_storage(self._options, patient=True)
            self._planner = Planner(self._storage)
        return self._storage

    def _fetch(self) -> Manifest:
        self._manifest = self._open().manifest()
        return self._manifest


def _check(options: Mapping[str, str]) -> SourceOptions:
    """Parse options and check them against the stream."""
    parsed = parse_options(options)
    if parsed.push_down_filters:
        logger.warning(_IGNORED)
    storage = open_storage(parsed)
    try:
        read_range.check_partitions(parsed, storage.manifest())
    finally:
        storage.close()
    return parsed


def explain(**options: str) -> str:
    """The plan of a batch read with these options: the ranges and files that are read, and the number of tasks.

    Spark's own `explain` cannot show it, because a Python source has no part in the text of a plan.
    """
    parsed = _check(options)
    check_for_batch(parsed)
    storage = open_storage(parsed)
    try:
        manifest, start, end = _range(parsed, storage)
        tasks = _tasks(parsed, Planner(storage), manifest, start, end)
    finally:
        storage.close()
    return explain_plan(parsed, manifest, [task.slices for task in tasks])


def _range(options: SourceOptions, storage: Storage) -> tuple[Manifest, Offsets, Offsets]:
    """The manifest, and the start and end of a batch read."""
    manifest = storage.manifest()
    start = read_range.starting(options, storage, manifest, offsets.earliest(manifest))
    end = read_range.ending(options, storage, manifest, start)
    start, end = offsets.check_kept(start, end, manifest, options.fail_on_data_loss)
    return (manifest, *read_range.narrowed(storage, manifest, options.predicate, start, end))


def _payload_reader(options: SourceOptions, schema: StructType) -> PayloadReader:
    known = dict([*_COLUMNS, _USER_PROPERTY_LIST])
    levels = options.topic_pattern.names if options.topic_pattern is not None else ()
    for name in levels:
        if name in known or name in PAYLOAD_COLUMNS:
            raise OptionError("topicPattern", f"a level cannot be named {name!r}, which is a column")
    for field in schema.fields:
        if field.name not in PAYLOAD_COLUMNS and field.name not in levels:
            check_column(field, known, [*known, *PAYLOAD_COLUMNS, *levels])
    try:
        return PayloadReader(arrow_schema(schema), options.payload, options.topic_pattern)
    except (PayloadSchemaError, UnusableType) as error:
        raise StreamError(f"mqtt source: {error}") from None


def _tasks(options: SourceOptions, planner: Planner, manifest: Manifest, start: Offsets, end: Offsets) -> list[SliceTask]:
    tasks = planner.plan(
        manifest,
        start,
        end,
        options.min_partitions,
        options.max_records_per_partition,
        options.predicate,
        PARSED_TASK_BYTES if options.payload is not None else MIN_TASK_BYTES,
    )
    return [SliceTask(slices) for slices in tasks]


def _read(options: SourceOptions, payloads: PayloadReader, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    if not isinstance(partition, SliceTask):
        return
    storage = open_storage(options, patient=True)
    try:
        builder = ColumnBuilder(payloads.message_schema, options.stream, options.topic_filter, options.predicate)
        messages = read_slices(storage, partition.slices, builder, options.fail_on_data_loss, options.skip_corrupt_batches)
        for batch in messages:
            yield from payloads.rows(batch)
    finally:
        storage.close()
        freeze_worker()
