"""Random write sets: pages, queries, a start after a kill and the tables of a stopped store equal a model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from support import store_model
from support.store_cases import Opened, log, opened, path  # noqa: F401 - fixtures
from support.store_model import (
    RandomCommits,
    check_later_page,
    check_reads,
    check_records,
    check_recovered,
    check_tables,
)
from support.store_writer import FileLog, Writer

from sessions.store.writer import SqliteStore

WRITE_SETS = 120
SLOW = pytest.mark.slow(reason="more of the same")
SEEDS = [*range(2), *(pytest.param(seed, marks=SLOW) for seed in range(2, 40))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_write_sets_add_up_to_the_rows_of_a_model(opened: Opened, path: Path, seed: int) -> None:
    chance = Random(seed)
    commits = RandomCommits(seed)
    streams = path.parent / "streams"
    _, writer = opened("commit", FileLog(streams))
    for _ in range(WRITE_SETS):
        assert writer.outcome(commits.next()) is None
        if chance.random() < 0.3:
            check_later_page(writer, commits.rows, chance)
        if chance.random() < 0.1:
            check_reads(writer, commits.rows)
        if chance.random() < 0.05:
            recovered, writer = opened("commit", FileLog(streams))
            check_recovered(recovered, commits.rows)
    check_reads(writer, commits.rows)
    writer.store.stop()
    check_tables(path, commits.rows)
    check_records(streams, commits.rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kill_leaves_the_rows_of_all_reported_commits(tmp_path: Path, seed: int) -> None:
    """Whatever of them the tables had, each start goes on where the kill was."""
    chance = Random(seed)
    number = 0
    for _ in range(4):
        number = killed_behind(tmp_path, seed, number, chance.randrange(1, 120))
        number = recovered_number(tmp_path, seed, number)


def killed_behind(directory: Path, seed: int, number: int, commits: int) -> int:
    """Run a process that goes on from a number, and kill it; the number of its last reported commit."""
    command = [sys.executable, store_model.__file__, str(directory), str(seed), str(number)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as victim:
        assert victim.stdout is not None
        for _ in range(commits):
            number = int(victim.stdout.readline())
        victim.send_signal(signal.SIGKILL)
        rest = victim.stdout.read().split(b"\n")[:-1]
    return int(rest[-1]) if rest else number


def recovered_number(directory: Path, seed: int, reported: int) -> int:
    """The number of the last commit that a start finds: the last reported one or the one behind it."""
    store = SqliteStore(directory / "broker.db", "commit", FileLog(directory / "streams"))
    recovered = store.recover()
    writer = Writer(store)
    commits = RandomCommits(seed)
    commits.skip_to(reported)

    def check() -> None:
        check_recovered(recovered, commits.rows)
        check_reads(writer, commits.rows)
        check_records(directory / "streams", commits.rows)

    try:
        check()
    except AssertionError:
        commits.next()
        check()
    store.stop()
    check_tables(directory / "broker.db", commits.rows)
    check_records(directory / "streams", commits.rows)
    return commits.number
