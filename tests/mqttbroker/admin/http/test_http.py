"""The HTTP server: stream files by range up to what is committed, errors, health, and readers that stall."""

from __future__ import annotations

import http.client
import json
import logging
import select
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.http_server import http_server
from support.patience import PATIENCE

from bridge_spark.log.record_batch import iter_batches
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from bridge_spark.source.consumers import MAX_REPORT_BYTES
from mqttbroker import __version__
from mqttbroker.admin.http import application as http_application
from mqttbroker.admin.http import routes as http_routes
from mqttbroker.admin.http import streams as http_streams
from mqttbroker.admin.http.access import access_list
from mqttbroker.config.settings import Http, Settings
from mqttbroker.core.access.policy import AllowAll
from sessions.message import Message

FILE = "00000000000000000000.seg"
OPEN = access_list(Settings(), AllowAll())


def records(count: int, start: int = 0, payload: bytes = b"21.5") -> list[Message]:
    return [Message("sensors/a", payload, 1, False, b"", "dev", (start + index) * 1000, 0) for index in range(count)]


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[StreamLogs]:
    config = StreamConfig("s", ["sensors/#"], 2, segment_bytes=10**9, segment_age=10**12)
    opened = StreamLogs(tmp_path / "streams", [config])
    opened.recover({})
    for start in (0, 10, 20):
        opened.append({("s", 0): records(10, start)})
        opened.committed()
    yield opened
    opened.close()


class Service:
    """A server whose readiness a test sets, and a client for it."""

    def __init__(self, logs: StreamLogs | None, token: str | None = None) -> None:
        self.reasons: list[str] = []
        access = access_list(Settings(http=Http(token=token)), AllowAll())
        self.server = http_server(logs, self.metrics, self.readiness, access)
        self.server.start()

    async def metrics(self) -> bytes:
        return b"messages_total 5\n"

    async def readiness(self) -> list[str]:
        return self.reasons

    def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)
        try:
            connection.request(method, path, headers=headers or {})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def json(self, path: str, status: int = 200) -> Any:
        found, headers, body = self.get(path)
        assert found == status, body
        assert headers["content-type"].startswith("application/json")
        return json.loads(body)


@pytest.fixture
def service(logs: StreamLogs) -> Iterator[Service]:
    made = Service(logs)
    yield made
    made.server.stop()


def content(logs: StreamLogs) -> bytes:
    path, size = logs.committed_file("s", 0, FILE)
    return path.read_bytes()[:size]


def test_streams_and_their_manifest(service: Service, logs: StreamLogs) -> None:
    assert service.json("/streams") == {"streams": ["s"]}
    assert service.json("/streams/s") == {**logs.manifest("s"), "broker_version": __version__}
    first = service.json("/streams/s")["partitions"][0]
    assert first["high_watermark"] == 30 and first["segments"][0]["file"] == FILE


def test_a_whole_file(service: Service, logs: StreamLogs) -> None:
    status, headers, body = service.get(f"/streams/s/0/{FILE}")
    assert (status, body) == (200, content(logs))
    assert headers["accept-ranges"] == "bytes"
    status, headers, body = service.get(f"/streams/s/0/{FILE}", method="HEAD")
    assert (status, headers["content-length"], body) == (200, str(len(content(logs))), b"")


def test_the_index_is_served_too(service: Service, logs: StreamLogs) -> None:
    status, _, body = service.get(f"/streams/s/0/{FILE[:-4]}.idx")
    assert status == 200 and len(body) == 24


def test_ranges(service: Service, logs: StreamLogs) -> None:
    data = content(logs)
    size = len(data)
    for text, start, end in (
        ("0-0", 0, 1),
        ("5-99", 5, 100),
        (f"{size - 1}-", size - 1, size),
        ("100-", 100, size),
        (f"100-{size + 10**6}", 100, size),
        ("-7", size - 7, size),
        (f"-{size + 5}", 0, size),
        (f"0-{size - 1}", 0, size),
    ):
        status, headers, body = service.get(f"/streams/s/0/{FILE}", {"Range": f"bytes={text}"})
        assert (status, body) == (206, data[start:end]), text
        assert headers["content-range"] == f"bytes {start}-{end - 1}/{size}"


@pytest.mark.parametrize(
    "wanted",
    [
        "bytes={size}-",
        "bytes=10000000-",
        "bytes=9-3",
        "lines=1-2",
        "bytes=-0",
        "bytes=-",
        "bytes=0-1,4-5",
        "bytes=x-",
    ],
)
def test_ranges_that_cannot_be_satisfied(service: Service, logs: StreamLogs, wanted: str) -> None:
    size = len(content(logs))
    status, headers, body = service.get(f"/streams/s/0/{FILE}", {"Range": wanted.format(size=size)})
    assert (status, headers["content-range"]) == (416, f"bytes */{size}")
    assert json.loads(body) == {"error": f"bytes 0 to {size - 1} are committed"}


