"""An event loop and a transport that a test drives by hand."""

from __future__ import annotations

from typing import Any


class Timer:
    def cancel(self) -> None:
        pass


class Loop:
    """Runs callbacks when told to; every call of `time` advances the clock by ``look`` seconds."""

    def __init__(self) -> None:
        self.soon: list[Any] = []
        self.now = 0.0
        self.look = 0.0

    def call_soon(self, call: Any) -> None:
        self.soon.append(call)

    def call_later(self, seconds: float, call: Any) -> Timer:
        return Timer()

    def time(self) -> float:
        self.now += self.look
        return self.now

    def turn(self) -> None:
        calls, self.soon = self.soon, []
        for call in calls:
            call()

    def run(self) -> None:
        """Run iterations until no callback is scheduled."""
        while self.soon:
            self.turn()


class Transport:
    def __init__(self) -> None:
        self.reading = True
        self.written = b""
        self.parts: list[bytes] = []

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: list[bytes]) -> None:
        self.parts += parts
        self.written += b"".join(parts)

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def abort(self) -> None:
        pass
