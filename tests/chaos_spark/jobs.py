"""The jobs of a driver: the ingest job, or a query with Spark's own Kafka source. Each knows its settings and its table."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from support.class_archive import QUICK_JVM

from bridge_spark.log.kafka_record import stream_topic
from chaos_spark.driver import ALL, EXECUTOR, JVM, PYTHON, VICTIMS, TableFiles
from chaos_spark.outbox import SCHEMA
from chaos_spark.verdict import Findings, Row, judge_readers, read_dead_letters, read_messages, read_table

OFFSETS_PER_BATCH = 3000


class Job(Protocol):
    """A query that writes one table. ``program``: Python's arguments; ``victims``: its processes that may be killed."""

    files: TableFiles
    program: tuple[str, ...]
    victims: Sequence[str]

    def settings(self, stream: str, source: Mapping[str, str], strict: bool) -> str:
        """The contents of the file that the program reads; ``source`` is that of a `Service`."""

    def rows(self) -> list[Row]:
        """The rows of the table, as a reader finds them now."""

    def dead_letters(self) -> list[Row]:
        """Messages whose payloads do not parse and are not in the table."""

    def judge_readers(self, findings: Findings, rows: list[Row]) -> None:
        """Check that other readers of the table find the same rows."""


class IngestJob:
    """`mqttbroker ingest`, whose table is in ``directory``."""

    def __init__(self, directory: Path, program: tuple[str, ...], executors: bool = False) -> None:
        self.files = TableFiles(directory / "table")
        self.program = (*program, "ingest")
        self.victims: Sequence[str] = (ALL, PYTHON, JVM, EXECUTOR) if executors else VICTIMS

    def settings(self, stream: str, source: Mapping[str, str], strict: bool) -> str:
        return (
            "[source]\n"
            + "".join(f"{name} = {json.dumps(value)}\n" for name, value in source.items())
            + f"[spark]\nmaster = 'local[2,4]'\n[spark.conf]\n'spark.driver.extraJavaOptions' = '{QUICK_JVM}'\n"
            f"[tables.readings]\nstream = '{stream}'\nschema = '{SCHEMA}'\noutput = {json.dumps(str(self.files.output))}\n"
            f"columns = ['topic', 'partition', 'offset', 'client_id', 'qos']\n"
            f"max_offsets_per_trigger = {OFFSETS_PER_BATCH}\nfail_on_data_loss = {json.dumps(strict)}\n"
        )

    def rows(self) -> list[Row]:
        return read_table(self.files.output)

    def dead_letters(self) -> list[Row]:
        return read_dead_letters(self.files.dead_letters)

    def judge_readers(self, findings: Findings, rows: list[Row]) -> None:
        judge_readers(findings, self.files.output, rows)


class SinkFiles(TableFiles):
    """The files of a table that Spark's Parquet sink writes to ``output``: its log there names those that are of the table."""

    def __init__(self, output: Path, topic: str) -> None:
        super().__init__(output)
        self._topic = topic
        self._log = output / "_spark_metadata"
        self._since = 0.0

    def started(self) -> None:
        self._since = time.time()

    def published(self, batch: int) -> bool:
        return batch < 0 or any((self._log / name).exists() for name in (f"{batch}", f"{batch}.compact"))

    def visible(self) -> int:
        """The number of the last batch in the log."""
        return max(self._batches(), default=-1)

    def staged(self, batch: int) -> list[str]:
        """The files that this life has written since the batch before was published. Files of earlier lives stay there for
        ever, and nothing tells their batch."""
        before = self._since
        for name in (f"{batch - 1}", f"{batch - 1}.compact"):
            with suppress(FileNotFoundError):
                before = max(before, (self._log / name).stat().st_mtime)
        with suppress(FileNotFoundError):
            return [path.name for path in self.output.glob("part-*.parquet") if path.stat().st_mtime > before]
        return []

    def written(self, batch: int) -> bool:
        with suppress(FileNotFoundError):
            return any((self.output / name).stat().st_size > 0 for name in self.staged(batch))
        return False

    def offsets(self, batch: int) -> dict[int, int]:
        if batch < 0:
            return {}
        last = (self.checkpoint / "offsets" / str(batch)).read_text().splitlines()[-1]
        return {int(partition): offset for partition, offset in json.loads(last)[self._topic].items()}

    def logged(self) -> list[str]:
        """The paths of the files that the log names: those of the last compaction, and of each batch behind it."""
        batches = self._batches()
        compacted = max((batch for batch, name in batches.items() if name.endswith(".compact")), default=-1)
        found = []
        for batch, name in sorted(batches.items()):
            if batch >= compacted:
                version, *lines = (self._log / name).read_text().splitlines()
                assert version == "v1", f"the log of Spark's sink has the version {version!r}"
                found += [json.loads(line)["path"].removeprefix("file://") for line in lines]
        return found

    def _batches(self) -> dict[int, str]:
        """The names of the log's files by batch."""
        if not self._log.exists():
            return {}
        return {int(path.stem): path.name for path in self._log.iterdir() if path.name.removesuffix(".compact").isdigit()}


class KafkaSourceJob:
    """`chaos_spark.kafka_query`, whose table is in ``directory``; ``topic``: that of the stream."""

    def __init__(self, directory: Path, cluster: str, stream: str) -> None:
        self.program: tuple[str, ...] = ("-m", "chaos_spark.kafka_query")
        self.victims: Sequence[str] = VICTIMS  # no Python works for its executor
        self._sink = SinkFiles(directory / "table", stream_topic(cluster, stream))
        self.files: TableFiles = self._sink

    def settings(self, stream: str, source: Mapping[str, str], strict: bool) -> str:
        return json.dumps(
            {
                "servers": source["bootstrap_servers"],
                "topic": stream_topic(source["cluster_id"], stream),
                "options": {"maxOffsetsPerTrigger": str(OFFSETS_PER_BATCH), "failOnDataLoss": json.dumps(strict)},
                "output": str(self.files.output),
                "checkpoint": str(self.files.checkpoint),
            }
        )

    def rows(self) -> list[Row]:
        return read_messages(self._sink.logged())

    def dead_letters(self) -> list[Row]:
        return []

    def judge_readers(self, findings: Findings, rows: list[Row]) -> None:
        """Nothing to do: only Spark reads the sink's log."""
