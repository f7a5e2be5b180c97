"""A stream's files over the broker's HTTP interface.

The rule kept here: a broken connection costs a retry and never a byte.  A
range that broke off is continued where it stopped, waits grow between tries,
and only what cannot get better (unknown stream, wrong token) fails at once.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from typing import Any, Optional
from urllib.parse import quote, urlsplit

from bridge_spark.segment import IndexEntry
from bridge_spark.storage import (
    Manifest,
    Segment,
    SegmentGone,
    StreamError,
    UnknownStream,
    index_file,
    parse_manifest,
    usable_index,
)

TIMEOUT_S = 30.0
TRIES = 6
FIRST_WAIT_S = 0.1
PIECE_BYTES = 256 * 1024


class _NotFound(Exception):
    """The broker answered 404."""


class HttpStorage:
    """Files of ``stream`` at ``url``; ``token`` is sent as a bearer token.

    One connection is kept open between requests.  Not thread safe.
    """

    def __init__(self, url: str, stream: str, token: Optional[str], tries: int = TRIES) -> None:
        parts = urlsplit(url)
        self._url = url
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port
        self._base = parts.path.rstrip("/")
        self._stream = stream
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tries = tries
        self._connection: Optional[http.client.HTTPConnection] = None

    def manifest(self) -> Manifest:
        path = f"/streams/{quote(self._stream, safe='')}"
        try:
            return parse_manifest(self._get_json(path), self._url + path)
        except _NotFound:
            raise UnknownStream(f"mqtt source: option 'stream': {self._url} has no stream {self._stream!r}"
                                f"{self._names()}") from None

    def offsets_at(self, timestamp: int) -> Optional[dict[int, int]]:
        path = f"/streams/{quote(self._stream, safe='')}/offsets?timestamp={timestamp}"
        try:
            answer = self._get_json(path)
            return {int(entry["partition"]): int(entry["offset"]) for entry in answer["partitions"]}
        except _NotFound:
            return None
        except (KeyError, TypeError, ValueError) as error:
            raise StreamError(f"mqtt source: {self._url}{path} did not answer with offsets ({error!r})") from None

    def read(self, partition: int, file: str, position: int, length: int) -> bytes:
        try:
            return self._get(self._file_path(partition, file), position, length)
        except _NotFound:
            raise SegmentGone(f"mqtt source: {self.describe(partition, file)} is gone") from None

    def index(self, partition: int, segment: Segment) -> list[IndexEntry]:
        try:
            data = self._get(self._file_path(partition, index_file(segment.file)))
        except _NotFound:
            return []
        return usable_index(data, segment)

    def describe(self, partition: int, file: str) -> str:
        return self._url + self._file_path(partition, file)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _file_path(self, partition: int, file: str) -> str:
        return f"/streams/{quote(self._stream, safe='')}/{partition}/{quote(file)}"

    def _names(self) -> str:
        try:
            document = self._get_json("/streams")
        except (StreamError, _NotFound):
            return ""
        names = document.get("streams") if isinstance(document, dict) else document
        return f" (there are: {', '.join(map(str, names))})" if isinstance(names, list) and names else ""

    def _get_json(self, path: str) -> Any:
        body = self._get(path)
        try:
            return json.loads(body)
        except ValueError:
            raise StreamError(f"mqtt source: {self._url}{path} did not answer with JSON: "
                              f"is this the broker's HTTP address?") from None

    def _get(self, path: str, position: int = 0, length: Optional[int] = None) -> bytes:
        """One resource, or exactly ``length`` bytes of it from ``position``."""
        received = bytearray()
        wait = FIRST_WAIT_S
        reason = ""
        for attempt in range(self._tries):
            if attempt:
                time.sleep(wait * random.uniform(0.5, 1.5))
                wait *= 2
            before = len(received)
            try:
                self._request(path, position, length, received)
                return bytes(received)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                reason = str(error) or type(error).__name__
                if length is None:
                    received.clear()
                elif len(received) > before:
                    wait = FIRST_WAIT_S
        raise StreamError(f"mqtt source: {self._url}{path} cannot be read after {self._tries} tries: {reason}")

    def _request(self, path: str, position: int, length: Optional[int], received: bytearray) -> None:
        headers = dict(self._headers)
        if length is not None:
            headers["Range"] = f"bytes={position + len(received)}-{position + length - 1}"
        connection = self._connect()
        connection.request("GET", self._base + path, headers=headers)
        response = connection.getresponse()
        if response.status == 404:
            response.read()
            raise _NotFound
        if response.status in (401, 403):
            self.close()
            raise StreamError(f"mqtt source: option 'token': {self._url} refused it ({response.status})"
                              if self._headers else f"mqtt source: {self._url} wants a 'token' ({response.status})")
        if response.status >= 500 or response.status == 429:
            raise http.client.HTTPException(f"{response.status} {response.reason}")
        if response.status != (200 if length is None else 206):
            self.close()
            raise StreamError(f"mqtt source: {self._url}{path} answered {response.status} {response.reason}")
        if length is None:
            received += response.read()
            return
        while len(received) < length:
            data = response.read(min(length - len(received), PIECE_BYTES))
            if not data:
                raise http.client.HTTPException(f"the answer broke off after {len(received)} of {length} bytes")
            received += data
        response.read()

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            self._connection = kind(self._host, self._port, timeout=TIMEOUT_S)
        return self._connection