def test_nothing_uncommitted_is_served(service: Service, logs: StreamLogs) -> None:
    data = content(logs)
    logs.append({("s", 0): records(5, 30), ("s", 1): records(5)})
    path, _ = logs.committed_file("s", 0, FILE)
    assert path.stat().st_size > len(data)
    assert service.get(f"/streams/s/0/{FILE}")[2] == data
    past = {"Range": f"bytes={len(data)}-"}
    assert service.get(f"/streams/s/0/{FILE}", past)[0] == 416
    assert service.get(f"/streams/s/1/{FILE}")[0] == 404
    logs.committed()
    status, _, body = service.get(f"/streams/s/0/{FILE}", past)
    assert status == 206 and data + body == content(logs)
    assert service.get(f"/streams/s/1/{FILE}")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/streams/x",
        "/streams/x/offsets?timestamp=0",
        f"/streams/x/0/{FILE}",
        f"/streams/s/7/{FILE}",
        f"/streams/s/-1/{FILE}",
        f"/streams/s/{'9' * 30}/{FILE}",
        f"/streams/s/%C2%B2/{FILE}",
        "/streams/s/0/00000000000000000005.seg",
        "/streams/s/0/high_watermark",
        "/streams/s/0/..%2Fstream.json",
        "/streams/s/0/%2Fetc%2Fpasswd",
        "/nowhere",
    ],
)
def test_unknown_paths_are_404(service: Service, path: str) -> None:
    assert set(service.json(path, 404)) == {"error"}


def test_a_file_that_retention_has_removed_is_404(service: Service, logs: StreamLogs) -> None:
    logs.committed_file("s", 0, FILE)[0].unlink()
    assert "no file" in service.json(f"/streams/s/0/{FILE}", 404)["error"]


def test_methods_that_are_not_allowed(service: Service) -> None:
    status, headers, body = service.get("/streams", method="POST")
    assert status == 405 and "GET" in headers["allow"] and "error" in json.loads(body)


def test_offsets_by_time(service: Service) -> None:
    for timestamp, expected in ((0, 0), (12_000, 12), (12_001, 13), (-5, 0), (10**15, 30)):
        assert service.json(f"/streams/s/offsets?timestamp={timestamp}") == {
            "stream": "s",
            "timestamp_us": timestamp,
            "partitions": [{"partition": 0, "offset": expected}, {"partition": 1, "offset": 0}],
        }
    refused = ("noon", "1.5", "1_0", "%201", "1%20", "+1", "%2B1", "%D9%A1", "--1", "1" * 19)
    for query in ("", "?timestamp=", *(f"?timestamp={text}" for text in refused)):
        assert "microseconds" in service.json(f"/streams/s/offsets{query}", 400)["error"]


def test_a_damaged_segment_is_an_error_of_the_request(service: Service, logs: StreamLogs) -> None:
    path, _ = logs.committed_file("s", 0, FILE)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert "damaged segment" in service.json("/streams/s/offsets?timestamp=12000", 500)["error"]
    assert service.json("/livez") == {"status": "ok"}


def test_health_and_metrics(service: Service) -> None:
    assert service.json("/livez") == {"status": "ok"}
    assert service.json("/readyz") == {"status": "ok"}
    service.reasons.append("the disk is full")
    assert service.json("/readyz", 503) == {"status": "not ready", "reasons": ["the disk is full"]}
    status, headers, body = service.get("/metrics")
    assert (status, body) == (200, b"messages_total 5\n")
    assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_without_streams(tmp_path: Path) -> None:
    service = Service(None)
    try:
        assert service.json("/streams") == {"streams": []}
        assert "no stream" in service.json("/streams/s", 404)["error"]
    finally:
        service.server.stop()


def test_the_token(logs: StreamLogs) -> None:
    service = Service(logs, "sesame")
    try:
        for path in ("/streams", f"/streams/s/0/{FILE}", "/metrics", "/nowhere"):
            for given in (None, "Bearer no", "Basic sesame", "sesame", "Bearer", "Bearer \xff"):
                headers = {"Authorization": given.encode("utf-8").decode("latin-1")} if given else {}
                status, answer, body = service.get(path, headers)
                assert (status, answer["www-authenticate"]) == (401, "Bearer"), (path, given)
                assert "token" in json.loads(body)["error"]
        right = {"Authorization": "bearer sesame"}
        assert service.get("/streams", right)[0] == 200
        assert service.get("/livez")[0] == service.get("/readyz")[0] == 200
    finally:
        service.server.stop()


