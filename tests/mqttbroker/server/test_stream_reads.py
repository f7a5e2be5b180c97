"""The threads that read streams for clients: what they answer if a sealed segment cannot be read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.patience import PATIENCE
from support.sealed_log import seal_closed

from bridge_spark.log.sealed.row_process import ProcessEnded, RowProcess, SealedBatch
from bridge_spark.log.stream_config import StreamConfig
from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.core.streams.chunk_reads import FAILED, READ, UNAVAILABLE, ChunkReads, ChunkUser, ReadRequest
from mqttbroker.core.terms.terms import BrokerTerms
from mqttbroker.server import stream_reads
from mqttbroker.server.stream_reads import StreamReads
from sessions.message import Message

pytest.importorskip("pyarrow")


class User(ChunkUser):
    """Keeps the request that was answered."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: asyncio.Future[ReadRequest] = asyncio.get_running_loop().create_future()

    def answered(self, request: ReadRequest) -> None:
        self.answer.set_result(request)

    def give_up_chunk(self) -> bool:
        return False

    def advanced(self) -> None:
        pass


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[StreamLogs]:
    """A log whose first segment is sealed."""
    made = StreamLogs(tmp_path / "streams", [StreamConfig("s", ["#"], segment_bytes=500, seal=True)], lambda: 1.0)
    (tmp_path / "streams").mkdir()
    made.recover(None)
    for number in range(10):
        made.append({("s", 0): [Message("t", b"%d" % number * 50, 1, False, b"", "c", number, 0)]})
        made.committed()
    made.close()
    seal_closed(tmp_path / "streams" / "s" / "0")
    made = StreamLogs(tmp_path / "streams", [StreamConfig("s", ["#"], segment_bytes=500, seal=True)], lambda: 1.0)
    made.recover(None)
    yield made
    made.close()


def read(logs: StreamLogs) -> ReadRequest:
    """The answered request for the first record."""

    async def run() -> ReadRequest:
        terms = BrokerTerms()
        terms.max_total_stream_chunk_bytes = 1 << 20
        terms.sealed_reader_cache_bytes = 1 << 20
        reads = ChunkReads(terms)
        threads = StreamReads(asyncio.get_running_loop(), logs, reads, lambda: None)
        threads.start()
        user = User()
        reads.request(user, ReadRequest("s", 0, 0, -1, -1, 4096, False))
        try:
            return await asyncio.wait_for(user.answer, PATIENCE)
        finally:
            threads.stop()

    return asyncio.run(run())


def first_file(logs: StreamLogs) -> Path:
    partition = logs.partition("s", 0)
    assert partition.view.segments[0].sealed
    return partition.directory / partition.view.segments[0].file


def test_a_sealed_segment_is_read(logs: StreamLogs) -> None:
    request = read(logs)
    assert request.outcome == READ and request.chunk is not None and request.chunk.source == first_file(logs).name


def test_a_missing_file_is_named(logs: StreamLogs) -> None:
    path = first_file(logs)
    path.unlink()
    request = read(logs)
    assert (request.outcome, request.found, request.reason) == (FAILED, 0, f"{path.name} is missing")


def test_without_pyarrow_nothing_counts_as_damaged(logs: StreamLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reads, "can_seal", lambda: False)
    request = read(logs)
    assert request.outcome == UNAVAILABLE and request.reason.endswith("is sealed, and pyarrow is not installed")


@pytest.mark.parametrize("deaths, outcome", [(1, READ), (2, UNAVAILABLE)])
def test_a_process_that_is_killed_is_started_again_once(
    logs: StreamLogs, monkeypatch: pytest.MonkeyPatch, deaths: int, outcome: int
) -> None:
    original = RowProcess.read
    left = deaths

    def ends(process: RowProcess, path: Path, length: int, offset: int, size: int, location: str = "") -> SealedBatch:
        nonlocal left
        if left:
            left -= 1
            raise ProcessEnded("the process has ended")
        return original(process, path, length, offset, size, location)

    monkeypatch.setattr(RowProcess, "read", ends)
    assert read(logs).outcome == outcome and left == 0


def test_only_a_failed_disk_counts_as_damage(logs: StreamLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, outcome in ((5, FAILED), (24, UNAVAILABLE)):

        def fails(*arguments: object, number: int = number) -> SealedBatch:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(RowProcess, "read", fails)
        request = read(logs)
        assert request.outcome == outcome and os.strerror(number) in request.reason
