"""Consumer lag: the progress of consumers as the broker shows it, and its warnings about retention."""

from __future__ import annotations

import json
import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.metric_samples import samples
from support.raw_client import RawClient

from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from bridge_spark.source.consumers import ReportError, encode_report, write_report
from bridge_spark.source.directory_storage import DirectoryStorage
from bridge_spark.source.http_storage import HttpStorage
from bridge_spark.source.storage import Storage
from mqttbroker.admin.metrics.consumer_lag import ConsumerLag, PartitionLag, TooManyConsumers
from mqttbroker.cli.main import main
from mqttbroker.config.settings import Consumers
from sessions.message import Message

pytestmark = pytest.mark.one_build
START = 1_700_000_000.0


class Consumed:
    """A stream of two partitions with small segments, and its consumers, under one clock."""

    def __init__(self, directory: Path, settings: Consumers, age: float | None, size: int | None) -> None:
        self.now = START
        config = StreamConfig("s", ["#"], 2, retention_age=age, retention_bytes=size, segment_bytes=1000)
        self.logs = StreamLogs(directory / "streams", [config], lambda: self.now)
        self.logs.recover({})
        self.directory = directory / "streams" / "s" / "consumers"
        self.lag = ConsumerLag(self.logs, settings, lambda: self.now)

    def append(self, count: int, partition: int = 0) -> None:
        """Append one record per second; a few fill a segment."""
        for _ in range(count):
            self.now += 1
            record = Message("t", bytes(30), 1, False, b"", "c", int(self.now * 1e6), 0)
            self.logs.append({("s", partition): [record]})
            self.logs.committed()

    def report(self, name: str, offsets: dict[int, int]) -> None:
        self.lag.report("s", name, encode_report(offsets))
        os.utime(self.directory / f"{name}.json", (self.now, self.now))

    def progress(self, name: str = "job", partition: int = 0) -> PartitionLag:
        (consumer,) = (consumer for consumer in self.lag.consumers("s") if consumer.name == name)
        return next(found for found in consumer.partitions if found.partition == partition)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Consumed]]:
    made: list[Consumed] = []

    def consumed(age: float | None = None, size: int | None = None, **settings: Any) -> Consumed:
        made.append(Consumed(tmp_path / str(len(made)), Consumers(**settings), age, size))
        return made[-1]

    yield consumed
    for each in made:
        each.logs.close()


def test_lag_in_offsets_and_seconds(make: Callable[..., Consumed]) -> None:
    stream = make()
    stream.append(50)
    expected = ((0, 50, 49.0), (7, 43, 42.0), (29, 21, 20.0), (49, 1, 0.0), (50, 0, 0.0), (60, 0, 0.0))
    for offset, lag, seconds in expected:
        stream.report("job", {0: offset, 1: 0})
        assert stream.progress()[1:5] == (offset, lag, seconds, 0)
    stream.now += 5
    stream.report("job", {0: 49})
    assert stream.progress().lag_seconds == 5.0
    assert stream.lag.consumers("s")[0].reported_at == stream.now


def test_lag_without_an_index_is_interpolated(make: Callable[..., Consumed]) -> None:
    stream = make()
    stream.append(30)
    for path in (stream.directory.parent / "0").glob("*.idx"):
        path.unlink()
    stream.report("job", {0: 15})
    assert stream.progress().lag_seconds == pytest.approx(14, abs=1.5)


def test_retention_by_age(make: Callable[..., Consumed]) -> None:
    stream = make(age=100.0, retention_warning=20.0)
    stream.append(20)
    stream.report("job", {0: 3})
    first = stream.logs.manifest("s")["partitions"][0]["segments"][0]
    left = first["last_timestamp_us"] / 1e6 + 100 - stream.now
    assert stream.progress().seconds_left == pytest.approx(left) and not stream.progress().at_risk
    stream.now += left - 19
    assert stream.progress().at_risk and stream.progress().seconds_left == pytest.approx(19)
    stream.report("job", {0: first["end_offset"]})
    assert not stream.progress().at_risk
    stream.report("job", {0: 20})
    assert stream.progress()[5:] == (None, None, False)


def test_warnings_begin_at_half_of_a_short_retention(make: Callable[..., Consumed]) -> None:
    stream = make(age=100.0, retention_warning=3600.0)
    stream.append(5)
    stream.report("job", {0: 0})
    assert not stream.progress().at_risk
    stream.now += 51
    assert stream.progress().at_risk


def test_retention_by_size_removes_records_after_bytes_left(make: Callable[..., Consumed]) -> None:
    stream = make(size=8000, retention_warning_percent=25)
    for partition in (0, 1):
        stream.append(30, partition)
    stream.report("job", {0: 15, 1: 15})
    segment = stream.logs.manifest("s")["partitions"][0]["segments"][0]
    record = segment["bytes"] // segment["end_offset"]
    for partition in (0, 1):
        progress = stream.progress(partition=partition)
        left, appended = progress.bytes_left, 0
        assert left is not None and left > 0
        while not progress.lost:
            assert progress.bytes_left is not None and progress.at_risk == (progress.bytes_left < 2000)
            stream.append(1)
            appended += record
            progress = stream.progress(partition=partition)
        assert progress.at_risk and left < appended <= left + 2 * record


