"""A client of the broker's HTTP interface.

An interrupted range continues at the byte where it stopped, which is safe because the committed part of a segment file
never changes; the answer's Content-Range is checked.  The wait between attempts doubles and starts again after
progress. Permanent errors (a wrong token, an untrusted certificate, not a broker) are not retried.  Each error is one
line.
"""

from __future__ import annotations

import functools
import http.client
import io
import json
import os
import random
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

RETRIES = 5  # 3 s
PATIENT_RETRIES = 14  # at least 70 s: a broker that restarts
RETRY_INTERVAL_S = 0.1
MAX_WAIT_S = 10.0
TIMEOUT_S = 30.0
PIECE_BYTES = 256 * 1024
MAX_ERROR_BYTES = 64 * 1024

_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG")


class HttpError(Exception):
    """The request failed; the message is one line.

    ``status`` is that of the answer, 0 without one; ``detail`` and ``field`` are those of the broker's problem (RFC 9457).
    """

    status = 0
    detail = ""
    field = ""


class NotFound(HttpError):
    """The broker answered 404: no such stream or file."""


class _TryAgain(Exception):
    """The answer is unusable; try again after ``wait`` seconds (Retry-After)."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class _Range:
    """``length`` bytes from ``position``, of which ``filled`` have been received.

    `BytesIO.getvalue` returns its buffer without a copy: copying 8 MiB to fresh pages costs four times the CPU of
    receiving them.
    """

    def __init__(self, position: int, length: int) -> None:
        self.position = position
        self.length = length
        self.filled = 0
        self.buffer = io.BytesIO(bytes(length))

    @property
    def first(self) -> int:
        """The first byte that is still missing."""
        return self.position + self.filled

    @property
    def last(self) -> int:
        return self.position + self.length - 1


class HttpClient:
    """Requests to the broker at ``url``; ``token`` is sent as a bearer token.

    ``ca_file``: trusted authorities for https, default the system's.  A failed request is repeated ``retries`` times,
    the first time after about ``retry_interval_s`` seconds.  ``timeout_s``: the longest silence of the server.  Keeps
    one connection open between requests.  Not thread-safe.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        ca_file: str | None = None,
        retries: int = RETRIES,
        retry_interval_s: float = RETRY_INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._base = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._ca_file = ca_file
        self._retries = retries
        self._retry_interval_s = retry_interval_s
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self._answered = False

    def get(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        """A whole resource, or exactly ``length`` bytes from ``position``; raises `HttpError`."""
        if length is None:
            return self._request("GET", path, None, None)
        wanted = _Range(position, length)
        if length:
            self._request("GET", path, None, wanted)
        return wanted.buffer.getvalue()

    def get_json(self, path: str) -> Any:
        """A JSON document; raises `HttpError`."""
        body = self.get(path)
        try:
            return json.loads(body)
        except ValueError:
            raise HttpError(f"{self.url}{path} did not answer with JSON: is this the broker's HTTP address?") from None

    def call(self, method: str, path: str, content: bytes | None = None) -> Any:
        """Send a request, again only as a GET may be; returns the JSON of the answer, None without one.

        Raises `HttpError`.
        """
        if method == "GET":
            return self.get_json(path)
        retries, self._retries = self._retries, 0
        self.close()  # a request is sent again if a connection from before has been closed
        try:
            body = self._request(method, path, content, None)
        finally:
            self._retries = retries
        return json.loads(body) if body else None

    def stream(self, path: str, seconds: float) -> Iterator[bytes]:
        """The pieces of an answer that takes up to ``seconds``, as they come; raises `HttpError`."""
        connection = self._connect()
        connection.timeout = seconds + self._timeout_s
        try:
            connection.request("GET", self._base + path, headers=self._headers)
            response = connection.getresponse()
            self._answered = True
            if response.status != 200:
                self._refused(path, response, None)
            while piece := response.read1(PIECE_BYTES):
                yield piece
        except (OSError, http.client.HTTPException, _TryAgain) as error:
            raise HttpError(f"{self.url}: {self._reason(error)}") from None
        finally:
            connection.close()

    def send(self, method: str, path: str, content: bytes | None = None) -> None:
        """Send an idempotent request that changes something; raises `HttpError`."""
        self._request(method, path, content, None)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, method: str, path: str, content: bytes | None, wanted: _Range | None) -> bytes:
        failures = 0
        while True:
            had = wanted.filled if wanted is not None else 0
            stale = self._connection is not None
            try:
                return self._try(method, path, content, wanted)
            except HttpError:
                self.close()
                raise
            except (OSError, http.client.HTTPException, _TryAgain) as error:
                self.close()
                if stale and isinstance(error, ConnectionError):
                    continue  # the server had closed the idle connection
                reason = self._reason(error)
                if wanted is not None and wanted.filled > had:
                    failures = 0
                failures += 1
                if failures > self._retries:
                    tries = f"{failures} tries" if failures > 1 else "one try"
                    doubt = "" if self._answered else ": is this the broker's HTTP address, and is it running?"
                    raise HttpError(f"{self.url}{path} cannot be read after {tries}: {reason}{doubt}") from None
                wait = self._retry_interval_s * random.uniform(0.5, 1.5) * 2 ** (failures - 1)
                asked = error.wait if isinstance(error, _TryAgain) else 0.0
                time.sleep(min(max(wait, asked), MAX_WAIT_S))

    def _try(self, method: str, path: str, content: bytes | None, wanted: _Range | None) -> bytes:
        headers = dict(self._headers)
        if wanted is not None:
            headers["Range"] = f"bytes={wanted.first}-{wanted.last}"
        if self._connection is None:
            self._connection = self._connect()
        self._connection.request(method, self._base + path, content, headers)
        response = self._connection.getresponse()
        self._answered = True
        expected = (200, 204) if wanted is None else (206,)
        if response.status not in expected:
            self._refused(path, response, wanted)
        if wanted is None:
            return response.read()
        _check_range(response, wanted)
        with wanted.buffer.getbuffer() as view:
            while wanted.filled < wanted.length:
                with view[wanted.filled : wanted.filled + PIECE_BYTES] as piece:
                    count = response.readinto(piece)
                if not count:
                    raise _TryAgain(f"the answer broke off after {wanted.filled} of {wanted.length} bytes")
                wanted.filled += count
        if not response.isclosed():
            self.close()  # the answer is longer than the range
        return b""

    def _refused(self, path: str, response: http.client.HTTPResponse, wanted: _Range | None) -> None:
        """Raise the error for an unexpected status."""
        status = response.status
        answer = f"{status} {response.reason}".strip()
        problem = _problem_in(response.read(MAX_ERROR_BYTES))
        said = problem.get("detail")
        if status >= 500 or status in (408, 429):
            after = response.headers.get("Retry-After", "")
            reason = f"{answer}: {said}" if said is not None else answer
            raise _TryAgain(reason, float(after) if after.isdecimal() else 0.0)
        kind, text = NotFound if status == 404 and said is not None else HttpError, ""
        if status in (401, 403):
            detail = f": {said}" if status == 403 and _is_problem(response) and said is not None else ""
            refused = f"option 'token': {self.url} refused it" if self._headers else f"{self.url} wants a 'token'"
            text = f"{refused} ({status}){detail}"
        elif kind is NotFound:
            text = f"{self.url}{path} answered {answer}: {said}"
        elif status == 200 and wanted is not None:
            text = f"{self.url}{path} answered with the whole file instead of a range of it: does a proxy in between drop the Range header?"
        else:
            if 300 <= status < 400:
                answer += f" ({response.headers.get('Location')})"
            doubt = "" if said is not None else ": is this the broker's HTTP address?"
            text = f"{self.url}{path} answered {answer}{f': {said}' if said else ''}{doubt}"
        error = kind(text)
        error.status, error.detail, error.field = status, said or "", problem.get("field", "")
        raise error

    def _reason(self, error: Exception) -> str:
        """Why an attempt failed; raises `HttpError` if a retry would fail as well."""
        if isinstance(error, ssl.SSLCertVerificationError):
            raise HttpError(
                f"{self.url}: its certificate is not to be trusted: {error.verify_message} "
                f"(option 'caFile', or --ca-file, names the authorities to trust)"
            ) from None
        if isinstance(error, ssl.SSLError):
            if error.reason in _NO_TLS and not self._answered:
                raise HttpError(f"{self.url} does not speak TLS there: begin the address with http://") from None
            return f"TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"
        if isinstance(error, socket.timeout):
            return f"nothing came for {self._timeout_s:g} s"
        if isinstance(error, (http.client.BadStatusLine, ConnectionError)) and not self._answered:
            if not isinstance(error, ConnectionRefusedError) and not self._secure and self._speaks_tls():
                raise HttpError(f"{self.url} speaks TLS there: begin the address with https://") from None
            if type(error) is http.client.BadStatusLine:
                return f"{error} is no answer in HTTP"
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        return str(error) or type(error).__name__

    def _speaks_tls(self) -> bool:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        try:
            with socket.create_connection((self._host, self._port), self._timeout_s) as plain:
                context.wrap_socket(plain, server_hostname=self._host).close()
        except OSError:
            return False
        return True

    def _connect(self) -> http.client.HTTPConnection:
        if not self._secure:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        context = _trust(self._ca_file, _changed(self._ca_file))
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=context)


