"""The HTTP routes of streams: manifests, offsets by time, and files up to the high watermark.

A sender needs access to the stream (`Principal.may_read_stream`); for names and manifests the right LIST suffices.
Files are sent by ``sendfile``, with TLS in pieces that OpenSSL encrypts.

Measured over loopback on a shared 2-core machine, CPU of the whole server: 0.2 to 0.3 s per GB in ranges of 8 MiB,
0.5 s in ranges of 1 MiB, 0.3 ms per small request; with TLS 1 s per GB, of which OpenSSL takes 0.4. Two readers at full
speed do not change the median latency of MQTT, and its tail no more than any two busy processes do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from typing import Any, BinaryIO

from aiohttp import web

from bridge_spark.log.archive.files import ArchiveError
from bridge_spark.log.stream_log import StreamLogs
from mqttbroker import __version__
from mqttbroker.admin.http.access import Principal, Right
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import Answer, Parameter, Route, error
from mqttbroker.admin.http.schemas import INTEGER, TEXT, array, record

MAX_DOWNLOADS = 512  # stream files served at once; further requests get 503
SLICE_BYTES = 8 * 1024 * 1024
PIECE_BYTES = 256 * 1024  # of a slice, encrypted in one call
ARCHIVED_AT_ONCE = 1000  # archived segments in one answer; the next request begins at the end of the last one
LAST_OFFSET = (1 << 63) - 1
SLICE_TIMEOUT = 120.0  # seconds for sending one slice, after which the connection is closed

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
_TIMESTAMP = re.compile(r"-?[0-9]{1,18}")

logger = logging.getLogger("mqttbroker.http")


def _whole(text: str, parameter: str) -> int:
    """Raises `ValueError` unless the text is a whole number that an offset can be."""
    if not re.fullmatch("[0-9]{1,19}", text) or int(text) > LAST_OFFSET:
        raise ValueError(f"{parameter} must be a whole number from 0 to {LAST_OFFSET}, not {text!r}")
    return int(text)


def _range(request: web.Request, size: int) -> tuple[int, int] | None:
    """The requested range of bytes as (start, end).

    The whole file if none is requested, None if it is outside of the file or not one range of bytes.
    """
    requested = request.headers.get("Range")
    if requested is None:
        return 0, size
    match = _RANGE.fullmatch(requested)
    if match is None:
        return None
    first, last = match.groups()
    start = int(first) if first else max(size - int(last or 0), 0)
    end = min(int(last) + 1, size) if first and last else size
    return (start, end) if start < end else None


async def _send_range(response: web.StreamResponse, transport: asyncio.WriteTransport, file: BinaryIO, start: int, end: int) -> None:
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


class StreamAccess:
    """Which streams of ``logs`` the sender of a request may see."""

    def __init__(self, logs: StreamLogs | None) -> None:
        self._logs = logs

    def reads(self, principal: Principal, name: str) -> bool:
        """Whether the sender may read the stream."""
        return principal.may_read_stream(name, () if self._logs is None else self._logs.stored_filters(name))

    def sees(self, principal: Principal, name: str) -> bool:
        """Whether the sender may know the stream's name, manifest and consumers."""
        return Right.LIST in principal.rights or self.reads(principal, name)

    def check(self, request: web.Request, principal: Principal, allowed: Callable[[Principal, str], bool]) -> str:
        """The name of the stream in the path, as of `check_name`."""
        return self.check_name(request.match_info["name"], principal, allowed)

    def check_name(self, name: str, principal: Principal, allowed: Callable[[Principal, str], bool]) -> str:
        """The name. Raises RequestError, 403 if the sender may not, 404 if there is no such stream.

        A sender that may not see all streams is not told which ones exist.
        """
        known = self._logs is not None and name in self._logs.streams()
        if (known or not self.sees(principal, name)) and not allowed(principal, name):
            raise RequestError(403, _refusal(principal.name, name))
        if not known:
            raise RequestError(404, f"no stream {name!r}", "name")
        return name


def _refusal(sender: str, stream: str) -> str:
    if sender == "anonymous":
        return "streams need a token: set http.token"
    return f"{sender} may not read stream {stream!r}"


def _manifest_of(logs: StreamLogs, name: str) -> dict[str, Any]:
    """The manifest. Raises RequestError, 404, if the stream was deleted meanwhile."""
    try:
        return logs.manifest(name)
    except KeyError:
        raise RequestError(404, f"no stream {name!r}", "name") from None


