"""A log with sealed segments: visibility, recovery, check, repair and backup."""

from __future__ import annotations

import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.damaged_log import END, EVERYTHING, KEY, commit, make, open_log
from support.sealed_log import seal_closed, seal_segment, sealed_files
from support.stream_reads import rows as rows_of

from bridge_spark.log import partition, stream_log
from bridge_spark.log.backup import DamagedLog, backup_lock, copy_partition
from bridge_spark.log.check import check_partition
from bridge_spark.log.high_watermark import Watermark, encode_watermark
from bridge_spark.log.repair import repair_partition
from bridge_spark.log.segment import read_sealed_segment
from bridge_spark.log.segment_names import sealed_file_name, segment_offsets
from bridge_spark.log.stream_log import StreamConfig, StreamLogDamage, StreamLogs
from bridge_spark.source.damage import CorruptSegment
from bridge_spark.source.directory_storage import DirectoryStorage
from bridge_spark.source.time_index import offsets_at

pytestmark = pytest.mark.one_build


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make(tmp_path)


def payloads(directory: Path) -> dict[int, bytes]:
    """The payloads that the Spark source reads, by offset."""
    data = directory.parent.parent.parent
    return {row["offset"]: row["payload"] for row in rows_of(data, stream="s", failOnDataLoss="false")}


def opened(directory: Path, end: int | None = END) -> StreamLogs:
    return open_log(directory.parent.parent.parent, None if end is None else {KEY: end})


def files(logs: StreamLogs) -> list[str]:
    return [part["file"].partition(".")[2] for part in logs.manifest("s")["partitions"][0]["segments"]]


# -- visibility -------------------------------------------------------------------------------------------------------


class Clock:
    now = 1e6

    def __call__(self) -> float:
        return self.now


def sealing_log(directory: Path) -> tuple[StreamLogs, Clock]:
    clock = Clock()
    config = StreamConfig("s", ["sensors/#"], segment_bytes=5000, seal=True)
    logs = StreamLogs(directory.parent.parent, [config], clock)
    logs.recover({KEY: END})
    return logs, clock


def test_readers_see_the_sealed_file_before_the_unsealed_one_is_removed(directory: Path) -> None:
    logs, clock = sealing_log(directory)
    before = logs.manifest("s")["partitions"][0]["segments"]
    (key, where, part), *_ = logs.unsealed()
    assert (key, where, part.file) == (KEY, directory, before[0]["file"])
    sealed = seal_segment(directory / part.file, part.end_offset, keep=True)
    logs.add_sealed(key, read_sealed_segment(sealed))
    assert logs.manifest("s")["partitions"][0]["segments"] == before
    logs.committed()
    first, *others = logs.manifest("s")["partitions"][0]["segments"]
    size = sealed.stat().st_size
    assert first == {**before[0], "file": sealed.name, "bytes": size, "sealed": True} and others == before[1:]
    assert logs.committed_file("s", 0, sealed.name) == (sealed, size)
    for name in (part.file, f"{part.stem}.idx"):
        assert (directory / name).exists()
        with pytest.raises(KeyError):
            logs.committed_file("s", 0, name)
    assert (logs.sealed_segments, logs.sealed_bytes_saved) == (1, part.size - size)
    assert logs.offset_for_timestamp("s", 0, 10**12 + 7) == 7
    clock.now += stream_log.UNSEALED_STAYS
    with backup_lock(logs.directory):
        logs.committed()
        assert (directory / part.file).exists()
    logs.committed()
    assert not (directory / part.file).exists() and not (directory / f"{part.stem}.idx").exists()
    assert payloads(directory) == EVERYTHING
    assert next(logs.unsealed())[2].first_offset == part.end_offset
    logs.close()


def test_a_segment_removed_by_retention_meanwhile_stays_removed(directory: Path) -> None:
    logs, _ = sealing_log(directory)
    _, _, part = next(logs.unsealed())
    sealed = seal_segment(directory / part.file, part.end_offset, keep=True)
    found, data = read_sealed_segment(sealed), sealed.read_bytes()
    logs._partitions[KEY].drop(1)
    sealed.write_bytes(data)
    logs.add_sealed(KEY, found)
    logs.committed()
    assert not sealed.exists() and segment_offsets(directory)[0] == part.end_offset
    assert logs.sealed_segments == 0
    logs.close()


def test_retention_removes_sealed_segments(directory: Path) -> None:
    sealed = seal_closed(directory)
    logs, _ = sealing_log(directory)
    logs._partitions[KEY].drop(1)
    assert [path.exists() for path in sealed] == [False, True]
    logs.close()


def test_a_segment_of_a_quiet_stream_is_closed_when_it_is_old(directory: Path) -> None:
    logs, clock = sealing_log(directory)
    last = logs.manifest("s")["partitions"][0]["segments"][-1]
    clock.now += 3601
    logs.committed()
    assert [part.file for _, _, part in logs.unsealed()][-1] == last["file"]
    assert logs.manifest("s")["partitions"][0]["segments"][-1] == last
    assert payloads(directory) == EVERYTHING
    seal_segment(directory / last["file"], END)
    logs.close()
    logs, _ = sealing_log(directory)
    commit(logs, END)
    assert segment_offsets(directory)[-1] == END and len(payloads(directory)) == END + 10
    logs.close()