def _check_range(response: http.client.HTTPResponse, wanted: _Range) -> None:
    """Raise `_TryAgain` unless the answer begins at the requested byte; a shorter answer counts as interrupted."""
    said = response.headers.get("Content-Range", "")
    unit, _, place = said.partition(" ")
    first, _, last = place.partition("/")[0].partition("-")
    if unit != "bytes" or first != str(wanted.first) or not last.isdecimal() or int(last) > wanted.last:
        raise _TryAgain(f"asked for bytes {wanted.first}-{wanted.last} it answered with {said or 'some bytes'!r}")


def _is_problem(response: http.client.HTTPResponse) -> bool:
    return response.headers.get_content_type() == "application/problem+json"


def _problem_in(body: bytes) -> dict[str, str]:
    """The ``detail`` of the broker's error, and the ``field`` that it names; empty if the body is not from a broker."""
    try:
        document = json.loads(body)
        found = {"detail": document["detail"] if "detail" in document else document["error"]}
        found |= {"field": document["field"]} if "field" in document else {}
    except (ValueError, KeyError, TypeError):
        return {}
    return {key: " ".join(text.split()) for key, text in found.items() if isinstance(text, str)}


def _changed(ca_file: str | None) -> int:
    if ca_file is None:
        return 0
    try:
        return os.stat(ca_file).st_mtime_ns
    except OSError as error:
        raise HttpError(f"option 'caFile': {ca_file}: {error.strerror}") from None


@functools.lru_cache(maxsize=8)
def _trust(ca_file: str | None, changed: int) -> ssl.SSLContext:
    """Cached: loading the system's authorities takes 20 ms, too long for every task."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError:
        raise HttpError(f"option 'caFile': {ca_file} holds no certificates in PEM") from None
