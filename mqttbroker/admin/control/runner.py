"""Runs the operations of `Controls` on the event loop, for any thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from mqttbroker.admin.control.slices import ControlError, Slices

P = ParamSpec("P")
T = TypeVar("T")


class BrokerStopping(ControlError):
    """The broker takes no more operations."""

    def __init__(self) -> None:
        super().__init__("the broker is stopping")


class ControlRunner:
    """Operations from all threads, one slice of one of them per iteration of the event loop.

    ``tell_time`` sets the broker's clock and is called before each slice. ``reload`` reads settings and files again.
    `call`, `scan`, `start` and `reload` may be called on any thread, the loop's included, where nobody may wait for the future
    but with `asyncio.wrap_future`. Cancelling a future ends its operation before the next slice.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tell_time: Callable[[], object],
        reload: Callable[[], Awaitable[None]],
    ) -> None:
        self._loop = loop
        self._tell_time = tell_time
        self._reload = reload
        self._lock = threading.Lock()
        self._closed = False
        self._futures: set[Future[Any]] = set()  # those that are not done
        self._operations: deque[_Operation] = deque()  # those with a slice to run
        self._scheduled = False
        self._tasks: set[asyncio.Future[None]] = set()  # those that run

    def call(self, operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run an operation of one slice."""
        future: Future[T] = Future()
        self._submit(future, self._begin, _Operation(future, lambda: operation(*args, **kwargs)))
        return future

    def scan(self, operation: Callable[P, Slices[T]], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run an operation of many slices."""
        future: Future[T] = Future()
        self._submit(future, self._begin, _Operation(future, lambda: operation(*args, **kwargs)))
        return future

    def reload(self) -> Future[None]:
        """Reload settings, password and ACL files and certificates, as SIGHUP does; problems are in the log."""
        return self.start(self._reload)

    def start(self, begin: Callable[[], Awaitable[T]]) -> Future[T]:
        """Run a coroutine, which ``begin`` makes on the event loop."""
        future: Future[T] = Future()
        self._submit(future, self._begin_task, (future, begin))
        return future

    def close(self) -> None:
        """Fail unfinished and later operations with `BrokerStopping`; for the loop's thread."""
        with self._lock:
            self._closed = True
            futures = list(self._futures)
        self._operations.clear()
        for future in futures:
            _finish(future, None, BrokerStopping())

    def _submit(self, future: Future[Any], begin: Callable[[Any], None], argument: object) -> None:
        with self._lock:
            if self._closed:
                raise BrokerStopping
            self._futures.add(future)
            future.add_done_callback(self._forget)
            self._loop.call_soon_threadsafe(begin, argument)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._futures.discard(future)

    # --- on the loop's thread -----------------------------------------------------------------------------------------

    def _begin(self, operation: _Operation) -> None:
        if not self._closed:
            self._operations.append(operation)
            self._schedule()

    def _schedule(self) -> None:
        if self._operations and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run_slice)

    def _run_slice(self) -> None:
        self._scheduled = False
        if not self._operations:
            return
        operation = self._operations.popleft()
        self._tell_time()
        wait = operation.run_slice()
        if wait > 0.0:
            self._loop.call_later(wait, self._begin, operation)
        elif wait == 0.0:
            self._operations.append(operation)
        self._schedule()

    def _begin_task(self, given: tuple[Future[Any], Callable[[], Awaitable[Any]]]) -> None:
        future, begin = given
        if self._closed:
            return

        async def run() -> None:
            try:
                result = await begin()
            except Exception as error:
                _finish(future, None, error)
            else:
                _finish(future, result, None)

        task = asyncio.ensure_future(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Operation:
    """One unfinished operation."""

    def __init__(self, future: Future[Any], begin: Callable[[], Any]) -> None:
        self._future = future
        self._begin = begin
        self._slices: Generator[float, None, Any] | None = None

    def run_slice(self) -> float:
        """Run one slice; returns the seconds to wait before the next one, negative if there is none."""
        if self._future.cancelled():
            return -1.0
        try:
            if self._slices is None:
                result = self._begin()
                if not isinstance(result, Generator):
                    _finish(self._future, result, None)
                    return -1.0
                self._slices = result
            return next(self._slices)
        except StopIteration as end:
            _finish(self._future, end.value, None)
        except Exception as error:
            _finish(self._future, None, error)
        return -1.0


def _finish(future: Future[Any], result: object, error: Exception | None) -> None:
    """Complete a future that other threads may cancel at the same time."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