# -- recovery ---------------------------------------------------------------------------------------------------------


def test_recovery_of_sealed_unsealed_and_unfinished_files(directory: Path) -> None:
    firsts = segment_offsets(directory)
    seal_segment(directory / f"{firsts[0]:020d}.seg", firsts[1])
    seal_segment(directory / f"{firsts[1]:020d}.seg", firsts[2], keep=True)
    (directory / f"{sealed_file_name(firsts[2])}.77.sealing").write_bytes(b"PAR1 half")
    for end in (END, None):
        logs = opened(directory, end)
        assert files(logs) == ["parquet", "parquet", *["seg"] * (len(firsts) - 2)]
        assert not list(directory.glob("*.sealing")) and not (directory / f"{firsts[1]:020d}.seg").exists()
        assert payloads(directory) == EVERYTHING
        logs.close()


@pytest.mark.parametrize("size", [0, 3, 400, -1])
def test_a_truncated_sealed_file_is_damage_only_without_the_unsealed_one(directory: Path, size: int) -> None:
    firsts = segment_offsets(directory)
    sealed = seal_segment(directory / f"{firsts[0]:020d}.seg", firsts[1], keep=True)
    sealed.write_bytes(sealed.read_bytes()[:size])
    opened(directory).close()
    assert not sealed.exists() and payloads(directory) == EVERYTHING
    sealed = seal_segment(directory / f"{firsts[0]:020d}.seg", firsts[1])
    sealed.write_bytes(sealed.read_bytes()[:size])
    with pytest.raises(StreamLogDamage, match=sealed.name):
        opened(directory)
    assert sealed.exists()


def test_a_sealed_segment_that_is_missing_is_damage(directory: Path) -> None:
    seal_closed(directory)[1].unlink()
    with pytest.raises(StreamLogDamage, match="are missing from segment .*parquet"):
        opened(directory)


def test_the_sealed_file_is_durable_before_the_unsealed_one_is_removed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, end, *_ = segment_offsets(directory)
    path = directory / f"{first:020d}.seg"
    seal_segment(path, end, keep=True)
    there: list[bool] = []
    monkeypatch.setattr(partition, "sync_directory", lambda _: there.append(path.exists()))
    opened(directory).close()
    assert there == [True, False]


# -- reading with missing files ---------------------------------------------------------------------------------------


def test_a_sealed_segment_does_not_replace_a_missing_one(directory: Path) -> None:
    first, second, *_ = seal_closed(directory)
    sealed = second.read_bytes()
    second.unlink()
    with pytest.raises(CorruptSegment, match=f"offset {int(second.stem)}: the segment ends here"):
        payloads(directory)
    found = rows_of(directory.parent.parent.parent, stream="s", skipCorruptBatches="true")
    missing = range(int(second.stem), segment_offsets(directory)[-1])
    assert [row["offset"] for row in found] == [offset for offset in EVERYTHING if offset not in missing]
    first.write_bytes(sealed)
    with pytest.raises(CorruptSegment, match=f"begins with offset {int(second.stem)}"):
        payloads(directory)


