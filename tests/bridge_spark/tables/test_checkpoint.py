"""What the ingest job adds to a query's checkpoint, without Spark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from support.spark_session import StreamWriter, message

from bridge_spark.tables.checkpoint import Checkpoint
from bridge_spark.tables.ingest_session import IngestError

pytestmark = pytest.mark.one_build


def begun(path: Path, batch: int, offsets: Mapping[str, int] = MappingProxyType({}), watermark: int = 0) -> None:
    """As Spark notes that it begins a batch."""
    (path / "offsets").mkdir(parents=True, exist_ok=True)
    metadata = json.dumps({"batchWatermarkMs": watermark, "batchTimestampMs": 1, "conf": {}})
    (path / "offsets" / str(batch)).write_text(f"v1\n{metadata}\n{json.dumps(dict(offsets))}")
    (path / "metadata").write_text('{"id":"af00"}')


def test_one_run_at_a_time_has_it(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "deep" / "down")
    with checkpoint.lock("[tables.t]"):
        with pytest.raises(IngestError, match=r"^\[tables.t\]: another ingest is running with .*down$"):
            checkpoint.lock("[tables.t]")
    checkpoint.lock("[tables.t]").close()


def test_a_directory_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IngestError, match=r"^\[tables.t\]: .*file") as refused:
        Checkpoint(tmp_path / "file" / "below").lock("[tables.t]")
    assert "\n" not in str(refused.value)


def test_it_is_new_until_a_query_has_used_it(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.is_new() and checkpoint.open_batch() is None
    begun(tmp_path, 0)
    assert not checkpoint.is_new()
    assert checkpoint.id() == "af00"


def test_the_open_batch_is_the_one_that_is_begun_and_not_done(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    for batch in range(12):
        begun(tmp_path, batch)
        (tmp_path / "offsets" / f".{batch}.crc").touch()
        assert checkpoint.open_batch() == batch
        checkpoint.sync_offsets(batch)
        checkpoint.commit(batch)
        assert checkpoint.open_batch() is None


def test_a_batch_says_what_it_reads(tmp_path: Path) -> None:
    begun(tmp_path, 3, {"0": 17, "1": 4}, 1_700_000_000_000)
    assert Checkpoint(tmp_path).offsets_and_watermark(3) == ({"0": 17, "1": 4}, 1_700_000_000_000)


def test_a_query_begins_where_its_first_start_did(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data")
    writer.append(0, [message(number) for number in range(5)])
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.path.mkdir()
    options = {"path": str(tmp_path / "data"), "stream": "sensors", "startingOffsets": "latest"}
    assert json.loads(checkpoint.starting_offsets(options))["0"] == 5
    writer.append(0, [message(number) for number in range(5, 9)])
    assert json.loads(checkpoint.starting_offsets(options))["0"] == 5
    assert checkpoint.starting_offsets({**options, "startingOffsets": "earliest"}) == "earliest"