def test_start_raises_if_the_port_is_in_use(service: Service) -> None:
    second = http_server(None, service.metrics, service.readiness, OPEN, service.server.port)
    with pytest.raises(OSError):
        second.start()
    second.stop()


def test_the_port_is_free_after_stop(logs: StreamLogs) -> None:
    service = Service(logs)
    service.server.stop()
    again = http_server(None, service.metrics, service.readiness, OPEN, service.server.port)
    again.start()
    again.stop()
    again.stop()


def test_ranges_follow_a_growing_file(service: Service, logs: StreamLogs) -> None:
    """A reader that fetches ranges that end anywhere gets every byte once."""
    finished = threading.Event()

    def append() -> None:
        for start in range(30, 630, 3):
            logs.append({("s", 0): records(3, start, bytes(2000))})
            if start % 2:
                logs.rollback()
                logs.append({("s", 0): records(3, start, bytes(1000))})
            logs.committed()
        finished.set()

    writer = threading.Thread(target=append)
    writer.start()
    received = b""
    while True:
        last = finished.is_set()
        wanted = {"Range": f"bytes={len(received)}-{len(received) + 30_000}"}
        status, headers, body = service.get(f"/streams/s/0/{FILE}", wanted)
        assert status in (206, 416)
        if status == 206:
            received += body
        elif last:
            break
    writer.join()
    assert received == content(logs)
    assert list(iter_batches(received))[-1].end_offset == 630


def large(logs: StreamLogs) -> int:
    logs.append({("s", 1): records(40, payload=bytes(500_000))})
    logs.committed()
    return logs.committed_file("s", 1, FILE)[1]


