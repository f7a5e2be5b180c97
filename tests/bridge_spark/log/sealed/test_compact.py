"""Compaction of sealed segments: what survives, what readers see, and crashes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from pyspark.sql.types import StructType
from support.api_client import ACCESS, Api
from support.raw_client import RawClient
from support.sealed_log import seal_closed
from support.stream_reads import batches, rows, source

from bridge_spark.log import stream_log
from bridge_spark.log.backup import copy_partition
from bridge_spark.log.check import check_partition
from bridge_spark.log.high_watermark import published_end
from bridge_spark.log.record_batch import decode_messages, iter_batches
from bridge_spark.log.repair import repair_partition
from bridge_spark.log.sealed.compact import compact
from bridge_spark.log.sealed.footer import load_footer
from bridge_spark.log.sealed.reader import SealedFile
from bridge_spark.log.sealed.sealer import Sealer
from bridge_spark.log.segment_names import is_sealed, sealed_file_in, segment_offsets
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from mqttbroker.admin.data.repair import check
from sessions.message import Message

pytestmark = pytest.mark.one_build
KEY = ("s", 0)
NOW = 1_000_000.0
Record = tuple[int, str, bytes]  # offset, topic, payload


class Clock:
    """Seconds since the epoch, set by the test."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def message(topic: str, payload: bytes, client_id: str = "dev", properties: bytes = b"") -> Message:
    return Message(topic, payload, 1, False, properties, client_id, int(NOW * 1e6), 0)


def open_logs(path: Path, end: int | None = None, clock: Any = None, **config: Any) -> StreamLogs:
    given = {"segment_bytes": 2000, "seal": True, "compact": True, **config}
    logs = StreamLogs(path / "streams", [StreamConfig("s", ["#"], **given)], clock or Clock())
    logs.recover({} if end is None else {KEY: end})
    return logs


def append(logs: StreamLogs, messages: Sequence[Message]) -> int:
    end = 0
    for message in messages:
        end = logs.append({KEY: [message]})[KEY][0]
        logs.committed()
    logs.sync()
    return end


def records(directory: Path, segments: Sequence[Any]) -> list[Record]:
    """The records of the segments of a manifest, as a reader finds them."""
    found: list[Record] = []
    for segment in segments:
        path = directory / segment["file"]
        if is_sealed(segment["file"]):
            data = path.read_bytes()
            file = SealedFile(lambda position, length, data=data: data[position : position + length], len(data))
            for _, _, rows in file.rows(["payload", "topic"], 0, 1 << 62):
                assert rows is not None
                found += [(row["offset"], row["topic"], row["payload"]) for row in rows.to_pylist()]
        else:
            data = path.read_bytes()[: segment["bytes"]]
            for batch in iter_batches(data):
                found += [
                    (offset, each.topic, each.payload) for offset, each in enumerate(decode_messages(data, batch), batch.first_offset)
                ]
    return found


def read(logs: StreamLogs) -> list[Record]:
    return records(logs.directory / "s" / "0", logs.manifest("s")["partitions"][0]["segments"])


