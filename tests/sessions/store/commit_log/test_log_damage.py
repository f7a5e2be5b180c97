"""sessions.store.commit_log: what a start makes of torn, damaged, missing and foreign segments."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from struct import pack, pack_into

import pytest
from google_crc32c import value as checksum

from sessions.store.commit_log import segment
from sessions.store.commit_log.file_log import FileCommitLog
from sessions.store.commit_log.segment import FORMAT_VERSION, HEADER_BYTES, RECORD_BYTES, Record, read_records
from sessions.store.commit_log.survey import Survey, survey
from sessions.store.interface import CorruptStore, StoreError

IDENTITY = b"identity of us.."
OTHER = b"identity of them"
SEGMENT_BYTES = 8192
SECTOR = 512
# The fields of a record's header that a flipped bit must not pass through, as (name, first byte, bytes).
FIELDS = [
    ("magic", 0, 4), ("length", 4, 4), ("checksum", 8, 4), ("version", 12, 4), ("position", 16, 8), ("reserved", 24, 4),
    ("checksum of the header", 28, 4),
]  # fmt: skip


def body(position: int) -> bytes:
    return Random(position).randbytes(100 + position % 7 * 90)


def write(directory: Path, positions: int, identity: bytes = IDENTITY, other: int = 0) -> None:
    """A log with records up to a position, that a killed process leaves; with ``other`` bodies."""
    log = FileCommitLog(directory, SEGMENT_BYTES)
    log.open(identity, 0, True)
    for position in range(1, positions + 1):
        log.append(body(position + other))
        assert log.position == position
    log.close()


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.log"))


def in_segment(path: Path) -> list[Record]:
    data = path.read_bytes()
    found = survey(path.parent, IDENTITY)
    (header,) = [one.header for one in found.segments if one.path == path]
    return list(read_records(data, header.salt, HEADER_BYTES, header.first_position, None))


def whole(found: Survey) -> list[int]:
    """The positions of the records, whose bodies are as they were written."""
    records = list(found.records(0))
    assert all(record.body == body(record.position) for record in records)
    return [record.position for record in records]


def reopened(directory: Path, position: int = 0, closed: bool = False) -> list[int]:
    """The positions that a start finds, and one more that it appends."""
    log = FileCommitLog(directory, SEGMENT_BYTES)
    found = whole(log.open(IDENTITY, position, closed))
    log.append(body(log.position + 1))
    log.close()
    assert whole(survey(directory, IDENTITY)) == [*found, log.position]
    return found


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def refusal(directory: Path, error: type[StoreError] = StoreError, position: int = 0, closed: bool = False) -> str:
    """The one line of the refusal, which changes no file."""
    before = contents(directory)
    log = FileCommitLog(directory, SEGMENT_BYTES)
    with pytest.raises(error) as caught:
        log.open(IDENTITY, position, closed)
    log.close()
    assert contents(directory) == before
    text = str(caught.value)
    assert "\n" not in text and str(directory) in text
    return text


# -- the torn end -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["zeros", "bytes of an earlier use"])
def torn(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, bytes, Record]]:
    """A segment, its bytes without the last record, and that record."""
    directory = tmp_path / "log"
    write(directory, 4)
    (path,) = segments(directory)
    last = in_segment(path)[-1]
    before = bytearray(SEGMENT_BYTES)
    if request.param != "zeros":
        write(tmp_path / "earlier", 12, other=100)
        before[:] = segments(tmp_path / "earlier")[0].read_bytes()
    data = path.read_bytes()
    before[: last.start] = data[: last.start]
    path.write_bytes(bytes(before[: last.start]) + data[last.start : last.end] + bytes(before[last.end :]))
    yield path, bytes(before), last


def test_a_record_torn_at_any_byte_ends_the_log_before_it(torn: tuple[Path, bytes, Record], tmp_path: Path) -> None:
    path, before, last = torn
    data = path.read_bytes()
    padding = last.end - last.start - RECORD_BYTES - len(last.body)
    for cut in range(last.start, last.end + 1):
        path.write_bytes(data[:cut] + before[cut:])
        found = survey(path.parent, IDENTITY)
        assert not found.damage
        is_whole = cut >= last.end - padding or data[:cut] + before[cut:] == data
        assert whole(found) == ([1, 2, 3, 4] if is_whole else [1, 2, 3])
    for cut in (last.start, last.start + 1, last.start + RECORD_BYTES, last.end - padding - 1):
        copy = tmp_path / f"cut-{cut}"
        copy.mkdir()
        (copy / path.name).write_bytes(data[:cut] + before[cut:])
        assert reopened(copy) == [1, 2, 3]


def test_a_record_with_any_of_its_sectors_ends_the_log_before_it(torn: tuple[Path, bytes, Record]) -> None:
    path, before, last = torn
    data = path.read_bytes()
    sectors = range(last.start // SECTOR, (last.end - 1) // SECTOR + 1)
    assert len(sectors) >= 2
    for chosen in range(1 << len(sectors)):
        left = bytearray(before)
        for place, sector in enumerate(sectors):
            if chosen >> place & 1:
                left[sector * SECTOR : (sector + 1) * SECTOR] = data[sector * SECTOR : (sector + 1) * SECTOR]
        path.write_bytes(left)
        found = survey(path.parent, IDENTITY)
        assert not found.damage
        assert whole(found) == ([1, 2, 3, 4] if chosen == (1 << len(sectors)) - 1 else [1, 2, 3])


def test_a_payload_that_imitates_records_is_none(tmp_path: Path) -> None:
    """In the torn end of the log, too: no client knows the salt."""
    write(tmp_path / "log", 3)
    (path,) = segments(tmp_path / "log")
    data = bytearray(path.read_bytes())
    first, *_, last = in_segment(path)
    imitations = b"".join(bytes(data[first.start : first.end]) for _ in range(4))
    forged = bytearray(imitations)
    length = first.end - first.start
    for place in range(4):
        pack_into("<Q", forged, place * length + 16, 5 + place)
        checked = bytes(forged[place * length : place * length + RECORD_BYTES - 4])
        pack_into("<I", forged, place * length + RECORD_BYTES - 4, checksum(checked))
    data[last.end : last.end + len(forged)] = forged
    path.write_bytes(data)
    found = survey(path.parent, IDENTITY)
    assert not found.damage and whole(found) == [1, 2, 3]
    assert reopened(path.parent) == [1, 2, 3]


def test_a_payload_of_headers_does_not_make_a_start_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each claims all bytes behind it, so that a start which believed them would read some of them thousands of times."""
    directory = tmp_path / "log"
    write(directory, 3)
    (path,) = segments(directory)
    data = bytearray(path.read_bytes())
    end = in_segment(path)[-1].end
    for at in range(end, SEGMENT_BYTES - RECORD_BYTES, RECORD_BYTES):
        left = SEGMENT_BYTES - at - RECORD_BYTES
        data[at : at + RECORD_BYTES] = pack("<4sIIIQII", b"MQCR", left, 0, FORMAT_VERSION, 9, 0, 0)
    path.write_bytes(data)
    read: list[int] = []
    monkeypatch.setattr(segment.google_crc32c, "value", lambda data: read.append(len(data)) or checksum(data))
    assert whole(survey(directory, IDENTITY)) == [1, 2, 3]
    assert sum(read) < 4 * SEGMENT_BYTES


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: str(field[0]))
def test_a_flipped_bit_of_a_middle_record_is_damage(tmp_path: Path, field: tuple[str, int, int]) -> None:
    """Each other record is still read, and the place is named."""
    directory = tmp_path / "log"
    write(directory, 30)
    path = segments(directory)[1]
    record = in_segment(path)[2]
    data = path.read_bytes()
    for at in range(record.start + field[1], record.start + field[1] + field[2]):
        for bit in (0, 7):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            found = survey(directory, IDENTITY)
            (damage,) = found.damage
            assert damage.path == path and f"position {record.position} " in damage.reason
            assert whole(found) == [position for position in range(1, 31) if position != record.position]
    text = refusal(directory, CorruptStore)
    assert str(path) in text and str(record.position) in text


