"""The stream log on real files: recovery, rolling, retention, visibility to readers."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_spark.log import segment, sparse_index
from bridge_spark.log.high_watermark import decode_watermark
from bridge_spark.log.record_batch import decode_messages, iter_batches, read_batch
from bridge_spark.log.stream_log import StreamConfig, StreamLogError, StreamLogs, partition_of
from sessions.message import Message

KEY = ("s", 0)


class Clock:
    """Seconds since the epoch, set by the test."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def message(index: int, seconds: float = 1_000_000.0, payload: bytes = b"") -> Message:
    data = payload or str(index).encode()
    return Message(f"sensors/{index % 7}", data, 1, False, b"", "dev", int(seconds * 1e6), 0)


def open_logs(path: Path, ends: dict[Any, int] | None, **config: Any) -> StreamLogs:
    clock = config.pop("clock", Clock())
    logs = StreamLogs(path / "streams", [StreamConfig("s", ["sensors/#"], **config)], clock)
    logs.recover(ends)
    return logs


def commit(logs: StreamLogs, messages: list[Message], key: Any = KEY) -> int:
    end = logs.append({key: messages})[key][0]
    logs.sync()
    logs.committed()
    return end


def visible(logs: StreamLogs, partition: int = 0) -> list[Message]:
    """The records of the manifest's segments."""
    found: list[Message] = []
    entry = logs.manifest("s")["partitions"][partition]
    expected = entry["log_start_offset"]
    for part in entry["segments"]:
        path, size = logs.committed_file("s", partition, part["file"])
        data = path.read_bytes()[:size]
        assert size == part["bytes"] == len(data)
        assert part["first_offset"] == expected
        for batch in iter_batches(data):
            assert batch.first_offset == expected
            expected = batch.end_offset
            found.extend(decode_messages(data, batch))
        assert part["end_offset"] == expected
    assert entry["high_watermark"] == expected
    return found


def payloads(logs: StreamLogs, partition: int = 0) -> list[bytes]:
    return [record.payload for record in visible(logs, partition)]


def numbers(start: int, end: int) -> list[bytes]:
    return [str(index).encode() for index in range(start, end)]


def on_disk(path: Path) -> list[Message]:
    """The records that a reader without the broker sees, by the watermark file."""
    directory = path / "streams" / "s" / "0"
    mark = decode_watermark((directory / "high_watermark").read_bytes())
    found: list[Message] = []
    for file in sorted(directory.glob("*.seg")):
        first = int(file.stem)
        if first < mark.log_start_offset or first > mark.segment:
            continue
        data = file.read_bytes()
        data = data[: mark.position] if first == mark.segment else data
        for batch in iter_batches(data):
            found.extend(decode_messages(data, batch))
    assert len(found) == mark.high_watermark - mark.log_start_offset
    return found


def test_records_are_invisible_before_the_commit(tmp_path: Path) -> None:
    logs = open_logs(tmp_path, {})
    ends = logs.append({KEY: [message(0), message(1)]})
    size = os.path.getsize(tmp_path / "streams/s/0/00000000000000000000.seg")
    assert ends == {KEY: (2, size, "0" * 20)}
    logs.sync()
    assert visible(logs) == [] and on_disk(tmp_path) == []
    logs.committed()
    assert payloads(logs) == numbers(0, 2)
    assert [record.payload for record in on_disk(tmp_path)] == numbers(0, 2)


def test_a_rolled_back_batch_is_removed(tmp_path: Path) -> None:
    logs = open_logs(tmp_path, {}, segment_bytes=2000)
    commit(logs, [message(0), message(1)])
    before = {p: p.stat().st_size for p in tmp_path.rglob("*.seg")}
    for count in (1, 50):
        for index in range(count):
            logs.append({KEY: [message(900 + index)] * 3})
        logs.rollback()
        assert {p: p.stat().st_size for p in tmp_path.rglob("*.seg")} == before
    assert commit(logs, [message(2)]) == 3
    assert payloads(logs) == numbers(0, 3)