def test_a_watermark_older_than_the_sealing(directory: Path) -> None:
    path = directory / f"{segment_offsets(directory)[1]:020d}.seg"
    first, size = int(path.stem), len(path.read_bytes())
    seal_closed(directory)
    (directory / "high_watermark").write_bytes(encode_watermark(Watermark(first + 20, first, size // 5, 0)))
    assert list(payloads(directory)) == list(range(first + 20))


def test_a_time_is_not_found_after_the_end_of_the_manifest(directory: Path) -> None:
    found = DirectoryStorage(str(directory.parent.parent.parent), "s")
    (state,) = found.manifest().values()
    file = state.segments[0].file
    shorter = replace(state, high_watermark=50, segments=(replace(state.segments[0], end_offset=50),))
    seal_closed(directory)
    assert not (directory / file).exists()
    assert offsets_at(found, {0: shorter}, {0: 10**12 + 250}) == {0: 50}


# -- check and repair -------------------------------------------------------------------------------------------------


def test_an_undamaged_log_with_sealed_segments(directory: Path) -> None:
    seal_closed(directory)
    for end in (END, None):
        state = check_partition(directory, end, False)
        assert (state.start, state.end, state.lost, state.problems) == (0, END, [], [])
    assert repair_partition(directory, END, 0, "now") == (END, [])


def damage(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("number", [0, 1, -1])
def test_damage_affects_single_row_groups(directory: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge_spark.log.sealed.writer.GROUP_ROWS", 10)
    sealed = seal_closed(directory)[number]
    damage(sealed, 200)
    state = check_partition(directory, END, False)
    (problem,) = state.problems
    assert problem.startswith(f"{sealed.name}: ") and "wrong checksum" in problem and state.end == END
    logs = opened(directory)  # recovery does not read every byte
    logs.close()
    done = repair_partition(directory, END, 0, "now")
    assert done.end == END and f"{sealed.name}: wrong checksum; put aside as {sealed.name}.damaged-now" in done.lines
    first = int(sealed.stem)
    lost = range(first, first + 10)
    assert payloads(directory) == {offset: value for offset, value in EVERYTHING.items() if offset not in lost}
    state = check_partition(directory, END, False)
    assert (state.lost, state.problems) == ([(first, first + 10)], [])
    opened(directory).close()
    assert repair_partition(directory, END, 0, "later") == (END, [])


def test_lost_offsets_stay_marked_after_sealing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_damage_affects_single_row_groups(directory, 0, monkeypatch)
    sealed = seal_segment(directory / f"{0:020d}.seg", segment_offsets(directory)[1])
    state = check_partition(directory, END, False)
    assert (state.lost, state.problems) == ([(0, 10)], []) and sealed.exists()


@pytest.mark.parametrize("left", [b"", b"PAR1"])
def test_a_sealed_segment_that_cannot_be_salvaged(directory: Path, left: bytes) -> None:
    sealed = seal_closed(directory)[0]
    sealed.write_bytes(left)
    assert len(check_partition(directory, END, False).problems) == 1
    end = segment_offsets(directory)[1]
    assert repair_partition(directory, END, 0, "now").end == END
    assert check_partition(directory, END, False).lost == [(0, end)]
    assert sealed.with_name(f"{sealed.name}.damaged-now").read_bytes() == left


def test_repair_on_a_full_disk_keeps_the_damaged_file(directory: Path) -> None:
    sealed = seal_closed(directory)[0]
    damage(sealed, 200)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most[1]))  # inherited by the worker process
    try:
        with pytest.raises(OSError, match="File too large"):
            repair_partition(directory, END, 0, "now")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    after = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert {name: data for name, data in after.items() if not name.endswith(".new")} == before


def test_a_damaged_sealed_file_beside_its_unsealed_one(directory: Path) -> None:
    firsts = segment_offsets(directory)
    sealed = seal_segment(directory / f"{firsts[0]:020d}.seg", firsts[1], keep=True)
    damage(sealed, 200)
    assert "exists too" in check_partition(directory, END, False).problems[0]
    repair_partition(directory, END, 0, "now")
    assert not sealed.exists() and check_partition(directory, END, False).problems == []
    assert payloads(directory) == EVERYTHING


def test_missing_offsets_after_a_sealed_segment_are_marked(directory: Path) -> None:
    last = seal_closed(directory)[-1]
    end = read_sealed_segment(last).end_offset
    (directory / f"{end:020d}.seg").unlink()
    assert repair_partition(directory, END, 0, "now").end == END
    assert check_partition(directory, END, False).lost == [(end, END)]
    opened(directory).close()


def test_missing_offsets_between_sealed_segments_are_marked(directory: Path) -> None:
    missing = seal_closed(directory)[1]
    gap = int(missing.stem), read_sealed_segment(missing).end_offset
    missing.unlink()
    done = repair_partition(directory, END, 0, "now")
    assert done == (END, [f"{gap[0]:020d}.seg: offsets {gap[0]} to {gap[1] - 1} are lost"])
    state = check_partition(directory, END, False)
    assert (state.lost, state.problems) == ([gap], [])
    opened(directory).close()
    assert repair_partition(directory, END, 0, "later") == (END, [])


# -- backup -----------------------------------------------------------------------------------------------------------


def test_a_copy_includes_sealed_files(directory: Path, tmp_path: Path) -> None:
    sealed = [path.name for path in seal_closed(directory)]
    target = tmp_path / "copy/streams/s/0"
    assert copy_partition(directory, target, END) == 0
    assert [path.name for path in sealed_files(target)] == sealed
    shutil.copy(directory.parent / "stream.json", target.parent)
    assert payloads(target) == EVERYTHING
    assert check_partition(target, END, False).problems == []


def test_a_copy_that_ends_inside_a_segment_sealed_meanwhile(directory: Path, tmp_path: Path) -> None:
    firsts = segment_offsets(directory)
    path = directory / f"{firsts[1]:020d}.seg"
    end = firsts[1] + 20
    seal_segment(path, firsts[2], keep=True)
    copy_partition(directory, tmp_path / "copy/0", end)
    assert check_partition(tmp_path / "copy/0", end, False).problems == []
    path.unlink()
    with pytest.raises(DamagedLog, match=f"ends at offset {firsts[2]}, not {end}"):
        copy_partition(directory, tmp_path / "other/0", end)


def test_damage_is_not_copied(directory: Path, tmp_path: Path) -> None:
    firsts = segment_offsets(directory)
    sealed = seal_segment(directory / f"{firsts[0]:020d}.seg", firsts[1], keep=True)
    damage(sealed, 200)
    copy_partition(directory, tmp_path / "copy/0", END)
    assert check_partition(tmp_path / "copy/0", END, False).problems == []
    (directory / f"{firsts[0]:020d}.seg").unlink()
    with pytest.raises(DamagedLog, match="wrong checksum"):
        copy_partition(directory, tmp_path / "other/0", END)
