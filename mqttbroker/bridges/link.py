"""The link of a bridge: the socket to the remote, the relay, and the local client, from connect to disconnect.

A remote that does not read pauses the local client, whose messages then wait in its session, on disk; a local broker
that does not read pauses the remote.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from mqttbroker.bridges.local_client import LocalTransport
from mqttbroker.bridges.relay import JOINING, RELEASING, RUNNING, Relay
from mqttbroker.bridges.relay_terms import RelayError
from mqttbroker.core.terms.deadline import STOPPED
from mqttbroker.net.wire import Endpoint, Wire

WRITE_BUFFER: Final = 262_144  # bytes that wait for the remote before the local client is paused
MAX_UNREAD: Final = 1_048_576  # bytes of answers to a full socket after which the remote is not read
TICK: Final = 1.0  # seconds between checks of the keep alive
CLOSE_TIMEOUT: Final = 2.0  # seconds for the last packets to the remote


class Link:
    """An asyncio protocol for the socket to the remote, or for the WebSocket on it.

    ``endpoint`` is that of bridges' clients, ``peer`` their address as in the log. ``accept_timeout`` is in seconds,
    from the open socket until both brokers have accepted the bridge. ``on_running`` is called then; it may raise
    RelayError. ``ended`` gets the reason of the end.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        relay: Relay,
        endpoint: Endpoint,
        peer: str,
        accept_timeout: float,
        on_running: Callable[[], None],
    ) -> None:
        self.relay = relay
        self.ended: asyncio.Future[RelayError] = loop.create_future()
        self._loop = loop
        self._endpoint = endpoint
        self._local = LocalTransport(self, loop.call_soon, peer)
        self._accept_until = loop.time() + accept_timeout
        self._on_running = on_running
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticked = 0.0  # when `_tick` was called last
        self._remote_full = False  # its socket takes no more
        self._unread = 0  # bytes of answers since the socket is full
        self._continuing = False
        self._remote_paused = False
        self._local_paused = False
        self._delivering = False
        self._was_running = False
        self._over: RelayError | None = None

    # -- the socket ---------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        if self._over is not None:
            transport.abort()
            return
        self._transport = transport
        transport.set_write_buffer_limits(WRITE_BUFFER)
        self._ticked = self._loop.time()
        self.relay.start(self._ticked)
        self._write()
        self._timer = self._loop.call_later(TICK, self._tick)

    def data_received(self, data: bytes) -> None:
        if self._over is None:
            self._handle(lambda: self.relay.remote_received(data, self._loop.time()), True)
            self._deliver()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Any) -> None:
        self._transport = None
        self._finish(RelayError(f"connection lost: {error}" if error else "the remote closes the connection"))

    def pause_writing(self) -> None:
        self._remote_full = True
        self._pause()

    def resume_writing(self) -> None:
        self._remote_full = False
        self._unread = 0
        self._pause()

    # -- the local client ---------------------------------------------------------

    def local_wrote(self, data: bytes) -> None:
        if self._over is None:
            self._handle(lambda: self.relay.local_received(data))
            if self.relay.to_local:
                # The broker is in the middle of a flush.
                self._loop.call_soon(self._deliver)

    def local_reading_changed(self) -> None:
        self._loop.call_soon(self._deliver)
        self._pause()

    def local_lost(self) -> None:
        self.fail(RelayError("the local broker closes the connection"))

    @property
    def unsent(self) -> int:
        return 0 if self._transport is None else int(self._transport.get_write_buffer_size())

    # -- both ---------------------------------------------------------------------

    def _continue(self) -> None:
        """Handle more of the packets that the remote has sent."""
        self._continuing = False
        if self._over is None:
            self._handle(self.relay.proceed, True)
            self._deliver()

    def _handle(self, step: Callable[[], None], answers: bool = False) -> None:
        """Make a step of the relay, and send the packets that come out; ``answers``: to packets of the remote."""
        try:
            step()
            if self.relay.state == RUNNING and not self._was_running:
                self._was_running = True
                self._on_running()  # before a message leaves
        except RelayError as error:
            if error.ended_session:
                self._write()
            self.fail(error)
            return
        if self.relay.unfinished and not self._continuing:
            self._continuing = True
            self._loop.call_soon(self._continue)
        written = self._write()
        if answers and self._remote_full:
            self._unread += written
        self._pause()

    def _write(self) -> int:
        """Send the packets to the remote; returns their bytes."""
        if not self.relay.to_remote or self._transport is None:
            return 0
        self.relay.remote_written(self._loop.time())
        data = self.relay.to_remote.drain()
        self._transport.write(data)
        return len(data)

    def _deliver(self) -> None:
        """Give the local broker the packets that wait for it, if it reads."""
        if self._delivering or self._over is not None:
            return
        self._delivering = True
        try:
            while self.relay.to_local and self._local.reading and self._over is None:
                if self._local.wire is None:
                    self._local.open(Wire(self._endpoint))
                data = self.relay.to_local.drain()
                wire = self._local.wire
                if wire is not None:
                    wire.data_received(data)
        finally:
            self._delivering = False
        self._pause()

    def _pause(self) -> None:
        """Stop or continue to read either side."""
        if self._over is not None or self._transport is None:
            return
        relay = self.relay
        stop = not relay.reads_remote or relay.unfinished or not self._local.reading or self._unread > MAX_UNREAD
        if stop != self._remote_paused:
            self._remote_paused = stop
            if stop:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
        wire = self._local.wire
        full = self._remote_full or relay.pauses_local
        if wire is not None and full != self._local_paused and relay.state > JOINING:
            self._local_paused = full
            if full:
                wire.pause_writing()
            else:
                wire.resume_writing()

    def _tick(self) -> None:
        now = self._loop.time()
        if now - self._ticked > TICK + STOPPED:
            self.relay.stopped(now - self._ticked)
            self._accept_until += now - self._ticked
        self._ticked = now
        self._timer = self._loop.call_later(TICK, self._tick)
        if self.relay.state != RUNNING and now >= self._accept_until:
            silent = "the local broker" if self.relay.state in (JOINING, RELEASING) else "the remote"
            self.fail(RelayError(f"no answer of {silent} in time"))
            return
        self._handle(lambda: self.relay.tick(now))

    # -- the end ------------------------------------------------------------------

    def fail(self, error: RelayError) -> None:
        """End the link without DISCONNECT, so that the remote publishes the bridge's will."""
        transport = self._transport
        self._finish(error)
        if transport is not None:
            if error.ended_session:
                transport.close()
            else:
                transport.abort()

    def close(self, reason: RelayError, forget: bool = False) -> None:
        """Disconnect; with ``forget`` the remote's session ends, too."""
        if self._over is not None:
            return
        self.relay.close(forget)
        self._write()
        transport = self._transport
        self._finish(reason)
        if transport is not None:
            transport.close()
            self._loop.call_later(CLOSE_TIMEOUT, transport.abort)

    def _finish(self, error: RelayError) -> None:
        if self._over is not None:
            return
        self._over = error
        if self._timer is not None:
            self._timer.cancel()
        # Not in the call of a flush.
        self._loop.call_soon(self._end, error)

    def _end(self, error: RelayError) -> None:
        self._local.lose(str(error))
        if not self.ended.done():
            self.ended.set_result(error)
