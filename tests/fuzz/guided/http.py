"""Requests to the HTTP server: paths, ranges, tokens and reports of consumers."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from support.http_server import http_server

from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from fuzz.guided.target import Target
from fuzz.verdict import Finding
from mqttbroker.admin.http.access import access_list
from mqttbroker.admin.metrics.consumer_lag import ConsumerLag
from mqttbroker.config.settings import Consumers, Settings
from mqttbroker.config.settings import Http as HttpSettings
from mqttbroker.core.access.policy import AllowAll
from sessions.message import Message

TOKEN = "s3cret"
FILE = "/streams/s/0/00000000000000000000.seg"
PARTITIONS = 2
OPEN_PATHS = ("/livez", "/readyz")


class Http(Target):
    """The lines of an input are method, path, Range, Authorization; the rest is the body."""

    modules = (
        "mqttbroker.admin.http.server",
        "mqttbroker.admin.http.consumers",
        "mqttbroker.admin.http.streams",
        "mqttbroker.admin.http.admission",
        "mqttbroker.admin.http.access",
        "bridge_spark.source.consumers",
    )
    max_bytes = 500
    words = (
        b"GET\n",
        b"PUT\n",
        b"DELETE\n",
        b"HEAD\n",
        FILE.encode(),
        b"/streams/s/consumers/c",
        b"/streams/s/offsets?timestamp=",
        b"bytes=",
        b"Bearer s3cret",
        b'{"offsets": {"0": 1}}',
        b"/livez",
        b"/metrics",
        b"..",
        b"%2e%2e%2f",
        b"%00",
    )

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        config = StreamConfig("s", ["#"], PARTITIONS, segment_bytes=10**9, segment_age=10**12)
        self.logs = StreamLogs(directory / "streams", [config])
        self.logs.recover({})
        self.logs.append({("s", 0): [Message("a", b"21.5", 1, False, b"", "dev", 1000 + at, 0) for at in range(20)]})
        self.logs.committed()
        lag = ConsumerLag(self.logs, Consumers())
        access = access_list(Settings(http=HttpSettings(token=TOKEN)), AllowAll())
        self.server = http_server(self.logs, _metrics, _readiness, access, consumers=lag)
        self.server.start()
        self.connection: socket.socket | None = None
        self.file = b""
        _, _, self.file = self._answer("GET", FILE, "", f"Bearer {TOKEN}", b"")

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.server.stop()
        self.logs.close()

    def check(self, data: bytes) -> None:
        parts = (data.split(b"\n", 4) + [b""] * 4)[:5]
        method, path, wanted, authorization = (part.decode("latin-1").strip("\r") for part in parts[:4])
        status, headers, body = self._answer(method, path, wanted, authorization, parts[4])
        context = f"{status} {body[:200]!r} for {data!r}"
        if status >= 500 or status < 200:
            raise Finding(context)
        if status >= 400 and headers.get("Content-Type", "").startswith("application/json") and method != "HEAD":
            if not isinstance(json.loads(body)["error"], str):
                raise Finding(f"no reason: {context}")
        scheme, _, credentials = authorization.strip(" \t").partition(" ")
        if status < 400 and not (scheme.lower() == "bearer" and credentials.strip() == TOKEN):
            if path.split("?")[0].split("#")[0] not in OPEN_PATHS and not _is_open(path):
                raise Finding(f"without the token: {context}")
        if method == "GET" and path == FILE and status in (200, 206, 416):
            self._range(wanted.strip(" \t"), status, headers, body, context)
        if method == "PUT" and status == 204:
            given = json.loads(parts[4])["offsets"]
            if not all(key.isdigit() and int(key) < PARTITIONS and type(offset) is int and offset >= 0 for key, offset in given.items()):
                raise Finding(f"the report is wrong: {context}")

    def _range(self, wanted: str, status: int, headers: http.client.HTTPMessage, body: bytes, context: str) -> None:
        """RFC 9110, section 14, for one range."""
        size = len(self.file)
        found = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", wanted, re.ASCII)
        if status == 206:
            if found is None:
                raise Finding(f"an unknown range: {context}")
            first, last = found.groups()
            start = int(first) if first else max(0, size - int(last or 0))
            end = min(size, int(last) + 1) if first and last else size
            if body != self.file[start:end] or headers.get("Content-Range") != f"bytes {start}-{end - 1}/{size}":
                raise Finding(f"not bytes {start} to {end}: {headers.get('Content-Range')} {context}")
        elif status == 200 and body != self.file:
            raise Finding(f"not the whole file: {context}")
        elif status == 416 and found is not None and found[1] and int(found[1]) < size:
            if not found[2] or int(found[2]) >= int(found[1]):
                raise Finding(f"the range exists: {context}")

    def _answer(self, method: str, path: str, wanted: str, authorization: str, body: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        head = f"{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n"
        head += f"Range: {wanted}\r\n" if wanted else ""
        head += f"Authorization: {authorization}\r\n" if authorization else ""
        request = head.encode("latin-1") + b"\r\n" + body
        for attempt in range(2):
            try:
                if self.connection is None:
                    self.connection = socket.create_connection(("127.0.0.1", self.server.port), 10)
                self.connection.sendall(request)
                response = http.client.HTTPResponse(self.connection, method=method)
                response.begin()
                found = response.status, response.headers, response.read()
                if response.will_close:
                    self.connection.close()
                    self.connection = None
                return found
            except (ConnectionError, http.client.BadStatusLine):
                # The server closed the idle connection of the request before.
                assert self.connection is not None
                self.connection.close()
                self.connection = None
                if attempt:
                    raise Finding(f"no answer to {request!r}") from None
            except (TimeoutError, http.client.HTTPException) as error:
                raise Finding(f"{error!r} for {request!r}") from None
        raise AssertionError("not reached")

    def seeds(self) -> Iterator[bytes]:
        token = f"Bearer {TOKEN}".encode()
        for wanted in (b"", b"bytes=0-9", b"bytes=5-", b"bytes=-5", b"bytes=9999-", b"bytes=0-1,4-5", b"bytes=5-1"):
            yield b"\n".join((b"GET", FILE.encode(), wanted, token, b""))
        for path in (
            b"/streams",
            b"/streams/s",
            b"/streams/s/offsets?timestamp=1005",
            b"/metrics",
            b"/readyz",
            b"/livez",
            b"/streams/s/consumers",
            b"/streams/../s",
            b"/streams/s/0/../../x",
        ):
            yield b"\n".join((b"GET", path, b"", token, b""))
            yield b"\n".join((b"GET", path, b"", b"", b""))
        for body in (b'{"offsets": {"0": 5, "1": 0}}', b'{"offsets": {"2": 5}}', b'{"offsets": []}', b"[" * 300):
            yield b"\n".join((b"PUT", b"/streams/s/consumers/c", b"", token, body))
        yield b"\n".join((b"DELETE", b"/streams/s/consumers/c", b"", token, b""))


def _is_open(path: str) -> bool:
    """Whether a path, decoded and in the absolute form or not, is one that needs no token."""
    plain = re.sub(r"^[a-z]+://[^/]*", "", path.split("?")[0].split("#")[0], flags=re.IGNORECASE)
    decoded = re.sub(r"%([0-9a-fA-F]{2})", lambda found: chr(int(found[1], 16)), plain)
    return decoded in OPEN_PATHS


async def _metrics() -> bytes:
    return b"messages_total 5\n"


async def _readiness() -> list[str]:
    return []
