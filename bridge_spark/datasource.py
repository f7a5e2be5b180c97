"""The Spark data source `mqtt`: batch and streaming reads of a stream.

The rule kept here: the same range of offsets always yields the same rows, and
never one that is not committed.  Offsets live in Spark's checkpoint; nothing
is remembered here that a restarted query would need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Optional

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)
from pyspark.sql.pandas.types import to_arrow_schema
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
from bridge_spark.log.predicates import Predicate
from bridge_spark.source import offsets, read_range
from bridge_spark.source.offsets import Offsets
from bridge_spark.source.open_storage import open_storage
from bridge_spark.source.options import OptionError, SourceOptions, check_for_batch, check_for_stream, parse_options
from bridge_spark.source.payload_reader import PAYLOAD_COLUMNS, PayloadReader, PayloadSchemaError
from bridge_spark.source.plan import Planner, Slice
from bridge_spark.source.rate_limit import RateLimit
from bridge_spark.source.slice_reader import read_slices
from bridge_spark.source.storage import Manifest, Storage, StreamError

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
_OPERATORS: dict[type[Filter], str] = {
    EqualTo: "=",
    EqualNullSafe: "=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
    In: "in",
    StringStartsWith: "prefix",
    IsNotNull: "not null",
}


class SliceTask(InputPartition):
    """What one Spark task reads."""

    def __init__(self, slices: list[Slice]) -> None:
        super().__init__(None)
        self.slices = slices


class MqttDataSource(DataSource):
    """`spark.read.format("mqtt")` and `spark.readStream.format("mqtt")`.

    Bad options and unknown streams are refused here, at load time, with
    `OptionError` or `StreamError`.  A user-given schema selects columns: those
    it leaves out are not read.
    """

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._parsed = parse_options(options)
        storage = open_storage(self._parsed)
        read_range.check_partitions(self._parsed, storage.manifest())
        storage.close()

    @classmethod
    def name(cls) -> str:
        return "mqtt"

    def schema(self) -> StructType:
        columns = [*_COLUMNS, _USER_PROPERTY_LIST] if self._parsed.include_user_properties else _COLUMNS
        return StructType([StructField(name, kind) for name, kind in columns])

    def reader(self, schema: StructType) -> DataSourceReader:
        check_for_batch(self._parsed)
        kind = FilteringMqttReader if self._parsed.push_down_filters else MqttReader
        return kind(self._parsed, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return MqttStreamReader(self._parsed, schema)


class MqttReader(DataSourceReader):
    """One batch read; its end is fixed when it is planned."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._payloads = _payload_reader(options, schema)
        self._wanted = Predicate()

    def partitions(self) -> list[InputPartition]:
        options = self._options
        storage = open_storage(options)
        try:
            manifest = storage.manifest()
            start = read_range.starting(options, storage, manifest, offsets.earliest(manifest))
            end = read_range.ending(options, storage, manifest, start)
            start, end = offsets.check_kept(start, end, manifest, options.fail_on_data_loss)
            start, end = read_range.narrowed(storage, manifest, self._wanted, start, end)
            return _tasks(options, Planner(storage), manifest, start, end, self._wanted)
        finally:
            storage.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, self._payloads, partition, self._wanted)


