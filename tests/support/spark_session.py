"""The session of all Spark tests, with settings for a fast start, and stream files in the broker's format."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bridge_spark.java import use_java
from bridge_spark.log.high_watermark import Watermark, encode_watermark
from bridge_spark.log.record_batch import encode_batch, encode_lost
from bridge_spark.log.sparse_index import INDEX_ENTRY, INDEX_INTERVAL
from sessions.message import Message
from support.class_archive import QUICK_JVM
from support.paths import ROOT
from support.worker_fork_server import worker_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AUTOLOAD = ROOT / "bridge_spark" / "autoload"
START_US = 1_700_000_000_000_000


def python_path() -> str:
    """PYTHONPATH for Python workers and child processes; empty for the installed build."""
    given = os.environ.get("PYTHONPATH", "")
    if not given:
        return ""
    return os.pathsep.join(dict.fromkeys([*given.split(os.pathsep), str(AUTOLOAD)]))


def start_session(warehouse: Path, java_options: str = QUICK_JVM, master: str = "local[2]") -> SparkSession:
    """A session with a short start-up."""
    if python_path():
        os.environ["PYTHONPATH"] = python_path()
    os.environ["PYSPARK_PYTHON"] = worker_python(python_path())
    from pyspark.sql import SparkSession

    use_java()
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "1",
        # Few rows do not pay for the Java code that Spark would write and compile for each query. Tests whose program has a session
        # of its own, such as those of the documentation's examples, run with it.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(warehouse),
        "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": java_options,
    }
    builder = SparkSession.builder.master(master).appName("tests")
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


def message(
    number: int,
    topic: str = "sensors/a",
    payload: bytes | None = None,
    qos: int = 1,
    retain: bool = False,
    properties: bytes = b"",
) -> Message:
    """A message received ``number`` ms after `START_US`; by default its payload has the number."""
    body = b'{"n": %d}' % number if payload is None else payload
    return Message(topic, body, qos, retain, properties, f"client-{number % 3}", START_US + number * 1000, 0)


class StreamWriter:
    """Writes one stream in the directory ``data`` in the broker's format."""

    def __init__(self, data: Path, name: str = "sensors", partitions: int = 1) -> None:
        self.directory = data / "streams" / name
        self._marks = [Watermark(0, 0, 0, 0) for _ in range(partitions)]
        self._last_index = [-INDEX_INTERVAL] * partitions
        for partition in range(partitions):
            (self.directory / str(partition)).mkdir(parents=True)
        (self.directory / "stream.json").write_text(
            json.dumps({"name": name, "partitions": partitions, "filters": ["#"], "key": "topic", "format_version": 1})
        )

    def append(self, partition: int, records: Sequence[Message], commit: bool = True) -> None:
        """Write one batch; ``commit``: move the high watermark."""
        mark = self._marks[partition]
        data = encode_batch(records, mark.high_watermark)
        path = self._file(partition, mark.segment)
        with open(path, "ab") as file:
            file.write(data)
        if mark.position - self._last_index[partition] >= INDEX_INTERVAL:
            with open(path.with_suffix(".idx"), "ab") as file:
                file.write(INDEX_ENTRY.pack(mark.high_watermark, mark.position, records[0].timestamp))
            self._last_index[partition] = mark.position
        if commit:
            self._mark(partition, high_watermark=mark.high_watermark + len(records), position=mark.position + len(data))

    def lose(self, partition: int, count: int) -> int:
        """Write a mark for ``count`` lost offsets; returns the end offset."""
        mark = self._marks[partition]
        data = encode_lost(mark.high_watermark, mark.high_watermark + count)
        with open(self._file(partition, mark.segment), "ab") as file:
            file.write(data)
        self._mark(partition, high_watermark=mark.high_watermark + count, position=mark.position + len(data))
        return mark.high_watermark + count

    def roll(self, partition: int) -> None:
        """Begin a new segment."""
        self._mark(partition, segment=self._marks[partition].high_watermark, position=0)
        self._last_index[partition] = -INDEX_INTERVAL

    def remove_before(self, partition: int, offset: int) -> None:
        """Apply retention; ``offset`` is the first offset of a segment."""
        self._mark(partition, log_start_offset=offset)
        for path in self.segments(partition):
            if int(path.stem) < offset:
                path.unlink()

    def segments(self, partition: int) -> list[Path]:
        return sorted((self.directory / str(partition)).glob("*.seg"))

    def manifest(self) -> dict[str, Any]:
        """The manifest as the broker's HTTP interface returns it."""
        partitions: list[dict[str, Any]] = []
        for partition, mark in enumerate(self._marks):
            files = self.segments(partition)
            ends = [int(path.stem) for path in files[1:]] + [mark.high_watermark]
            partitions.append(
                {
                    "partition": partition,
                    "log_start_offset": mark.log_start_offset,
                    "high_watermark": mark.high_watermark,
                    "segments": [
                        {
                            "file": path.name,
                            "first_offset": int(path.stem),
                            "end_offset": end,
                            "bytes": mark.position if int(path.stem) == mark.segment else path.stat().st_size,
                            "first_timestamp_us": 0,
                            "last_timestamp_us": 0,
                            "sealed": False,
                        }
                        for path, end in zip(files, ends)
                    ],
                }
            )
        return {"stream": self.directory.name, "format_version": 1, "partitions": partitions}

    def _file(self, partition: int, first_offset: int) -> Path:
        return self.directory / str(partition) / f"{first_offset:020d}.seg"

    def _mark(self, partition: int, **changes: int) -> None:
        self._marks[partition] = self._marks[partition]._replace(**changes)
        path = self.directory / str(partition) / "high_watermark"
        path.write_bytes(encode_watermark(self._marks[partition]))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session of all tests, shared by every module that imports it."""
    session = start_session(tmp_path_factory.mktemp("spark"))
    yield session
    session.stop()
