"""bridge_spark.log.backup: a copy has all records up to one offset, also while the log changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.damaged_log import BATCH, DAMAGES, END, EVERYTHING, KEY, batches, commit, make, open_log, records

from bridge_spark.log import backup
from bridge_spark.log.backup import DamagedLog, copy_partition
from bridge_spark.log.check import check_partition, read_file
from bridge_spark.log.high_watermark import Watermark, encode_watermark
from bridge_spark.log.segment_names import segment_file_name, segment_offsets


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make(tmp_path / "data")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "copy" / "streams" / "s" / "0"


@pytest.mark.parametrize("end", [0, BATCH, 150, END - BATCH, END])
def test_a_copy_ends_at_the_given_offset(directory: Path, target: Path, end: int) -> None:
    assert copy_partition(directory, target, end) == 0
    assert records(target) == {offset: EVERYTHING[offset] for offset in range(end)}
    assert check_partition(target, end, False).problems == []
    logs = open_log(target.parent.parent.parent, {KEY: end})
    commit(logs, end)
    logs.close()
    assert set(records(target)) == set(range(end + BATCH))


def test_copy_of_a_growing_log(directory: Path, target: Path) -> None:
    logs = open_log(directory.parent.parent.parent, {KEY: END})
    for number in range(3):
        logs.append({KEY: []})
        commit(logs, END + number * BATCH)
    copy_partition(directory, target, END)
    logs.close()
    assert records(target) == EVERYTHING


def test_copy_of_an_empty_partition(tmp_path: Path, target: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert copy_partition(tmp_path / "empty", target, 0) == 0
    assert check_partition(target, 0, False) == (0, 0, 0, [], [])


def drop(directory: Path, upto: int) -> None:
    """Remove segments as retention does: first from the readers' view, then the files."""
    firsts = segment_offsets(directory)
    start = END if upto == len(firsts) else firsts[upto]
    mark = Watermark(END, firsts[-1], 0, start)
    (directory / "high_watermark").write_bytes(encode_watermark(mark))
    for first in firsts[:upto]:
        (directory / segment_file_name(first)).unlink()


@pytest.mark.parametrize("when", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_retention_during_a_copy(directory: Path, target: Path, when: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    firsts = segment_offsets(directory)
    calls: list[Path] = []

    def reading(path: Path) -> bytes:
        if len(calls) == when:
            drop(directory, count)
        calls.append(path)
        return read_file(path)

    monkeypatch.setattr(backup, "read_file", reading)
    start = copy_partition(directory, target, END)
    assert start in (*firsts, END)
    assert records(target) == {offset: EVERYTHING[offset] for offset in range(start, END)}
    assert check_partition(target, END, False).problems == []
    if when == 0:
        assert start == (END if count == len(firsts) else firsts[count])
    open_log(target.parent.parent.parent, {KEY: END}).close()


def test_retention_before_a_copy(directory: Path, target: Path) -> None:
    drop(directory, len(segment_offsets(directory)))
    assert copy_partition(directory, target, END) == END
    open_log(target.parent.parent.parent, {KEY: END}).close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_not_copied(directory: Path, target: Path, damage: str) -> None:
    first, batch, data = batches(directory)[13]
    (directory / segment_file_name(first)).write_bytes(DAMAGES[damage](data, batch))
    with pytest.raises(DamagedLog, match=f"{segment_file_name(first)}.*; offsets 130 to 139"):
        copy_partition(directory, target, END)


def test_missing_offsets_are_reported(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(DamagedLog, match="offsets 300 to 304 are missing"):
        copy_partition(directory, tmp_path / "a", END + 5)
    (directory / segment_file_name(segment_offsets(directory)[1])).unlink()
    with pytest.raises(DamagedLog, match="are missing"):
        copy_partition(directory, tmp_path / "b", END)
    with pytest.raises(DamagedLog, match="offsets 0 to 6 are missing"):
        copy_partition(tmp_path / "nowhere", tmp_path / "c", 7)