def test_warnings_are_repeated_at_a_bounded_rate(make: Callable[..., Consumed], caplog: pytest.LogCaptureFixture) -> None:
    stream = make(age=100.0, retention_warning=20.0, warning_interval=600.0, forget_after=1e6)
    stream.append(20)
    stream.report("slow", {0: 3, 1: 0})
    stream.report("fine", {0: 20, 1: 0})

    def warned() -> list[str]:
        caplog.clear()
        stream.lag.update()
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.WARNING):
        assert warned() == []
        stream.now += 75
        (line,) = warned()
        assert line.startswith("event=consumer_at_risk stream=s consumer=slow partition=0 offset=3 lag=17 ")
        assert line.endswith("bytes_left=any partitions_at_risk=1")
        assert warned() == []
        stream.now += 601
        stream.append(1)
        stream.report("fine", {0: 21})
        (line,) = warned()
        assert line.startswith("event=consumer_overtaken stream=s consumer=slow partition=0 offset=3 lost=11")
        assert warned() == []
        stream.now += 601
        assert len(warned()) == 1
        stream.report("slow", {0: 21})
        assert warned() == [] and not any(consumer.at_risk for consumer in stream.lag.latest)


def test_the_number_of_consumers_is_limited(make: Callable[..., Consumed], caplog: pytest.LogCaptureFixture) -> None:
    stream = make(max_consumers=2, max_name_length=3)
    for name in ("a", "b", "a"):
        stream.report(name, {0: 0})
    with pytest.raises(TooManyConsumers, match="stream 's' has 2 consumers already"):
        stream.report("c", {0: 0})
    with pytest.raises(ReportError, match="at most 3 characters"):
        stream.report("four", {0: 0})
    assert stream.lag.forget("s", "a") and not stream.lag.forget("s", "a") and not stream.lag.forget("s", "../../x")
    stream.report("c", {0: 0})
    write_report(stream.directory, "d", encode_report({0: 0}))
    os.utime(stream.directory / "d.json", (stream.now + 1, stream.now + 1))
    with caplog.at_level(logging.WARNING):
        assert "d" in [consumer.name for consumer in stream.lag.consumers("s")] and len(stream.lag.consumers("s")) == 2
    assert caplog.messages == ["event=consumers_too_many stream=s consumers=3 shown=2"]
    with pytest.raises(KeyError):
        stream.lag.report("x", "a", encode_report({0: 0}))


def test_old_reports_are_deleted(make: Callable[..., Consumed]) -> None:
    stream = make(forget_after=3600.0)
    stream.append(1)
    stream.report("old", {0: 0})
    (stream.directory / ".half").write_text("x")
    os.utime(stream.directory / ".half", (stream.now, stream.now))
    stream.now += 3000
    stream.report("new", {0: 0})
    stream.now += 601
    stream.lag.update()
    assert [consumer.name for consumer in stream.lag.latest] == ["new"]
    assert os.listdir(stream.directory) == ["new.json"]


def test_files_that_are_no_reports_are_skipped(make: Callable[..., Consumed], caplog: pytest.LogCaptureFixture) -> None:
    stream = make()
    stream.report("good", {0: 0})
    (stream.directory / "bad.json").write_text("{")
    (stream.directory / "far.json").write_bytes(encode_report({7: 0}))
    (stream.directory / "a b.json").write_bytes(encode_report({0: 0}))
    (stream.directory / "directory.json").mkdir()
    (stream.directory / "link.json").symlink_to("/etc/passwd")
    os.mkfifo(stream.directory / "pipe.json")
    (stream.directory / "notes.txt").write_text("x")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [consumer.name for consumer in stream.lag.consumers("s")] == ["good"]
    assert len(caplog.records) == 6


# --- a broker -------------------------------------------------------------------------------------------------------


def publish(broker: BrokerProcess, count: int) -> None:
    with RawClient(broker.port) as client:
        client.connect("publisher")
        for _ in range(count):
            client.publish("r/1", bytes(500), 1)


def shown(broker: BrokerProcess) -> dict[str, Any]:
    listed = json.loads(broker.get("/streams/s/consumers", {"Authorization": "Bearer t"}))
    return {entry["consumer"]: entry for entry in listed["consumers"]}


