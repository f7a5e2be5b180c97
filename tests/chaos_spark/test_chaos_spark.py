"""A short run of `make chaos-spark`, and tests of its verdict and its outbox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pandas
import pyarrow
import pyarrow.parquet
import pytest
from support.core import wait_until
from support.patience import PATIENCE
from support.scripted_broker import Peer, ScriptedBroker

from chaos_spark.cluster_lives import BOTH, KAFKA, NODE, Kinds
from chaos_spark.defects import BROKER, DEFECTS
from chaos_spark.driver import ALL, EXECUTOR, INSIDE, JVM, PYTHON, deaths
from chaos_spark.jobs import KafkaSourceJob
from chaos_spark.outbox import PACKET_IDS, Outbox, Reading, reading_of
from chaos_spark.publisher import Publisher
from chaos_spark.run import CLUSTER_MODES, Plan, Run, chaos
from chaos_spark.state import START, WINDOW, StateRun
from chaos_spark.verdict import (
    GLIMPSES,
    LOST,
    MISSING,
    ORDER,
    PLACES,
    REFUSED,
    TWICE,
    WINDOWS,
    WRONG,
    Findings,
    Ranges,
    Row,
    judge,
)
from mqttbroker.codec.packets import Disconnect, Packet

SERVER_UNAVAILABLE = 0x88

pytestmark = pytest.mark.one_build


def test_each_reading_is_in_the_table_once_after_kills() -> None:
    run, summary = chaos(partial(Run, Plan("short", "sealing", "both", 2, 3, 400.0, 3.0, 5.0)))
    assert not run.findings.text(), f"{summary}\n{run.findings.text()}"
    unused = [row for row, count in run.findings.faults.items() if not run.findings.checked[row]]
    assert not set(unused) - {LOST, REFUSED, WINDOWS}, f"nothing was checked of: {unused}"
    assert sum(run.counts[moment] for moment in INSIDE) == run.counts["kills"] == 2
    assert run.service.lives.counts["kills"] >= 2 and all(actor.counts["kills"] for actor in run.publishers)


@pytest.mark.slow("kills a node, a Kafka broker and Spark's driver: two minutes for each way to read the stream")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", CLUSTER_MODES)
def test_each_reading_of_a_cluster_is_in_the_table_once_after_kills(mode: str) -> None:
    run, summary = chaos(partial(Run, Plan("short", mode, "both", 1, 4, 100.0, 10.0, 3.0)))
    assert not run.findings.text(), f"{summary}\n{run.findings.text()}"
    assert all(run.findings.checked[row] for row in (MISSING, TWICE, WRONG, ORDER, PLACES, GLIMPSES)), summary
    kills = run.service.lives.counts
    assert run.counts["kills"] == 1 and kills[NODE] >= 1 and kills[KAFKA] >= 1, summary


def test_a_seed_gives_the_same_deaths() -> None:
    assert deaths("1", 30) == deaths("1", 30) != deaths("2", 30)


def test_each_victim_has_its_turn() -> None:
    victims = (ALL, PYTHON, JVM, EXECUTOR)
    assert Counter(death.victim for death in deaths("1", 8, victims)) == {victim: 2 for victim in victims}


# --- the publisher --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 1])
def test_a_publisher_that_a_node_refuses_as_unavailable_tries_again(nodes: int, tmp_path: Path) -> None:
    ended: list[Packet] = []

    def script(peer: Peer) -> None:
        ended.extend(peer.welcome(0 if peer.number else SERVER_UNAVAILABLE))

    (tmp_path / "s.finish").touch()
    with ScriptedBroker(script) as broker:
        outbox = Outbox(tmp_path / "s.outbox")
        Publisher("s", [broker.port] * nodes, tmp_path, 5, 1.0, outbox).run()
        outbox.close()
        wait_until(lambda: bool(ended))
    assert isinstance(ended[0], Disconnect)
    assert (tmp_path / "s.faults").exists() == (nodes == 1), "a single broker is never unavailable"


@pytest.mark.parametrize("kills", range(2, 12, 2))
def test_nodes_and_kafka_brokers_are_killed_so_often_each(kills: int) -> None:
    kinds = Kinds(Random(kills))
    counts = Counter(kinds.next() for _ in range(kills))
    assert min(counts[NODE], counts[KAFKA]) + counts[BOTH] >= kills // 2 and sum(counts.values()) == kills


# --- the tables of Spark's own sink ---------------------------------------------------------------------------------


def log_of_sink(directory: Path, name: str, *files: str) -> None:
    log = directory / "_spark_metadata"
    log.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"path": f"file://{directory}/{file}", "action": "add"}) for file in files]
    (log / name).write_text("\n".join(["v1", *lines]))


def test_the_rows_of_a_sink_are_those_of_the_files_in_its_log(tmp_path: Path) -> None:
    job = KafkaSourceJob(tmp_path, "c", "chaos")
    output = job.files.output
    assert job.rows() == [] and not job.files.published(0) and job.files.visible() == -1
    expected = []
    for batch, number in enumerate((1, 2, 49, 4)):
        output.mkdir(exist_ok=True)
        reading = Reading("s", number)
        expected.append(row(number, batch)._replace(value=reading.value if reading.parses else None))
        columns = {
            "partition": [0],
            "offset": [batch],
            "topic": [reading.topic],
            "client_id": ["s"],
            "qos": [2],
            "payload": [reading.payload],
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), output / f"part-{batch}.parquet")
    log_of_sink(output, "0", "part-0.parquet")
    assert job.rows() == expected[:1] and job.files.published(0) and not job.files.published(1)
    log_of_sink(output, "1.compact", "part-0.parquet", "part-1.parquet")
    log_of_sink(output, "2", "part-2.parquet")
    assert sorted(job.rows()) == expected[:3]
    assert job.files.published(1) and job.files.visible() == 2


def test_files_of_a_sink_are_staged_until_their_batch_is_in_the_log(tmp_path: Path) -> None:
    files = KafkaSourceJob(tmp_path, "c", "chaos").files
    files.output.mkdir()
    (files.output / "part-left.parquet").write_bytes(b"x")
    os.utime(files.output / "part-left.parquet", (1, 1))
    files.started()
    assert files.staged(0) == []
    (files.output / "part-0.parquet").touch()
    os.utime(files.output / "part-0.parquet", (time.time() + 1, time.time() + 1))
    assert files.staged(0) == ["part-0.parquet"] and not files.written(0)
    (files.output / "part-0.parquet").write_bytes(b"x")
    os.utime(files.output / "part-0.parquet", (time.time() + 1, time.time() + 1))
    assert files.written(0)
    log_of_sink(files.output, "0", "part-0.parquet")
    os.utime(files.output / "_spark_metadata" / "0", (time.time() + 2, time.time() + 2))
    assert files.staged(1) == []


# --- the outbox -----------------------------------------------------------------------------------------------------


def test_an_outbox_is_restored_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "outbox"
    before = Outbox(path)
    ids = [before.next_reading()[0] for _ in range(PACKET_IDS)]
    before.received(ids[1])
    before.received(ids[2])
    before.complete(ids[2])
    path.write_bytes(path.read_bytes() + b"R 1")
    after = Outbox(path)
    assert (after.outgoing, after.last, after.known) == (before.outgoing, PACKET_IDS, True)
    assert list(after.outgoing.values())[:2] == [(1, False), (2, True)]
    assert after.next_reading() == (ids[2], PACKET_IDS + 1)
    assert Outbox(path).last == PACKET_IDS + 1


@pytest.mark.parametrize("number", [1, 49, 98, 99])
def test_a_dead_letter_identifies_its_reading(number: int) -> None:
    reading = Reading("sensor-1", number)
    assert reading.parses == (number not in (49, 99))
    if not reading.parses:
        assert reading_of(reading.payload) == reading


# --- the verdict ----------------------------------------------------------------------------------------------------


def row(number: int, offset: int, partition: int = 0) -> Row:
    reading = Reading("s", number)
    return Row(partition, offset, reading.topic, "s", number, reading.value, "s", reading.qos)


GOOD = [row(number, number - 1) for number in range(1, 7)]

VERDICTS: list[tuple[str, list[Row], Ranges, list[str]]] = [
    ("nothing", GOOD, [], []),
    ("a loss", [*GOOD[:2], *GOOD[3:]], [], [MISSING, PLACES]),
    ("a loss at the beginning", GOOD[1:], [], [MISSING, PLACES]),
    ("a loss at the end", GOOD[:-1], [], [MISSING, PLACES]),
    ("a repetition from the log", [*GOOD, row(2, 1)], [], [TWICE, PLACES]),
    ("a repetition in the log", [*GOOD[:5], row(5, 5)], [], [MISSING, TWICE]),
    ("a step back", [row(1, 0), row(3, 1), row(2, 2), *GOOD[3:]], [], [ORDER]),
    ("another value", [*GOOD[:5], GOOD[5]._replace(value=0.0)], [], [WRONG]),
    ("another client id", [*GOOD[:5], GOOD[5]._replace(client_id="t")], [], [WRONG]),
    ("another QoS", [*GOOD[:5], GOOD[5]._replace(qos=1)], [], [WRONG]),
    ("an offset that the log does not have", [*GOOD[:5], GOOD[5]._replace(offset=7)], [], [PLACES]),
    ("a reading that was never sent", [*GOOD, row(7, 6)], [], [WRONG, PLACES]),
    ("removed by retention", [*GOOD[:2], *GOOD[4:]], [(0, 2, 4)], []),
    ("removed by retention at the beginning", GOOD[3:], [(0, 0, 3)], []),
    ("more than retention removed", [*GOOD[:1], *GOOD[4:]], [(0, 2, 4)], [MISSING, PLACES, LOST]),
    ("less than retention removed", [*GOOD[:3], *GOOD[4:]], [(0, 2, 4)], [PLACES, LOST]),
]


@pytest.mark.parametrize(("name", "rows", "lost", "expected"), VERDICTS, ids=[case[0] for case in VERDICTS])
def test_verdict(name: str, rows: list[Row], lost: Ranges, expected: list[str]) -> None:
    findings = Findings()
    judge(findings, rows, [], {"s": 6}, {0: range(6)}, lost)
    assert sorted(found for found, texts in findings.faults.items() if texts) == sorted(expected), findings.text()
    assert all(found in findings.text() for found in expected) and GLIMPSES in findings.table()


# --- the verdict on tables with state -------------------------------------------------------------------------------


def complete(directory: Path) -> tuple[StateRun, dict[str, Any]]:
    """A run and its expected tables."""
    run = StateRun("1", "state", 2, directory, ())
    offsets = {"out": [offsets[0] for offsets in run.log.good.values()], "out.rejected": [*run.log.bad, *run.log.late]}
    windows = [{"window_start": begin, "window_end": begin + timedelta(seconds=WINDOW), "device": device, "count": one[0],
                "value_mean": one[1], "value_min": one[2], "value_max": one[3]}
               for (begin, device), one in run.log.windows().items()]  # fmt: skip
    return run, {
        **{name: pandas.DataFrame({"offset": places}) for name, places in offsets.items()},
        "out.minute": pandas.DataFrame(windows),
    }


STATES: list[tuple[str, str, Any, list[str]]] = [
    ("nothing", "out", lambda rows: rows, []),
    ("a loss", "out", lambda rows: rows[1:], [MISSING]),
    ("a repetition", "out", lambda rows: pandas.concat([rows, rows[5:6]]), [TWICE, GLIMPSES]),
    ("a duplicate", "out", lambda rows: pandas.concat([rows, rows[5:6] * 0 + 39]), [WRONG]),
    ("a lost dead letter", "out.rejected", lambda rows: rows[:-1], [MISSING]),
    ("no dead letter", "out.rejected", lambda rows: pandas.concat([rows, rows[:1] * 0]), [WRONG]),
    ("a lost window", "out.minute", lambda rows: rows[3:], [WINDOWS]),
    ("another count", "out.minute", lambda rows: rows.assign(count=rows["count"] + (rows.index == 7)), [WINDOWS]),
    ("a window twice", "out.minute", lambda rows: pandas.concat([rows, rows[:1]]), [WINDOWS, GLIMPSES]),
    (
        "too few windows",
        "out.minute",
        lambda rows: rows[rows["window_start"] < START + timedelta(minutes=5)],
        [WINDOWS],
    ),
]


@pytest.mark.parametrize(("name", "table", "change", "expected"), STATES, ids=[case[0] for case in STATES])
def test_verdict_on_state(name: str, table: str, change: Any, expected: list[str], tmp_path: Path) -> None:
    run, tables = complete(tmp_path)
    for table_name, rows in tables.items():
        (tmp_path / table_name).mkdir()
        rows = change(rows) if table_name == table else rows
        pyarrow.parquet.write_table(pyarrow.Table.from_pandas(rows, preserve_index=False), tmp_path / table_name / "a.parquet")
    run._judge()
    assert sorted(row for row, texts in run.findings.faults.items() if texts) == sorted(expected), run.findings.text()


@pytest.mark.parametrize("name", sorted(name for name, (victim, _) in DEFECTS.items() if victim != BROKER))
def test_a_defect_fits_the_code_that_it_replaces(name: str) -> None:
    program = "import sys; from chaos_spark.defects import DEFECTS; DEFECTS[sys.argv[1]][1]()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-P", "-c", program, name], check=True, env=environment, timeout=PATIENCE)
