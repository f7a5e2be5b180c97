"""The sources `mqtt.retained` and `mqtt.sessions` against real brokers, in-process and in a real session."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from support.broker_process import BrokerProcess
from support.raw_client import RawClient
from support.spark_session import spark

from bridge_spark.source import state_pages
from bridge_spark.source.http_client import HttpClient
from bridge_spark.source.storage import StreamError
from bridge_spark.state_datasource import RetainedDataSource, SessionsDataSource
from bridge_spark.tables.ingest_session import one_line
from mqttbroker.admin.control.slices import MAX_CURSORS
from mqttbroker.codec.properties import Properties

__all__ = ["spark"]

pytestmark = [pytest.mark.one_build]

TOKEN = "t-viewer"
ACCESS = [
    {"name": "viewer", "role": "viewer", "token": TOKEN},
    {"name": "reader", "role": "reader", "streams": ["*"], "token": "t-reader"},
]
State = type[RetainedDataSource] | type[SessionsDataSource]


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(config={"http": {"access": ACCESS}}) as process:
        yield process


def options(broker: BrokerProcess, **more: str) -> dict[str, str]:
    return {"url": broker.url, "token": TOKEN, **more}


def rows(kind: State, given: dict[str, str]) -> list[dict[str, Any]]:
    """The rows, read as Spark reads them but in this process; each batch has Spark's Arrow schema."""
    found = kind(given)
    schema = found.schema()
    assert not isinstance(schema, str)
    read: list[dict[str, Any]] = []
    reader = found.reader(schema)
    for partition in reader.partitions():
        for batch in reader.read(partition):
            assert batch.schema.equals(to_arrow_schema(schema, timezone="UTC"))  # type: ignore[union-attr]
            read += batch.to_pylist()  # type: ignore[union-attr]
    return read


def retain(broker: BrokerProcess, topics: list[str], payload: bytes = b"x") -> None:
    with RawClient(broker.port) as client:
        client.connect("")
        for topic in topics:
            client.publish(topic, payload, 1, retain=True)


# --- rows -----------------------------------------------------------------------------------------------------------


def test_every_column_of_retained_messages(broker: BrokerProcess, connect: Callable[..., RawClient]) -> None:
    properties = Properties()
    properties.payload_format_indicator = 1
    properties.content_type = "text/plain"
    properties.response_topic = "answers"
    properties.correlation_data = b"\0\xff"
    properties.user_properties = [("a", "1"), ("b", ""), ("a", "2")]
    properties.message_expiry_interval = 3600
    client = connect("publisher")
    client.publish("columns/all/ü", "°C".encode(), 2, retain=True, properties=properties)
    client.publish("columns/none", b"\0\xff", 0, retain=True)
    client.ping()
    topics = [row["topic"] for row in rows(RetainedDataSource, options(broker))]
    assert topics and not [topic for topic in topics if topic.startswith("$")]
    one, other = rows(RetainedDataSource, options(broker, filter="columns/#", includeUserProperties="true"))
    full, bare = (one, other) if one["qos"] == 2 else (other, one)
    received = full.pop("timestamp")
    assert abs(datetime.now(UTC) - received) < timedelta(minutes=1)
    assert abs(full.pop("expires_at") - received - timedelta(hours=1)) < timedelta(seconds=2)
    assert full == {
        "topic": "columns/all/ü",
        "payload": "°C".encode(),
        "qos": 2,
        "client_id": "publisher",
        "payload_format_indicator": 1,
        "content_type": "text/plain",
        "response_topic": "answers",
        "correlation_data": b"\0\xff",
        "user_properties": [("a", "2"), ("b", "")],
        "user_property_list": [{"key": key, "value": value} for key, value in properties.user_properties],
    }
    assert bare.pop("timestamp") is not None
    assert bare == {
        "topic": "columns/none",
        "payload": b"\0\xff",
        "qos": 0,
        "client_id": "publisher",
        "expires_at": None,
        "payload_format_indicator": None,
        "content_type": None,
        "response_topic": None,
        "correlation_data": None,
        "user_properties": [],
        "user_property_list": [],
    }


def test_every_column_of_sessions(broker: BrokerProcess, connect: Callable[..., RawClient]) -> None:
    lasting = Properties()
    lasting.session_expiry_interval = 600
    away = connect("session-away", properties=lasting)
    away.subscribe("to/sessions", "also/this")
    away.disconnect()
    here = connect("session-here", version=4)
    here.publish("to/sessions", b"12345", 1)
    first, second = rows(SessionsDataSource, options(broker, prefix="session-"))
    assert first.pop("disconnected_at") > second["connected_at"] - timedelta(minutes=1)
    assert first.pop("queued_bytes") > 5
    assert first == {
        "client_id": "session-away",
        "username": None,
        "protocol": "5.0",
        "persistent": True,
        "connected": False,
        "address": None,
        "listener": None,
        "connected_at": None,
        "expiry_interval": 600,
        "subscriptions": 2,
        "queued_messages": 1,
        "in_flight": 0,
    }
    assert abs(datetime.now(UTC) - second["connected_at"]) < timedelta(minutes=1)
    assert second["address"].startswith("127.0.0.1:") and second["listener"].startswith("127.0.0.1:")
    assert (second["protocol"], second["connected"], second["disconnected_at"]) == ("3.1.1", True, None)
    connected = rows(SessionsDataSource, options(broker, prefix="session-", connected="TRUE", address="127.0.0.0/8"))
    assert [row["client_id"] for row in connected] == ["session-here"]