def until(logs: StreamLogs, condition: Any) -> None:
    """Let the log show what was sealed and compacted until the condition holds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        logs.committed()
        time.sleep(0.01)


def compacted(logs: StreamLogs) -> bool:
    """Whether most segments are compacted; the rest is, with the setting of these tests, when it is as large."""
    closed = logs.partition("s", 0).closed
    return sum(segment.generation > 0 for segment in closed) > len(closed) / 2


def last_values(found: Sequence[Record]) -> dict[str, bytes]:
    return {topic: payload for _, topic, payload in found}


def pass_over(directory: Path, key: str = "topic", tombstones_before: int = 0, now: int = 1, most: int = 10**6) -> int:
    """One pass over all sealed files of a directory; returns how many files were written."""
    files = [directory / sealed_file_in(directory, first) for first in segment_offsets(directory)]
    found = compact([file for file in files if file.exists()], key, tombstones_before, now, most)
    for each in found:
        for former in directory.glob(f"{each.file[:20]}.*parquet"):
            former.unlink()
        os.rename(each.unfinished, directory / each.file)
    return len(found)


def offsets_left(directory: Path) -> list[Record]:
    names = [sealed_file_in(directory, first) for first in segment_offsets(directory)]
    return records(directory, [{"file": name} for name in names if (directory / name).exists() and is_sealed(name)])


@pytest.fixture(autouse=True)
def remove_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_log, "UNSEALED_STAYS", 0.0)


def test_the_broker_compacts_and_every_key_keeps_its_last_value(tmp_path: Path) -> None:
    logs = open_logs(tmp_path)
    sent = [message(f"t/{number % 5}", str(number).encode() * 5) for number in range(400)]
    append(logs, sent)
    sealer = Sealer(logs)
    sealer.start()
    try:
        until(logs, lambda: compacted(logs))
        end = append(logs, [message("t/1", b"new"), message("t/9", b"only")])
        closed = logs.partition("s", 0).closed
        left = read(logs)
        assert last_values(left) == {**{f"t/{n}": str(395 + n).encode() * 5 for n in range(5)}, "t/1": b"new", "t/9": b"only"}
        assert len(left) < 300 and [offset for offset, _, _ in left] == sorted({offset for offset, _, _ in left})
        for offset, topic, payload in left[:-2]:
            assert (sent[offset].topic, sent[offset].payload) == (topic, payload)  # offsets stay
        until(logs, lambda: len(list((logs.directory / "s/0").glob("*.parquet"))) == len(closed))
    finally:
        sealer.stop()
        logs.close()
    assert check_partition(tmp_path / "streams/s/0", end, False).problems == []
    again = open_logs(tmp_path, end)
    assert read(again) == left
    again.close()
    copy_partition(tmp_path / "streams/s/0", tmp_path / "copy", end)
    assert check_partition(tmp_path / "copy", end, False).problems == []


def sealed_directory(tmp_path: Path, messages: Sequence[Message], **config: Any) -> Path:
    """A partition whose closed segments are sealed."""
    logs = open_logs(tmp_path, **config)
    append(logs, messages)
    logs.close()
    directory = tmp_path / "streams/s/0"
    seal_closed(directory)
    return directory


def test_tombstones_stay_as_long_as_they_are_to(tmp_path: Path) -> None:
    sent = [message("kept", b"1"), message("gone", b"1"), message("gone", b"")]
    directory = sealed_directory(tmp_path, sent + [message("fill", bytes(100)) for _ in range(60)])
    assert pass_over(directory, now=1000)
    assert [each for each in offsets_left(directory) if each[1] != "fill"] == [(0, "kept", b"1"), (2, "gone", b"")]
    assert pass_over(directory, tombstones_before=1000, now=2000) == 0  # compacted at 1000, not before
    assert pass_over(directory, tombstones_before=1001, now=2000) == 1
    assert [each for each in offsets_left(directory) if each[1] != "fill"] == [(0, "kept", b"1")]


def test_an_old_value_never_comes_back_after_its_tombstone(tmp_path: Path) -> None:
    """A copy with an old file of the value and a new one of the tombstone compacts both before the tombstone goes."""
    sent = [message("gone", b"1"), *(message("fill", bytes(100)) for _ in range(40)), message("gone", b"")]
    directory = sealed_directory(tmp_path, sent + [message("fill", bytes(100)) for _ in range(40)])
    first = directory / sealed_file_in(directory, 0)
    shutil.copy(first, tmp_path / "old")
    pass_over(directory, now=1000)
    (directory / sealed_file_in(directory, 0)).unlink()
    for path in directory.glob("00000000000000000000.*"):
        path.unlink()
    shutil.copy(tmp_path / "old", first)
    for now in (5000, 9000):
        pass_over(directory, tombstones_before=now - 1000, now=now)
        left = [payload for _, topic, payload in offsets_left(directory) if topic == "gone"]
        assert left in ([b""], [])
    assert left == []


def user_property(name: str, value: str) -> bytes:
    pair = [name.encode(), value.encode()]
    return b"\x26" + b"".join(len(part).to_bytes(2, "big") + part for part in pair)


def test_keys_are_those_of_the_stream(tmp_path: Path) -> None:
    filler = [message("fill", bytes(100), "filler") for _ in range(40)]
    sent = [
        message("a", b"1", "c1", user_property("id", "x")), message("b", b"2", "c1", user_property("id", "y")),
        message("a", b"3", "c2", user_property("id", "y")), message("c", b"4", "c2"), message("c", b"5", "c3"),
    ]  # fmt: skip
    expected = {"topic": [1, 2, 4], "client": [1, 3, 4], "user-property:id": [0, 2, 3, 4]}  # none without a key is removed
    for number, (key, left) in enumerate(expected.items()):
        directory = sealed_directory(tmp_path / str(number), sent + filler)
        pass_over(directory, key)
        assert [offset for offset, topic, _ in offsets_left(directory) if topic != "fill"] == left


def test_a_pass_with_few_keys_in_memory_goes_on_where_it_ended(tmp_path: Path) -> None:
    sent = [message(f"t/{number % 100}", str(number).encode() * 10) for number in range(1000)]
    directory = sealed_directory(tmp_path, sent)
    dirty = [path for path in directory.glob("*.parquet")]
    passes = 0
    while pass_over(directory, now=10 + passes, most=30):
        passes += 1
        assert passes <= len(dirty)
    assert passes > 3
    left = offsets_left(directory)
    ends = max(offset for offset, _, _ in left) + 1
    assert last_values(left) == last_values([(n, each.topic, each.payload) for n, each in enumerate(sent[:ends])])
    assert len(left) == len({topic for _, topic, _ in left})


def test_removed_records_take_little_room(tmp_path: Path) -> None:
    shuffled = random.Random(1)
    sent = [message(f"t/{shuffled.randrange(3)}", shuffled.randbytes(50)) for _ in range(5000)]
    directory = sealed_directory(tmp_path, sent, segment_bytes=200_000)
    first = directory / sealed_file_in(directory, 0)
    before, sealed = first.stat().st_size, load_footer(first)
    pass_over(directory)
    (after,) = directory.glob("00000000000000000000.1.parquet")
    footer = load_footer(after)
    assert after.stat().st_size < before / 5
    assert (footer.rows, footer.end_offset, footer.lost) == (sealed.rows, sealed.end_offset, sealed.lost)
    assert pq.read_table(after).column("topic").null_count >= footer.rows - 3


def test_spark_reads_what_is_left_by_any_columns(tmp_path: Path) -> None:
    sent = [message(f"t/{number % 5}", str(number).encode() * 5) for number in range(200)]
    directory = sealed_directory(tmp_path, sent)
    found = source(tmp_path, stream="s", startingOffsets="earliest")
    part = found.reader(found.schema()).partitions()[0]
    before = rows(tmp_path, stream="s")
    assert len(before) == 200
    pass_over(directory)
    after = [(row["offset"], row["topic"], row["payload"]) for row in rows(tmp_path, stream="s")]
    left = offsets_left(directory)
    assert after[: len(left)] == left
    assert last_values(after) == {f"t/{number % 5}": str(number).encode() * 5 for number in range(195, 200)}
    assert len(after) < 40
    again = [row for batch in found.reader(found.schema()).read(part) for row in batch.to_pylist()]
    assert [row["offset"] for row in again] == [offset for offset, _, _ in after]  # a plan from before finds the new files
    only = StructType([field for field in found.schema() if field.name in ("offset", "qos")])
    assert [row["offset"] for batch in batches(found, only) for row in batch.to_pylist()] == [each[0] for each in after]


KILLED = """
import os, sys, threading, time
from pathlib import Path
from bridge_spark.log import stream_log
from bridge_spark.log.sealed.sealer import Sealer
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from sessions.message import Message
stream_log.UNSEALED_STAYS = 0.0
directory, end = Path(sys.argv[1]), int(sys.argv[2])
logs = StreamLogs(directory, [StreamConfig("s", ["#"], segment_bytes=20000, seal=True, compact=True, compact_dirty_percent=1)])
logs.recover({("s", 0): end})
sealer = Sealer(logs)
sealer.start()
number = end
while True:
    logs.append({("s", 0): [Message(f"t/{each % 7}", str(each).encode() * 5, 1, False, b"", "dev", int(time.time() * 1e6), 0)
                            for each in range(number, number + 5)]})
    logs.committed()
    number += 5
    time.sleep(0.005)
    print(number, flush=True)
