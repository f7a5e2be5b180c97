"""The HTTP client against servers that interrupt, stall, send wrong answers or are no broker."""

from __future__ import annotations

import http.client
import http.server
import json
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.raw_client import RawClient

from bridge_spark.log.stream_config import FORMAT_VERSION
from bridge_spark.source import http_client
from bridge_spark.source.directory_storage import DirectoryStorage
from bridge_spark.source.http_client import HttpClient, HttpError, NotFound
from bridge_spark.source.storage import StreamError, parse_manifest

pytestmark = pytest.mark.one_build
PATH = "/streams/s/0/00000000000000000000.seg"


class Server(http.server.ThreadingHTTPServer):
    """Serves ranges of ``content``; each request consumes one of ``faults``."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = content
        self.faults: list[str] = []
        self.ranges: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.over = threading.Event()

    def handle_error(self, *_: object) -> None:
        """Ignore clients that disconnect."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        """No log in a test."""

    def do_GET(self) -> None:
        content = self.server.content
        asked = self.headers["Range"] or f"bytes=0-{len(content) - 1}"
        self.server.ranges.append(asked)
        first, last = map(int, asked.removeprefix("bytes=").split("-"))
        fault, _, number = (self.server.faults.pop(0) if self.server.faults else "").partition(" ")
        if fault == "status":
            status, _, after = number.partition(" ")
            self._answer(int(status), b"", "", after=after)
        elif fault == "whole":
            self._answer(200, content, "")
        elif fault == "shifted":
            self._answer(206, content[first + 1 : last + 2], f"bytes {first + 1}-{last + 1}/{len(content)}")
        elif fault == "unnamed":
            self._answer(206, content[first + 1 : last + 2], "")
        elif fault == "longer":
            self._answer(206, content[first : last + 1] + b"x" * int(number), f"bytes {first}-{last}/{len(content)}")
        elif fault == "shorter":
            last = max(first, last - int(number))
            self._answer(206, content[first : last + 1], f"bytes {first}-{last}/{len(content)}")
        else:
            self._answer(206, content[first : last + 1], f"bytes {first}-{last}/{len(content)}", fault, number)

    def _answer(self, status: int, body: bytes, place: str, fault: str = "", number: str = "", after: str = "") -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n" + (f"Retry-After: {after}\r\n" if after else "")
        answer = (head + (f"Content-Range: {place}\r\n" if place else "") + "\r\n").encode() + body
        if fault:
            self.close_connection = True
            answer = answer[: int(number)]
        self.wfile.write(answer)
        if fault == "stall":
            self.server.over.wait(20)
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(http_client, "MAX_WAIT_S", 0.001)
    with Server(random.Random(1).randbytes(600_000)) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield found
        found.over.set()
        found.shutdown()
        thread.join()


@pytest.mark.parametrize("seed", range(5))
def test_every_byte_arrives_once_despite_faults(server: Server, seed: int) -> None:
    dice = random.Random(seed)
    kinds = ("cut", "reset", "stall", "status 500", "status 503", "status 429", "shifted", "unnamed", "longer", "shorter", "")
    for _ in range(10):
        faults = [dice.choice(kinds) for _ in range(dice.randrange(5))]
        server.faults = [kind if " " in kind or not kind else f"{kind} {int(10 ** dice.uniform(0, 5.8))}" for kind in faults]
        client = HttpClient(server.url, timeout_s=0.25)
        position = dice.randrange(len(server.content))
        length = dice.randrange(len(server.content) - position + 1)
        for first, size in ((position, length), (0, 10)):
            assert client.get(PATH, first, size) == server.content[first : first + size], (seed, faults)
        client.close()


def test_an_interrupted_range_continues_and_progress_resets_the_retries(server: Server) -> None:
    server.faults = ["cut 50000"] * 12
    client = HttpClient(server.url, retries=1)
    assert client.get(PATH, 7, 500_000) == server.content[7:500_007]
    starts = [int(asked.removeprefix("bytes=").split("-")[0]) for asked in server.ranges]
    assert starts[0] == 7 and sorted(set(starts)) == starts and len(starts) > 10
    assert {asked.split("-")[1] for asked in server.ranges} == {"500006"}
    client.close()


GIVEN_UP = [
    ("status 500", "cannot be read after 3 tries: 500 X"),
    ("stall 20", "cannot be read after 3 tries: nothing came for 0.25 s: is this the broker's HTTP address"),
    ("cut 0", "cannot be read after 3 tries: Remote end closed connection without response"),
    ("shifted", r"after 3 tries: asked for bytes 0-99 it answered with 'bytes 1-100/600000'"),
    ("unnamed", r"after 3 tries: asked for bytes 0-99 it answered with 'some bytes'"),
    ("whole", "answered with the whole file instead of a range of it: does a proxy"),
    ("status 416", "answered 416 X: is this the broker's HTTP address"),
    ("status 302", r"answered 302 X \(None\): is this"),
    ("status 404", "answered 404 X: is this the broker's HTTP address"),
]


@pytest.mark.parametrize(("fault", "reason"), GIVEN_UP, ids=[fault for fault, _ in GIVEN_UP])
def test_permanent_failures_are_one_line(server: Server, fault: str, reason: str) -> None:
    server.faults = [fault] * 10
    client = HttpClient(server.url, retries=2, timeout_s=0.25)
    with pytest.raises(HttpError, match=reason) as caught:
        client.get(PATH, 0, 100)
    assert "\n" not in str(caught.value) and server.url in str(caught.value)
    assert len(server.ranges) == (3 if "3 tries" in reason else 1)
    server.faults = []
    assert client.get(PATH, 0, 100) == server.content[:100]
    client.close()


@pytest.mark.parametrize(
    ("faults", "waits"),
    [
        (["status 503 3"], [3.0]),
        (["status 429 2", "status 503", "status 503 1"], [2.0, None, 1.0]),
        (["status 503 3600"], [10.0]),
        (["status 503 0", "status 503 Fri, 31 Dec 2027 23:59:59 GMT", "status 503 -1"], [None, None, None]),
        (["status 404 3"], []),
    ],
)
def test_retry_after_is_respected(server: Server, monkeypatch: pytest.MonkeyPatch, faults: list[str], waits: list[float | None]) -> None:
    """None: the client's own wait, which starts at a millisecond and does not include an earlier Retry-After."""
    monkeypatch.setattr(http_client, "MAX_WAIT_S", 10.0)
    waited: list[float] = []
    monkeypatch.setattr(http_client, "time", SimpleNamespace(sleep=waited.append))  # other threads keep their own sleep
    client = HttpClient(server.url, retry_interval_s=0.001)
    server.faults = faults.copy()
    if waits:
        assert client.get(PATH, 0, 100) == server.content[:100]
    else:
        with pytest.raises(HttpError, match="404"):
            client.get(PATH, 0, 100)
    assert [None if 0 < wait < 0.1 else wait for wait in waited] == waits
    client.close()


