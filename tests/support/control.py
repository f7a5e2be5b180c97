"""Operations of `Controls` from start to end, and what they list."""

from __future__ import annotations

from typing import Any

from mqttbroker.admin.control.slices import Slices
from mqttbroker.codec.packets import Publish
from support.core import Core


def finish(operation: Slices[Any]) -> Any:
    return count_slices(operation)[1]


def count_slices(operation: Slices[Any]) -> tuple[int, Any]:
    """Run an operation to its end: the number of slices, and the result."""
    slices = 1
    while True:
        try:
            next(operation)
        except StopIteration as end:
            return slices, end.value
        slices += 1


def many_sessions(core: Core, count: int) -> list[str]:
    """Sessions without clients, made in no order; their client identifiers in order."""
    client_ids = [f"dev-{number * 7919 % count:06d}" for number in range(count)]
    for client_id in client_ids:
        core.broker.registry.create(client_id, False)
    return sorted(client_ids)


def retain(core: Core, topics: list[str], payload: bytes = b"x") -> None:
    publisher = core.connect("publisher")
    core.eager = False
    for topic in topics:
        publisher.send(Publish(topic, payload, 0, True, False, 0))
    core.eager = True
    core.settle()
    publisher.disconnect()
