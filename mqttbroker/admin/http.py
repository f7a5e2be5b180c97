"""The HTTP server: stream files for readers, metrics and health for operators.

It runs in a thread of its own, on an asyncio loop of the standard library (uvloop has no ``sendfile``). Stream files
are sent by ``sendfile``, with TLS in pieces that OpenSSL encrypts, and end at the high
watermark. Requests read the broker's state through a `ControlRunner`.

    GET /streams                               {"streams": [names]}
    GET /streams/{name}                        the manifest
    GET /streams/{name}/offsets?timestamp=µs   the first offset at or after it, per partition
    GET /streams/{name}/{partition}/{file}     a .seg, .idx or .parquet file, byte ranges (RFC 9110, 14)
    GET /metrics /livez /readyz
    /streams/{name}/consumers                  progress of consumers (`http_consumers`)

Errors are JSON, {"error": "..."}. With a token every request but /livez and /readyz needs
``Authorization: Bearer <token>``.

Measured over loopback on a shared 2-core machine, CPU of the whole server: 0.2 to 0.3 s per GB in ranges of 8 MiB,
0.5 s in ranges of 1 MiB, 0.3 ms per small request; with TLS 1 s per GB, of which OpenSSL takes 0.4. Two readers at full
speed do not change the median latency of MQTT, and its tail no more than any two busy processes do.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import ssl
import threading
from typing import Awaitable, BinaryIO, Callable, Dict, List, Optional, Tuple

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from bridge_spark.log.record_batch import SegmentError
from bridge_spark.log.stream_log import StreamLogs
from mqttbroker import __version__
from mqttbroker.admin.consumer_lag import ConsumerLag
from mqttbroker.admin.control_runner import BrokerStopping
from mqttbroker.admin.http_connections import HttpConnections
from mqttbroker.admin.http_consumers import ConsumerRoutes
from mqttbroker.net.acceptor import Acceptor
from mqttbroker.net.open_sockets import OpenSockets
from sessions.counters import Counters

BACKLOG = 512
IDLE_TIMEOUT = 75.0  # seconds without a request after which a connection is closed
MAX_DOWNLOADS = 512  # stream files served at once; further requests get 503
SLICE_BYTES = 8 * 1024 * 1024
PIECE_BYTES = 256 * 1024  # of a slice, encrypted in one call
HANDSHAKE_TIMEOUT = 10.0  # seconds
SLICE_TIMEOUT = 120.0  # seconds for sending one slice, after which the connection is closed
STOP_TIMEOUT = 2.0  # seconds for downloads to finish when the server stops
OPEN_PATHS = ("/livez", "/readyz")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)
_requests = logging.getLogger(f"{__name__}.requests")


def _log_as_event(record: logging.LogRecord) -> bool:
    """Log a request that is not HTTP as one line; aiohttp logs it with a stack, as if it were a defect."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
        record.msg, record.args = "event=defect in=http what=%s", (record.getMessage(),)
        return True
    record.msg, record.args = (
        "event=refused client=%s address=%s reason=%s user=%s listener=%s",
        ("", "http:", " ".join(str(error).split()), "", "http"),
    )
    record.exc_info = record.exc_text = None
    record.levelno, record.levelname = logging.INFO, "INFO"
    return _requests.isEnabledFor(logging.INFO)


_requests.addFilter(_log_as_event)


def _error(
    status: int, reason: str, headers: Optional[Dict[str, str]] = None
) -> web.Response:
    return web.json_response({"error": reason}, status=status, headers=headers)


def _range(request: web.Request, size: int) -> Optional[Tuple[int, int]]:
    """The requested range of bytes as (start, end).

    The whole file if none is requested, None if it is outside of the file.
    """
    try:
        requested = request.http_range
    except ValueError:
        return None
    if requested.start is None:
        return 0, size
    start = max(size + requested.start, 0) if requested.start < 0 else requested.start
    end = size if requested.stop is None else min(requested.stop, size)
    return (start, end) if start < end else None


async def _send_range(
    response: web.StreamResponse, transport: asyncio.WriteTransport, file: BinaryIO, start: int, end: int
) -> None:
    """Send a range of a file; OSError if the file is too short or the reader too slow."""
    loop = asyncio.get_running_loop()
    secure = transport.get_extra_info("ssl_object") is not None
    while start < end:
        length = min(end - start, SLICE_BYTES)
        async with asyncio.timeout(SLICE_TIMEOUT):
            if secure:
                sent = await _send_pieces(response, file, start, length)
            else:
                sent = await loop.sendfile(transport, file, start, length)
        if sent != length:
            raise OSError(f"the file ends at byte {start + sent}")
        start += length


