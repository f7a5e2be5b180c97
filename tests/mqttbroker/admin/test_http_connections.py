"""Idle connections of the HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from mqttbroker.admin.http_connections import HttpConnections


class ScriptedTransport(asyncio.Transport):
    """Has so many unsent bytes each time it is asked, and remembers how it ended."""

    def __init__(self, unsent: Iterator[int]) -> None:
        super().__init__()
        self.ended = asyncio.get_running_loop().create_future()
        self._unsent = unsent

    def get_write_buffer_size(self) -> int:
        return next(self._unsent)

    def is_closing(self) -> bool:
        return self.ended.done()

    def close(self) -> None:
        self.ended.set_result("closed")

    def abort(self) -> None:
        self.ended.set_result("aborted")


@pytest.mark.parametrize(
    "unsent, end",
    [([0], "closed"), ([5, 5], "aborted"), ([5, 9], "aborted"), ([5, 4, 3, 0], "closed"), ([5, 4, 4], "aborted")],
)
def test_idle_client_is_one_that_takes_no_byte_of_its_answer(unsent: list[int], end: str) -> None:
    async def idle() -> str:
        connections, sizes = HttpConnections(1, 0.001), iter(unsent)
        transport = ScriptedTransport(sizes)
        connections.opened(transport)
        found: str = await asyncio.wait_for(transport.ended, 10)
        assert list(sizes) == []
        return found

    assert asyncio.run(idle()) == end
