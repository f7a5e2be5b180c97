"""The memory that there is: machine, control groups; and the setting that is a share of it."""

from __future__ import annotations

import asyncio
import dataclasses
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.core import Core

from mqttbroker.config.setting_kinds import MemorySize
from mqttbroker.config.settings import Cluster, Limits, Listener, Settings
from mqttbroker.node.shard_process import core_settings
from mqttbroker.system import memory_limit
from mqttbroker.system.memory_limit import (
    MemoryWatch,
    ProcessesMemory,
    ProcessMemory,
    available_memory,
    divided_memory,
    memory_bytes,
    memory_warning,
    part_limits,
)

GIB = 1 << 30


def machine(root: Path, cgroup: str, **files: str) -> tuple[Path, Path]:
    """/proc of a machine with 8 GiB, and /sys/fs/cgroup with these files."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal:  {8 * GIB // 1024} kB\nMemFree: 1 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroups


V1 = "9:pids:/x\n4:memory,cpu:/a/b\n0::/\n"


@pytest.mark.parametrize(
    "cgroup, files, found",
    [
        ("", {}, 8),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{2 * GIB}\n"}, 2),
        ("0::/a/b\n", {"a/b/memory.max": f"{3 * GIB}\n", "a/b/memory.high": f"{GIB}\n"}, 1),
        ("0::/host/only\n", {"memory.max": f"{GIB}\n"}, 1),  # a container whose path is the host's
        ("0::/a\n", {"a/memory.max": f"{16 * GIB}\n"}, 8),
        (V1, {"memory/a/b/memory.limit_in_bytes": f"{2 * GIB}\n", "memory/a/memory.limit_in_bytes": f"{GIB}\n"}, 1),
        (V1, {"memory/memory.limit_in_bytes": f"{2 * GIB}\n"}, 2),
        (V1, {"memory/a/b/memory.limit_in_bytes": "9223372036854771712\n"}, 8),
    ],
)
def test_available_memory_is_the_least_limit(tmp_path: Path, cgroup: str, files: dict[str, str], found: int) -> None:
    assert available_memory(*machine(tmp_path, cgroup, **files)) == found * GIB


def test_no_limit_is_known_without_these_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_memory(tmp_path, tmp_path) is None
    monkeypatch.setattr(memory_limit, "available_memory", lambda: None)
    assert memory_bytes("auto") == memory_bytes("50%") == 0


def test_the_setting_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "available_memory", lambda: 10 * GIB)
    assert memory_bytes(Limits().max_memory) == 6 * GIB
    assert memory_bytes("25%") == 10 * GIB // 4 and memory_bytes(123) == 123 and memory_bytes(None) == 0


def test_values_of_the_setting() -> None:
    kind = MemorySize("64MiB", "1TiB")
    assert [kind.read(value) for value in ("auto", "50%", "7 %", "2GiB")] == ["auto", "50%", "7%", 2 * GIB]
    for value, reason in (("0%", "1%–100%"), ("101%", "1%–100%"), ("1MiB", "64MiB–1TiB"), (5, "share"), ("x", "share")):
        with pytest.raises(ValueError, match=reason):
            kind.read(value)


def test_resident_memory_follows_what_is_allocated() -> None:
    process = ProcessMemory()
    before = process.resident()
    with mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE) as block:  # a heap may have as much to reuse, and keep it
        block.write(b"x" * len(block))
        during = process.resident()
    assert before > 1 << 20 and 60 << 20 < during - before < 80 << 20
    assert process.resident() < during - (50 << 20)


def test_memory_of_processes_that_come_and_go() -> None:
    memory = ProcessesMemory()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = memory.resident([os.getpid(), child.pid])
        assert found[os.getpid()] > 1 << 20 and found[child.pid] > 0
        child.kill()
        child.wait()
        assert memory.resident([child.pid]) == {child.pid: 0}
    assert memory.resident([]) == {}


@pytest.mark.parametrize("took, again", [(0.0, 0.5), (0.1, 2.0)])
def test_free_memory_is_given_back_before_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took: float, again: float
) -> None:
    """It is given back at most twice per second, and for at most 5 % of the time."""
    calls: list[float] = []

    def give_back() -> float:
        calls.append(1)
        return took

    monkeypatch.setattr(memory_limit, "give_back", give_back)

    class Fixed(ProcessMemory):
        size = 0

        def resident(self) -> int:
            return self.size

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        clock = [0.0]
        monkeypatch.setattr(loop, "time", lambda: clock[0])
        with Core(tmp_path, max_memory=100 << 20) as core:
            process = Fixed()
            memory = MemoryWatch(core.broker.memory, process, 7)
            for now, per_cent, times in ((0.0, 74, 0), (0.1, 75, 1), (again, 90, 1), (again + 0.2, 90, 2), (9, 50, 2)):
                process.size = per_cent << 20
                clock[0] = now
                memory.sample(now)
                assert core.broker.memory.resident == process.size
                while len(calls) < times or memory.returning:  # in another thread
                    await asyncio.sleep(0)
                assert len(calls) == times
            assert core.broker.memory.base == 7

    asyncio.run(watch())


def test_glibc_gives_free_memory_back() -> None:
    assert 0 <= memory_limit.give_back() < 60


def test_the_sum_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "available_memory", lambda: GIB)
    defaults = Settings()
    found = part_limits(defaults)
    # Every total in bytes is a part; what is on disk is none.
    totals = {field.name for field in dataclasses.fields(Limits) if field.name.startswith("max_total_")}
    assert totals - found.keys() == {"max_total_queued_bytes", "max_total_queued_messages"}
    assert 5 * GIB < sum(found.values()) < 8 * GIB
    assert memory_warning(defaults) == ""  # nobody chose it
    half = dataclasses.replace(defaults, limits=Limits(max_memory="50%"))
    assert re.fullmatch(
        r"limits\.max_memory: 512 MiB is less than all parts may take together, [\d,]+ MiB \(max_total_session_bytes"
        r" 2,048 MiB, .*\): requests will be refused before these limits are reached",
        memory_warning(half),
    )
    assert memory_warning(dataclasses.replace(defaults, limits=Limits(max_memory=20 * GIB))) == ""
    secure = dataclasses.replace(defaults, listeners=(Listener(type="tls"),))
    assert part_limits(secure)["max_connections"] == found["max_connections"] * 13


def test_cores_of_a_node_divide_a_share_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "available_memory", lambda: 10 * GIB)
    settings = Settings(cluster=Cluster(shards=4))
    assert core_settings(settings, 3).limits.max_memory == 6 * GIB // 4
    assert divided_memory("50%", 5) == GIB
    assert divided_memory("auto", 1000) == 64 << 20
    assert divided_memory(2 * GIB, 4) == 2 * GIB, "a size is that of each core"
    assert divided_memory(None, 4) is None
    monkeypatch.setattr(memory_limit, "available_memory", lambda: None)
    assert divided_memory("auto", 4) is None
