"""A stream's files over the broker's HTTP interface.  Connection errors become one-line `StreamError`s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from bridge_spark.log.segment_names import archived_offsets, is_sealed
from bridge_spark.log.sparse_index import IndexEntry
from bridge_spark.source.archive_reader import ArchiveOptions, ArchiveReader, parse_segments
from bridge_spark.source.consumers import REPORT_TIMEOUT_S, Reporter
from bridge_spark.source.http_client import RETRIES, RETRY_INTERVAL_S, TIMEOUT_S, HttpClient, HttpError, NotFound
from bridge_spark.source.storage import (
    Manifest,
    Segment,
    SegmentGone,
    StreamError,
    UnknownStream,
    index_file,
    parse_manifest,
    sealed_index,
    usable_index,
)


class HttpStorage:
    """Files of ``stream`` at ``url``; see `HttpClient` for the other arguments.  Not thread-safe."""

    chunk_bytes = 16 * 1024 * 1024  # half the size costs the broker a quarter more CPU

    def __init__(
        self,
        url: str,
        stream: str,
        token: str | None = None,
        ca_file: str | None = None,
        retries: int = RETRIES,
        retry_interval_s: float = RETRY_INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
        archive: ArchiveOptions = ArchiveOptions(),
    ) -> None:
        self._client = HttpClient(url, token, ca_file, retries, retry_interval_s, timeout_s)
        self._stream = stream
        self._path = f"/streams/{quote(stream, safe='')}"
        self._reports = HttpClient(url, token, ca_file, 0, 0.0, min(timeout_s, REPORT_TIMEOUT_S))
        self._reporter = Reporter(self._send_report)
        self._archive_options = archive
        self._archive: ArchiveReader | None = None

    def manifest(self) -> Manifest:
        return parse_manifest(self._manifest_json(), self._client.url + self._path)

    def _manifest_json(self) -> Any:
        try:
            return self._client.get_json(self._path)
        except NotFound:
            raise UnknownStream(f"mqtt source: option 'stream': {self._client.url} has no stream {self._stream!r}{self._names()}") from None
        except HttpError as error:
            raise _stream_error(error) from None

    def archived(self, partition: int, start: int, end: int) -> list[Segment]:
        found: list[Segment] = []
        while start < end:
            path = f"{self._path}/archive?partition={partition}&start={start}&end={end}"
            try:
                page = parse_segments(self._client.get_json(path))
            except HttpError as error:
                raise _stream_error(error) from None
            except (KeyError, TypeError, ValueError) as error:
                raise StreamError(f"mqtt source: {self._client.url}{path} did not answer with segments ({error!r})") from None
            if not page:
                break
            found += page
            start = page[-1].end_offset
        return found

    def archived_at(self, partition: int, timestamp: int) -> Segment | None:
        return None  # `offsets_at` includes the archive

    def _open_archive(self) -> ArchiveReader:
        if self._archive is None:
            location = self._archive_options.location or str(self._manifest_json().get("archive", ""))
            self._archive = ArchiveReader(self._archive_options, location, self._stream)
        return self._archive

    def offsets_at(self, timestamp: int) -> dict[int, int] | None:
        path = f"{self._path}/offsets?timestamp={timestamp}"
        try:
            answer = self._client.get_json(path)
            return {int(entry["partition"]): int(entry["offset"]) for entry in answer["partitions"]}
        except NotFound:
            return None
        except HttpError as error:
            raise _stream_error(error) from None
        except (KeyError, TypeError, ValueError) as error:
            raise StreamError(f"mqtt source: {self._client.url}{path} did not answer with offsets ({error!r})") from None

    def read(self, partition: int, file: str, position: int, length: int) -> bytes:
        if archived_offsets(file) is not None:
            return self._open_archive().read(partition, file, position, length)
        try:
            return self._client.get(self._file_path(partition, file), position, length)
        except NotFound:
            raise SegmentGone(f"mqtt source: {self.describe(partition, file)} is gone") from None
        except HttpError as error:
            raise _stream_error(error) from None

    def index(self, partition: int, segment: Segment) -> list[IndexEntry]:
        if is_sealed(segment.file):
            return sealed_index(self, partition, segment)
        try:
            return usable_index(self._client.get(self._file_path(partition, index_file(segment.file))), segment)
        except NotFound:
            return []
        except HttpError as error:
            raise _stream_error(error) from None

    def report(self, consumer: str, offsets: Mapping[int, int]) -> None:
        self._reporter.report(consumer, offsets)

    def _send_report(self, consumer: str, report: bytes) -> None:
        self._reports.send("PUT", f"{self._path}/consumers/{quote(consumer, safe='')}", report)

    def describe(self, partition: int, file: str) -> str:
        if archived_offsets(file) is not None:
            return self._open_archive().describe(partition, file)
        return self._client.url + self._file_path(partition, file)

    def close(self) -> None:
        self._client.close()
        self._reports.close()

    def _file_path(self, partition: int, file: str) -> str:
        return f"{self._path}/{partition}/{quote(file)}"

    def _names(self) -> str:
        try:
            document: Any = self._client.get_json("/streams")
        except HttpError:
            return ""
        names = document.get("streams") if isinstance(document, dict) else document
        return f" (there are: {', '.join(map(str, names))})" if isinstance(names, list) and names else ""


def _stream_error(error: HttpError) -> StreamError:
    return StreamError(f"mqtt source: {error}")
