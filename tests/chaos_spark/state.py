"""Tables of queries with state under kills: deduplication and windows, in Parquet, Delta and Iceberg.

The log is written before the run and never changes, so the expected tables are computed from it with pandas.  The
verdict reads the tables without Spark.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pandas  # type: ignore[import-untyped]
import pyarrow.dataset  # type: ignore[import-untyped]
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from support.class_archive import QUICK_JVM
from support.spark_session import START_US, StreamWriter, message

from chaos_spark.driver import STARTING, Death, Driver, TableFiles, deaths, told
from chaos_spark.verdict import GLIMPSES, MISSING, PROCESSES, TWICE, WINDOWS, WRONG, Findings
from sessions.message import Message

FORMATS = {"state": "parquet", "state-delta": "delta", "state-iceberg": "iceberg"}
BATCH = 100  # messages
BATCHES_OF_A_LIFE = 5  # on average
BAD, AGAIN, LATE = 40, 10, 97  # one in this many messages does not parse, is a duplicate, is hours late
WINDOW = 60  # seconds
LAST_SECONDS = 1800.0  # for the last driver to read the rest
SCHEMA = "device string not null, ts timestamp not null, value double not null"
START = datetime.fromtimestamp(START_US / 1e6, UTC)


class Log:
    """Messages of three devices, one per second, and of a fourth that is always late."""

    def __init__(self, seed: str, count: int) -> None:
        self.messages: list[Message] = []
        self.good: dict[tuple[str, float], list[int]] = {}  # offsets of a reading by device and second
        self.values: dict[tuple[str, float], float] = {}
        self.bad: set[int] = set()
        self.late: set[int] = set()
        random = Random(f"{seed}:log")
        for offset in range(count):
            second = float(offset + random.randint(-15, 15))
            device = "abc"[offset % 3]
            if offset % BAD == BAD - 1:
                self.bad.add(offset)
                self.messages.append(message(offset, payload=b"bad"))
            elif offset % LATE == LATE - 1 and offset > 4 * BATCH:
                self.late.add(offset)
                self._add(offset, "late", -1000.0 - offset, 0.0)
            elif offset % AGAIN == AGAIN - 1 and self.good:
                key = random.choice(list(self.good)[-15:])
                self.good[key].append(offset)
                self._add(offset, *key, self.values[key])
            else:
                key = (device, second)
                self.good.setdefault(key, []).append(offset)
                self.values.setdefault(key, random.randint(0, 400) / 4)
                self._add(offset, *key, self.values[key])

    def _add(self, offset: int, device: str, second: float, value: float) -> None:
        ts = (START + timedelta(seconds=second)).isoformat()
        body = json.dumps({"device": device, "ts": ts, "value": value}).encode()
        self.messages.append(message(offset * 1000 + 20_000, f"sensors/{device}", body))

    def windows(self) -> dict[tuple[datetime, str], tuple[int, float, float, float]]:
        """Count, mean, minimum and maximum by window start and device."""
        frame = pandas.DataFrame(
            [(START + timedelta(seconds=second), device, value) for (device, second), value in self.values.items()],
            columns=["time", "device", "value"],
        )
        groups = frame.groupby([pandas.Grouper(key="time", freq=f"{WINDOW}s", origin="epoch"), "device"])["value"]
        made = groups.agg(["count", "mean", "min", "max"])
        return {(begin.to_pydatetime(), device): tuple(made.loc[(begin, device)]) for begin, device in made.index}


class VersionedFiles(TableFiles):
    """The files of a Delta or Iceberg table, which executors write where they stay."""

    data: Path

    def staged(self, batch: int) -> list[str]:
        return [path.name for path in self.data.glob(f"ingest-{batch:010d}-*.parquet")]

    def written(self, batch: int) -> bool:
        with suppress(FileNotFoundError):
            return any((self.data / name).stat().st_size > 0 for name in self.staged(batch))
        return False

    def id(self) -> str | None:
        """The checkpoint's id, None before there is one."""
        path = self.checkpoint / "metadata"
        return json.loads(path.read_text())["id"] if path.exists() else None


class DeltaFiles(VersionedFiles):
    """The files of a Delta table; its log tells which batches are published."""

    def __init__(self, output: Path) -> None:
        super().__init__(output)
        self.data = output

    def published(self, batch: int) -> bool:
        checkpoint = self.id()
        if not DeltaTable.is_deltatable(str(self.output)) or checkpoint is None:
            return False
        version = DeltaTable(self.output).transaction_version(checkpoint)
        return version is not None and version >= batch

    def visible(self) -> int:
        return sum(1 for _ in (self.output / "_delta_log").glob("*.json"))


