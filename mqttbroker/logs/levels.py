"""Levels of the log: one for all lines, and others for areas, some of them until a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import NamedTuple

log = logging.getLogger("mqttbroker")

# The loggers of each area; a level counts for the loggers below them, too.
AREAS: Mapping[str, tuple[str, ...]] = {
    "clients": ("mqttbroker.clients",),
    "packets": ("mqttbroker.packets",),
    "auth": ("mqttbroker.auth",),
    "store": ("mqttbroker.store", "sessions"),
    "streams": ("mqttbroker.streams", "bridge_spark"),
    "network": ("mqttbroker.network",),
    "http": ("mqttbroker.http",),
    "bridges": ("mqttbroker.bridges",),
}
ALL = ""  # the name for all lines of no area with a level of its own


def set_level(level: str, area: str = ALL) -> None:
    """Log events of this level and above: ``debug``, ``info``, ``warning`` or ``error``; "" = as for `ALL`.

    The audit file has all events of its logger.
    """
    number = logging.getLevelNamesMapping()[level.upper()] if level else logging.NOTSET
    if area == ALL:
        logging.getLogger().setLevel(number)
    for name in AREAS.get(area, ()):
        logging.getLogger(name).setLevel(number)


def level(area: str = ALL) -> str:
    """The level in force, as for `set_level`."""
    logger = logging.getLogger(AREAS[area][0]) if area else logging.getLogger()
    return logging.getLevelName(logger.getEffectiveLevel()).lower()


class LevelView(NamedTuple):
    """The level of an area; ``seconds_left`` None = until the next reload. ``configured`` is that of the settings."""

    area: str
    level: str
    seconds_left: float | None
    configured: str


class LogLevels:
    """The levels of the settings, and those that operators set meanwhile; for the thread of ``loop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, level: str, levels: Mapping[str, str]) -> None:
        self._loop = loop
        self._configured: dict[str, str] = {ALL: level, **levels}
        self._ends: dict[str, asyncio.TimerHandle] = {}

    def apply(self, level: str, levels: Mapping[str, str]) -> None:
        """Use the levels of the settings alone."""
        for end in self._ends.values():
            end.cancel()
        self._ends.clear()
        self._configured = {ALL: level, **levels}
        for area in (ALL, *AREAS):
            set_level(self._configured.get(area, ""), area)

    def change(self, level: str, area: str = ALL, seconds: float | None = None) -> None:
        """Use a level for ``seconds``; None = until the next `apply`."""
        end = self._ends.pop(area, None)
        if end is not None:
            end.cancel()
        set_level(level, area)
        if seconds is not None:
            self._ends[area] = self._loop.call_later(seconds, self._restore, area)

    def _restore(self, area: str) -> None:
        del self._ends[area]
        configured = self._configured.get(area, "")
        set_level(configured, area)
        log.info("event=log_level to=%s area=%s reason=%s", level(area), area or "all", "its time is over")

    def views(self) -> list[LevelView]:
        """The level for `ALL`, and then that of each area."""
        now = self._loop.time()
        configured = self._configured
        return [
            LevelView(
                area,
                level(area),
                round(self._ends[area].when() - now, 3) if area in self._ends else None,
                configured.get(area, configured[ALL]),
            )
            for area in (ALL, *AREAS)
        ]
