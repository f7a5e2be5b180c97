"""Reading a stream over HTTP: the broker's own server, and servers that misbehave on purpose."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from spark_session import START_US, StreamWriter, message, spark
from test_datasource import places, rows

from bridge_spark import http_storage
from bridge_spark.datasource import MqttDataSource
from bridge_spark.storage import SegmentGone, StreamError, UnknownStream
from bridge_spark.stream_log import StreamConfig, StreamLogs
from mqttbroker.http import HttpServer

__all__ = ["spark"]


class FaultyServer(http.server.ThreadingHTTPServer):
    """Serves the files of a `StreamWriter`; ``faults`` are used up one per request of a segment."""

    daemon_threads = True

    def __init__(self, writer: StreamWriter) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.writer = writer
        self.faults: list[str] = []
        self.ranges: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def log_message(self, *_: object) -> None:
        """Nothing to say in a test."""

    def do_GET(self) -> None:
        parts = self.path.strip("/").split("/")
        if len(parts) == 2:
            self._answer(200, json.dumps(self.server.writer.manifest()).encode())
            return
        path = self.server.writer.directory.joinpath(*parts[2:])
        if path.suffix != ".seg":
            self._answer(404, b"")
            return
        fault = self.server.faults.pop(0) if self.server.faults else ""
        asked = self.headers["Range"]
        self.server.ranges.append(asked)
        start, end = (int(number) for number in asked.removeprefix("bytes=").split("-"))
        body = path.read_bytes()[start:end + 1]
        if fault == "busy":
            self._answer(503, b"")
        elif fault == "close":
            self.close_connection = True
        elif fault == "half":
            self._answer(206, body, body[:len(body) // 2])
            self.close_connection = True
        else:
            self._answer(206, body)

    def _answer(self, status: int, body: bytes, sent: bytes | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if sent is None else sent)


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setattr(http_storage, "FIRST_WAIT_S", 0.001)
    writer = StreamWriter(tmp_path)
    for number in range(10):
        writer.append(0, [message(number * 100 + n) for n in range(100)])
    with FaultyServer(writer) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[StreamLogs]:
    found = StreamLogs(tmp_path / "streams", [StreamConfig("sensors", ["#"], partitions=2, segment_bytes=8192)])
    found.recover({})
    for number in range(40):
        found.append({("sensors", p): [message(number * 5 + n, f"sensors/{p}") for n in range(5)] for p in (0, 1)})
        found.sync()
        found.committed()
    yield found
    found.close()


@pytest.fixture
def broker_url(logs: StreamLogs) -> Iterator[str]:
    server = HttpServer("127.0.0.1", 0, logs, lambda: b"", list, token="s3cret")
    server.start()
    yield f"http://127.0.0.1:{server.port}"
    server.stop()


def rows_over(url: str, **options: str) -> list[dict[str, Any]]:
    found = MqttDataSource({"url": url, "stream": "sensors", **options})
    reader = found.reader(found.schema())
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def test_the_same_rows_as_from_the_directory(broker_url: str, tmp_path: Path) -> None:
    for options in ({}, {"filter": "sensors/1"}, {"startingOffsets": '{"0": 57, "1": 199}'},
                    {"startingTimestamp": str(START_US // 1000 + 120)}):
        found = rows_over(broker_url, token="s3cret", **options)
        assert found == rows(tmp_path, **options)
    assert places(found) == [(partition, offset) for partition in (0, 1) for offset in range(120, 200)]


def test_a_wrong_or_missing_token(broker_url: str) -> None:
    with pytest.raises(StreamError, match="option 'token': .* refused it"):
        rows_over(broker_url, token="wrong")
    with pytest.raises(StreamError, match="wants a 'token'"):
        rows_over(broker_url)


def test_an_unknown_stream_and_a_file_that_is_gone(broker_url: str) -> None:
    with pytest.raises(UnknownStream, match=r"has no stream 'meters' \(there are: sensors\)"):
        MqttDataSource({"url": broker_url, "stream": "meters", "token": "s3cret"})
    storage = http_storage.HttpStorage(broker_url, "sensors", "s3cret")
    with pytest.raises(SegmentGone):
        storage.read(0, "00000000000000009999.seg", 0, 10)
    storage.close()


def test_a_broken_range_is_continued_where_it_stopped(faulty: FaultyServer) -> None:
    faulty.faults = ["half", "busy", "half", "close"]
    assert places(rows_over(faulty.url)) == [(0, offset) for offset in range(1000)]
    starts = [int(asked.removeprefix("bytes=").split("-")[0]) for asked in faulty.ranges]
    assert starts[0] == 0 and 0 < starts[1] == starts[2] < starts[3] == starts[4]
    assert len({asked.split("-")[1] for asked in faulty.ranges}) == 1


def test_a_broker_that_stays_away_is_given_up(faulty: FaultyServer) -> None:
    faulty.faults = ["busy"] * 100
    with pytest.raises(StreamError, match=r"0{20}\.seg cannot be read after 6 tries: 503"):
        rows_over(faulty.url)


def test_a_place_that_is_no_broker(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulty.writer, "manifest", lambda: {"hello": "world"})
    with pytest.raises(StreamError, match="did not answer with a stream's manifest"):
        rows_over(faulty.url)


@pytest.mark.timeout(180)
def test_spark_reads_over_http(spark: SparkSession, broker_url: str) -> None:
    found = spark.read.format("mqtt").options(url=broker_url, stream="sensors", token="s3cret").load()
    assert found.where("topic = 'sensors/1'").count() == 200
    with pytest.raises(Exception, match="option 'token': .* refused it"):
        spark.readStream.format("mqtt").options(url=broker_url, stream="sensors", token="no").load()
