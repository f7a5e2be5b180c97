"""Lists of the broker's HTTP API, read by pages: retained messages and sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from tempfile import SpooledTemporaryFile
from typing import IO, Any, cast
from urllib.parse import urlencode

import pyarrow as pa  # type: ignore[import-untyped]

from bridge_spark.source.http_client import HttpClient, HttpError, NotFound
from bridge_spark.source.storage import StreamError

API = "/api/v1"
PAGE_ROWS = 1000  # the most that the API gives; it ends a page of retained messages early at 1 MiB
MEMORY_BYTES = 8 * 1024 * 1024  # a complete list that is longer is kept in a temporary file
MAX_STARTS = 10

Batch = Callable[[list[dict[str, Any]]], pa.RecordBatch]


def check_access(client: HttpClient) -> None:
    """Raise `StreamError` unless the broker has the API, and the sender may see lists."""
    try:
        client.get_json(f"{API}/listeners")
    except HttpError as error:
        raise state_error(client, error) from None


def state_error(client: HttpClient, error: HttpError) -> StreamError:
    """The line for a failed request."""
    if isinstance(error, NotFound):
        return StreamError(
            f"mqtt source: {client.url} has no {API}: the broker is older than this source, or it is not the broker's HTTP address"
        )
    return StreamError(f"mqtt source: {error}")


class StatePages:
    """Pages of the list at ``path`` whose items satisfy ``selection``."""

    def __init__(self, client: HttpClient, path: str, selection: dict[str, str]) -> None:
        self._client = client
        self._path = path
        self._selection = selection

    def items(self) -> Iterator[list[dict[str, Any]]]:
        """The items, page by page.

        Raises `StreamError`, and `NotFound` if the broker does not know the cursor of a page, after a restart for
        example.
        """
        cursor: dict[str, str] = {}
        while True:
            query = urlencode({**self._selection, "limit": str(PAGE_ROWS), **cursor})
            try:
                page = self._client.get_json(f"{self._path}?{query}")
                items, following = page["items"], page["next_cursor"]
            except HttpError as error:
                if cursor and isinstance(error, NotFound):
                    raise
                raise state_error(self._client, error) from None
            except (KeyError, TypeError):
                raise StreamError(f"mqtt source: {self._client.url}{self._path} did not answer with a list") from None
            yield items
            if following is None:
                return
            cursor = {"cursor": str(following)}

    def batches(self, make: Batch, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The items as Arrow batches.

        The first one follows the last page, because a list whose cursor was forgotten is read again from its start:
        rows that Spark has got cannot be taken back.
        """
        for _ in range(MAX_STARTS):
            with SpooledTemporaryFile(MEMORY_BYTES) as spool:
                file = cast(IO[bytes], spool)
                try:
                    with pa.ipc.new_stream(file, schema) as writer:
                        for items in filter(None, self.items()):
                            writer.write_batch(make(items))
                except NotFound:
                    continue
                file.seek(0)
                with pa.ipc.open_stream(file) as reader:
                    yield from reader
                return
        raise StreamError(
            f"mqtt source: {self._client.url}{self._path} lost the place in its list {MAX_STARTS} times: "
            f"the broker restarts, or too many lists are read at once"
        )