async def _send_pieces(response: web.StreamResponse, file: BinaryIO, start: int, length: int) -> int:
    """Send a range through TLS, one piece in memory at a time.

    Returns the bytes sent, fewer if the file ends before.
    """
    sent = 0
    while sent < length:
        piece = os.pread(file.fileno(), min(length - sent, PIECE_BYTES), start + sent)
        if not piece:
            break
        await response.write(piece)
        sent += len(piece)
    return sent


class HttpServer:
    """Serves streams, metrics and health on ``host`` and ``port`` (0: any free port).

    ``metrics`` returns the Prometheus text, ``readiness`` the reasons why the broker is not ready; both are awaited on
    the server's loop. ``logs`` is None if there are no streams. With ``context`` the server speaks HTTPS, and
    ``counters`` counts the handshakes that fail. `start`, `renew` and `stop` are for the thread that owns the server.
    """

    def __init__(
        self,
        host: str,
        port: int,
        logs: Optional[StreamLogs],
        metrics: Callable[[], Awaitable[bytes]],
        readiness: Callable[[], Awaitable[List[str]]],
        token: Optional[str] = None,
        context: Optional[ssl.SSLContext] = None,
        counters: Optional[Counters] = None,
        consumers: Optional[ConsumerLag] = None,
        max_connections: int = 1000,
        warnings: Callable[[], List[str]] = list,
        streams_protected: bool = False,
    ) -> None:
        self.host = host
        self.port = port
        self._logs = logs
        self._metrics = metrics
        self._readiness = readiness
        self._warnings = warnings
        self._streams_protected = streams_protected
        self.token = token  # any thread may set it
        self._context = context
        self._counters = Counters() if counters is None else counters
        self._consumers = ConsumerRoutes(consumers)
        self._acceptor: Optional[Acceptor] = None
        self._max_connections = max_connections
        self._connections = HttpConnections(max_connections, IDLE_TIMEOUT)
        self._downloads = 0
        self._thread: Optional[threading.Thread] = None
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._stopping: Optional[asyncio.Event] = None

    # -- start and stop -------------------------------------------------------

    def start(self) -> None:
        """Bind and serve; from then on `port` is the port that was bound.

        Raises OSError if the address cannot be bound.
        """
        listening = self._bind()
        self.port = listening.getsockname()[1]
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listening, started), name="http", daemon=True
        )
        self._thread.start()
        started.wait()

    def _bind(self) -> socket.socket:
        found = socket.getaddrinfo(
            self.host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(
            address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=dual
        )

    def renew(self, context: ssl.SSLContext) -> None:
        """Use other certificates for new connections; without effect unless the server speaks HTTPS."""
        if self._acceptor is not None and self._acceptor.context is not None:
            self._acceptor.context = context

    def stop(self) -> None:
        """Close every connection and end the thread; without effect unless started."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        assert self._loop is not None and self._stopping is not None
        self._loop.call_soon_threadsafe(self._stopping.set)
        thread.join()

    def _run(self, listening: socket.socket, started: threading.Event) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._serve(listening, started))

    async def _serve(self, listening: socket.socket, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        runner = web.AppRunner(
            self._application(), access_log=None, shutdown_timeout=STOP_TIMEOUT, logger=_requests
        )
        try:
            await runner.setup()
            server = runner.server
            assert server is not None
            listening.setblocking(False)
            self._acceptor = Acceptor(
                listening,
                self._context,
                HANDSHAKE_TIMEOUT,
                lambda _: server(),
                self._counters,
                OpenSockets(self._max_connections, self._max_connections, self._counters),
                self._connections.opened,
                name="http",
            )
            started.set()
            await self._stopping.wait()
        finally:
            started.set()
            if self._acceptor is not None:
                self._acceptor.close()
            await runner.cleanup()

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard])
        application.add_routes(
            [
                *self._consumers.routes(),
                web.get("/streams", self._streams),
                web.get("/streams/{name}", self._manifest),
                web.get("/streams/{name}/offsets", self._offsets),
                web.get("/streams/{name}/{partition}/{file}", self._file),
                web.get("/metrics", self._serve_metrics),
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
            ]
        )
        return application

    # -- requests -------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token, and return every error as JSON."""
        transport = request.transport
        if transport is None:
            return await self._answer(request, handler)
        self._connections.request_started(transport)
        try:
            return await self._answer(request, handler)
        finally:
            self._connections.request_ended(transport)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        token = self.token
        if token is not None and request.path not in OPEN_PATHS:
            scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
            known = hmac.compare_digest(credentials.strip().encode(errors="replace"), token.encode())
            if scheme.lower() != "bearer" or not known:
                return _error(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"})
        elif self._streams_protected and request.path.startswith("/streams"):
            return _error(403, "streams need a token: set http.token")
        try:
            return await handler(request)
        except web.HTTPException as error:
            allow = error.headers.get("Allow")
            reason = f"{error.reason}: {request.method} {request.path}"
            return _error(error.status, reason, {"Allow": allow} if allow else None)
        except web.RequestPayloadError as error:
            return _error(400, f"the body cannot be read: {str(error).split()[-1]}")
        except BrokerStopping as error:
            return _error(503, str(error))
        except SegmentError as error:
            logger.error("event=damaged_segment path=%s reason=%s", request.path, error)
            return _error(500, f"damaged segment: {error}")
        except (OSError, RuntimeError) as error:
            if isinstance(error, ConnectionError):
                raise
            logger.exception("event=defect in=http path=%s", request.path)
            return _error(500, f"{type(error).__name__}: {error}")

    def _stream(self, request: web.Request) -> Optional[StreamLogs]:
        """The logs, if they have the stream that the path names."""
        logs = self._logs
        return logs if logs is not None and request.match_info["name"] in logs.streams() else None

    @staticmethod
    def _no_stream(request: web.Request) -> web.Response:
        return _error(404, f"no stream {request.match_info['name']!r}")

    async def _streams(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"streams": [] if self._logs is None else self._logs.streams()})

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        logs = self._stream(request)
        if logs is None:
            return self._no_stream(request)
        manifest = logs.manifest(request.match_info["name"])
        return web.json_response({**manifest, "broker_version": __version__})

    async def _offsets(self, request: web.Request) -> web.StreamResponse:
        logs = self._stream(request)
        if logs is None:
            return self._no_stream(request)
        text = request.query.get("timestamp", "")
        try:
            timestamp = int(text)
        except ValueError:
            return _error(400, f"timestamp must be microseconds since 1970, not {text!r}")
        name = request.match_info["name"]
        count = len(logs.manifest(name)["partitions"])
        loop = asyncio.get_running_loop()
        offsets = [
            {
                "partition": number,
                "offset": await loop.run_in_executor(
                    None, logs.offset_for_timestamp, name, number, timestamp
                ),
            }
            for number in range(count)
        ]
        return web.json_response({"stream": name, "timestamp_us": timestamp, "partitions": offsets})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        logs = self._stream(request)
        if logs is None:
            return self._no_stream(request)
        name, file = request.match_info["name"], request.match_info["file"]
        partition = request.match_info["partition"]
        if not (partition.isascii() and partition.isdigit()) or len(partition) > 9:
            return _error(404, f"stream {name!r} has no partition {partition!r}")
        if self._downloads >= MAX_DOWNLOADS:
            return _error(503, "too many downloads at once", {"Retry-After": "1"})
        try:
            path, size = logs.committed_file(name, int(partition), file)
            opened = open(path, "rb", buffering=0)
        except (KeyError, FileNotFoundError):
            return _error(404, f"stream {name!r} partition {partition} has no file {file!r}")
        self._downloads += 1
        try:
            with opened:
                return await self._send(request, opened, size)
        finally:
            self._downloads -= 1

    async def _send(self, request: web.Request, file: BinaryIO, size: int) -> web.StreamResponse:
        found = _range(request, size)
        if found is None:
            reason = f"bytes 0 to {size - 1} are committed" if size else "nothing is committed"
            return _error(416, reason, {"Content-Range": f"bytes */{size}"})
        start, end = found
        response = web.StreamResponse(
            headers={"Accept-Ranges": "bytes", "Cache-Control": "no-store"}
        )
        response.content_type = "application/octet-stream"
        response.content_length = end - start
        if request.http_range.start is not None:
            response.set_status(206)
            response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("connection lost")
        if request.method != "HEAD":
            try:
                await _send_range(response, transport, file, start, end)
            except OSError as error:
                # The status line has been sent: the only way to report an error is to close the connection.
                logger.debug("%s: %s", request.path, error)
                transport.abort()
                return response
        await response.write_eof()
        return response

    async def _serve_metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=await self._metrics(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _livez(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def _readyz(self, request: web.Request) -> web.StreamResponse:
        reasons = await self._readiness()
        warnings = self._warnings()
        detail = {"warnings": warnings} if warnings else {}
        if reasons:
            return web.json_response({"status": "not ready", "reasons": reasons, **detail}, status=503)
        return web.json_response({"status": "ok", **detail})
