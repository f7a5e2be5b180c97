"""bridge_spark.tables.checkpoint, without Spark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from support.spark_session import StreamWriter, message

from bridge_spark.source.options import parse_options
from bridge_spark.source.storage import Manifest, StreamError
from bridge_spark.tables.checkpoint import Checkpoint
from bridge_spark.tables.ingest_session import IngestError

pytestmark = pytest.mark.one_build


def start_batch(path: Path, batch: int, offsets: Mapping[str, int] = MappingProxyType({}), watermark: int = 0) -> None:
    """Write the offsets of a batch as Spark does when it starts the batch."""
    (path / "offsets").mkdir(parents=True, exist_ok=True)
    metadata = json.dumps({"batchWatermarkMs": watermark, "batchTimestampMs": 1, "conf": {}})
    (path / "offsets" / str(batch)).write_text(f"v1\n{metadata}\n{json.dumps(dict(offsets))}")
    (path / "metadata").write_text('{"id":"af00"}')


def test_only_one_run_at_a_time_holds_the_lock(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "deep" / "down")
    with checkpoint.lock("[tables.t]"):
        with pytest.raises(IngestError, match=r"^\[tables.t\]: another ingest is running with .*down$"):
            checkpoint.lock("[tables.t]")
    checkpoint.lock("[tables.t]").close()


def test_a_directory_that_cannot_be_created_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IngestError, match=r"^\[tables.t\]: .*file") as refused:
        Checkpoint(tmp_path / "file" / "below").lock("[tables.t]")
    assert "\n" not in str(refused.value)


def test_a_checkpoint_is_new_until_a_query_uses_it(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.is_new() and checkpoint.open_batch() is None
    start_batch(tmp_path, 0)
    assert not checkpoint.is_new()
    assert checkpoint.id() == "af00"


def test_the_open_batch_is_started_and_not_committed(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    for batch in range(12):
        start_batch(tmp_path, batch)
        (tmp_path / "offsets" / f".{batch}.crc").touch()
        assert checkpoint.open_batch() == batch
        checkpoint.sync_offsets(batch)
        checkpoint.commit(batch)
        assert checkpoint.open_batch() is None


def test_the_offsets_and_watermark_of_a_batch(tmp_path: Path) -> None:
    start_batch(tmp_path, 3, {"0": 17, "1": 4}, 1_700_000_000_000)
    assert Checkpoint(tmp_path).offsets_and_watermark(3) == ({"0": 17, "1": 4}, 1_700_000_000_000)


def test_the_starting_offsets_of_the_first_start_are_kept(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data")
    writer.append(0, [message(number) for number in range(5)])
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.path.mkdir()
    options = {"path": str(tmp_path / "data"), "stream": "sensors", "startingOffsets": "latest"}
    assert json.loads(checkpoint.starting_offsets(options))["0"] == 5
    writer.append(0, [message(number) for number in range(5, 9)])
    assert json.loads(checkpoint.starting_offsets(options))["0"] == 5
    assert checkpoint.starting_offsets({**options, "startingOffsets": "earliest"}) == "earliest"


def test_a_checkpoint_is_of_one_stream(tmp_path: Path) -> None:
    StreamWriter(tmp_path / "data", "flow")
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.path.mkdir()

    def check(stream: str) -> None:
        parsed = parse_options({"path": str(tmp_path / "data"), "stream": stream})
        checkpoint.check_stream(parsed, Manifest())

    check("flow")
    checkpoint.starting_offsets({"path": str(tmp_path / "data"), "stream": "flow", "startingOffsets": "latest"})
    check("flow")
    for _ in range(2):
        with pytest.raises(StreamError, match="the checkpoint is of stream 'flow', not of 'ev'"):
            check("ev")
        start_batch(checkpoint.path, 0, {"0": 4, "stream=flow": 0})
    start_batch(checkpoint.path, 1, {"0": 4, "stream=ev": 0})
    check("ev")
    start_batch(checkpoint.path, 2, {"0": 4})  # of an earlier version
    check("flow")
    (checkpoint.path / "offsets" / "3").touch()
    check("flow")


def test_beginning_offsets_say_of_which_stream_they_are_until_there_is_a_batch(tmp_path: Path) -> None:
    StreamWriter(tmp_path / "data", "flow")
    options = {"path": str(tmp_path / "data"), "stream": "flow", "startingOffsets": "latest"}
    checkpoint = Checkpoint(tmp_path)
    assert json.loads(checkpoint.starting_offsets(options)) == {"0": 0, "stream=flow": 0}
    start_batch(tmp_path, 0)
    assert json.loads(checkpoint.starting_offsets(options)) == {"0": 0}
