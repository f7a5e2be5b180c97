"""Options of the Spark source: accepted values; a refusal is one line with option and reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge_spark.log.predicates import Bounds, Predicate
from bridge_spark.source.options import EARLIEST, LATEST, OptionError, check_for_batch, check_for_stream, parse_options

BASE = {"path": "data", "stream": "sensors"}


def test_defaults() -> None:
    options = parse_options(BASE)
    assert (options.path, options.url, options.stream) == ("data", None, "sensors")
    assert options.starting_offsets is None and options.ending_offsets is None
    assert options.fail_on_data_loss and not options.include_user_properties
    assert options.max_offsets_per_trigger is None and options.topic_filter is None


def test_names_are_case_insensitive_and_sparks_own_options_are_ignored() -> None:
    options = parse_options(
        {
            "PATH": "data",
            "Stream": "s",
            "STARTINGOFFSETS": "Earliest",
            "failondataloss": "FALSE",
            "serialization.format": "1",
            "spark.something": "x",
        }
    )
    assert options.starting_offsets == EARLIEST
    assert not options.fail_on_data_loss


ACCEPTED = [
    ({"startingOffsets": "latest"}, "starting_offsets", LATEST),
    ({"startingOffsets": '{"0": 12, "3": -2}'}, "starting_offsets", {0: 12, 3: EARLIEST}),
    ({"endingOffsets": '{"1": -1}'}, "ending_offsets", {1: LATEST}),
    ({"endingOffsets": "latest"}, "ending_offsets", LATEST),
    ({"maxOffsetsPerTrigger": " 5 "}, "max_offsets_per_trigger", 5),
    ({"minPartitions": "8"}, "min_partitions", 8),
    ({"filter": "a/+/#"}, "topic_filter", "a/+/#"),
    ({"startingTimestamp": "1700000000123"}, "starting_timestamp", 1_700_000_000_123_000),
    ({"startingTimestamp": "2023-11-14T22:13:20Z"}, "starting_timestamp", 1_700_000_000_000_000),
    ({"startingTimestamp": "2023-11-14T23:13:20.000001+01:00"}, "starting_timestamp", 1_700_000_000_000_001),
    ({"skipCorruptBatches": "true"}, "skip_corrupt_batches", True),
    ({"includeUserProperties": "true"}, "include_user_properties", True),
    ({"startingOffsetsByTimestamp": '{"0": 1700000000123}'}, "starting_timestamps", {0: 1_700_000_000_123_000}),
    ({"endingOffsetsByTimestamp": '{"0": 5, "1": 0}'}, "ending_timestamps", {0: 5000, 1: 0}),
    ({"endingTimestamp": "1700000000123"}, "ending_timestamp", 1_700_000_000_123_000),
    ({"startingOffsetsByTimestampStrategy": "Latest"}, "latest_if_no_offset", True),
    ({"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "5"}, "min_offsets_per_trigger", 5),
    ({"maxTriggerDelay": "90s"}, "max_trigger_delay_ms", 90_000),
    ({"maxTriggerDelay": "250"}, "max_trigger_delay_ms", 250),
    ({"maxTriggerDelay": "15 min"}, "max_trigger_delay_ms", 900_000),
    ({"maxRecordsPerPartition": "1000"}, "max_records_per_partition", 1000),
    ({"pushDownFilters": "true"}, "push_down_filters", True),
    ({"where": "offset < 5"}, "predicate", Predicate(offset=Bounds(end=5))),
    ({"startingOffsets": '{"0": 7, "filter=a/#": 0}'}, "starting_offsets", {0: 7}),
    ({"consumer": "plant-7:ingest"}, "consumer", "plant-7:ingest"),
]


@pytest.mark.parametrize(("given", "attribute", "value"), ACCEPTED)
def test_accepted(given: dict[str, str], attribute: str, value: object) -> None:
    assert getattr(parse_options(BASE | given), attribute) == value


def test_url() -> None:
    options = parse_options(
        {
            "url": "https://broker:18083/",
            "stream": "s",
            "token": "abc",
            "caFile": "ca.pem",
            "fetch.numRetries": "0",
            "fetch.retryIntervalMs": "10",
            "FETCH.timeoutMs": "500",
        }
    )
    assert (options.url, options.token, options.path) == ("https://broker:18083", "abc", None)
    assert (options.ca_file, options.fetch_retries, options.fetch_retry_interval_ms) == ("ca.pem", 0, 10)
    assert options.request_timeout_ms == 500


@pytest.mark.parametrize("url", ["http://me:s3cret@h:x", "ftp://me:s3cret@h", "http://:s3cret@", "s3cret@h"])
def test_credentials_of_a_url_are_never_shown(url: str) -> None:
    with pytest.raises(OptionError, match="must not carry a name or password") as caught:
        parse_options({"url": url, "stream": "s"})
    assert "s3cret" not in str(caught.value)


def test_token_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    assert parse_options({"url": "http://h", "stream": "s", "tokenFile": str(tmp_path / "token")}).token == "s3cret"


REFUSED = [
    (BASE | {"startOffset": "1"}, "startOffset", "unknown, did you mean 'startingOffsets'?"),
    (BASE | {"includeUserProperty": "1"}, "includeUserProperty", "did you mean 'includeUserProperties'?"),
    (BASE | {"hostname": "h"}, "hostname", "unknown; the options are path, url, stream"),
    (BASE | {"archive.location": "history"}, "archive.location", 'must be "s3://BUCKET/PREFIX" or the absolute path'),
    (BASE | {"archive.accessKey": "k"}, "archive.secretKey", "missing: both keys are needed"),
    (BASE | {"archive.secretKey": "k"}, "archive.accessKey", "missing: both keys are needed"),
    (BASE | {"archive.endpoint": "http://k:s@h"}, "archive.endpoint", "must not have credentials"),
    (BASE | {"archive.sessionToken": "t"}, "archive.sessionToken", "needs 'archive.accessKey' and 'archive.secretKey'"),
    (BASE | {"includeHeaders": "true"}, "includeHeaders", "option of the Kafka source is 'includeUserProperties'"),
    ({"kafka.bootstrap.servers": "h:1", "path": "d"}, "path", "cannot be given together"),
    (BASE | {"subscribe": "s"}, "subscribe", "is 'stream'"),
    (BASE | {"url": "http://h:1"}, "url", "together with 'path'"),
    ({"stream": "s"}, "path", "missing"),
    ({"path": "data"}, "stream", "missing"),
    (BASE | {"stream": "../x"}, "stream", "not a stream name"),
    ({"url": "ftp://h", "stream": "s"}, "url", "not an address"),
    ({"url": "http://h:x", "stream": "s"}, "url", "http://h:x"),
    ({"url": "http://me:secret@h", "stream": "s"}, "url", "token"),
    (BASE | {"token": "abc"}, "token", "for 'url' only"),
    ({"url": "http://h", "stream": "s", "token": "a\nb"}, "token", "not a bearer token"),
    (BASE | {"filter": "a/#/b"}, "filter", "'a/#/b' is not an MQTT topic filter"),
    (BASE | {"filter": "$share/g/a"}, "filter", "shared"),
    (BASE | {"startingOffsets": "first"}, "startingOffsets", "'first' is neither"),
    (BASE | {"startingOffsets": "[1]"}, "startingOffsets", "nor JSON like"),
    (BASE | {"startingOffsets": "{}"}, "startingOffsets", "nor JSON like"),
    (BASE | {"startingOffsets": '{"a": 1}'}, "startingOffsets", "'{\"a\": 1}': 'a' is not a partition number"),
    (BASE | {"startingOffsets": '{"s": {"0": 1}}'}, "startingOffsets", 'number: write {"0": 123}, without a name'),
    (BASE | {"startingOffsets": '{"0": -3}'}, "startingOffsets", "-3 is not an offset"),
    (BASE | {"startingOffsets": '{"0": true}'}, "startingOffsets", "True is not an offset"),
    (BASE | {"endingOffsets": "earliest"}, "endingOffsets", "not where it ends"),
    (BASE | {"endingOffsets": '{"0": -2}'}, "endingOffsets", "-2 is not an offset"),
    (BASE | {"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger", "not a positive whole number"),
    (BASE | {"minPartitions": "many"}, "minPartitions", "not a positive whole number"),
    (BASE | {"failOnDataLoss": "yes"}, "failOnDataLoss", "neither true nor false"),
    (BASE | {"startingTimestamp": "yesterday"}, "startingTimestamp", "'yesterday' is neither"),
    (BASE | {"startingTimestamp": "2026-01-31T12:00:00"}, "startingTimestamp", "nor a time with a zone like"),
    (BASE | {"endingTimestamp": "2026-01-31"}, "endingTimestamp", "nor a time with a zone like"),
    (BASE | {"where": "qos = 1"}, "where", "qos is not one of the columns"),
    ({"url": "http://h", "stream": "s", "tokenFile": "/no/file"}, "tokenFile", "/no/file: No such file"),
    ({"url": "http://h", "stream": "s", "tokenFile": "x", "token": "y"}, "tokenFile", "together with 'token'"),
    (BASE | {"endingTimestamp": "9" * 30}, "endingTimestamp", "is neither"),
    (BASE | {"startingOffsetsByTimestamp": "1700000000123"}, "startingOffsetsByTimestamp", "not JSON like"),
    (BASE | {"startingOffsetsByTimestamp": '{"0": -1}'}, "startingOffsetsByTimestamp", "-1 is not milliseconds"),
    (BASE | {"endingOffsetsByTimestamp": '{"x": 1}'}, "endingOffsetsByTimestamp", "'x' is not a partition number"),
    (BASE | {"startingOffsetsByTimestampStrategy": "none"}, "startingOffsetsByTimestampStrategy", "error or latest"),
    (BASE | {"minOffsetsPerTrigger": "6", "maxOffsetsPerTrigger": "5"}, "minOffsetsPerTrigger", "6 is more than"),
    (BASE | {"maxTriggerDelay": "soon"}, "maxTriggerDelay", "'soon' is not a duration"),
    (BASE | {"maxTriggerDelay": "5 weeks"}, "maxTriggerDelay", "not a duration"),
    (BASE | {"maxRecordsPerPartition": "0"}, "maxRecordsPerPartition", "not a positive whole number"),
    (BASE | {"consumer": "a b"}, "consumer", "'a b' is not a name"),
    (BASE | {"fetch.numRetries": "3"}, "fetch.numRetries", "for 'url' only"),
    (BASE | {"caFile": "ca.pem"}, "caFile", "for 'url' only"),
    ({"url": "http://h", "stream": "s", "caFile": "ca.pem"}, "caFile", "https"),
    ({"url": "http://h", "stream": "s", "fetch.numRetries": "-1"}, "fetch.numRetries", "not a whole number"),
    ({"url": "http://h", "stream": "s", "fetch.timeoutMs": "0"}, "fetch.timeoutMs", "not a positive"),
]


@pytest.mark.parametrize(("given", "option", "reason"), REFUSED)
def test_refused_in_one_line(given: dict[str, str], option: str, reason: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options(given)
    text = str(caught.value)
    assert text.startswith(f"mqtt source: option '{option}': ") and reason in text and "\n" not in text
    assert "secret" not in text.replace("archive.secretKey", "")


def test_options_for_batch_or_stream_only() -> None:
    check_for_stream(parse_options(BASE | {"startingOffsets": "latest"}))
    with pytest.raises(OptionError, match="startingOffsets"):
        check_for_batch(parse_options(BASE | {"startingOffsets": "latest"}))
    with pytest.raises(OptionError, match="startingOffsets"):
        check_for_batch(parse_options(BASE | {"startingOffsets": '{"0": -1}'}))
    check_for_batch(parse_options(BASE | {"startingOffsets": "latest", "startingTimestamp": "5"}))
    for name, value in (("endingOffsets", "latest"), ("endingTimestamp", "5"), ("endingOffsetsByTimestamp", '{"0":1}')):
        with pytest.raises(OptionError, match=f"'{name}': is for batch reads"):
            check_for_stream(parse_options(BASE | {name: value}))


@pytest.mark.parametrize(
    ("topic_filter", "inside", "outside"),
    [
        ("a/b", ["a/b"], ["a/", "a/bc"]),
        ("a/+", ["a/", "a/x"], ["a", "b"]),
        ("a/#", ["a", "a/", "a/x"], ["b"]),
        ("a/+/c", ["a/b/c"], ["b/b/c"]),
        ("#", ["", "b"], []),
        ("+/a", ["x/a"], []),
        ("/#", ["", "/a"], []),
    ],
)
def test_a_filter_bounds_the_topics_that_are_read(topic_filter: str, inside: list[str], outside: list[str]) -> None:
    bounds = parse_options(BASE | {"filter": topic_filter}).predicate.topic
    assert all(bounds.contains(topic) for topic in inside) and not any(bounds.contains(topic) for topic in outside)
