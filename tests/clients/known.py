"""The known differences: tests of the suites that fail, each with its reason."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from clients.results import FAILED, PASSED, Result

KNOWN = Path(__file__).with_name("known.toml")


@dataclass(frozen=True)
class Difference:
    """Why tests of a suite fail; ``tests`` are patterns as of `fnmatch`, in which [ has no meaning.

    One that fails ``sometimes`` may pass. ``brokers`` are those against which it fails.
    """

    suite: str
    tests: tuple[str, ...]
    reason: str
    brokers: tuple[str, ...]
    sometimes: bool = False

    def explains(self, suite: str, broker: str, test: str) -> bool:
        return (
            suite == self.suite and broker in self.brokers and any(fnmatchcase(test, pattern.replace("[", "[[]")) for pattern in self.tests)
        )


def load(path: Path = KNOWN) -> list[Difference]:
    """Raises KeyError or TypeError for a table without a key, or with one that there is not."""
    tables = tomllib.loads(path.read_text(encoding="utf-8")).get("difference", [])
    return [Difference(**table | {"tests": tuple(table["tests"]), "brokers": tuple(table["brokers"])}) for table in tables]


def reason_of(differences: Iterable[Difference], suite: str, broker: str, test: str) -> str:
    """The reason why a test fails, empty if it is not known."""
    for difference in differences:
        if difference.explains(suite, broker, test):
            return difference.reason
    return ""


def problems(differences: Iterable[Difference], suite: str, broker: str, results: Iterable[Result]) -> list[str]:
    """One line for each failed test without a reason, and for each that has one and passed."""
    differences = list(differences)
    found = []
    for result in results:
        known = [one for one in differences if one.explains(suite, broker, result.test)]
        if result.outcome == FAILED and not known:
            found.append(f"{suite}: {result.test} failed against {broker}: {result.detail or 'no detail'}")
        if result.outcome == PASSED and known and not any(one.sometimes for one in known):
            found.append(f"{suite}: {result.test} passed against {broker}: remove it from {KNOWN.name}")
    return found