"""


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow("minutes"))])
def test_kill_9_while_segments_are_sealed_and_compacted(tmp_path: Path, rounds: int) -> None:
    """Each key has its last value after each kill, and no file is left over."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    end = generations = 0
    for number in range(rounds):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "streams"), str(end)],
                                   stdout=subprocess.PIPE, text=True, env=environment)  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            end = int(line)
            done = len(list((tmp_path / "streams/s/0").glob("*.*.parquet")))
            if done > generations + number:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        end = published_end(tmp_path / "streams/s/0")
        logs = open_logs(tmp_path, end)
        left = read(logs)
        logs.close()
        assert last_values(left) == {f"t/{n % 7}": str(n).encode() * 5 for n in range(max(0, end - 7), end)}
        assert check_partition(tmp_path / "streams/s/0", end, False).problems == []
        names = os.listdir(tmp_path / "streams/s/0")
        assert len([name for name in names if is_sealed(name)]) == len({name[:20] for name in names if is_sealed(name)})
        generations = len([name for name in names if name.count(".") == 2])
    assert generations


def test_a_damaged_compacted_file_is_repaired_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    sent = [message(f"t/{number % 5}", str(number).encode() * 5) for number in range(200)]
    directory = sealed_directory(tmp_path, sent)
    pass_over(directory)
    end = 200
    left = offsets_left(directory)
    name = sealed_file_in(directory, 0)
    data = bytearray((directory / name).read_bytes())
    footer = load_footer(directory / name)
    data[footer.groups[0].times_position + 2] ^= 0xFF  # in the index of times: every row can be read
    (directory / name).write_bytes(data)
    (problem,) = check_partition(directory, end, False).problems
    assert problem.startswith(name)
    lines = repair_partition(directory, end, end, "now").lines
    assert any("put aside" in line for line in lines)
    assert check_partition(directory, end, False).problems == []
    salvaged = directory / "00000000000000000000.seg"
    kept = [record for record in left if record[0] < footer.end_offset]
    found = [
        (offset, each.topic, each.payload)
        for data in [salvaged.read_bytes()]
        for batch in iter_batches(data)
        if not batch.lost
        for offset, each in enumerate(decode_messages(data, batch), batch.first_offset)
    ]
    assert found == kept