def test_a_changed_byte_of_a_middle_body_is_damage(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    write(directory, 30)
    path = segments(directory)[0]
    record = in_segment(path)[1]
    data = path.read_bytes()
    for at in range(record.start + RECORD_BYTES, record.start + RECORD_BYTES + len(record.body)):
        damaged = bytearray(data)
        damaged[at] ^= 0x40
        path.write_bytes(damaged)
        found = survey(directory, IDENTITY)
        assert [damage.path for damage in found.damage] == [path]
        assert whole(found) == [position for position in range(1, 31) if position != record.position]


@pytest.mark.parametrize("which", [0, 1, -1])
def test_the_last_record_of_a_segment_that_is_damaged_is_damage_unless_it_is_the_last_of_all(tmp_path: Path, which: int) -> None:
    directory = tmp_path / "log"
    write(directory, 40)
    path = segments(directory)[which]
    last = in_segment(path)[-1]
    data = bytearray(path.read_bytes())
    data[last.start + RECORD_BYTES] ^= 1
    path.write_bytes(data)
    found = survey(directory, IDENTITY)
    assert bool(found.damage) == (which != -1)
    assert whole(found) == [position for position in range(1, 41) if position != last.position]
    # The tables had the record.
    if which == -1:
        assert str(path) in refusal(directory, CorruptStore, last.position)


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_flipped_bit_of_a_header_is_damage(tmp_path: Path, which: int) -> None:
    """Not a newer program's file, and not another store's."""
    directory = tmp_path / "log"
    write(directory, 40)
    path = segments(directory)[which]
    data = path.read_bytes()
    for at in range(HEADER_BYTES):
        damaged = bytearray(data)
        damaged[at] ^= 4
        path.write_bytes(damaged)
        found = survey(directory, IDENTITY)
        assert path in [damage.path for damage in found.damage]
    assert str(path) in refusal(directory, CorruptStore)


@pytest.mark.parametrize("left", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 10])
def test_a_segment_cut_short_is_damage(tmp_path: Path, left: int) -> None:
    directory = tmp_path / "log"
    write(directory, 40)
    path = segments(directory)[1]
    os.truncate(path, left)
    assert str(path) in refusal(directory, CorruptStore)