class StreamRoutes:
    """The handlers; ``logs`` is None if there are no streams."""

    def __init__(self, logs: StreamLogs | None, access: StreamAccess) -> None:
        self._logs = logs
        self._access = access
        self._downloads = 0

    def routes(self) -> list[Route]:
        name = Parameter("name", TEXT, "the name of a stream", "path", True)
        file = (
            name,
            Parameter("partition", TEXT, "the number of a partition", "path", True),
            Parameter("file", TEXT, "a name in the manifest", "path", True),
        )
        bytes_answer = Answer("bytes of the file", {"type": "string"}, "application/octet-stream")
        refused = Answer("refused", record(error=TEXT))
        errors = {401: refused, 403: refused, 404: refused, 429: refused}
        at = Parameter("timestamp", INTEGER, "microseconds since 1970", required=True)
        offsets = record(stream=TEXT, timestamp_us=INTEGER, partitions=array(record(partition=INTEGER, offset=INTEGER)))
        archive_range = (
            Parameter("partition", INTEGER, "the number of a partition", required=True),
            Parameter("start", INTEGER, "the first offset"),
            Parameter("end", INTEGER, "the offset after the last one"),
        )
        archived = record(stream=TEXT, location=TEXT, partition=INTEGER, segments=array({"type": "object"}))
        none = Right.NONE  # each stream has readers of its own
        return [
            Route("GET", "/streams", self._streams, none, "The names of the streams that the sender may see",
                  {200: Answer("names", record(streams=array(TEXT))), 401: refused, 403: refused, 429: refused},
                  tag="streams"),
            Route("GET", "/streams/{name}", self._manifest, none, "Partitions, segments and offsets of a stream",
                  {200: Answer("the manifest", {"type": "object"}), **errors}, (name,), tag="streams"),
            Route("GET", "/streams/{name}/offsets", self._offsets, none, "The first offsets at or after a time",
                  {200: Answer("an offset of each partition", offsets), 400: refused, 503: refused, **errors},
                  (name, at), tag="streams"),
            Route("GET", "/streams/{name}/archive", self._archive, none, "The archived segments of a range of offsets",
                  {200: Answer("segments in order", archived), 400: refused, **errors}, (name, *archive_range),
                  tag="streams"),
            Route("GET", "/streams/{name}/{partition}/{file}", self._file, none,
                  "A segment file or index, whole or a byte range (RFC 9110, 14)",
                  {200: bytes_answer, 206: bytes_answer, 416: refused, 503: refused, **errors}, file, tag="streams"),
        ]  # fmt: skip

    async def _streams(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        if not principal.streams and Right.LIST not in principal.rights:
            raise RequestError(403, _refusal(principal.name, ""))
        names = [] if self._logs is None else self._logs.streams()
        return web.json_response({"streams": [name for name in names if self._access.sees(principal, name)]})

    def _readable(self, request: web.Request, principal: Principal, allowed: Callable[[Principal, str], bool]) -> tuple[StreamLogs, str]:
        name = self._access.check(request, principal, allowed)
        assert self._logs is not None
        return self._logs, name

    async def _manifest(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        logs, name = self._readable(request, principal, self._access.sees)
        manifest = _manifest_of(logs, name)
        return web.json_response({**manifest, "broker_version": __version__})

    async def _offsets(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        logs, name = self._readable(request, principal, self._access.reads)
        text = request.query.get("timestamp", "")
        if not _TIMESTAMP.fullmatch(text):
            return error(request, 400, f"timestamp must be microseconds since 1970, not {text[:100]!r}")
        timestamp = int(text)
        count = len(_manifest_of(logs, name)["partitions"])
        loop = asyncio.get_running_loop()
        try:
            offsets = [
                {
                    "partition": number,
                    "offset": await loop.run_in_executor(None, logs.offset_for_timestamp, name, number, timestamp),
                }
                for number in range(count)
            ]
        except KeyError:
            raise RequestError(404, f"no stream {name!r}", "name") from None
        except ArchiveError as failure:
            return error(request, 503, f"the archive cannot be read: {failure}", {"Retry-After": "5"})
        return web.json_response({"stream": name, "timestamp_us": timestamp, "partitions": offsets})

    async def _archive(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        logs, name = self._readable(request, principal, self._access.sees)
        try:
            number, start, end = (
                _whole(request.query.get(parameter, default), parameter)
                for parameter, default in (("partition", ""), ("start", "0"), ("end", str(LAST_OFFSET)))
            )
        except ValueError as failure:
            return error(request, 400, str(failure))
        manifest = _manifest_of(logs, name)
        if number >= len(manifest["partitions"]):
            return error(request, 404, f"stream {name!r} has no partition {number}")
        segments = await asyncio.get_running_loop().run_in_executor(None, logs.archived, name, number, start, end, ARCHIVED_AT_ONCE)
        return web.json_response(
            {
                "stream": name,
                "location": manifest.get("archive", ""),
                "partition": number,
                "segments": [
                    {
                        "file": segment.file,
                        "first_offset": segment.first_offset,
                        "end_offset": segment.end_offset,
                        "bytes": segment.size,
                        "first_timestamp_us": segment.first_timestamp,
                        "last_timestamp_us": segment.last_timestamp,
                    }
                    for segment in segments
                ],
            }
        )

    async def _file(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        logs, name = self._readable(request, principal, self._access.reads)
        file = request.match_info["file"]
        partition = request.match_info["partition"]
        if not (partition.isascii() and partition.isdigit()) or len(partition) > 9:
            return error(request, 404, f"stream {name!r} has no partition {partition!r}")
        if self._downloads >= MAX_DOWNLOADS:
            return error(request, 503, "too many downloads at once", {"Retry-After": "1"})
        try:
            path, size = logs.committed_file(name, int(partition), file)
            opened = open(path, "rb", buffering=0)
        except (KeyError, FileNotFoundError):
            return error(request, 404, f"stream {name!r} partition {partition} has no file {file!r}")
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
            return error(request, 416, reason, {"Content-Range": f"bytes */{size}"})
        start, end = found
        response = web.StreamResponse(headers={"Accept-Ranges": "bytes", "Cache-Control": "no-store"})
        response.content_type = "application/octet-stream"
        response.content_length = end - start
        if "Range" in request.headers:
            response.set_status(206)
            response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("connection lost")
        if request.method != "HEAD":
            try:
                await _send_range(response, transport, file, start, end)
            except OSError as failure:
                # The status line has been sent: the only way to report an error is to close the connection.
                logger.debug("%s: %s", request.path, failure)
                transport.abort()
                return response
        await response.write_eof()
        return response
