"""The index of an archive: lookups against a list, incomplete and damaged records, compaction, repair."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_spark.log.archive import index as index_module
from bridge_spark.log.archive.index import (
    INDEX_FILE,
    ArchivedSegment,
    ArchiveIndex,
    ArchiveState,
    IndexReader,
    copy_index,
    repair_index,
)
from bridge_spark.log.archive.location import parse_location
from bridge_spark.log.record_batch import CorruptBatch

pytestmark = pytest.mark.one_build

RECORD = 80


def segment(first: int, end: int, last_time: int = 0, size: int = 100) -> ArchivedSegment:
    return ArchivedSegment(first, end, size, max(0, last_time - 5), last_time, first + 7)


def filled(directory: Path, count: int = 10) -> ArchiveIndex:
    index = ArchiveIndex(directory / INDEX_FILE)
    index.load()
    for number in range(count):
        index.append(segment(number * 10, number * 10 + 10, number * 1000))
    return index


SEGMENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 50)), max_size=30)


@settings(max_examples=60, deadline=None)
@given(SEGMENTS, st.data())
def test_lookups_equal_those_in_a_list(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """With gaps between segments, clocks that go back, and segments taken out at the front in between."""
    directory = tmp_path_factory.mktemp("index")
    index = ArchiveIndex(directory / INDEX_FILE)
    known: list[ArchivedSegment] = []
    end = 0
    for gap, length, time in parts:
        known.append(segment(end + gap, end + gap + length, time, size=length * 10))
        end += gap + length
        index.append(known[-1])
        if data.draw(st.integers(0, 4)) == 0:
            count = data.draw(st.integers(1, len(known)))
            index.remove_before(known[count - 1].end_offset)
            del known[:count]
        if data.draw(st.integers(0, 6)) == 0:
            index = ArchiveIndex(directory / INDEX_FILE)
            index.load()
    assert index.between(0, end + 1) == known
    assert (index.current.segments, index.current.size) == (len(known), sum(each.size for each in known))
    assert index.current == IndexReader(directory / INDEX_FILE).check() and index.current.end == end
    for offset in range(0, end + 2):
        assert index.between(offset, offset + 3) == [each for each in known if each.end_offset > offset and each.first_offset < offset + 3]
        assert index.size_before(offset) == sum(each.size for each in known if each.end_offset <= offset)
    for time in range(0, 52):
        assert index.at_time(time) == next((each for each in known if each.last_timestamp >= time), None)


def test_segments_must_follow_each_other(tmp_path: Path) -> None:
    index = filled(tmp_path)
    with pytest.raises(ValueError, match="does not follow offset 99"):
        index.append(segment(90, 110))
    assert index.current == ArchiveState(0, 100, 10, 1000)


@pytest.mark.parametrize("left", [1, 40, RECORD - 1])
def test_an_incomplete_record_is_cut(tmp_path: Path, left: int) -> None:
    path = tmp_path / INDEX_FILE
    filled(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: -RECORD + left])
    reader = IndexReader(path)
    assert reader.state() == ArchiveState(0, 90, 9, 900) and len(reader.between(0, 200)) == 9
    index = ArchiveIndex(path)
    index.load()
    index.append(segment(90, 100, 9000))
    assert path.read_bytes() == data


def test_a_last_record_with_wrong_bytes_is_cut_and_any_other_is_damage(tmp_path: Path) -> None:
    path = tmp_path / INDEX_FILE
    filled(tmp_path)
    data = bytearray(path.read_bytes())
    path.write_bytes(bytes(data[:-RECORD]) + bytes(RECORD))
    index = ArchiveIndex(path)
    index.load()
    assert index.current.end == 90
    data[3 * RECORD] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptBatch):
        ArchiveIndex(path).load()
    (line,) = repair_index(tmp_path, "now")
    assert line.startswith("archive_index: ") and line.endswith("put aside as archive_index.damaged-now, 9 segments are known")
    assert (tmp_path / "archive_index.damaged-now").read_bytes() == data
    index = ArchiveIndex(path)
    index.load()
    assert index.current.start == 0 and [each.first_offset for each in index.between(0, 60)] == [0, 10, 20, 40, 50]
    assert repair_index(tmp_path, "later") == []
    index.insert([segment(30, 40, 3000)])  # found in the archive
    assert [each.first_offset for each in index.between(0, 200)] == list(range(0, 100, 10))


def test_an_index_of_removed_segments_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "COMPACT_AFTER", 5)
    index = filled(tmp_path, 20)
    index.remove_before(180)
    before, kept = index.current, index.between(0, 999)
    again = ArchiveIndex(tmp_path / INDEX_FILE)
    again.load()
    assert (tmp_path / INDEX_FILE).stat().st_size == 3 * RECORD
    assert (again.current, again.between(0, 999)) == (before, kept) and again.size_before(190) == 100
    again.remove_before(200)
    again.load()
    assert again.current == ArchiveState(200, 200, 0, 0)
    again.append(segment(200, 210, 1))
    assert again.current == ArchiveState(200, 210, 1, 100) and again.at_time(1) == segment(200, 210, 1)


def test_a_copy_ends_at_an_offset(tmp_path: Path) -> None:
    index = filled(tmp_path)
    index.remove_before(20)
    (tmp_path / "copy").mkdir()
    copy_index(tmp_path, tmp_path / "copy", 75)
    copied = ArchiveIndex(tmp_path / "copy" / INDEX_FILE)
    copied.load()
    assert copied.current == ArchiveState(20, 70, 5, 500) and copied.between(0, 999) == index.between(0, 70)
    (tmp_path / "none").mkdir()
    copy_index(tmp_path / "none", tmp_path / "none", 75)
    assert list((tmp_path / "none").iterdir()) == []


def test_without_a_file_the_index_is_empty(tmp_path: Path) -> None:
    reader = IndexReader(tmp_path / INDEX_FILE)
    assert (reader.state(), reader.between(0, 9), reader.at_time(0), reader.size_before(9)) == (ArchiveState(0, 0, 0, 0), [], None, 0)


@pytest.mark.parametrize(
    "text, root, shown",
    [
        ("/srv/history/", "/srv/history", "/srv/history"),
        ("file:///srv/my%20history", "/srv/my history", "/srv/my history"),
        ("s3://bucket", "bucket", "s3://bucket"),
        ("s3://bucket/a b/", "bucket/a b", "s3://bucket/a%20b"),
        ("s3://bucket/a?region=eu-west-1", "bucket/a", "s3://bucket/a?region=eu-west-1"),
        (
            "s3://bucket/a?scheme=http&endpoint_override=127.0.0.1:9000",
            "bucket/a",
            "s3://bucket/a?scheme=http&endpoint_override=127.0.0.1%3A9000",
        ),
    ],
)
def test_locations(text: str, root: str, shown: str) -> None:
    location = parse_location(text)
    assert (location.root, str(location)) == (root, shown)
    assert parse_location(shown) == location
