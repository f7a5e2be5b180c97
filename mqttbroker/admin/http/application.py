"""What the HTTP server answers: streams for readers, metrics, health and the administration API for operators.

Requests read and change the broker's state through a `ControlRunner`. Each path is a `Route` of a table, which names the
right that it needs; a `RequestAdmission` finds the sender of a request and its rights. /livez and /readyz are open.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import unquote

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from bridge_spark.log.record_batch import SegmentError
from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.admin.control.runner import BrokerStopping
from mqttbroker.admin.http.access import NOBODY, Principal, Right
from mqttbroker.admin.http.admission import RequestAdmission, address_of, log_action
from mqttbroker.admin.http.connections import HttpConnections
from mqttbroker.admin.http.consumers import ConsumerRoutes
from mqttbroker.admin.http.openapi import PATH, document
from mqttbroker.admin.http.parameters import MAX_BODY, MAX_LINE
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import API, CONNECTIONS, PROBLEM, PROBLEM_SCHEMA, Answer, Route, error
from mqttbroker.admin.http.schemas import TEXT, array, record
from mqttbroker.admin.http.streams import StreamAccess, StreamRoutes
from mqttbroker.admin.metrics.consumer_lag import ConsumerLag
from mqttbroker.net.acceptor import Acceptor, LocalAdmission
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.wire import peer_text
from sessions.counters import Counters

IDLE_TIMEOUT = 75.0  # seconds without a request after which a connection is closed
HANDSHAKE_TIMEOUT = 10.0  # seconds
STOP_TIMEOUT = 2.0  # seconds for downloads to finish when the server stops

_AioHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger("mqttbroker.http")
_requests = logging.getLogger("mqttbroker.http.requests")
_audit = logging.getLogger("mqttbroker.audit")


def _log_as_event(record: logging.LogRecord) -> bool:
    """Log a request that is not HTTP as one line; aiohttp logs it with a stack, as if it were a defect."""
    if str(record.msg).startswith("event="):  # a count of these lines, which the log writes to the same logger
        return True
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
        record.msg, record.args = "event=defect in=http what=%s", (record.getMessage(),)
        return True
    # aiohttp's message ends with the bytes it complains about, which may be a token.
    reason = re.split(r":\s|['\"]", getattr(error, "message", "") or type(error).__name__, maxsplit=1)[0].strip()
    record.msg, record.args = (
        "event=refused client=%s address=%s reason=%s user=%s listener=%s",
        ("", getattr(record, "address", ""), f"not a valid HTTP request: {reason}", "", "http"),
    )
    record.exc_info = record.exc_text = None
    record.levelno, record.levelname = logging.INFO, "INFO"
    return _requests.isEnabledFor(logging.INFO)


_requests.addFilter(_log_as_event)


async def _forbid_sniffing(request: web.Request, response: web.StreamResponse) -> None:
    """No browser may take what clients of MQTT sent for a page or a script."""
    response.headers["X-Content-Type-Options"] = "nosniff"


class HttpApplication:
    """Answers the requests to one HTTP server, on its thread.

    ``metrics`` returns the Prometheus text, ``readiness`` the reasons why the broker is not ready; both are awaited on
    the server's loop. ``logs`` is None if there are no streams. ``admission`` decides on access. ``requests`` counts requests by role and
    status, ``counters`` handshakes that fail.
    """

    def __init__(
        self,
        admission: RequestAdmission,
        requests: Counter[tuple[str, int]],
        logs: StreamLogs | None,
        metrics: Callable[[], Awaitable[bytes]],
        readiness: Callable[[], Awaitable[list[str]]],
        counters: Counters | None = None,
        consumers: ConsumerLag | None = None,
        max_connections: int = 1000,
        warnings: Callable[[], list[str]] = list,
        routes: Sequence[Route] = (),
    ) -> None:
        self._admission = admission
        self._requests = requests
        self._metrics = metrics
        self._readiness = readiness
        self._warnings = warnings
        self._counters = Counters() if counters is None else counters
        stream_access = StreamAccess(logs)
        self.routes = [
            *ConsumerRoutes(consumers, stream_access).routes(),
            *StreamRoutes(logs, stream_access).routes(),
            *self._status_routes(),
            *routes,
        ]
        self._document = json.dumps(document(self.routes)).encode()
        self._max_connections = max_connections
        self._connections = HttpConnections(max_connections, IDLE_TIMEOUT)
        self._acceptor: Acceptor | None = None

    def _status_routes(self) -> list[Route]:
        metrics = Answer("Prometheus' text format", {"type": "string"}, "text/plain")
        refused = Answer("refused", record(error=TEXT))
        problems = {status: Answer("refused", PROBLEM_SCHEMA, PROBLEM) for status in (401, 421, 429)}
        status = {"title": "Readiness", "type": "object", "properties": {"status": TEXT, "reasons": array(TEXT), "warnings": array(TEXT)}}
        return [
            Route("GET", "/metrics", self._serve_metrics, Right.STATUS, "Metrics for Prometheus",
                  {200: metrics, 401: refused, 403: refused, 429: refused, 503: refused}, tag="status"),
            Route("GET", "/livez", self._livez, None, "Whether the process runs", {200: Answer("it does", status)},
                  tag="status"),
            Route("GET", "/readyz", self._readyz, None, "Whether clients should connect",
                  {200: Answer("they should", status), 503: Answer("they should not", status)}, tag="status"),
            Route("GET", PATH, self._openapi, Right.NONE, "This document",
                  {200: Answer("OpenAPI 3.1", {"type": "object"}), **problems}, tag="status"),
        ]  # fmt: skip

    async def serve(self, listening: socket.socket, stopping: asyncio.Event) -> None:
        """Accept clients until ``stopping``."""
        runner = web.AppRunner(
            self._application(),
            access_log=None,
            shutdown_timeout=STOP_TIMEOUT,
            logger=_requests,
            max_line_size=MAX_LINE,
        )
        try:
            await runner.setup()
            server = runner.server
            assert server is not None
            self._acceptor = Acceptor(
                listening,
                self._admission.context,
                HANDSHAKE_TIMEOUT,
                lambda *_: server(),
                LocalAdmission(
                    "http",
                    self._counters,
                    OpenSockets(self._max_connections, self._max_connections, self._counters),
                ),
                on_open=self._opened,
            )
            await stopping.wait()
        finally:
            if self._acceptor is not None:
                self._acceptor.close()
            await runner.cleanup()

    def renew(self) -> None:
        """Use the certificates of ``admission`` for new connections; on the server's thread."""
        context = self._admission.context
        if self._acceptor is None or context is None:
            return
        self._acceptor.context = context
        if context.verify_mode != ssl.CERT_NONE:
            self._connections.close_idle()  # their certificates were verified by former authorities

    def _opened(self, transport: asyncio.Transport) -> None:
        # aiohttp does not log the port of a client whose request it cannot read.
        address = {"address": peer_text(transport.get_extra_info("peername"))}
        setattr(transport.get_protocol(), "logger", logging.LoggerAdapter(_requests, address))
        self._connections.opened(transport)

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY)
        application[CONNECTIONS] = self._connections
        application.on_response_prepare.append(_forbid_sniffing)
        for route in self.routes:
            handler = functools.partial(self._dispatch, route)
            if route.method == "GET":
                application.router.add_get(route.path, handler)
            else:
                application.router.add_route(route.method, route.path, handler)
        return application

    # -- requests -------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: _AioHandler) -> web.StreamResponse:
        """Note when the connection is idle; requests for unknown paths need credentials, too."""
        transport = request.transport
        if transport is not None:
            self._connections.request_started(transport)
        try:
            unknown = request.match_info.http_exception
            return await (handler(request) if unknown is None else self._dispatch(None, request))
        finally:
            if transport is not None:
                self._connections.request_ended(transport)

    async def _dispatch(self, route: Route | None, request: web.Request) -> web.StreamResponse:
        """Check credentials and rights, and count and log the request; every error is JSON."""
        principal = NOBODY
        try:
            if route is None or route.right is not None:
                principal = self._admission.admit(request)
            response = await self._handle(route, request, principal)
        except RequestError as refusal:
            if refusal.status in (401, 403, 408, 421, 429):
                self._log_denied(request, principal, str(refusal))
            headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
            response = error(request, refusal.status, str(refusal), headers, refusal.field)
        if route is not None and route.action and response.status < 400:
            log_action(route.action, unquote(request.path), request, principal)
        self._requests[principal.role, response.status] += 1
        return response

    async def _handle(self, route: Route | None, request: web.Request, principal: Principal) -> web.StreamResponse:
        try:
            if route is None:
                assert request.match_info.http_exception is not None
                raise request.match_info.http_exception
            self._admission.authorize(principal, route)
            return await route.handler(request, principal)
        except web.HTTPException as answer:
            allow = answer.headers.get("Allow")
            reason = f"{answer.reason}: {request.method} {request.path}"
            return error(request, answer.status, reason, {"Allow": allow} if allow else None)
        except web.RequestPayloadError as failure:
            return error(request, 400, f"the body cannot be read: {str(failure).split()[-1]}")
        except BrokerStopping as stopping:
            return error(request, 503, str(stopping))
        except SegmentError as damage:
            logger.error("event=damaged_segment path=%s reason=%s", request.path, damage)
            return error(request, 500, f"damaged segment: {damage}")
        except ConnectionError:
            return error(request, 400, "the connection was lost")  # nobody receives it; aiohttp would log a defect
        except (OSError, RuntimeError) as failure:
            logger.exception("event=defect in=http path=%s", request.path)
            return error(request, 500, f"{type(failure).__name__}: {failure}")

    def _log_denied(self, request: web.Request, principal: Principal, reason: str) -> None:
        # The dashboard asks without a token whether one is needed, at each first visit.
        asks = request.path == f"{API}/access" and "Authorization" not in request.headers
        log = logger.debug if asks else _audit.info
        log(
            "event=denied action=%s target=%s address=%s reason=%s user=%s listener=%s",
            request.method,
            request.path,
            address_of(request),
            reason,
            principal.name,
            "http",
        )

    async def _serve_metrics(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        return web.Response(
            body=await self._metrics(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _openapi(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        return web.Response(body=self._document, content_type="application/json")

    async def _livez(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def _readyz(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        reasons = await self._readiness()
        warnings = self._warnings()
        detail = {"warnings": warnings} if warnings else {}
        if reasons:
            return web.json_response({"status": "not ready", "reasons": reasons, **detail}, status=503)
        return web.json_response({"status": "ok", **detail})
