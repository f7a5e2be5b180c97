"""The kinds of abuse by name. Each is a function that abuses a `Target` until its time is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from abuse.target import GROWTH, Target

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Kind:
    """``what`` describes the packets; ``limits`` are settings of the broker, ``growth`` bytes that its memory may grow by,
    ``program`` a script in the place of the package. ``short``: also part of the tests that run often."""

    name: str
    what: str
    abuse: Callable[[Target], None]
    short: bool = False
    limits: Mapping[str, Any] = field(default_factory=dict)
    growth: int = GROWTH
    program: str = ""


KINDS: dict[str, Kind] = {}


def kind(what: str, **options: Any) -> Callable[[Callable[[Target], None]], Callable[[Target], None]]:
    """Register a kind of abuse under the name of its function."""

    def register(abuse: Callable[[Target], None]) -> Callable[[Target], None]:
        name = abuse.__name__.replace("_", "-")
        assert name not in KINDS
        KINDS[name] = Kind(name, what, abuse, **options)
        return abuse

    return register
