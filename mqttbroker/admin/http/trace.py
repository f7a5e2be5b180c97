"""``GET /api/v1/trace``: the packets of a trace as they come, as a capture file or as lines."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import deque
from datetime import UTC, datetime

from aiohttp import web

from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.http.access import Principal, Right
from mqttbroker.admin.http.admission import log_action
from mqttbroker.admin.http.parameters import Field, Filter, Word, read_texts
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import API, PROBLEM, PROBLEM_SCHEMA, Answer, Parameter, Route
from mqttbroker.config.setting_kinds import Boolean, Choice, Integer
from mqttbroker.net.packet_log import PacketScanner
from mqttbroker.net.pcap import FILE_HEADER
from mqttbroker.net.trace import Trace, TracedPacket, TraceFilter, Tracer

log = logging.getLogger("mqttbroker.http")

MAX_SECONDS = 3600
MAX_BYTES = 1 << 30
MAX_UNSENT = 4 << 20  # bytes that wait for the receiver; packets beyond it are left out
SLOW = 30.0  # seconds in which the receiver has to take what was sent
FIELDS = (
    Field("client_id", Word(), "packets of this client", ""),
    Field("address", Word(), "packets of clients at this address or in this network", ""),
    Field("topic", Filter(), "PUBLISH packets whose topic matches this filter", ""),
    Field("seconds", Integer(1, MAX_SECONDS), "how long", 60),
    Field("max_bytes", Integer(1000, MAX_BYTES), "end when the answer has so many bytes", 16 << 20),
    Field("format", Choice("pcap", "text"), "a capture file, or lines", "pcap"),
    Field("payload", Boolean(), "with payloads; for administrators only", False),
)


class _Answer:
    """Bytes on their way from the event loop of the broker to that of the HTTP server."""

    def __init__(self, text: bool, payloads: bool) -> None:
        self.dropped = 0
        self.packets = 0
        self._text = text
        self._payloads = payloads
        self._chunks: deque[bytes] = deque()
        self._unsent = 0
        self._more = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, packet: TracedPacket) -> None:
        """Called on the broker's event loop."""
        chunk = text_line(packet, self._payloads) if self._text else packet.conversation.records(
            packet.microseconds, packet.from_client, packet.head, packet.size
        )  # fmt: skip
        if self._unsent + len(chunk) > MAX_UNSENT:
            self.dropped += 1
            return
        self.packets += 1
        self._unsent += len(chunk)
        self._chunks.append(chunk)
        self._loop.call_soon_threadsafe(self._more.set)

    async def next(self) -> bytes:
        """The bytes that have come since the last call; waits for some."""
        while not self._chunks:
            self._more.clear()
            if not self._chunks:
                await self._more.wait()
        chunks = [self._chunks.popleft() for _ in range(len(self._chunks))]
        data = b"".join(chunks)
        self._unsent -= len(data)
        return data


def text_line(packet: TracedPacket, payloads: bool) -> bytes:
    """A packet as one line, like those of the log at level ``debug``."""
    scanner = PacketScanner()
    scanner.version = 5 if packet.version >= 5 else 4
    time = datetime.fromtimestamp(packet.microseconds / 1e6, UTC).isoformat(timespec="milliseconds")
    described = scanner.feed(packet.head + b"\0\0")  # it wants room for a packet id behind the topic
    name, packet_id, topic, qos, retain, size = described[0] if described else ("?", 0, "", 0, 0, 0)
    line = (
        f"{time[:-6]}Z {'received' if packet.from_client else 'sent'} client={packet.client_id!r} address={packet.peer}"
        f" type={name} packet_id={packet_id} topic={packet.topic or topic!r} qos={qos} retain={retain} size={packet.size}"
    )
    if payloads and name == "PUBLISH":
        line += f" packet={packet.head!r}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line).encode("utf-8", "replace") + b"\n"


class TraceRoutes:
    """The route of traces; there is one trace at a time."""

    def __init__(self, tracer: Tracer, runner: ControlRunner) -> None:
        self._tracer = tracer
        self._runner = runner

    def routes(self) -> list[Route]:
        problem = Answer("refused", PROBLEM_SCHEMA, PROBLEM)
        answers = {200: Answer("the packets", {"type": "string"}, "application/vnd.tcpdump.pcap")}
        answers |= {status: problem for status in (400, 401, 403, 409, 421, 429, 503)}
        parameters = tuple(Parameter(field.name, field.schema, field.description) for field in FIELDS)
        return [
            Route("GET", f"{API}/trace", self._trace, Right.OPERATE, "The packets of a client, address or topic", answers,
                  parameters, tag="clients", operation_id="trace")
        ]  # fmt: skip

    async def _trace(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        values = read_texts(FIELDS, request.query, list(request.query))
        where = TraceFilter(values["client_id"], _network(values["address"]), values["topic"])
        if not any(where):
            raise RequestError(400, "give client_id, address or topic", "client_id")
        if values["payload"] and not principal.rights & Right.ADMINISTER:
            raise RequestError(403, "payloads are for administrators only", "payload")
        text = values["format"] == "text"
        answer = _Answer(text, values["payload"])
        trace = Trace(where, values["payload"], answer.emit)
        if not await asyncio.wrap_future(self._runner.call(self._begin, trace)):
            raise RequestError(409, "there is a trace already")
        try:
            log_action("trace", " ".join(f"{key}={value}" for key, value in where._asdict().items() if value), request,
                       principal)  # fmt: skip
            return await self._send(request, answer, b"" if text else FILE_HEADER, values["seconds"], values["max_bytes"])
        finally:
            self._runner.call(self._tracer.end)
            log.info("event=trace_ended packets=%d left_out=%d", answer.packets, answer.dropped)

    def _begin(self, trace: Trace) -> bool:
        if self._tracer.active:
            return False
        self._tracer.begin(trace)
        return True

    async def _send(self, request: web.Request, answer: _Answer, header: bytes, seconds: int, most: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Cache-Control": "no-store"})
        response.content_type = "application/vnd.tcpdump.pcap" if header else "text/plain"
        await response.prepare(request)
        if header:
            await response.write(header)
        sent = len(header)
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while sent < most and (left := until - loop.time()) > 0 and not _gone(request):
            try:
                async with asyncio.timeout(min(left, 1.0)):
                    data = await answer.next()
            except TimeoutError:
                continue
            async with asyncio.timeout(SLOW):
                await response.write(data)
            sent += len(data)
        if answer.dropped and not header:
            await response.write(f"# {answer.dropped} packets were left out\n".encode())
        await response.write_eof()
        return response


def _gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _network(text: str) -> str:
    """An address or network in its usual form."""
    if not text:
        return ""
    try:
        return str(ipaddress.ip_network(text, False))
    except ValueError:
        raise RequestError(400, f"not an address or network: {text!r}", "address") from None