def stalled(service: Service) -> socket.socket:
    """A client that requests a large file and reads only its first bytes."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect(("127.0.0.1", service.server.port))
    client.sendall(f"GET /streams/s/1/{FILE} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert client.recv(12) == b"HTTP/1.1 200"
    return client


def test_stalled_readers_do_not_slow_others(service: Service, logs: StreamLogs) -> None:
    size = large(logs)
    clients = [stalled(service) for _ in range(5)]
    assert len(service.get(f"/streams/s/1/{FILE}")[2]) == size
    assert service.json("/livez") == {"status": "ok"}
    for client in clients:
        client.close()
    assert len(service.get(f"/streams/s/1/{FILE}")[2]) == size


def test_a_stalled_reader_is_disconnected(service: Service, logs: StreamLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_streams, "SLICE_TIMEOUT", 0.05)
    size = large(logs)
    client = stalled(service)
    monkeypatch.setattr(http_streams, "MAX_DOWNLOADS", 1)
    wait_until(lambda: service.get("/streams/s/0/" + FILE)[0] != 503)
    received = 0
    try:
        while data := client.recv(1 << 20):
            received += len(data)
    except ConnectionResetError:
        pass
    client.close()
    assert received < size


def test_a_client_that_reads_no_answers_is_disconnected(service: Service) -> None:
    assert service.get("/livez")[0] == 200
    assert service.server._application is not None
    service.server._application._connections.idle_timeout = 0.1
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", service.server.port))
        client.settimeout(1.0)
        with pytest.raises(OSError) as ended:
            while True:
                with suppress(TimeoutError):  # while the server waits for this client to read
                    client.send(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        assert isinstance(ended.value, ConnectionError)


def test_a_body_that_does_not_arrive_is_408(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_routes, "BODY_TIMEOUT", 0.05)
    with socket.create_connection(("127.0.0.1", service.server.port), 20) as client:
        client.sendall(b"PUT /streams/s/consumers/c HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        assert client.recv(4096).startswith(b"HTTP/1.1 408")


def test_clients_that_send_no_bodies_do_not_keep_others_out(start_broker: Callable[..., BrokerProcess]) -> None:
    access = [{"name": "grafana", "role": "viewer", "streams": ["s"], "token": "t"}]
    broker = start_broker(config={"http": {"max_connections": 5, "access": access}, "streams": {"s": {"filters": ["#"]}}})
    address = ("127.0.0.1", broker.http_port)
    head = "PUT /streams/s/consumers/c HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer t\r\nContent-Length: 23\r\n\r\n{"
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address, 20)) for _ in range(5)]
        for client in clients:
            client.sendall(head.encode())
            client.sendall(b'"offsets"')
        for _ in range(3):
            assert b"mqttbroker_uptime" in broker.get("/metrics", {"Authorization": "Bearer t"})
        closed, _, _ = select.select(clients, [], [], 30)
        assert 0 < len(closed) <= 3
        for client in closed:
            with suppress(ConnectionError):
                assert client.recv(1) == b""
        left = next(client for client in clients if client not in closed)
        left.sendall(b': {"0": 123}}')
        assert left.recv(4096).startswith(b"HTTP/1.1 204")
    assert "Traceback" not in broker.log and "event=defect" not in broker.log


def test_a_body_of_chunks_that_is_too_large_is_413(service: Service) -> None:
    with socket.create_connection(("127.0.0.1", service.server.port), 20) as client:
        client.sendall(b"PUT /streams/s/consumers/c HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.sendall(b"%x\r\n%b\r\n" % (MAX_REPORT_BYTES + 1, b" " * (MAX_REPORT_BYTES + 1)))  # and no end
        assert client.recv(4096).startswith(b"HTTP/1.1 413")


def test_too_many_downloads_are_503(service: Service, logs: StreamLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_streams, "MAX_DOWNLOADS", 1)
    large(logs)
    client = stalled(service)
    status, headers, _ = service.get(f"/streams/s/0/{FILE}")
    assert (status, headers["retry-after"]) == (503, "1")
    assert service.json("/streams")
    client.close()
    wait_until(lambda: service.get(f"/streams/s/0/{FILE}")[0] != 503)


def test_stop_does_not_wait_for_a_stalled_reader(logs: StreamLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_application, "STOP_TIMEOUT", 0.1)
    service = Service(logs)
    large(logs)
    client = stalled(service)
    service.server.stop()
    client.close()
    assert not any(thread.name == "http" for thread in threading.enumerate())


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x00\x01nonsense\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PUT /streams/x/consumers/y HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PUT /streams/x/consumers/y HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Encoding: gzip\r\n\r\nabcde",
    ],
)
def test_malformed_http_is_refused_without_a_stack_in_the_log(start_broker: Callable[..., BrokerProcess], request_bytes: bytes) -> None:
    broker = start_broker(config={"log": {"level": "debug"}, "streams": {"x": {"filters": ["#"]}}})
    with socket.create_connection((broker.host, broker.http_port), timeout=PATIENCE) as sock:
        sock.sendall(request_bytes)
        assert b" 400 " in sock.recv(4096)
        address = ":".join(map(str, sock.getsockname()))
    broker.wait_for_log(f'event=refused client="" address={address} reason="not a valid HTTP request: .*listener=http')
    assert b"ok" in broker.get("/livez")
    broker.terminate()
    assert "Traceback" not in broker.log


PROTECTED = [
    ({"allow_anonymous": False}, True),
    ({"acl_file": "rules"}, True),
    ({"allow_anonymous": "loopback"}, False),
]


@pytest.mark.parametrize(("config", "protected"), PROTECTED)
def test_streams_are_protected_as_anonymous_mqtt_clients_are(
    start_broker: Callable[..., BrokerProcess], tmp_path: Path, config: dict[str, Any], protected: bool
) -> None:
    (tmp_path / "rules").write_text("topic read a/#\n")
    if "acl_file" in config:
        config = {"acl_file": str(tmp_path / "rules")}
    broker = start_broker(config={**config, "streams": {"x": {"filters": ["#"]}}})
    for method, path in (("GET", "/streams"), ("GET", "/streams/x"), ("PUT", "/streams/x/consumers/c")):
        request = urllib.request.Request(broker.url + path, method=method, data=b'{"offsets": {"0": 0}}' if method == "PUT" else None)
        if protected:
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(request, timeout=30)
        else:
            with urllib.request.urlopen(request, timeout=30) as response:
                assert response.status < 300
    assert b"ok" in broker.get("/readyz") and broker.get("/metrics")
    if protected:
        broker.wait_for_log("event=streams_need_token")


def test_token_is_read_from_its_file(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    broker = start_broker(config={"http": {"token_file": str(tmp_path / "token")}})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        broker.get("/metrics")
    assert broker.get("/metrics", {"Authorization": "Bearer s3cret"})


def test_counts_of_refused_requests_are_no_defects() -> None:
    text = "event=refusals_repeated address=%s count=%d"
    record = logging.LogRecord("mqttbroker.admin.http.server.requests", logging.INFO, "", 0, text, ("x", 7), None)
    assert http_application._log_as_event(record) and record.getMessage() == "event=refusals_repeated address=x count=7"
    other = logging.LogRecord("mqttbroker.admin.http.server.requests", logging.ERROR, "", 0, "Unhandled exception", (), None)
    assert http_application._log_as_event(other) and "event=defect in=http" in other.getMessage()
