"""An archive at the start of a broker: lost and restored indexes, files that the log does not have, other owners; repair."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.archiving_process import main as archive_all
from support.damaged_log import END, EVERYTHING, KEY, make
from support.stream_reads import rows as rows_of

from bridge_spark.log import stream_log
from bridge_spark.log.archive.archiver import Archiver
from bridge_spark.log.archive.index import INDEX_FILE
from bridge_spark.log.check import check_partition
from bridge_spark.log.repair import repair_partition
from bridge_spark.log.sealed.sealer import Sealer
from bridge_spark.log.stream_log import StreamConfig, StreamLogDamage, StreamLogs
from bridge_spark.source.offsets import DataLoss

pytestmark = pytest.mark.one_build


class Place:
    """A data directory of which the offsets 0 to 199 are in the archive only."""

    def __init__(self, root: Path) -> None:
        self.data, self.archive = root / "data", root / "archive"
        self.archive.mkdir()
        assert archive_all(self.data, str(self.archive), None) == 0
        self.partition = self.data / "streams/s/0"
        self.files = sorted((self.archive / "s/0").glob("*.parquet"))
        assert len(self.files) == 2

    def payloads(self, **options: str) -> dict[int, bytes]:
        return {row["offset"]: row["payload"] for row in rows_of(self.data, stream="s", **options)}

    def logs(self) -> StreamLogs:
        config = StreamConfig("s", ["sensors/#"], segment_bytes=5000, seal=True, archive=str(self.archive))
        logs = StreamLogs(self.data / "streams", [config], lambda: 1e6)
        logs.recover({KEY: END})
        return logs


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(stream_log, "UNSEALED_STAYS", stream_log.UNSEALED_STAYS)  # `archive_all` changes it
    yield Place(tmp_path)


def opened(place: Place) -> Archiver:
    logs = place.logs()
    archiver = Archiver(logs)
    archiver.work()
    archiver._process.close()
    logs.close()
    return archiver


def test_a_lost_index_is_made_again_from_the_files(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    before = (place.partition / INDEX_FILE).read_bytes()
    (place.partition / INDEX_FILE).unlink()
    assert opened(place).problems() == []
    assert "event=archive_index_restored stream=s partition=0 segments=2" in caplog.text
    assert (place.partition / INDEX_FILE).read_bytes() == before and place.payloads() == EVERYTHING


def test_a_missing_file_is_named_and_its_offsets_are_data_loss(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.files[0].unlink()
    assert opened(place).problems() == []
    assert f"event=archive_files_missing stream=s partition=0 count=1 files={place.files[0].name}" in caplog.text
    with pytest.raises(DataLoss, match="offsets of the range 0 to 99"):
        place.payloads()
    assert list(place.payloads(failOnDataLoss="false")) == list(range(100, END))


def test_files_of_offsets_that_the_log_does_not_have_are_renamed(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    names = [f"{first:020d}-{end:020d}.parquet" for first, end in ((50, 150), (300, 400))]
    for name in names:
        shutil.copyfile(place.files[0], place.archive / "s/0" / name)
    (place.archive / "s/0" / f".{names[0]}.17.unfinished").touch()
    assert opened(place).problems() == []
    left = sorted(path.name.partition(".parquet")[2] for path in (place.archive / "s/0").iterdir())
    assert left[:2] == ["", ""] and len(left) == 4 and all(name.startswith(".unknown-") for name in left[2:])
    assert caplog.text.count("event=archive_file_renamed") == 2 and place.payloads() == EVERYTHING


def test_files_that_an_interrupted_removal_left_are_removed(place: Place) -> None:
    logs = place.logs()
    logs.partition("s", 0).archive.remove_before(100)
    logs.close()
    assert opened(place).problems() == []
    assert [path.name for path in (place.archive / "s/0").iterdir()] == [place.files[1].name]
    assert list(place.payloads()) == list(range(100, END))


def test_the_archive_of_another_data_directory_is_refused(place: Place, tmp_path: Path) -> None:
    files = {path: path.read_bytes() for path in place.archive.rglob("*.parquet")}
    other = tmp_path / "other"
    assert archive_all(other, str(place.archive), None) == 3
    assert {path: path.read_bytes() for path in place.archive.rglob("*.parquet")} == files
    assert list({row["offset"]: 0 for row in rows_of(other, stream="s")}) == list(range(END))


def test_a_stream_whose_archive_is_no_longer_configured_is_read(place: Place) -> None:
    config = StreamConfig("s", ["sensors/#"], segment_bytes=5000)
    logs = StreamLogs(place.data / "streams", [config], lambda: 1e6)
    logs.recover({KEY: END})
    manifest = logs.manifest("s")
    assert manifest["archive"] == str(place.archive) and manifest["partitions"][0]["log_start_offset"] == 0
    assert logs.archiving() == [] and logs.offset_for_timestamp("s", 0, 10**12 + 42) == 42
    logs.close()
    assert place.payloads() == EVERYTHING


def test_offsets_between_archive_and_log_are_data_loss(place: Place) -> None:
    """As after a time without an archive."""
    logs = place.logs()
    index = logs.partition("s", 0).archive
    (second,) = index.between(100, 200)
    logs.close()
    assert second.file == place.files[1].name
    data = (place.partition / INDEX_FILE).read_bytes()
    (place.partition / INDEX_FILE).write_bytes(data[:80])
    with pytest.raises(DataLoss, match="offsets of the range 100 to 199"):
        place.payloads()
    assert list(place.payloads(failOnDataLoss="false")) == [*range(100), *range(200, END)]
    assert list(place.payloads(startingOffsets='{"0": 200}')) == list(range(200, END))


def test_repair_keeps_the_rows_of_a_damaged_segment_that_is_archived(tmp_path: Path) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    archive.mkdir()
    make(data)
    config = StreamConfig("s", ["sensors/#"], segment_bytes=5000, seal=True, archive=str(archive))
    logs = StreamLogs(data / "streams", [config], lambda: 1e6)
    logs.recover({KEY: END})
    sealer, archiver = Sealer(logs), Archiver(logs)
    sealer._seal_all()
    logs.committed()
    archiver.work()
    archiver._process.close()
    logs.close()
    directory = data / "streams/s/0"
    first, second = sorted(directory.glob("*.parquet"))
    for path in directory.glob("*.seg"):
        if path.name != f"{200:020d}.seg":
            path.unlink()
    damaged = bytearray(second.read_bytes())
    damaged[-50] ^= 255
    second.write_bytes(damaged)
    with pytest.raises(StreamLogDamage):
        logs.recover({KEY: END})
    repaired = repair_partition(directory, END, END, "now")
    assert repaired.end == END and any("the archive has the offsets up to 199" in line for line in repaired.lines)
    assert (directory / f"{second.name}.damaged-now").read_bytes() == damaged
    logs.recover({KEY: END})
    logs.close()
    state = check_partition(directory, END, False)
    assert (state.start, state.end, state.lost, state.problems) == (200, END, [], [])
    assert {row["offset"]: row["payload"] for row in rows_of(data, stream="s")} == EVERYTHING
    assert first.name == f"{0:020d}.parquet" and not first.exists()


def test_a_log_that_ends_before_its_archive_is_refused(place: Place) -> None:
    logs = place.logs()
    logs.close()
    with pytest.raises(stream_log.StreamLogError):
        logs.recover({KEY: 150})
