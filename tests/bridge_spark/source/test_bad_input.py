"""Errors as a Spark user sees them: one line in the exception of `load()` or of the query."""

from __future__ import annotations

import http.server
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from support.broker_process import BrokerProcess
from support.spark_session import StreamWriter, message, spark

from bridge_spark.ingest import run
from bridge_spark.tables.ingest_config import parse_config
from bridge_spark.tables.ingest_session import IngestError, one_line

__all__ = ["spark"]

pytestmark = [pytest.mark.one_build]

TOKEN = "s3cret"
BROKER = {"streams": {"sensors": {"filters": ["sensors/#"], "partitions": 2}}, "http": {"token": TOKEN}}


class _Answer(http.server.BaseHTTPRequestHandler):
    """Not this broker: `/newer` answers like a broker of a later version, other paths with HTML."""

    def log_message(self, *_: object) -> None:
        """No log in a test."""

    def do_GET(self) -> None:
        newer = {"stream": "sensors", "broker_version": "9.1", "format_version": 9, "partitions": []}
        body = json.dumps(newer).encode() if self.path.startswith("/newer") else b"<html>Welcome</html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, str]]]:
    """Sources by name: a sound one, and one for each kind of error."""
    directory = tmp_path_factory.mktemp("data")
    sound = StreamWriter(directory / "sound")
    sound.append(0, [message(n) for n in range(10)])
    short = StreamWriter(directory / "short")
    for _ in range(2):
        short.append(0, [message(n) for n in range(10)])
        short.roll(0)
    short.remove_before(0, 10)
    damaged = StreamWriter(directory / "damaged")
    for _ in range(3):
        damaged.append(0, [message(n) for n in range(10)])
    (segment,) = damaged.segments(0)
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    with (
        BrokerProcess(config=BROKER) as broker,
        socket.socket() as closed,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answer) as other,
    ):
        closed.bind(("127.0.0.1", 0))
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        yield {
            "directory": {"path": str(directory / "sound")},
            "short": {"path": str(directory / "short")},
            "damaged": {"path": str(directory / "damaged")},
            "broker": {"url": broker.url, "token": TOKEN},
            "no token": {"url": broker.url},
            "closed port": {"url": f"http://127.0.0.1:{closed.getsockname()[1]}", "fetch.numRetries": "0"},
            "page": {"url": url},
            "newer": {"url": f"{url}/newer"},
        }
        other.shutdown()


LOADS = [
    ("directory", {"ofset": "1"}, r"option 'ofset': unknown; the options are path, url, stream, .*"),
    ("directory", {"stream": "meters"}, r"option 'stream': no stream 'meters' below '.*/sound' \(there are: sensors\)"),
    (
        "directory",
        {"startingOffsets": "{0: 1}"},
        r"option 'startingOffsets': '\{0: 1\}' is neither earliest, latest nor JSON like \{\"0\": 123\}",
    ),
    ("directory", {"startingOffsets": '{"7": 1}'}, r"option 'startingOffsets': there is no partition 7, only 0 to 0"),
    ("directory", {"url": "http://127.0.0.1"}, r"option 'url': cannot be given together with 'path'"),
    ("directory", {"path": "/no/such/directory"}, r"option 'path': '/no/such/directory' is not a directory"),
    ("broker", {"stream": "meters"}, r"option 'stream': http://127.0.0.1:\d+ has no stream 'meters' \(there are: sensors\)"),
    ("broker", {"token": "guessed"}, r"option 'token': http://127.0.0.1:\d+ refused it \(401\)"),
    ("no token", {}, r"http://127.0.0.1:\d+ wants a 'token' \(401\)"),
    (
        "closed port",
        {},
        r"http://127.0.0.1:\d+/streams/sensors cannot be read after one try: Connection refused: "
        r"is this the broker's HTTP address, and is it running\?",
    ),
    ("page", {}, r"http://127.0.0.1:\d+/streams/sensors did not answer with JSON: is this the broker's HTTP address\?"),
    (
        "newer",
        {},
        r"http://\S+/streams/sensors: the broker, version 9.1, keeps streams in format 9, this source knows "
        r"format \d+: install the broker's version of mqttbroker for Spark too",
    ),
]
READS = [
    (
        "short",
        {"startingOffsets": '{"0": 4}'},
        r"partition 0: retention has removed the offsets 4 to 9 \(set failOnDataLoss=false to go on without them\)",
    ),
    ("damaged", {"startingOffsets": "earliest"}, r"\S*/damaged/streams/sensors/0/0{20}\.seg is corrupt at offset 10: wrong checksum"),
]


