"""Idle connections of the HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.patience import PATIENCE

from mqttbroker.admin.http.connections import HttpConnections


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


def test_connection_that_waits_for_a_body_is_closed_for_a_new_one() -> None:
    async def ends() -> list[bool]:
        connections = HttpConnections(3, 1000)
        waiting, busy, idle, new, another = (ScriptedTransport(iter([0])) for _ in range(5))
        for transport in (waiting, busy, idle):
            connections.opened(transport)
        for transport in (waiting, busy):
            connections.request_started(transport)
            connections.body_awaited(transport)
        connections.body_received(busy)  # it is served now
        connections.opened(new)
        connections.opened(another)
        return [each.ended.done() for each in (waiting, busy, idle, new, another)]

    assert asyncio.run(ends()) == [True, False, True, False, False]


@pytest.mark.parametrize(
    "unsent, end",
    [([0], "closed"), ([5, 5], "aborted"), ([5, 9], "aborted"), ([5, 4, 3, 0], "closed"), ([5, 4, 4], "aborted")],
)
def test_idle_client_is_one_that_takes_no_byte_of_its_answer(unsent: list[int], end: str) -> None:
    async def idle() -> str:
        connections, sizes = HttpConnections(1, 0.001), iter(unsent)
        transport = ScriptedTransport(sizes)
        connections.opened(transport)
        found: str = await asyncio.wait_for(transport.ended, PATIENCE)
        assert list(sizes) == []
        return found

    assert asyncio.run(idle()) == end
