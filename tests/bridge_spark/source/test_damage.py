"""skipCorruptBatches: which offsets are skipped and printed, and the error without the option."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sealed_log import seal_segment
from support.spark_session import StreamWriter, message
from support.stream_reads import places, rows

from bridge_spark.log.record_batch import HEADER_BYTES
from bridge_spark.log.sealed import writer as sealed_writer
from bridge_spark.log.sealed.footer import load_footer
from bridge_spark.source.damage import CorruptSegment
from bridge_spark.source.directory_storage import DirectoryStorage

pytestmark = pytest.mark.one_build

BATCHES = 6
ROWS = 10
SKIP = {"skipCorruptBatches": "true"}


def damaged_stream(data: Path, wrong: dict[int, str]) -> Path:
    """Six batches of ten messages in one file; ``wrong``: kind of damage by batch number."""
    writer = StreamWriter(data)
    starts = [0]
    for _ in range(BATCHES):
        writer.append(0, [message(n) for n in range(ROWS)])
        starts.append(writer.segments(0)[0].stat().st_size)
    path = writer.segments(0)[0]
    content = bytearray(path.read_bytes())
    for number, kind in wrong.items():
        start, end = starts[number], starts[number + 1]
        if kind == "body":
            content[end - 20] ^= 1
        elif kind == "header":
            content[start : start + HEADER_BYTES] = bytes(HEADER_BYTES)
        elif kind == "length":
            content[start + 4] ^= 0x40
        else:
            content[start:end] = bytes(end - start)
    path.write_bytes(content)
    return path


DAMAGE = st.dictionaries(st.integers(0, BATCHES - 1), st.sampled_from(["body", "header", "length", "zeros"]), max_size=3)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wrong=DAMAGE,
    cuts=st.tuples(st.integers(0, BATCHES * ROWS), st.integers(0, BATCHES * ROWS)),
    chunk=st.sampled_from([100, 1000, 1 << 20]),
    index=st.booleans(),
)
def test_all_rows_except_those_of_damaged_batches(
    wrong: dict[int, str],
    cuts: tuple[int, int],
    chunk: int,
    index: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DirectoryStorage, "chunk_bytes", chunk)
    data = tmp_path / "data"
    shutil.rmtree(data, ignore_errors=True)
    path = damaged_stream(data, wrong)
    if not index:
        path.with_suffix(".idx").unlink()
    start, end = min(cuts), max(cuts)
    reach = {"startingOffsets": '{"0": %d}' % start, "endingOffsets": '{"0": %d}' % end}
    found = places(rows(data, **reach, **SKIP))
    assert found == [(0, offset) for offset in range(start, end) if offset // ROWS not in wrong]


def test_skipped_offsets_are_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = damaged_stream(tmp_path, {1: "body", 2: "header", 5: "body"})
    with pytest.raises(CorruptSegment) as caught:
        rows(tmp_path)
    assert str(caught.value) == f"mqtt source: {path} is corrupt at offset 10: wrong checksum"
    assert capfd.readouterr().err == ""
    rows(tmp_path, **SKIP)
    assert capfd.readouterr().err.splitlines() == [
        f"mqtt source: {path} is corrupt at offset 10: wrong checksum; skipped the offsets 10 to 29 (skipCorruptBatches=true)",
        f"mqtt source: {path} is corrupt at offset 50: wrong checksum; skipped the offsets 50 to 59 (skipCorruptBatches=true)",
    ]


def test_damage_outside_the_range_has_no_effect(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = damaged_stream(tmp_path, {0: "body"})
    path.with_suffix(".idx").unlink()
    assert len(rows(tmp_path, startingOffsets='{"0": 25}', **SKIP)) == 35
    assert capfd.readouterr().err == ""


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same rows in a sealed segment, one row group per batch."""
    monkeypatch.setattr(sealed_writer, "GROUP_ROWS", ROWS)
    writer = StreamWriter(tmp_path)
    for _ in range(BATCHES):
        writer.append(0, [message(n) for n in range(ROWS)])
    writer.roll(0)
    return seal_segment(writer.segments(0)[0], BATCHES * ROWS)


@pytest.mark.parametrize("start", [0, 25])
def test_a_damaged_row_group_of_a_sealed_segment(start: int, sealed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (group,) = [group for group in load_footer(sealed).groups if group.first_offset == 2 * ROWS]
    content = bytearray(sealed.read_bytes())
    content[group.position : group.position + 100] = bytes(100)
    sealed.write_bytes(content)
    reach = {"startingOffsets": '{"0": %d}' % start}
    with pytest.raises(CorruptSegment, match=rf"\.parquet is corrupt at offset {max(20, start)}: "):
        rows(tmp_path, **reach)
    found = places(rows(tmp_path, **reach, **SKIP))
    assert found == [(0, offset) for offset in range(start, BATCHES * ROWS) if not 20 <= offset < 30]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(f"; skipped the offsets {max(20, start)} to 29 (skipCorruptBatches=true)")


def test_a_sealed_segment_without_its_footer(sealed: Path, tmp_path: Path) -> None:
    sealed.write_bytes(sealed.read_bytes()[:-8] + bytes(8))
    with pytest.raises(CorruptSegment, match=r"\.parquet is corrupt at offset 5: "):
        rows(tmp_path, startingOffsets='{"0": 5}')
    assert rows(tmp_path, startingOffsets='{"0": 5}', **SKIP) == []
