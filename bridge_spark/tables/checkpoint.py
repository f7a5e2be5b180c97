"""The checkpoint directory of a query: Spark's files, and those that the ingest job adds.

The offsets of a batch are synced before the batch is published, so that after a power loss Spark repeats exactly that
batch.  Spark itself syncs none of its files, and records the start of a query only after the first batch.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from bridge_spark.log.files import replace_file, sync
from bridge_spark.source import offsets, read_range
from bridge_spark.source.open_storage import open_storage
from bridge_spark.source.options import SourceOptions, parse_options
from bridge_spark.source.storage import Manifest
from bridge_spark.tables.ingest_session import IngestError, one_line

BEGINNING_FILE = "beginning.json"
_COMMITTED = b'v1\n{"nextBatchWatermarkMs":0}'  # Spark's commit file of a query without a watermark


class Checkpoint:
    """The checkpoint in the directory ``path``, which `lock` creates."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lock(self, where: str) -> IO[bytes]:
        """Lock the checkpoint until the returned file is closed.  Raises `IngestError`, prefixed with ``where``."""
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
        """Whether no query has used it yet."""
        return not (self.path / "metadata").exists()

    def id(self) -> str:
        """Its unique id.  A query must have used it."""
        return str(json.loads((self.path / "metadata").read_text())["id"])

    def starting_offsets(self, options: Mapping[str, str]) -> str:
        """The `startingOffsets` of its query, given the ``options`` of the source.

        An option such as "latest" means another offset at each start, so the offsets of the first start are stored.
        """
        if options["startingOffsets"] == "earliest":
            return "earliest"
        path = self.path / BEGINNING_FILE
        if not path.exists():
            parsed = parse_options(options)
            storage = open_storage(parsed)
            try:
                manifest = storage.manifest()
                begin = read_range.starting(parsed, storage, manifest, offsets.latest(manifest))
            finally:
                storage.close()
            entries = offsets.of_stream(parsed.stream, manifest)
            replace_file(path, json.dumps(offsets.to_json(begin, entries)).encode())
        if self._last("offsets") < 0:
            return path.read_text()
        # The offsets of the last batch say whose these are, and the stream may have been restored since.
        return json.dumps(offsets.to_json(offsets.from_json(json.loads(path.read_bytes()))))

    def check_stream(self, options: SourceOptions, manifest: Manifest) -> None:
        """Raise `StreamError` if the batches are of another stream than that of the ``options``."""
        last = self._last("offsets")
        try:
            document = self._source_offsets(last) if last >= 0 else json.loads((self.path / BEGINNING_FILE).read_bytes())
        except (FileNotFoundError, ValueError, IndexError):
            return  # it has no batch, or its last one is damaged, which Spark reports
        offsets.check_stream(document, options.stream, manifest, options.accept_incarnation)

    def offsets_and_watermark(self, batch: int) -> tuple[dict[str, int], int]:
        """The end offsets of a batch by partition, and its watermark in milliseconds."""
        metadata = (self.path / "offsets" / str(batch)).read_text().splitlines()[1]
        return self._source_offsets(batch), int(json.loads(metadata)["batchWatermarkMs"])

    def sync_offsets(self, batch: int) -> None:
        """Sync the offsets of the batch."""
        directory = self.path / "offsets"
        sync([self.path / "metadata", directory / str(batch), directory, self.path])

    def open_batch(self) -> int | None:
        """The batch that was started and not committed, which Spark would repeat; None if there is none."""
        started = self._last("offsets")
        return started if started > self._last("commits") else None

    def commit(self, batch: int) -> None:
        """Commit a batch of a query without state.  The query must not be running."""
        (self.path / "commits").mkdir(exist_ok=True)
        replace_file(self.path / "commits" / str(batch), _COMMITTED)

    def _source_offsets(self, batch: int) -> dict[str, int]:
        found: dict[str, int] = json.loads((self.path / "offsets" / str(batch)).read_text().splitlines()[2])
        return found

    def _last(self, directory: str) -> int:
        numbers = (int(path.name) for path in (self.path / directory).glob("*") if path.name.isdigit())
        return max(numbers, default=-1)
