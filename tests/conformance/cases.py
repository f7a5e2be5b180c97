"""The whole table: all cases, and the brokers they run against."""

from __future__ import annotations

from typing import Any

from conformance import cases_wire
from conformance.script import Case

# Settings that a case may ask for; "default" are the broker's own.
BROKERS: dict[str, dict[str, Any]] = {
    "default": {},
}

CASES: list[Case] = [*cases_wire.CASES]