def request(broker: BrokerProcess, method: str, path: str, body: bytes | None = None, token: str = "t") -> int:
    asked = urllib.request.Request(broker.url + path, body, {"Authorization": f"Bearer {token}"}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def until(broker: BrokerProcess, check: Callable[[dict[str, float]], bool]) -> None:
    """Wait until the metrics satisfy a condition."""
    wait_until(lambda: check(samples(broker.get("/metrics", {"Authorization": "Bearer t"}))))


def test_consumers_of_a_broker(start_broker: Callable[..., BrokerProcess], capsys: pytest.CaptureFixture[str]) -> None:
    broker = start_broker(config={
        "sys_interval": "100ms", "http": {"token": "t"},
        "consumers": {"interval": "100ms", "max_consumers": 2, "retention_warning_percent": 50},
        "streams": {"s": {
            "filters": ["r/#"], "partitions": 1, "segment_bytes": "4KiB", "seal": False, "retention_bytes": "20KiB",
        }},
    })  # fmt: skip
    publish(broker, 10)
    over_http: Storage = HttpStorage(broker.url, "s", "t")
    below: Storage = DirectoryStorage(str(broker.data_dir), "s")
    over_http.report("http", {0: 4})
    below.report("files", {0: 10})
    found = shown(broker)
    assert {name: (entry["lag"], entry["at_risk"]) for name, entry in found.items()} == {"http": (6, False), "files": (0, False)}
    assert found["http"]["partitions"][0]["offset"] == 4 and found["http"]["lag_seconds"] > 0
    assert found["files"]["lag_seconds"] == 0 and found["files"]["report_age_seconds"] < 3600
    until(broker, lambda values: values.get("mqttbroker_stream_consumer_lag/http/0/s") == 6)
    for method, path, body, token, status in (
        ("PUT", "/streams/s/consumers/http", b"{}", "t", 400),
        ("PUT", "/streams/s/consumers/.x", b'{"offsets": {}}', "t", 400),
        ("PUT", "/streams/s/consumers/third", b'{"offsets": {}}', "t", 429),
        ("PUT", "/streams/s/consumers/http", b'{"offsets": {}}', "x", 401),
        ("PUT", "/streams/none/consumers/http", b'{"offsets": {}}', "t", 404),
        ("DELETE", "/streams/s/consumers/http", None, "x", 401),
        ("DELETE", "/streams/s/consumers/none", None, "t", 404),
        ("GET", "/streams/none/consumers", None, "t", 404),
    ):
        assert request(broker, method, path, body, token) == status, (method, path)

    broker.restart(kill=True)
    assert shown(broker).keys() == found.keys()
    over_http.report("http", {0: 5})
    assert shown(broker)["http"]["lag"] == 5
    over_http.close()

    publish(broker, 20)
    broker.wait_for_log(r"event=consumer_at_risk stream=s consumer=http partition=0 offset=5 .*bytes_left=\d+")
    publish(broker, 30)
    broker.wait_for_log(r"event=consumer_overtaken stream=s consumer=http partition=0 offset=5 lost=\d+")
    until(
        broker,
        lambda values: (
            values["mqttbroker_stream_consumer_at_risk/http/0/s"] == 1 and values["mqttbroker_stream_consumer_lost/http/0/s"] > 0
        ),
    )
    assert shown(broker)["http"]["at_risk"]
    assert main(["consumers", "--url", broker.url, "--token", "t"]) == 1
    heading, first, second = capsys.readouterr().out.splitlines()
    assert heading.split() == ["STREAM", "CONSUMER", "PARTITION", "OFFSET", "LAG", "BEHIND", "REPORTED", "RETENTION"]
    assert re.fullmatch(r"s +files +0 +10 +50 +\d+s +\d+s ago +\d+ lost", first)
    assert re.fullmatch(r"s +http +0 +5 +55 +\d+s +\d+s ago +\d+ lost", second)
    with RawClient(broker.port) as client:
        client.connect("watch")
        client.subscribe("$SYS/broker/streams/s/consumers/at_risk", options=0)
        while client.take().payload != b"2":  # as of an earlier interval; without a further message `take` fails
            pass
    (broker.directory / "token").write_text("t\n")
    token_file = ["--url", broker.url, "--token-file", str(broker.directory / "token")]
    assert main(["consumers", *token_file]) == 1
    assert main(["consumers", *token_file, "--token", "t"]) == 2
    assert "not both" in capsys.readouterr().err
    assert main(["consumers", "--url", "http://me:s3cret@h"]) == 2
    assert "s3cret" not in capsys.readouterr().err
    address = ["--config", str(broker.config), "--url", broker.url]
    assert main(["consumers", "s", *address, "--forget", "http"]) == 0
    assert main(["consumers", "s", *address, "--forget", "http"]) == 1
    assert "no such consumer" in capsys.readouterr().err
    assert shown(broker).keys() == {"files"}


def test_reports_that_cannot_be_stored(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(config={"streams": {"s": {"filters": ["r/#"]}}})
    (broker.data_dir / "streams" / "s" / "consumers").write_text("in the way")
    assert request(broker, "PUT", "/streams/s/consumers/a", b'{"offsets": {}}') == 503
    DirectoryStorage(str(broker.data_dir), "s").report("a", {0: 1})
    HttpStorage(broker.url, "none").report("a", {0: 1})
    assert json.loads(broker.get("/streams/s/consumers"))["consumers"] == []
