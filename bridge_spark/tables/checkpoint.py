"""The checkpoint of a query: what Spark keeps in the directory, and what the ingest job adds.

The rule kept here: what a batch is made of is on disk before the batch is in a
table, so that after a power loss Spark repeats that batch and no other.  Spark
syncs none of its files, and notes where a query began only once a batch is done.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Optional

from bridge_spark.log.files import replace_file, sync
from bridge_spark.tables.ingest_session import IngestError, one_line

_COMMITTED = b'v1\n{"nextBatchWatermarkMs":0}'
"""What Spark writes when a batch of a query without a watermark is done."""


class Checkpoint:
    """The checkpoint in the directory ``path``, which `lock` makes where there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lock(self, where: str) -> IO[bytes]:
        """Keep other runs off it while the returned file is open; raises `IngestError`, whose line begins with ``where``."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / "ingest.lock", "ab")
        except OSError as error:
            raise IngestError(f"{where}: {one_line(error)}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise IngestError(f"{where}: another ingest is running with {self.path}") from None
        return lock

    def is_new(self) -> bool:
        """Whether no query has used it."""
        return not (self.path / "metadata").exists()

    def id(self) -> str:
        """What tells it from all others, once a query has used it."""
        return str(json.loads((self.path / "metadata").read_text())["id"])

    def beginning(self, options: Mapping[str, str]) -> str:
        """Where its query begins, as `startingOffsets`.

        ``options`` are the source's.  What they say of a stream that grows means
        another offset at each start, so the first start's is kept.
        """
        from bridge_spark.source import offsets, read_range
        from bridge_spark.source.open_storage import open_storage
        from bridge_spark.source.options import parse_options

        if options["startingOffsets"] == "earliest":
            return "earliest"
        path = self.path / "beginning.json"
        if not path.exists():
            parsed = parse_options(options)
            storage = open_storage(parsed)
            try:
                manifest = storage.manifest()
                begin = read_range.starting(parsed, storage, manifest, offsets.latest(manifest))
            finally:
                storage.close()
            replace_file(path, json.dumps(offsets.to_json(begin)).encode())
        return path.read_text()

    def offsets_and_watermark(self, batch: int) -> tuple[dict[str, int], int]:
        """Up to which offsets a batch read, and its watermark in milliseconds."""
        _, metadata, source = (self.path / "offsets" / str(batch)).read_text().splitlines()[:3]
        return json.loads(source), int(json.loads(metadata)["batchWatermarkMs"])

    def sync_offsets(self, batch: int) -> None:
        """Put on disk what the batch reads."""
        directory = self.path / "offsets"
        sync([self.path / "metadata", directory / str(batch), directory, self.path])

    def open_batch(self) -> Optional[int]:
        """The batch that was begun and that Spark would repeat, if there is one."""
        begun = self._last("offsets")
        return begun if begun > self._last("commits") else None

    def commit(self, batch: int) -> None:
        """Let Spark, which is not running, hold a batch of a query without state to be done."""
        (self.path / "commits").mkdir(exist_ok=True)
        replace_file(self.path / "commits" / str(batch), _COMMITTED)

    def _last(self, directory: str) -> int:
        numbers = (int(path.name) for path in (self.path / directory).glob("*") if path.name.isdigit())
        return max(numbers, default=-1)
