"""The options of the Spark data source `mqtt`.

Every option is checked at load time.  An error is one line that names the option, the value and the reason.  Names are
case-insensitive, as in all Spark sources; options of Spark's Kafka source have the same meaning here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bridge_spark.log.predicates import Predicate
from bridge_spark.source import option_values as values
from bridge_spark.source.archive_options import ARCHIVE_OPTION_NAMES, archive_options
from bridge_spark.source.archive_reader import ArchiveOptions
from bridge_spark.source.kafka_options import KAFKA_OPTION_NAMES, KafkaOptions, kafka_options
from bridge_spark.source.option_values import EARLIEST, LATEST, OffsetSpec, OptionError
from bridge_spark.source.payload_options import PAYLOAD_OPTION_NAMES, PayloadOptions, payload_options
from bridge_spark.source.topic_levels import PatternError, TopicPattern, parse_pattern
from bridge_spark.source.where import parse_where
from topic_matcher.filters import is_valid_filter

__all__ = [
    "EARLIEST",
    "LATEST",
    "OPTION_NAMES",
    "SPARK_INTERNAL",
    "OffsetSpec",
    "OptionError",
    "SourceOptions",
    "ca_file_of",
    "check_for_batch",
    "check_for_stream",
    "parse_options",
    "row_selection",
    "token_of",
    "topic_filter_of",
]

OPTION_NAMES = (
    "path",
    "url",
    "stream",
    "filter",
    "where",
    "schema",
    "token",
    "tokenFile",
    "caFile",
    "startingOffsets",
    "startingOffsetsByTimestamp",
    "startingTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingOffsetsByTimestamp",
    "endingTimestamp",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "acceptIncarnation",
    "skipCorruptBatches",
    "includeUserProperties",
    "pushDownFilters",
    "consumer",
    "fetch.numRetries",
    "fetch.retryIntervalMs",
    "fetch.timeoutMs",
    *KAFKA_OPTION_NAMES,
    *ARCHIVE_OPTION_NAMES,
    *PAYLOAD_OPTION_NAMES,
)
_URL_ONLY = ("token", "tokenFile", "caFile")
_REMOTE_ONLY = ("fetch.numRetries", "fetch.retryIntervalMs", "fetch.timeoutMs")
_BATCH_ONLY = ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")
_KAFKA_NAMES = {
    "kafka.ssl.truststore.location": "kafka.ssl.ca.location",
    "kafka.ssl.keystore.location": "kafka.ssl.certificate.location",
    "kafka.sasl.jaas.config": "kafka.sasl.username",
    "kafka.group.id": "consumer",
    "groupidprefix": "consumer",
    "subscribe": "stream",
    "subscribepattern": "filter",
    "includeheaders": "includeUserProperties",
    "fetchoffset.numretries": "fetch.numRetries",
    "fetchoffset.retryintervalms": "fetch.retryIntervalMs",
    "kafkaconsumer.polltimeoutms": "fetch.timeoutMs",
}
SPARK_INTERNAL = frozenset({"paths", "__paths__", "serialization.format", "provider"})
_NAMES = values.OptionNames(OPTION_NAMES, SPARK_INTERNAL, _KAFKA_NAMES, "the closest to this option of the Kafka source", "the options")


@dataclass(frozen=True)
class SourceOptions:
    """Checked options.

    Exactly one of ``path``, ``url`` and ``kafka`` is set.  ``starting_offsets`` is None for the default (earliest for a batch,
    latest for a stream).  Precedence of starts and ends: timestamp, timestamps per partition, offsets.  Timestamps are
    microseconds since the epoch.  ``positions`` are the options whose offset JSON says of which stream it is.
    """

    path: str | None
    url: str | None
    stream: str
    topic_filter: str | None = None
    predicate: Predicate = Predicate()
    where: str | None = None
    schema: str | None = None
    token: str | None = None
    ca_file: str | None = None
    starting_offsets: OffsetSpec | None = None
    starting_timestamps: dict[int, int] | None = None
    starting_timestamp: int | None = None
    latest_if_no_offset: bool = False
    ending_offsets: OffsetSpec | None = None
    ending_timestamps: dict[int, int] | None = None
    ending_timestamp: int | None = None
    max_offsets_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay_ms: int = 15 * 60_000
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    fail_on_data_loss: bool = True
    skip_corrupt_batches: bool = False
    include_user_properties: bool = False
    push_down_filters: bool = False
    consumer: str | None = None
    accept_incarnation: str | None = None
    positions: tuple[tuple[str, Mapping[str, int]], ...] = ()
    fetch_retries: int | None = None
    fetch_retry_interval_ms: int = 100
    request_timeout_ms: int = 30_000
    payload: PayloadOptions | None = None
    topic_pattern: TopicPattern | None = None
    archive: ArchiveOptions = ArchiveOptions()
    kafka: KafkaOptions | None = None


def parse_options(options: Mapping[str, str]) -> SourceOptions:
    """Check Spark's option map; raises `OptionError`."""
    given = _NAMES.given(options)
    path, url = given.get("path"), values.url(given, "url")
    if path is not None and url is not None:
        raise OptionError("url", "cannot be given together with 'path'")
    kafka = kafka_options(given)
    if path is None and url is None and kafka is None:
        raise OptionError(
            "path", "missing: give 'path' (data directory), 'url' (the broker's HTTP address), or 'kafka.bootstrap.servers' (a cluster)"
        )
    if url is None:
        for name in _URL_ONLY if kafka is not None else (*_URL_ONLY, *_REMOTE_ONLY):
            if name in given:
                raise OptionError(name, "is for 'url' only")
    if kafka is not None:
        for name in ("skipCorruptBatches", *ARCHIVE_OPTION_NAMES):
            if name in given:
                raise OptionError(name, "has no meaning for a cluster, whose streams are topics of Kafka")
    most, least = values.positive(given, "maxOffsetsPerTrigger"), values.positive(given, "minOffsetsPerTrigger")
    if most is not None and least is not None and least > most:
        raise OptionError("minOffsetsPerTrigger", f"{least} is more than 'maxOffsetsPerTrigger', {most}")
    default = SourceOptions(path, url, _stream(given))
    pattern = _topic_pattern(given)
    topic_filter, where = topic_filter_of(given) if pattern is None else pattern.filter, given.get("where")
    return SourceOptions(
        path=path,
        url=url,
        stream=default.stream,
        topic_filter=topic_filter,
        predicate=_predicate(topic_filter, where),
        where=where,
        schema=given.get("schema"),
        token=token_of(given),
        ca_file=ca_file_of(given, url),
        starting_offsets=values.offsets(given, "startingOffsets", starting=True),
        starting_timestamps=values.timestamps(given, "startingOffsetsByTimestamp"),
        starting_timestamp=values.timestamp(given, "startingTimestamp"),
        latest_if_no_offset=values.one_of(given, "startingOffsetsByTimestampStrategy", ("error", "latest")) == "latest",
        ending_offsets=values.offsets(given, "endingOffsets", starting=False),
        ending_timestamps=values.timestamps(given, "endingOffsetsByTimestamp"),
        ending_timestamp=values.timestamp(given, "endingTimestamp"),
        max_offsets_per_trigger=most,
        min_offsets_per_trigger=least,
        max_trigger_delay_ms=values.duration_ms(given, "maxTriggerDelay", default.max_trigger_delay_ms),
        min_partitions=values.positive(given, "minPartitions"),
        max_records_per_partition=values.positive(given, "maxRecordsPerPartition"),
        fail_on_data_loss=values.boolean(given, "failOnDataLoss", default.fail_on_data_loss),
        skip_corrupt_batches=values.boolean(given, "skipCorruptBatches", default.skip_corrupt_batches),
        include_user_properties=values.boolean(given, "includeUserProperties", default.include_user_properties),
        push_down_filters=values.boolean(given, "pushDownFilters", default.push_down_filters),
        consumer=values.consumer(given, "consumer"),
        accept_incarnation=given.get("acceptIncarnation"),
        positions=_positions(given),
        fetch_retries=values.count(given, "fetch.numRetries", 0) if "fetch.numRetries" in given else None,
        fetch_retry_interval_ms=values.count(given, "fetch.retryIntervalMs", default.fetch_retry_interval_ms),
        request_timeout_ms=values.positive(given, "fetch.timeoutMs") or default.request_timeout_ms,
        payload=payload_options(given),
        topic_pattern=pattern,
        archive=archive_options(given),
        kafka=kafka,
    )


