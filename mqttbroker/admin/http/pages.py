"""Pages of lists that have a cursor in the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from mqttbroker.admin.control.runner import BrokerStopping, ControlRunner
from mqttbroker.admin.control.slices import ControlError
from mqttbroker.admin.http.operations import Call
from mqttbroker.admin.http.parameters import decode_cursor
from mqttbroker.admin.http.request_error import RequestError

T = TypeVar("T")


async def cursor_of(runner: ControlRunner, call: Call, begin: Callable[..., int], *of: str | None) -> int:
    """The cursor of the request, or a new one."""
    parts = decode_cursor(call["cursor"], int)
    if parts is not None:
        return int(parts[0])
    return await asyncio.wrap_future(runner.call(begin, *of))


async def page_behind(future: Future[T]) -> T:
    """The page of a cursor; RequestError, 404, if it is past its end."""
    try:
        return await asyncio.wrap_future(future)
    except BrokerStopping:
        raise
    except ControlError as error:
        raise RequestError(404, str(error), "cursor") from None