class IcebergFiles(VersionedFiles):
    """The files of an Iceberg table; its properties tell which batches are published."""

    def __init__(self, output: Path) -> None:
        super().__init__(output)
        self._place = output.parent / "warehouse" / "n" / _in_catalog(output)
        self.data = self._place / "data"

    def published(self, batch: int) -> bool:
        table = _iceberg(self.output)
        return table is not None and int(table.properties.get(f"mqttbroker.batch.{self.id()}", -1)) >= batch

    def visible(self) -> int:
        return sum(1 for _ in (self._place / "metadata").glob("snap-*.avro"))


def _in_catalog(output: Path) -> str:
    return output.name.replace(".", "_")


def _catalog(root: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{root}/catalog.db", "warehouse": f"{root}/warehouse"}


def _iceberg(output: Path) -> Any | None:
    """The Iceberg table of an output; None before it exists."""
    if not (output.parent / "catalog.db").exists():
        return None
    catalog = load_catalog("default", **_catalog(output.parent))
    name = f"n.{_in_catalog(output)}"
    return catalog.load_table(name) if catalog.table_exists(name) else None


def rows(directory: Path) -> Any:
    """A table's rows as a pandas frame; empty before the table exists."""
    if DeltaTable.is_deltatable(str(directory)):
        return DeltaTable(directory).to_pandas()
    table = _iceberg(directory)
    if table is not None:
        return table.scan().to_pandas()
    if not any(directory.rglob("*.parquet")):
        return pandas.DataFrame({"offset": [], "window_start": [], "device": [], "count": []})
    return pyarrow.dataset.dataset(directory, format="parquet").to_table().to_pandas()


class StateRun:
    """One run in ``directory`` with ``kills`` of the driver; each waits for a moment of one of the tables."""

    def __init__(self, seed: str, mode: str, kills: int, directory: Path, program: tuple[str, ...]) -> None:
        self.mode, self.seed, self.kills, self.directory = mode, seed, kills, directory
        self.findings = Findings()
        self.counts: Counter[str] = Counter()
        self.random = Random(f"{seed}:state")
        kind = {"parquet": TableFiles, "delta": DeltaFiles, "iceberg": IcebergFiles}[FORMATS[mode]]
        self.tables = [kind(directory / "out"), kind(directory / "out.minute")]
        self.drivers = [Driver(files, directory / "driver.log", (*program, "ingest")) for files in self.tables]
        self.log = Log(seed, kills * BATCHES_OF_A_LIFE * BATCH)
        self.seen: dict[str, set[Any]] = {"out": set(), "out.minute": set()}

    def go(self) -> None:
        writer = StreamWriter(self.directory / "data")
        for first in range(0, len(self.log.messages), BATCH):
            writer.append(0, self.log.messages[first : first + BATCH])
        config = self._config(BATCH)
        for death in deaths(f"{self.seed}:state", self.kills):
            if not self._live(self.random.choice(self.drivers), death, config):
                return
        driver = self.drivers[0]
        driver.start(self._config(100 * BATCH), "--once")
        self.findings.checked[PROCESSES] += 1
        if (status := driver.wait(LAST_SECONDS)) != 0:
            self.findings.fault(PROCESSES, f"the last driver ended with {status}: {driver.last_words()}")
            return
        self._judge()

    def _config(self, limit: int) -> Path:
        config = self.directory / "ingest.toml"
        config.write_text(
            f"[source]\npath = {json.dumps(str(self.directory / 'data'))}\n[spark]\nmaster = 'local[2,4]'\n"
            f"[spark.conf]\n'spark.driver.extraJavaOptions' = '{QUICK_JVM}'\n'spark.sql.shuffle.partitions' = '2'\n"
            f"[tables.t]\nstream = 'sensors'\nschema = '{SCHEMA}'\nevent_time = 'ts'\nwatermark = '1 minute'\n"
            f"deduplicate_by = ['device', 'ts']\nmax_offsets_per_trigger = {limit}\n"
            f"table_format = '{FORMATS[self.mode]}'\noutput = {json.dumps(self._place('out'))}\n"
            f"checkpoint = {json.dumps(str(self.tables[0].checkpoint))}\ncompact_after = 10\n"
            f"[tables.t.aggregates.minute]\nwindow = '{WINDOW} seconds'\ngroup_by = ['device']\n"
            f"checkpoint = {json.dumps(str(self.tables[1].checkpoint))}\n"
            "[catalog]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in _catalog(self.directory).items())
        )
        return config

    def _place(self, name: str) -> str:
        return f"n.{name}" if FORMATS[self.mode] == "iceberg" else str(self.directory / name)

    def _live(self, driver: Driver, death: Death, config: Path) -> bool:
        """One life of the driver; false if it ended by itself."""
        driver.start(config)
        self.findings.checked[PROCESSES] += 1
        if not driver.wait_for(death):
            if driver.ended is not None:
                self.findings.fault(PROCESSES, f"the driver ended by itself with {driver.ended}: {driver.last_words()}")
                return False
            self.counts["late"] += 1
        state = driver.files.state()
        driver.kill(death.victim)
        self.counts["kills"] += 1
        self.counts[STARTING if death.moment == STARTING else state] += 1
        self._glimpse()
        return True

    def _glimpse(self) -> None:
        """Check that rows seen before are still there, once each."""
        for name, columns in (("out", ["offset"]), ("out.minute", ["window_start", "device", "count"])):
            found = [tuple(row) for row in rows(self.directory / name)[columns].itertuples(index=False)]
            self.findings.checked[GLIMPSES] += len(found)
            if len(set(found)) != len(found):
                self.findings.fault(GLIMPSES, f"{name}: {len(found) - len(set(found))} rows are there twice")
            if gone := self.seen[name] - set(found):
                self.findings.fault(GLIMPSES, f"{name}: {len(gone)} rows are gone, one of them {min(gone)}")
            self.seen[name] |= set(found)

    # --- the verdict ----------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        self._glimpse()
        self._judge_rows(Counter(int(offset) for offset in rows(self.directory / "out")["offset"]))
        rejected = rows(self.directory / "out.rejected")
        self._judge_rejected(Counter(int(offset) for offset in rejected["offset"]))
        self._judge_windows(rows(self.directory / "out.minute"))
        self.counts["batches"] = self.tables[0].committed() + self.tables[1].committed() + 2

    def _judge_rows(self, found: Counter[int]) -> None:
        for key, offsets in self.log.good.items():
            count = sum(found.pop(offset, 0) for offset in offsets)
            self.findings.checked[MISSING] += 1
            self.findings.checked[TWICE] += 1
            if count != 1:
                self.findings.fault(MISSING if count < 1 else TWICE, f"reading {key} of offsets {offsets}: {count} times")
        self.findings.checked[WRONG] += 1
        if found:
            self.findings.fault(WRONG, f"{len(found)} rows that belong to the dead letters, one of them {min(found)}")

    def _judge_rejected(self, found: Counter[int]) -> None:
        for offset in self.log.bad | self.log.late:
            self.findings.checked[MISSING] += 1
            if (count := found.pop(offset, 0)) != 1:
                self.findings.fault(MISSING if count < 1 else TWICE, f"dead letter {offset}: {count} times")
        if found:
            self.findings.fault(WRONG, f"{len(found)} dead letters that are none, one of them {min(found)}")

    def _judge_windows(self, found: Any) -> None:
        wanted = self.log.windows()
        end: Any | None = found["window_end"].max() if len(found) else None
        closed = {key: one for key, one in wanted.items() if end and key[0] + timedelta(seconds=WINDOW) <= end}
        self.findings.checked[WINDOWS] += len(closed)
        for row in found.itertuples():
            one = closed.pop((row.window_start.to_pydatetime(), row.device), None)
            values = (row[found.columns.get_loc("count") + 1], row.value_mean, row.value_min, row.value_max)
            if one is None or any(abs(a - b) > 1e-9 for a, b in zip(one, values)):
                self.findings.fault(WINDOWS, f"{row.window_start} of {row.device} has {values}, not {one}")
        for key in closed:
            self.findings.fault(WINDOWS, f"{key} is missing")
        if len(wanted) - self.findings.checked[WINDOWS] > 12:
            self.findings.fault(WINDOWS, f"only {self.findings.checked[WINDOWS]} of {len(wanted)} are closed")

    def close(self) -> None:
        for driver in self.drivers:
            driver.close()

    def summary(self, seconds: float) -> str:
        counts = self.counts
        return (
            f"chaos-spark: seed {self.seed}, {self.mode}, {seconds:.0f} s\n"
            f"  {told(counts)}\n"
            f"  messages: {len(self.log.messages):,} in {counts['batches']} batches of two queries\n\n"
            f"{self.findings.table()}"
        )