def row_selection(options: SourceOptions) -> dict[str, str]:
    """The options that select rows, as a checkpoint keeps them."""
    given = {"filter": options.topic_filter, "where": options.where}
    return {name: value for name, value in given.items() if value is not None}


def check_for_batch(options: SourceOptions) -> None:
    """Raise `OptionError` for options that a batch read cannot have."""
    spec = options.starting_offsets if options.starting_timestamp is None else None
    if LATEST in spec.values() if isinstance(spec, dict) else spec == LATEST:
        raise OptionError("startingOffsets", "'latest' (-1) reads nothing in a batch: it is for streams")


def check_for_stream(options: SourceOptions) -> None:
    """Raise `OptionError` for options that a streaming read cannot have."""
    ends = (options.ending_offsets, options.ending_timestamps, options.ending_timestamp)
    for name, end in zip(_BATCH_ONLY, ends):
        if end is not None:
            raise OptionError(name, "is for batch reads: a stream has no end")


def _stream(given: dict[str, str]) -> str:
    stream = given.get("stream", "")
    if not stream:
        raise OptionError("stream", "missing: give the name of a stream")
    if "/" in stream or stream in (".", ".."):
        raise OptionError("stream", f"{stream!r} is not a stream name")
    return stream


def _positions(given: dict[str, str]) -> tuple[tuple[str, Mapping[str, int]], ...]:
    found = ((name, values.stream_entries(given, name)) for name in ("startingOffsets", "endingOffsets"))
    return tuple((name, document) for name, document in found if document is not None)