def test_connection_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    with pytest.raises(
        HttpError,
        match=rf"http://127\.0\.0\.1:{port}/streams cannot be read after one try: "
        rf"Connection refused: is this the broker's HTTP address, and is it running",
    ):
        HttpClient(f"http://127.0.0.1:{port}", retries=0).get_json("/streams")


@pytest.mark.parametrize(("retries", "least", "most"), [(http_client.PATIENT_RETRIES, 70.0, 90.0), (http_client.RETRIES, 1.5, 5.0)])
def test_retries_outlast_a_restart_of_a_minute(retries: int, least: float, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    for spread in (0.5, 1.5):
        waited: list[float] = []
        monkeypatch.setattr(http_client, "time", SimpleNamespace(sleep=waited.append))
        monkeypatch.setattr(http_client, "random", SimpleNamespace(uniform=lambda low, high, spread=spread: spread))
        with pytest.raises(HttpError, match=f"cannot be read after {retries + 1} tries"):
            HttpClient(f"http://127.0.0.1:{port}", retries=retries).get_json("/streams")
        assert least <= sum(waited) <= most


def test_an_answer_that_is_not_json(server: Server) -> None:
    with pytest.raises(HttpError, match="did not answer with JSON: is this the broker's HTTP address"):
        server.faults = ["whole"]
        HttpClient(server.url).get_json("/streams")


# --- the broker itself ----------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return CertificateFiles(tmp_path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_WAIT_S", 0.05)


def test_tls_trust_and_tokens(start_broker: Callable[..., BrokerProcess], files: CertificateFiles, tmp_path: Path, quick: None) -> None:
    config = {"http": {"certfile": str(files.certfile), "keyfile": str(files.keyfile), "token": "s3cret"}}
    broker = start_broker(config=config)
    url, ca_file = f"https://localhost:{broker.http_port}", str(files.cafile)
    assert HttpClient(url, "s3cret", ca_file).get_json("/streams") == {"streams": []}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    missing, nonsense = str(tmp_path / "none.pem"), tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    for client, reason in (
        (
            HttpClient(url, "wrong", str(CertificateFiles(elsewhere).cafile)),
            "certificate is not to be trusted: .*'caFile'",
        ),
        (HttpClient(url, "s3cret"), "certificate is not to be trusted: .*'caFile'"),
        (HttpClient(url, "s3cret", missing), r"option 'caFile': .*none\.pem: No such file"),
        (HttpClient(url, "s3cret", str(nonsense)), r"option 'caFile': .*nonsense\.pem holds no certificates"),
        (HttpClient(url.replace("https", "http"), "s3cret"), "speaks TLS there: begin the address with https://"),
        (HttpClient(f"https://localhost:{broker.port}", "s3cret"), "cannot be read|does not speak TLS"),
        (HttpClient(f"http://localhost:{broker.port}", "s3cret"), "is this the broker's HTTP address"),
    ):
        with pytest.raises(HttpError, match=reason) as caught:
            client.get_json("/streams")
        assert "\n" not in str(caught.value)
    with pytest.raises(HttpError, match="option 'token': .* refused it"):
        HttpClient(url, "wrong", ca_file).get_json("/streams")
    with pytest.raises(HttpError, match="wants a 'token'"):
        HttpClient(url, None, ca_file).get_json("/streams")


def test_https_to_a_plain_broker(broker: BrokerProcess) -> None:
    with pytest.raises(HttpError, match="does not speak TLS there: begin the address with http://"):
        HttpClient(f"https://127.0.0.1:{broker.http_port}").get_json("/streams")
    with pytest.raises(NotFound, match="404 Not Found: no stream 'none'"):
        HttpClient(broker.url).get_json("/streams/none")


def test_a_broker_restart_during_a_read(start_broker: Callable[..., BrokerProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_WAIT_S", 0.2)
    broker = start_broker(config={"streams": {"s": {"filters": ["r/#"], "partitions": 1}}})
    with RawClient(broker.port) as publisher:
        publisher.connect("c")
        for number in range(8):
            publisher.publish("r", bytes([number]) * 900_000, 1)
    data = next(broker.data_dir.glob("streams/s/0/*.seg")).read_bytes()
    client = HttpClient(broker.url, retries=60)
    read = http.client.HTTPResponse.readinto
    reads: list[int] = []
    starting = threading.Thread(target=broker.start)

    def interrupted(self: http.client.HTTPResponse, buffer: bytearray) -> int:
        reads.append(len(buffer))
        if len(reads) == 3:
            broker.kill()
            starting.start()
        return read(self, buffer)

    monkeypatch.setattr(http.client.HTTPResponse, "readinto", interrupted)
    assert client.get(PATH, 5, len(data) - 5) == data[5:]
    starting.join()
    client.close()


# --- versions -------------------------------------------------------------------------------------------------------


def test_a_broker_of_a_later_version_is_refused(tmp_path: Path) -> None:
    later = FORMAT_VERSION + 1
    document = {"stream": "s", "format_version": later, "broker_version": "9.1.0", "partitions": "in another way"}
    with pytest.raises(
        StreamError,
        match=rf"http://x/streams/s: the broker, version 9\.1\.0, keeps streams in format "
        rf"{later}, this source knows format {FORMAT_VERSION}: install the broker's",
    ):
        parse_manifest(document, "http://x/streams/s")
    with pytest.raises(StreamError, match="is it a broker of another version"):
        parse_manifest({"partitions": []}, "http://x/streams/s")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "stream.json").write_text(json.dumps({"format_version": later, "partitions": 1}))
    with pytest.raises(StreamError, match=f"s: the broker keeps streams in format {later}, this source knows format"):
        DirectoryStorage(str(tmp_path), "s").manifest()
