"""Reads the committed records of a stream log in two ways: with the log's own decoder, and with Arrow as Spark does."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

from bridge_spark.log.columns import ColumnBuilder
from bridge_spark.log.record_batch import decode_messages
from bridge_spark.source.directory_storage import DirectoryStorage
from bridge_spark.source.offsets import Offsets, earliest, latest
from bridge_spark.source.plan import Planner, Slice
from bridge_spark.source.slice_reader import log_batches, read_slices
from bridge_spark.source.storage import Manifest


class StoredRecord(NamedTuple):
    """One record of the log."""

    partition: int
    offset: int
    topic: str
    payload: bytes
    qos: int
    client_id: str


SCHEMA = pa.schema(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("topic", pa.string()),
        ("payload", pa.binary()),
        ("qos", pa.int8()),
        ("client_id", pa.string()),
    ]
)


class LogReader:
    """Reads one stream below a data directory, whether or not a broker runs."""

    def __init__(self, data_dir: Path, stream: str) -> None:
        self.stream = stream
        self._storage = DirectoryStorage(str(data_dir), stream)
        self._seen: Offsets | None = None

    def records(self) -> list[StoredRecord]:
        """All committed records, by the log's own decoder."""
        return self._decoded(self._slices(self._storage.manifest(), None))

    def arrow_records(self) -> list[StoredRecord]:
        """All committed records, by Arrow."""
        builder = ColumnBuilder(SCHEMA, self.stream, None)
        batches = read_slices(self._storage, self._slices(self._storage.manifest(), None), builder, True)
        return [StoredRecord(*row.values()) for batch in batches for row in batch.to_pylist()]

    def new_records(self) -> list[StoredRecord]:
        """The records committed since the last call."""
        manifest = self._storage.manifest()
        start, self._seen = self._seen, latest(manifest)
        return self._decoded(self._slices(manifest, start))

    def _slices(self, manifest: Manifest, start: Offsets | None) -> list[Slice]:
        tasks = Planner(self._storage).plan(manifest, start or earliest(manifest), latest(manifest), None)
        return [part for task in tasks for part in task]

    def _decoded(self, slices: list[Slice]) -> list[StoredRecord]:
        return [
            StoredRecord(part.partition, offset, message.topic, message.payload, message.qos, message.publisher)
            for part in slices
            for data, batch in log_batches(self._storage, part)
            for offset, message in enumerate(decode_messages(data, batch), batch.first_offset)
            if part.start_offset <= offset < part.end_offset
        ]