class FilteringMqttReader(MqttReader):
    """A batch read that takes predicates from Spark.

    A class of its own: Spark refuses a reader that has `pushFilters` in every
    session without ``spark.sql.python.filterPushdown.enabled``.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for pushed in filters:
            operator = _OPERATORS.get(type(pushed))
            attribute: tuple[str, ...] = getattr(pushed, "attribute", ())
            narrowed = None
            if operator is not None and len(attribute) == 1:
                narrowed = self._wanted.narrowed(attribute[0], operator, getattr(pushed, "value", None))
            if narrowed is None:
                yield pushed
            else:
                self._wanted = narrowed


class MqttStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read with admission control (`maxOffsetsPerTrigger`,
    `minOffsetsPerTrigger`)."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._refusal: Optional[Exception] = None
        try:
            check_for_stream(options)
            self._payloads = _payload_reader(options, schema)
        except (OptionError, StreamError) as error:
            self._refusal = error  # for the first call: an error raised here Spark hides behind its own
        self._rate_limit = RateLimit(options.min_offsets_per_trigger, options.max_trigger_delay_ms)
        self._storage: Optional[Storage] = None
        self._planner: Optional[Planner] = None
        self._manifest: Optional[Manifest] = None
        self._target: Optional[Offsets] = None

    def initialOffset(self) -> dict[str, int]:
        manifest = self._fetch()
        return offsets.to_json(
            read_range.starting(self._options, self._open(), manifest, offsets.latest(manifest)))

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_offsets_per_trigger is not None:
            return ReadMaxRows(self._options.max_offsets_per_trigger)
        if self._options.min_offsets_per_trigger is not None:
            return ReadMinRows(self._options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = offsets.latest(self._fetch())

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        begin = offsets.from_json(start)
        if self._options.consumer is not None:
            # What begins here is committed up to here; Spark's commit() tells of a batch only once there is a next one.
            self._open().report(self._options.consumer, begin)
        manifest = self._fetch()
        end = dict(self._target) if self._target is not None else offsets.latest(manifest)
        for partition in begin:
            end.setdefault(partition, begin[partition])
        begin, end = offsets.check_kept(begin, end, manifest, self._options.fail_on_data_loss)
        max_rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        complete = self._target is not None or isinstance(limit, ReadAllAvailable)
        return offsets.to_json(self._rate_limit.batch_end(begin, end, max_rows, complete))

    def reportLatestOffset(self) -> Optional[dict[str, int]]:
        return None if self._manifest is None else offsets.to_json(offsets.latest(self._manifest))

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        begin, until = offsets.from_json(start), offsets.from_json(end)
        manifest = self._manifest
        if manifest is None or any(
            partition not in manifest or offset > manifest[partition].high_watermark
            for partition, offset in until.items()
        ):
            manifest = self._fetch()
        self._open()
        assert self._planner is not None
        begin, until = offsets.check_kept(begin, until, manifest, self._options.fail_on_data_loss)
        return _tasks(self._options, self._planner, manifest, begin, until, Predicate())

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, self._payloads, partition, Predicate())

    def stop(self) -> None:
        if self._storage is not None:
            self._storage.close()

    def _open(self) -> Storage:
        if self._refusal is not None:
            raise self._refusal
        if self._storage is None:
            self._storage = open_storage(self._options)
            self._planner = Planner(self._storage)
        return self._storage

    def _fetch(self) -> Manifest:
        self._manifest = self._open().manifest()
        return self._manifest


def _payload_reader(options: SourceOptions, schema: StructType) -> PayloadReader:
    known = dict([*_COLUMNS, _USER_PROPERTY_LIST])
    levels = options.topic_pattern.names if options.topic_pattern is not None else ()
    for name in levels:
        if name in known or name in PAYLOAD_COLUMNS:
            raise OptionError("topicPattern", f"a level cannot be named {name!r}, which is a column")
    for field in schema.fields:
        if field.name in PAYLOAD_COLUMNS or field.name in levels:
            continue
        kind = known.get(field.name)
        if kind is None:
            raise StreamError(f"mqtt source: there is no column {field.name!r}; "
                              f"the columns are {', '.join([*known, *PAYLOAD_COLUMNS, *levels])}")
        if field.dataType != kind:
            raise StreamError(f"mqtt source: column {field.name!r} is {kind.simpleString()}, "
                              f"not {field.dataType.simpleString()}: parse it after reading")
    try:
        return PayloadReader(to_arrow_schema(schema, timezone="UTC"), options.payload, options.topic_pattern)
    except PayloadSchemaError as error:
        raise StreamError(f"mqtt source: {error}") from None


def _tasks(
    options: SourceOptions, planner: Planner, manifest: Manifest, start: Offsets, end: Offsets, wanted: Predicate
) -> list[InputPartition]:
    tasks = planner.plan(manifest, start, end, options.min_partitions, options.max_records_per_partition, wanted)
    return [SliceTask(slices) for slices in tasks]


def _read(
    options: SourceOptions, payloads: PayloadReader, partition: InputPartition, wanted: Predicate
) -> Iterator[pa.RecordBatch]:
    if not isinstance(partition, SliceTask):
        return
    storage = open_storage(options)
    try:
        maker = ColumnBuilder(payloads.message_schema, options.stream, options.topic_filter, wanted)
        messages = read_slices(storage, partition.slices, maker, options.fail_on_data_loss,
                               options.skip_corrupt_batches)
        yield from map(payloads.rows, messages)
    finally:
        storage.close()