def test_a_full_disk_fails_only_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = open_logs(tmp_path, {})
    commit(logs, [message(0)])
    real = os.pwrite

    def half(fd: int, data: bytes, position: int) -> int:
        if position > 0:
            if len(data) < 40:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(fd, data[: len(data) // 2], position)
        return real(fd, data, position)

    def broken(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", half)
        patch.setattr(os, "ftruncate", broken)
        with pytest.raises(OSError, match="No space"):
            logs.append({KEY: [message(1)] * 9})
        with pytest.raises(OSError, match="Input/output"):
            logs.rollback()
        with pytest.raises(OSError, match="Input/output"):
            logs.append({KEY: [message(1)]})
        with pytest.raises(OSError):
            logs.rollback()
    assert commit(logs, [message(1)]) == 2
    assert payloads(logs) == numbers(0, 2)
    assert [record.payload for record in on_disk(tmp_path)] == numbers(0, 2)


def test_an_index_that_cannot_be_written_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = open_logs(tmp_path, {})
    end = logs.append({KEY: [message(0, payload=bytes(70_000))]})[KEY][0]
    (tmp_path / "streams/s/0" / ("0" * 20 + ".idx")).mkdir()
    logs.committed()
    assert end == len(visible(logs)) == 1


def three_batches(path: Path) -> Path:
    logs = open_logs(path, {})
    for count, start in ((2, 0), (1, 2), (3, 3)):
        commit(logs, [message(start + index) for index in range(count)])
    logs.close()
    return path / "streams" / "s" / "0" / ("0" * 20 + ".seg")


def batch_ends(data: bytes) -> list[tuple[int, int]]:
    return [(0, 0)] + [(batch.end, batch.end_offset) for batch in iter_batches(data)]


def test_recovery_after_truncation_at_every_byte(tmp_path: Path) -> None:
    path = three_batches(tmp_path)
    data = path.read_bytes()
    for cut in range(len(data) + 1):
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        path.write_bytes(data[:cut])
        logs = open_logs(tmp_path, None)
        expected = max(offset for end, offset in batch_ends(data) if end <= cut)
        assert payloads(logs) == numbers(0, expected)
        assert [m.payload for m in on_disk(tmp_path)] == numbers(0, expected)
        assert commit(logs, [message(expected)]) == expected + 1
        assert payloads(logs) == numbers(0, expected + 1)
        logs.close()


def test_offsets_of_a_lost_log_are_not_reused(tmp_path: Path) -> None:
    three_batches(tmp_path).unlink()
    logs = open_logs(tmp_path, None)
    assert commit(logs, [message(6)]) == 7
    assert logs.manifest("s")["partitions"][0]["log_start_offset"] == 6


def test_recovery_after_damage_at_every_byte(tmp_path: Path) -> None:
    path = three_batches(tmp_path)
    data = path.read_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x41
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        path.write_bytes(damaged)
        logs = open_logs(tmp_path, None)
        expected = max(offset for end, offset in batch_ends(data) if end <= position)
        assert payloads(logs) == numbers(0, expected)
        assert commit(logs, [message(expected)]) == expected + 1
        assert payloads(logs) == numbers(0, expected + 1)
        logs.close()


def test_a_log_shorter_than_the_database_is_an_error(tmp_path: Path) -> None:
    path = three_batches(tmp_path)
    data = path.read_bytes()
    for cut, found in ((0, 0), (len(data) - 1, 3), (batch_ends(data)[1][0], 2)):
        path.write_bytes(data[:cut])
        with pytest.raises(StreamLogError) as caught:
            open_logs(tmp_path, {KEY: 6})
        assert f"stream 's' partition 0: the log ends at offset {found}" in str(caught.value)
        assert f"offsets {found} to 5" in str(caught.value)
        assert path.stat().st_size == cut
    path.unlink()
    with pytest.raises(StreamLogError, match="offsets 0 to 5 are missing"):
        open_logs(tmp_path, {KEY: 6})


def test_an_end_inside_a_batch_is_an_error(tmp_path: Path) -> None:
    path = three_batches(tmp_path)
    (path.parent / "high_watermark").unlink()
    with pytest.raises(StreamLogError, match="the log ends at offset 3 but the database at 5"):
        open_logs(tmp_path, {KEY: 5})


def test_a_missing_segment_in_the_middle_is_an_error(tmp_path: Path) -> None:
    logs = open_logs(tmp_path, {}, segment_bytes=300)
    for index in range(6):
        commit(logs, [message(index)])
    files = sorted(tmp_path.rglob("*.seg"))
    assert len(files) > 2
    files[1].unlink()
    with pytest.raises(StreamLogError, match="offsets .* are missing from segment"):
        open_logs(tmp_path, {KEY: 6}, segment_bytes=300)
    assert payloads(open_logs(tmp_path, None)) == numbers(0, int(files[1].stem))


def test_a_database_older_than_the_watermark_is_an_error(tmp_path: Path) -> None:
    logs = open_logs(tmp_path, {})
    for index in range(5):
        commit(logs, [message(index)])
    with pytest.raises(StreamLogError, match="ends at offset 3 but readers .* up to 5"):
        open_logs(tmp_path, {KEY: 3})
    assert payloads(open_logs(tmp_path, {})) == numbers(0, 5)
    (tmp_path / "streams/s/0/high_watermark").unlink()
    assert payloads(open_logs(tmp_path, {KEY: 3})) == numbers(0, 3)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_recovery_restores_the_committed_records(data: st.DataObject) -> None:
    """Random appends, commits, rollbacks and crashes, compared with a list."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        size = data.draw(st.sampled_from([1, 400, 100_000]))
        kept: list[bytes] = []
        logs = open_logs(path, {}, segment_bytes=size)
        count = 0
        for step in data.draw(st.lists(st.sampled_from("ccrkK"), max_size=12)):
            records = [message(count + index) for index in range(data.draw(st.integers(1, 4)))]
            count += len(records)
            assert logs.append({KEY: records})[KEY][0] == len(kept) + len(records)
            if data.draw(st.booleans()):
                logs.sync()
            if step == "c":
                logs.committed()
            elif step == "r":
                logs.rollback()
            if step in "cK":  # "K": killed between the COMMIT and `committed`
                kept += [record.payload for record in records]
            if step in "kK":
                logs.close()
                logs = open_logs(path, {KEY: len(kept)}, segment_bytes=size)
            assert payloads(logs) == kept
            assert [record.payload for record in on_disk(path)] == kept
        logs.close()


APPENDER = """
import os, sys
from pathlib import Path
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from sessions.message import Message

path, end, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
logs = StreamLogs(path / "streams", [StreamConfig("s", ["#"], segment_bytes=size)])
logs.recover({("s", 0): end} if end else {})
recorder = os.open(path / "database", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    records = [
        Message("t", str(end + i).encode().ljust(300), 1, False, b"", "c", 1, 0) for i in range(1 + end % 5)
    ]
    (end, _, _), = logs.append({("s", 0): records}).values()
    logs.sync()
    os.write(recorder, end.to_bytes(8, "little"))
    logs.committed()
    os.write(1, b".")
"""


@pytest.mark.parametrize("size", [1, 4000])
def test_kill_9_at_any_moment(tmp_path: Path, size: int) -> None:
    """A child process appends, and records each end where the broker commits."""
    pick = random.Random(size)
    end = 0
    for _ in range(8):
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", APPENDER, str(tmp_path), str(end), str(size)],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        child.stdout.read(pick.randrange(1, 40))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        recorded = (tmp_path / "database").read_bytes()
        end = int.from_bytes(recorded[-8:], "little")
        assert len(on_disk(tmp_path)) <= end
        logs = open_logs(tmp_path, {KEY: end}, segment_bytes=size)
        assert [p.strip() for p in payloads(logs)] == numbers(0, end)
        assert [m.payload.strip() for m in on_disk(tmp_path)] == numbers(0, end)
        logs.close()
    assert end > 8


def files(logs: StreamLogs, partition: int = 0) -> list[int]:
    parts = logs.manifest("s")["partitions"][partition]["segments"]
    return [part["first_offset"] for part in parts]


def test_a_segment_rolls_when_it_is_full(tmp_path: Path) -> None:
    logs = open_logs(tmp_path, {}, segment_bytes=1000)
    for index in range(8):
        commit(logs, [message(index, payload=bytes(200))])
    parts = logs.manifest("s")["partitions"][0]["segments"]
    assert len(parts) == 3 and all(part["bytes"] <= 1000 for part in parts)
    commit(logs, [message(8, payload=bytes(5000))])
    assert files(logs)[-1] == 8
    assert len(visible(logs)) == 9
    again = open_logs(tmp_path, {KEY: 9}, segment_bytes=1000)
    assert again.manifest("s") == logs.manifest("s")


def test_a_segment_rolls_when_it_is_old(tmp_path: Path) -> None:
    clock = Clock()
    logs = open_logs(tmp_path, {}, segment_age=60, clock=clock)
    for index in range(6):
        commit(logs, [message(index, clock.now)])
        clock.now += 25
    assert files(logs) == [0, 3]
    logs.close()
    logs = open_logs(tmp_path, {KEY: 6}, segment_age=60, clock=clock)
    commit(logs, [message(6, clock.now)])
    assert files(logs) == [0, 3, 6]


def test_retention_by_age_removes_whole_closed_segments(tmp_path: Path) -> None:
    clock = Clock()
    logs = open_logs(tmp_path, {}, segment_age=10, retention_age=100, clock=clock)
    for index in range(20):
        commit(logs, [message(index, clock.now)])
        clock.now += 10
    entry = logs.manifest("s")["partitions"][0]
    assert entry["log_start_offset"] == 9 and entry["high_watermark"] == 20
    assert sorted(int(p.stem) for p in tmp_path.rglob("*.seg")) == files(logs) == list(range(9, 20))
    assert payloads(logs) == numbers(9, 20)
    assert len(on_disk(tmp_path)) == 11
    again = open_logs(tmp_path, {KEY: 20}, clock=clock)
    assert again.manifest("s") == logs.manifest("s")


def test_an_idle_stream_expires_and_keeps_its_end_offset(tmp_path: Path) -> None:
    clock = Clock()
    logs = open_logs(tmp_path, {}, retention_age=100, clock=clock)
    commit(logs, [message(index, clock.now) for index in range(5)])
    clock.now += 101
    logs.committed()
    entry = logs.manifest("s")["partitions"][0]
    assert (entry["log_start_offset"], entry["high_watermark"], entry["segments"]) == (5, 5, [])
    assert list(tmp_path.rglob("*.seg")) == []
    for ends in ({KEY: 5}, None):
        logs.close()
        logs = open_logs(tmp_path, ends, retention_age=100, clock=clock)
        assert logs.manifest("s")["partitions"][0] == entry
    assert commit(logs, [message(5, clock.now)]) == 6
    assert payloads(logs) == numbers(5, 6)


def test_retention_by_size_counts_all_partitions_and_removes_the_oldest(tmp_path: Path) -> None:
    clock = Clock()
    logs = open_logs(tmp_path, {}, partitions=2, segment_bytes=1, retention_bytes=4000, clock=clock)
    for index in range(12):
        commit(logs, [message(index, clock.now, bytes(1000))], ("s", index % 2 if index < 6 else 0))
        clock.now += 2
    total = sum(part["bytes"] for entry in logs.manifest("s")["partitions"] for part in entry["segments"])
    assert total <= 4000
    assert files(logs, 0) == [7, 8] and files(logs, 1) == [2]


def test_a_segment_below_the_log_start_is_removed_at_start(tmp_path: Path) -> None:
    clock = Clock()
    logs = open_logs(tmp_path, {}, segment_age=10, retention_age=100, clock=clock)
    commit(logs, [message(0, clock.now)])
    first = tmp_path / "streams/s/0" / ("0" * 20 + ".seg")
    data = first.read_bytes()
    clock.now += 200
    commit(logs, [message(1, clock.now)])
    assert not first.exists()
    first.write_bytes(data)
    for ends in ({KEY: 2}, None):
        first.write_bytes(data)
        assert payloads(open_logs(tmp_path, ends, clock=clock)) == numbers(1, 2)
        assert not first.exists()


def test_the_number_of_partitions_cannot_change(tmp_path: Path) -> None:
    open_logs(tmp_path, {}, partitions=2, key="client")
    description = json.loads((tmp_path / "streams/s/stream.json").read_bytes())
    assert description == {
        "name": "s",
        "partitions": 2,
        "filters": ["sensors/#"],
        "key": "client",
        "format_version": 2,
    }
    with pytest.raises(StreamLogError, match="'s' has 2 partitions and cannot get 3.*: set partitions = 2, or"):
        open_logs(tmp_path, {}, partitions=3)
    open_logs(tmp_path, {}, partitions=2, key="topic")
    assert json.loads((tmp_path / "streams/s/stream.json").read_bytes())["key"] == "topic"


@pytest.mark.parametrize("name", ["", ".", "..", ".s", "a/b", "a b", "ü", "a" * 129])
def test_invalid_stream_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="stream name"):
        StreamConfig(name, ["#"])


def test_invalid_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="partitions must be positive"):
        StreamConfig("s", ["#"], partitions=0)
    with pytest.raises(ValueError, match="same name"):
        StreamLogs(tmp_path, [StreamConfig("s", ["#"]), StreamConfig("s", ["a"])])
    logs = open_logs(tmp_path, {})
    with pytest.raises(StreamLogError, match="no stream 's' with a partition 7"):
        logs.append({("s", 7): [message(0)]})
    logs.rollback()
    for unknown in (("x", 0), ("s", 1)):
        with pytest.raises(KeyError):
            logs.offset_for_timestamp(*unknown, 0)


def test_the_partition_of_a_key_never_changes() -> None:
    assert [partition_of(key, 4) for key in (b"", b"a", b"sensors/1")] == [0, 3, 3]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=4), min_size=1, max_size=12),
    st.integers(-1, 51),
    st.sampled_from([0, 100, 2**40]),
)
def test_offset_for_timestamp(batches: list[list[int]], wanted: int, interval: int) -> None:
    """Even if the clock went back; with an index entry per batch and without any."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        for module in (segment, sparse_index):
            patch.setattr(module, "INDEX_INTERVAL", interval)
        logs = open_logs(Path(directory), {}, segment_bytes=1200)
        times: list[int] = []
        for seconds in batches:
            commit(logs, [message(0, second) for second in seconds])
            times += seconds
        expected = next((i for i, time in enumerate(times) if time >= wanted), len(times))
        assert logs.offset_for_timestamp("s", 0, wanted * 1_000_000) == expected
        logs.close()
        again = open_logs(Path(directory), {KEY: len(times)}, segment_bytes=1200)
        assert again.offset_for_timestamp("s", 0, wanted * 1_000_000) == expected
        again.close()


def indexed(path: Path) -> StreamLogs:
    logs = open_logs(path, {}, segment_bytes=600_000, segment_age=1e9)
    for index in range(40):
        commit(logs, [message(index, index, bytes(30_000))])
    return logs


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:30],
        lambda data: bytes(len(data)),
        lambda data: data[:24] + bytes(len(data) - 24),
        lambda data: data + b"\xff" * 24,
        lambda data: data[:-24] + b"\x01" + data[-23:],
    ],
)
def test_a_damaged_index_is_rebuilt_at_start(tmp_path: Path, damage: Any) -> None:
    logs = indexed(tmp_path)
    manifest = logs.manifest("s")
    logs.close()
    found = sorted(tmp_path.rglob("*.idx"))
    before = [path.read_bytes() for path in found]
    assert len(found) == 3 and all(len(data) >= 72 for data in before[:2])
    for path in found:
        path.write_bytes(damage(path.read_bytes()))
    again = open_logs(tmp_path, {KEY: 40})
    assert [path.read_bytes() for path in found] == before
    assert again.manifest("s") == manifest
    for path in found:
        path.write_bytes(damage(path.read_bytes()))
    assert [again.offset_for_timestamp("s", 0, s * 1_000_000) for s in range(41)] == list(range(41))


def test_index_entries_point_to_batches(tmp_path: Path) -> None:
    logs = indexed(tmp_path)
    for part in logs.manifest("s")["partitions"][0]["segments"]:
        index, size = logs.committed_file("s", 0, part["file"].replace(".seg", ".idx"))
        data = (index.parent / part["file"]).read_bytes()
        entries = sparse_index.decode_index(index.read_bytes()[:size])
        assert len(entries) == size // 24 == len(index.read_bytes()) // 24
        assert all(read_batch(data, e.position).first_offset == e.first_offset for e in entries)


def test_readers_on_other_threads_see_complete_commits(tmp_path: Path) -> None:
    logs = open_logs(tmp_path, {}, segment_bytes=3000, retention_bytes=10_000)
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                entry = logs.manifest("s")["partitions"][0]
                for part in entry["segments"]:
                    try:
                        path, size = logs.committed_file("s", 0, part["file"])
                        data = path.read_bytes()
                    except (KeyError, FileNotFoundError):
                        continue
                    assert part["bytes"] <= size <= len(data)
                    batches = list(iter_batches(data, 0, part["bytes"]))
                    assert batches[-1].end_offset == part["end_offset"]
                logs.offset_for_timestamp("s", 0, 500)
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for index in range(300):
        logs.append({KEY: [message(index)] * (1 + index % 3)})
        if index % 4 == 3:
            logs.rollback()
        else:
            logs.committed()
    done.set()
    for reader in readers:
        reader.join()
    assert failures == []
