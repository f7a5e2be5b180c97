"""bridge_spark.log.repair: records keep their offsets, lost offsets are marked, damaged files are kept."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from support.damaged_log import BATCH, DAMAGES, END, EVERYTHING, KEY, batches, commit, make, open_log, records

from bridge_spark.log.check import check_partition
from bridge_spark.log.columns import ColumnBuilder
from bridge_spark.log.high_watermark import read_watermark
from bridge_spark.log.record_batch import CorruptBatch, decode_columns, encode_lost, iter_batches, timestamps
from bridge_spark.log.repair import repair_partition
from bridge_spark.log.segment_names import segment_file_name, segment_offsets
from bridge_spark.log.stream_log import StreamLogDamage
from bridge_spark.source.directory_storage import DirectoryStorage
from bridge_spark.source.offsets import DataLoss
from bridge_spark.source.plan import Planner
from bridge_spark.source.slice_reader import read_slices

STAMP = "20260101T000000Z"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make(tmp_path)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def without(*ranges: tuple[int, int]) -> dict[int, bytes]:
    gone = {offset for first, end in ranges for offset in range(first, end)}
    return {offset: payload for offset, payload in EVERYTHING.items() if offset not in gone}


def test_an_undamaged_partition_is_not_changed(directory: Path) -> None:
    before = contents(directory)
    for end in (END, None):
        assert repair_partition(directory, end, 0, STAMP) == (END, [])
    assert contents(directory) == before


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("number", [0, 3, 13, 29])
@pytest.mark.parametrize("known", [True, False])
def test_damage_affects_one_batch(directory: Path, damage: str, number: int, known: bool) -> None:
    first, batch, data = batches(directory)[number]
    damaged = DAMAGES[damage](data, batch)
    (directory / segment_file_name(first)).write_bytes(damaged)
    repaired = repair_partition(directory, END if known else None, 0, STAMP)
    lost = batch.first_offset, batch.end_offset
    assert repaired.end == END and segment_file_name(first) in repaired.lines[0]
    assert records(directory) == without(lost)
    state = check_partition(directory, END, False)
    assert (state.problems, state.lost, state.end) == ([], [lost], END)
    assert (directory / f"{segment_file_name(first)}.damaged-{STAMP}").read_bytes() == damaged
    after = contents(directory)
    assert repair_partition(directory, END, 0, "later") == (END, [])
    assert contents(directory) == after
    logs = open_log(directory.parent.parent.parent, {KEY: END})
    commit(logs, END)
    logs.close()
    assert records(directory) == {**without(lost), **{END + i: b"%d" % (END + i) for i in range(BATCH)}}


def test_several_damaged_batches_in_one_segment(directory: Path) -> None:
    found = batches(directory)
    data = found[0][2]
    for number in (1, 2, 5):
        data = DAMAGES["body"](data, found[number][1])
    (directory / segment_file_name(0)).write_bytes(data)
    repair_partition(directory, END, 0, STAMP)
    assert check_partition(directory, END, False).lost == [(10, 30), (50, 60)]
    assert records(directory) == without((10, 30), (50, 60))


def test_a_missing_segment_is_marked_as_lost(directory: Path) -> None:
    firsts = segment_offsets(directory)
    (directory / segment_file_name(firsts[1])).unlink()
    repair_partition(directory, END, 0, STAMP)
    assert records(directory) == without((firsts[1], firsts[2]))
    open_log(directory.parent.parent.parent, {KEY: END}).close()


def test_a_missing_first_segment(directory: Path) -> None:
    firsts = segment_offsets(directory)
    (directory / segment_file_name(firsts[0])).unlink()
    assert repair_partition(directory, END, 0, STAMP).end == END
    assert records(directory) == without((0, firsts[1]))


def test_a_truncated_end_is_marked_as_lost(directory: Path) -> None:
    first, batch, data = batches(directory)[-1]
    (directory / segment_file_name(first)).write_bytes(data[: batch.end - 1])
    with pytest.raises(StreamLogDamage):
        open_log(directory.parent.parent.parent, {KEY: END + 5})
    assert repair_partition(directory, END + 5, 0, STAMP).end == END + 5
    assert check_partition(directory, END + 5, False).lost == [(END - BATCH, END + 5)]
    logs = open_log(directory.parent.parent.parent, {KEY: END + 5})
    commit(logs, END + 5)
    assert logs.offset_for_timestamp("s", 0, 10**12 + END + 6) == END + 6
    logs.close()


@pytest.mark.parametrize("end", [END, None])
def test_offsets_continue_without_any_segment(directory: Path, end: int | None) -> None:
    for first in segment_offsets(directory):
        (directory / segment_file_name(first)).unlink()
    assert repair_partition(directory, end, 0, STAMP).end == END
    assert check_partition(directory, END, False).lost == [(0, END)]
    logs = open_log(directory.parent.parent.parent, {KEY: END})
    commit(logs, END)
    logs.close()
    assert set(records(directory)) == set(range(END, END + BATCH))


def test_offsets_continue_without_the_directory(tmp_path: Path) -> None:
    assert repair_partition(tmp_path / "s" / "0", END, 0, STAMP).end == END
    assert check_partition(tmp_path / "s" / "0", END, False).lost == [(0, END)]


def test_without_the_database_every_undamaged_batch_is_kept(directory: Path) -> None:
    (directory / "high_watermark").unlink()
    with open(directory / segment_file_name(segment_offsets(directory)[-1]), "ab") as file:
        file.write(b"MQB1 torn")
    assert repair_partition(directory, None, 0, STAMP).end == END
    assert repair_partition(directory, None, END + 3, STAMP).end == END + 3
    assert records(directory) == EVERYTHING
    assert check_partition(directory, END + 3, False).lost == [(END, END + 3)]


def test_the_end_of_a_log_newer_than_the_database(directory: Path) -> None:
    assert repair_partition(directory, 100, 0, STAMP).end == END
    assert records(directory) == EVERYTHING


def test_a_damaged_watermark_is_rewritten(directory: Path) -> None:
    (directory / "high_watermark").write_bytes(bytes(40))
    repair_partition(directory, END, 0, STAMP)
    assert read_watermark(directory).high_watermark == END
    assert records(directory) == EVERYTHING


# -- readers of lost batches --------------------------------------------------


def test_a_lost_batch_has_no_records() -> None:
    data = encode_lost(5, 9)
    (batch,) = iter_batches(data)
    assert (batch.first_offset, batch.end_offset, batch.lost) == (5, 9, True)
    assert len(timestamps(data + bytes(100), batch)) == 0
    with pytest.raises(CorruptBatch, match="4 records were lost"):
        decode_columns(data, batch)
    many = list(iter_batches(encode_lost(0, 2**32 + 7)))
    assert [b.count for b in many] == [2**32 - 1, 8]
    for at in (3, 9, 12, 17, 24):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(CorruptBatch):
            list(iter_batches(bytes(damaged)))


@pytest.mark.parametrize("number", [0, 13, 29])
def test_the_spark_source_reports_lost_offsets(directory: Path, number: int) -> None:
    first, batch, data = batches(directory)[number]
    (directory / segment_file_name(first)).write_bytes(DAMAGES["body"](data, batch))
    repair_partition(directory, END, 0, STAMP)
    open_log(directory.parent.parent.parent, {KEY: END}).close()
    storage = DirectoryStorage(str(directory.parent.parent.parent), "s")
    manifest = storage.manifest()
    (task,) = Planner(storage).plan(manifest, {0: 0}, {0: END}, None)
    builder = ColumnBuilder(pa.schema([("offset", pa.int64()), ("payload", pa.binary())]), "s", None)
    with pytest.raises(DataLoss, match=f"offsets {batch.first_offset} to {batch.end_offset - 1}"):
        list(read_slices(storage, task, builder, True))
    rows = [row for part in read_slices(storage, task, builder, False) for row in part.to_pylist()]
    expected = without((batch.first_offset, batch.end_offset))
    assert {row["offset"]: row["payload"] for row in rows} == expected