# --- pages ----------------------------------------------------------------------------------------------------------


@contextmanager
def before_page(number: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Read pages of three rows, and call ``act`` before the first request of this page.  Gives the paths requested."""
    paths: list[str] = []
    send = HttpClient.get_json

    def get_json(client: HttpClient, path: str) -> Any:
        if "cursor" in path:
            paths.append(path)
            if len(paths) == number - 1:
                act()
        return send(client, path)

    with monkeypatch.context() as patch:
        patch.setattr(state_pages, "PAGE_ROWS", 3)
        patch.setattr(HttpClient, "get_json", get_json)
        yield paths


TOPICS = [f"paged/{number}" for number in range(10)]


def test_retained_messages_are_read_again_when_the_broker_has_forgotten_the_cursor(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    retain(broker, TOPICS)
    viewer = HttpClient(broker.url, TOKEN)

    def take_all_cursors() -> None:
        for _ in range(MAX_CURSORS):
            assert viewer.get_json("/api/v1/retained?limit=1")["next_cursor"]

    with before_page(3, take_all_cursors, monkeypatch) as paths:
        found = rows(RetainedDataSource, options(broker, filter="paged/+"))
    assert sorted(row["topic"] for row in found) == TOPICS
    assert len(paths) == 2 + 3  # the second request of a page failed, then the other three pages


def test_retained_messages_are_read_again_when_an_answer_is_lost(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker has given the page, so the same request must not be answered with the one after it."""
    retain(broker, TOPICS)
    viewer = HttpClient(broker.url, TOKEN)
    with before_page(2, lambda: viewer.get_json(paths[-1]), monkeypatch) as paths:
        found = rows(RetainedDataSource, options(broker, filter="paged/+"))
    assert sorted(row["topic"] for row in found) == TOPICS


@pytest.mark.parametrize("kind", [RetainedDataSource, SessionsDataSource], ids=["retained", "sessions"])
def test_a_read_survives_a_restart_of_the_broker(
    kind: State, start_broker: Callable[..., BrokerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker(config={"http": {"access": ACCESS}})
    retain(broker, TOPICS)
    lasting = Properties()
    lasting.session_expiry_interval = 600
    for topic in TOPICS:
        with RawClient(broker.port) as client:
            client.connect(topic, properties=lasting)
            client.subscribe("any")  # SUBACK follows the commit of the session, which CONNACK does not wait for
            client.disconnect()
    with before_page(3, lambda: broker.restart(kill=True), monkeypatch):
        if kind is RetainedDataSource:
            found = [row["topic"] for row in rows(kind, options(broker, filter="paged/+"))]
        else:
            found = [row["client_id"] for row in rows(kind, options(broker, prefix="paged/"))]
    assert sorted(found) == TOPICS


def test_a_list_that_is_lost_again_and_again_is_one_line(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    retain(broker, TOPICS)
    viewer = HttpClient(broker.url, TOKEN)
    monkeypatch.setattr(state_pages, "PAGE_ROWS", 3)
    ask = HttpClient.get_json

    def get_json(client: HttpClient, path: str) -> Any:
        return ask(viewer, path) and ask(client, path) if "cursor" in path else ask(client, path)

    monkeypatch.setattr(HttpClient, "get_json", get_json)
    with pytest.raises(StreamError, match="/api/v1/retained lost the place in its list 10 times: the broker restarts"):
        rows(RetainedDataSource, options(broker, filter="paged/+"))


def test_large_payloads_are_read_by_pages_of_bytes(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = bytes(range(256)) * 3200  # 800 KiB, twelve of them are more than stays in memory
    topics = [f"large/{number}" for number in range(12)]
    retain(broker, topics, payload)
    pages: list[int] = []
    ask = HttpClient.get_json

    def get_json(client: HttpClient, path: str) -> Any:
        answer = ask(client, path)
        if "retained" in path:
            pages.append(len(answer["items"]))
        return answer

    monkeypatch.setattr(HttpClient, "get_json", get_json)
    found = rows(RetainedDataSource, options(broker, filter="large/#"))
    assert sorted(row["topic"] for row in found) == sorted(topics) and {row["payload"] for row in found} == {payload}
    assert max(pages) == 2 and sum(pages) == 12


# --- in Spark -------------------------------------------------------------------------------------------------------


def test_each_action_and_each_query_reads_anew(broker: BrokerProcess, spark: SparkSession) -> None:
    retain(broker, ["anew/1", "anew/2"], b"10")
    given = options(broker, filter="anew/#")
    frame = spark.read.format("mqtt.retained").options(**given).load()
    clause = ", ".join(f"{key} '{value}'" for key, value in given.items())
    spark.sql(f"CREATE TEMPORARY VIEW anew USING `mqtt.retained` OPTIONS ({clause})")
    try:
        assert frame.count() == spark.sql("SELECT * FROM anew WHERE payload = X'3130'").count() == 2
        retain(broker, ["anew/1"], b"")
        retain(broker, ["anew/3", "anew/4"], b"10")
        assert sorted(row.topic for row in frame.collect()) == ["anew/2", "anew/3", "anew/4"]
        assert spark.sql("SELECT * FROM anew WHERE payload = X'3130'").count() == 3
    finally:
        spark.catalog.dropTempView("anew")


def test_a_table_of_the_catalog(broker: BrokerProcess, spark: SparkSession, connect: Callable[..., RawClient], tmp_path: Any) -> None:
    (tmp_path / "token").write_text(TOKEN)
    connect("tabled-1")
    spark.sql(f"CREATE TABLE state USING mqtt.sessions OPTIONS (url '{broker.url}', tokenFile '{tmp_path / 'token'}', prefix 'tabled-')")
    try:
        query = "SELECT count(*) FROM state WHERE connected"
        assert spark.sql(query).first()[0] == 1  # type: ignore[index]
        connect("tabled-2")
        assert spark.sql(query).first()[0] == 2  # type: ignore[index]
        found = spark.sql("SELECT client_id FROM state WITH (contains = '-2')").collect()
        assert [row.client_id for row in found] == ["tabled-2"]
    finally:
        spark.sql("DROP TABLE state")


class _OlderBroker(http.server.BaseHTTPRequestHandler):
    """A broker without the API."""

    def log_message(self, *_: object) -> None:
        """No log in a test."""

    def do_GET(self) -> None:
        body = json.dumps({"error": "no such path"}).encode()
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def older() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _OlderBroker) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


REFUSED: list[tuple[State, dict[str, str], str]] = [
    (RetainedDataSource, {"filtr": "a"}, r"option 'filtr': unknown, did you mean 'filter'\?"),
    (RetainedDataSource, {"stream": "s"}, r"option 'stream': unknown; the options of mqtt\.retained are url, .*, filter.*"),
    (SessionsDataSource, {"filter": "a"}, r"option 'filter': unknown; the options of mqtt\.sessions are url, .*"),
    (RetainedDataSource, {"filter": "a/#/b"}, r"option 'filter': 'a/#/b' is not an MQTT topic filter"),
    (RetainedDataSource, {"filter": "$share/g/a"}, r"option 'filter': a shared subscription means nothing here: .*"),
    (RetainedDataSource, {"url": "mqtt://h"}, r"option 'url': 'mqtt://h' is not an address like http://HOST:PORT"),
    (SessionsDataSource, {"connected": "yes"}, r"option 'connected': 'yes' is neither true nor false"),
    (SessionsDataSource, {"address": "here"}, r"option 'address': is not an address or network: .*'here'.*"),
    (RetainedDataSource, {"token": "guessed"}, r"option 'token': http://\S+ refused it \(401\)"),
    (RetainedDataSource, {"token": "t-reader"}, r"option 'token': http://\S+ refused it \(403\): .*; reader has reader"),
]


@pytest.mark.parametrize(("kind", "given", "line"), REFUSED)
def test_a_bad_option_is_one_line(kind: State, given: dict[str, str], line: str, broker: BrokerProcess) -> None:
    with pytest.raises(Exception) as caught:
        kind(options(broker, **given)).schema()
    assert re.fullmatch(f"mqtt source: {line}", str(caught.value))


def test_a_broker_without_the_api_and_a_missing_address(older: str) -> None:
    with pytest.raises(StreamError, match=f"^mqtt source: {older} has no /api/v1: the broker is older than this source"):
        RetainedDataSource({"url": older})
    with pytest.raises(Exception, match="^mqtt source: option 'url': missing: give the broker's HTTP address$"):
        SessionsDataSource({}).schema()


def test_spark_shows_the_line_first(broker: BrokerProcess, spark: SparkSession, tmp_path: Any) -> None:
    def stream() -> None:
        spark.readStream.format("mqtt.retained").options(**options(broker)).load().writeStream.format("noop").option(
            "checkpointLocation", str(tmp_path)
        ).start().awaitTermination()

    def column() -> None:
        spark.read.format("mqtt.retained").options(**options(broker)).schema("topic int").load().collect()

    def write() -> None:
        spark.range(1).write.format("mqtt.retained").options(**options(broker)).mode("append").save()

    refused: list[tuple[Callable[[], Any], str]] = [
        (column, "mqtt source: column 'topic' is string, not int: convert it after reading"),
        (stream, "mqtt source: mqtt.retained is for batch reads: read a stream of the broker with format('mqtt')"),
        (write, "mqtt sink: mqtt.retained is for reading: write with format('mqtt')"),
    ]
    for act, line in refused:
        with pytest.raises(Exception) as caught:
            act()
        assert one_line(caught.value) == line
        assert line in "\n".join(str(caught.value).splitlines()[:2])