def _topic_pattern(given: dict[str, str]) -> TopicPattern | None:
    if "topicPattern" not in given:
        return None
    if "filter" in given:
        raise OptionError("filter", "cannot be given together with 'topicPattern', which is a filter")
    try:
        return parse_pattern(given["topicPattern"])
    except PatternError as error:
        raise OptionError("topicPattern", str(error)) from None


def topic_filter_of(given: dict[str, str]) -> str | None:
    """The option `filter`; raises `OptionError`."""
    topic_filter = given.get("filter")
    if topic_filter is not None and not is_valid_filter(topic_filter):
        raise OptionError("filter", f"{topic_filter!r} is not an MQTT topic filter")
    if topic_filter is not None and topic_filter.startswith("$share/"):
        raise OptionError("filter", "a shared subscription means nothing here: give the filter alone")
    return topic_filter


def token_of(given: dict[str, str]) -> str | None:
    """The option `token`, or the content of `tokenFile`; raises `OptionError`."""
    path = given.get("tokenFile")
    if path is None:
        return values.token(given, "token")
    if "token" in given:
        raise OptionError("tokenFile", "cannot be given together with 'token'")
    try:
        with open(path, encoding="ascii") as file:
            return values.token({"tokenFile": file.read().strip()}, "tokenFile")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("tokenFile", f"{path}: {getattr(error, 'strerror', None) or 'is not ASCII'}") from None


def _predicate(topic_filter: str | None, where: str | None) -> Predicate:
    """Bounds of the rows that match: row groups outside of them are not read."""
    predicate = Predicate() if where is None else parse_where("where", where)
    if topic_filter is None:
        return predicate
    literal, wildcard, _ = re.split(r"(/#|[+#]|$)", topic_filter, maxsplit=1)  # "a/#" matches "a" as well
    bounded = predicate.narrowed("topic", "prefix" if wildcard else "=", literal) if literal else predicate
    assert bounded is not None
    return bounded


def ca_file_of(given: dict[str, str], url: str | None) -> str | None:
    """The option `caFile`; raises `OptionError`."""
    ca_file = given.get("caFile")
    if ca_file is not None and url is not None and not url.lower().startswith("https:"):
        raise OptionError("caFile", f"is for an https 'url', not {url!r}")
    return ca_file