def test_a_stream_is_compacted_once_an_operator_says_so(start_broker: Any) -> None:
    access = {"access": ACCESS}
    lab = {"filters": ["lab/#"], "partitions": 1, "segment_bytes": "2KiB"}
    broker = start_broker(config={"http": access, "streams": {"plant": {"filters": ["plant/#"]}}})
    api = Api(broker)
    assert api.ask("POST", "/streams", {"name": "lab", **lab})[0] == 200
    with RawClient(broker.port) as client:
        client.connect("publisher")
        for number in range(120):
            client.publish(f"lab/{number % 3}", str(number).encode() * 20, qos=1)
        assert api.ask("PATCH", "/streams/lab", {"compact": True})[0] == 200
        number = 120
        directory = broker.data_dir / "streams/lab/0"
        while not list(directory.glob("*.1.parquet")):
            client.publish(f"lab/{number % 3}", str(number).encode() * 20, qos=1)
            number += 1
        client.publish("lab/0", b"", qos=1)
    broker.restart(kill=True)
    found = [(row["topic"], row["payload"]) for row in rows(broker.data_dir, stream="lab")]
    assert dict(found)["lab/0"] == b"" and len(found) < number
    last = {f"lab/{each % 3}": str(each).encode() * 20 for each in range(number - 3, number)}
    assert {**last, "lab/0": b""} == dict(found)
    assert b"mqttbroker_stream_compaction_failures_total 0.0" in broker.get("/metrics", {"Authorization": "Bearer t-admin"})
    broker.terminate()
    assert check(broker.data_dir).problems == []