def test_random_damage_never_passes_for_other_records(tmp_path: Path) -> None:
    write(tmp_path / "log", 40)
    rng = Random(17)
    for number in range(60):
        directory = tmp_path / "damaged"
        shutil.copytree(tmp_path / "log", directory)
        path = rng.choice(segments(directory))
        data = bytearray(path.read_bytes())
        at = rng.randrange(len(data))
        length = rng.choice((1, 8, 600))
        data[at : at + length] = rng.choice((bytes(length), rng.randbytes(length)))[: len(data) - at]
        path.write_bytes(data)
        found = survey(directory, IDENTITY)
        positions = whole(found)
        assert positions == sorted(set(positions))
        if not found.damage:
            assert positions == list(range(1, len(positions) + 1))
            assert len(positions) == 40 or path == segments(directory)[-1], f"round {number}"
        shutil.rmtree(directory)


# -- segments that are missing or do not belong -----------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, -2])
def test_a_missing_segment_is_refused(tmp_path: Path, which: int) -> None:
    directory = tmp_path / "log"
    write(directory, 40)
    path = segments(directory)[which]
    path.unlink()
    text = refusal(directory)
    assert "position" in text


def test_the_last_segment_is_missed_if_the_tables_had_it(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    write(directory, 40)
    segments(directory)[-1].unlink()
    assert "40" in refusal(directory, CorruptStore, 40)


def test_a_log_without_segments_is_missed_unless_the_tables_have_everything(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    write(directory, 5)
    for path in segments(directory):
        path.unlink()
    assert "missing" in refusal(directory, CorruptStore, 3)
    assert reopened(directory, 5, closed=True) == []


def test_what_is_left_of_a_removed_log_is_no_damage(tmp_path: Path) -> None:
    """A power loss in a clean stop may keep any of the segments."""
    write(tmp_path / "log", 40)
    count = len(segments(tmp_path / "log"))
    assert count >= 3
    for chosen in range(1 << count):
        directory = tmp_path / f"left-{chosen}"
        shutil.copytree(tmp_path / "log", directory)
        for place, path in enumerate(segments(directory)):
            if not chosen >> place & 1:
                path.unlink()
        log = FileCommitLog(directory, SEGMENT_BYTES)
        log.open(IDENTITY, 40, True)
        log.append(body(41))
        log.close()
        again = FileCommitLog(directory, SEGMENT_BYTES)
        assert [record.position for record in again.open(IDENTITY, 40, False).records(40)] == [41]
        again.close()


def test_a_log_of_another_store_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    write(directory, 5, OTHER)
    assert "another store" in refusal(directory)


def test_one_segment_of_another_store_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    write(directory, 40)
    write(tmp_path / "other", 40, OTHER)
    shutil.copy(segments(tmp_path / "other")[1], directory / segments(directory)[1].name)
    assert refusal(directory)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    write(directory, 5)
    (path,) = segments(directory)
    data = bytearray(path.read_bytes())
    pack_into("<I", data, 4, FORMAT_VERSION + 1)
    pack_into("<I", data, HEADER_BYTES - 4, checksum(bytes(data[: HEADER_BYTES - 4])))
    path.write_bytes(data)
    text = refusal(directory)
    assert str(path) in text and "newer" in text


def test_a_record_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    """It must not pass for the torn end of the log, which the next record overwrites."""
    directory = tmp_path / "log"
    write(directory, 5)
    (path,) = segments(directory)
    (found,) = survey(directory, IDENTITY).segments
    data = bytearray(path.read_bytes())
    last = in_segment(path)[-1]
    pack_into("<I", data, last.start + 12, FORMAT_VERSION + 1)
    checked = found.header.salt + bytes(data[last.start : last.start + RECORD_BYTES - 4])
    pack_into("<I", data, last.start + RECORD_BYTES - 4, checksum(checked))
    path.write_bytes(data)
    text = refusal(directory)
    assert str(path) in text and "position 5" in text and "newer" in text


def test_a_segment_under_another_name_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    write(directory, 40)
    path = segments(directory)[1]
    path.rename(path.with_name(f"{int(path.stem) + 1:020d}.log"))
    assert refusal(directory)


def test_a_database_older_than_its_log_is_refused(tmp_path: Path) -> None:
    """Such as one from a backup, put beside a log that goes on later."""
    directory = tmp_path / "log"
    write(directory, 40)
    segments(directory)[0].unlink()
    first = int(segments(directory)[0].stem)
    assert str(first) in refusal(directory, StoreError, first - 2)


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"mine")
    with pytest.raises(StoreError, match=str(file)):
        FileCommitLog(file, SEGMENT_BYTES).open(IDENTITY, 0, True)
    assert file.read_bytes() == b"mine"


def test_a_segment_that_is_a_directory_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    write(directory, 40)
    path = segments(directory)[1]
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match=path.name):
        FileCommitLog(directory, SEGMENT_BYTES).open(IDENTITY, 0, False)


def test_files_of_others_in_the_directory_stay(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    write(directory, 5)
    (directory / "notes.txt").write_bytes(b"mine")
    (directory / "00000000000000000001.log.damaged-1").write_bytes(b"kept")
    assert reopened(directory) == [1, 2, 3, 4, 5]
    assert (directory / "notes.txt").read_bytes() == b"mine"
    assert (directory / "00000000000000000001.log.damaged-1").read_bytes() == b"kept"