def said(error: BaseException) -> str:
    line = one_line(error)
    text = str(error)
    assert line in text.splitlines()[0] or line in text.split("PythonException: ")[-1].splitlines()[1], text
    assert "\n" not in line
    return line


@pytest.mark.parametrize("number", range(len(LOADS)))
def test_load_refuses(number: int, places: dict[str, dict[str, str]], spark: SparkSession) -> None:
    """Alternates batch and stream: both are refused by the same code."""
    place, changes, line = LOADS[number]
    options = {"stream": "sensors", **places[place], **changes}
    reader: Any = spark.readStream if number % 2 else spark.read
    with pytest.raises(Exception) as caught:
        reader.format("mqtt").options(**options).load()
    assert re.fullmatch("mqtt source: " + line, said(caught.value))


@pytest.mark.parametrize("streaming", [False, True], ids=["batch", "stream"])
@pytest.mark.parametrize(("place", "options", "line"), READS, ids=["expired", "corrupt"])
def test_a_failed_read_is_one_line(
    place: str,
    options: dict[str, str],
    line: str,
    streaming: bool,
    places: dict[str, dict[str, str]],
    spark: SparkSession,
    tmp_path: Path,
) -> None:
    options = {"stream": "sensors", **places[place], **options}
    with pytest.raises(Exception) as caught:
        if streaming:
            spark.readStream.format("mqtt").options(**options).load().writeStream.format("noop").option(
                "checkpointLocation", str(tmp_path)
            ).trigger(availableNow=True).start().awaitTermination()
        else:
            spark.read.format("mqtt").options(**options).load().collect()
    assert re.fullmatch("mqtt source: " + line, said(caught.value))


@pytest.mark.parametrize(
    ("options", "schema", "line"),
    [
        ({"endingOffsets": "latest"}, "topic string", "option 'endingOffsets': is for batch reads: a stream has no end"),
        ({}, "topic string, value long", "column 'value' needs the option 'payloadFormat'"),
    ],
    ids=["end", "schema"],
)
def test_options_and_schemas_that_a_stream_refuses(
    options: dict[str, str],
    schema: str,
    line: str,
    places: dict[str, dict[str, str]],
    spark: SparkSession,
    tmp_path: Path,
) -> None:
    """Spark creates the stream reader in the query's own thread; the error of the source is the only one."""
    options = {"stream": "sensors", **places["directory"], **options}
    with pytest.raises(Exception) as caught:
        spark.readStream.format("mqtt").options(**options).schema(schema).load().writeStream.format("noop").option(
            "checkpointLocation", str(tmp_path)
        ).start().awaitTermination()
    assert said(caught.value) == f"mqtt source: {line}"
    assert "UnboundLocalError" not in str(caught.value)


def test_the_ingest_job_prints_the_line_alone(places: dict[str, dict[str, str]], spark: SparkSession, tmp_path: Path) -> None:
    table = {"stream": "sensors", "schema": "n long", "output": str(tmp_path / "out")}
    config = parse_config({"source": places["broker"] | {"token": "guessed"}, "tables": {"t": table}})
    with pytest.raises(IngestError) as caught:
        run(config, once=True, session=spark)
    assert str(caught.value) == f"ingest: tables.t: mqtt source: option 'token': {places['broker']['url']} refused it (401)"
