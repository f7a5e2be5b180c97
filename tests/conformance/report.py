"""``make conformance``: run the conformance tests and write docs/conformance.md.

The document has every statement that binds a server, with the results of its tests in this run, or with the reason why
no test is possible.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
DOCUMENT = TESTS.parent / "docs" / "conformance.md"
TABLES = {"3.1.1": HERE / "normative_v311.tsv", "5": HERE / "normative_v5.tsv"}

INTRODUCTION = """# Conformance

Each statement of the MQTT standards that binds a server, and the tests that fail when the broker violates it.
`make conformance` runs the tests and writes this page. Names without a file are cases of `tests/conformance/`: packets
sent over a socket, and the packets expected in return. Duties of clients are listed where the broker can detect their
violation and must not forward it. The paraphrases are ours; the standards' own words are at
[3.1.1](https://docs.oasis-open.org/mqtt/mqtt/v3.1.1/mqtt-v3.1.1.html) and
[5.0](https://docs.oasis-open.org/mqtt/mqtt/v5.0/mqtt-v5.0.html).
"""


class Statement(NamedTuple):
    id: str
    asks: str
    binds: str  # "server", "client" or "both"


class Row(NamedTuple):
    """A statement in the document; ``result`` is "pass", "FAIL: …" or the reason why it has no test."""

    id: str
    asks: str
    tests: tuple[str, ...]
    result: str


def statements(version: str) -> list[Statement]:
    lines = TABLES[version].read_text(encoding="utf-8").splitlines()
    return [Statement(*line.split("\t")) for line in lines]


def untested(version: str) -> dict[str, str]:
    """The statements without a test, and the reasons."""
    lines = (HERE / "untested.tsv").read_text(encoding="utf-8").splitlines()
    return {id: reason for of, id, reason in (line.split("\t") for line in lines) if of == version}


def files() -> list[Path]:
    """The test modules that name statements."""
    return sorted(path for path in TESTS.rglob("test_*.py") if "mark.normative" in path.read_text(encoding="utf-8"))


def label(item: pytest.Item) -> str:
    """The name of a test in the document: that of its case, else file and function."""
    spec = getattr(item, "callspec", None)
    if spec is not None and "case" in spec.params:
        return str(spec.params["case"].name)
    return item.nodeid.split("[")[0].removeprefix("tests/")


class Recorder:
    """A pytest plugin that records the outcome of each test under the statements that it names."""

    def __init__(self) -> None:
        self.tests: dict[tuple[str, str], dict[str, bool]] = {}  # (version, statement) -> test -> passed
        self.failed: list[str] = []
        self._items: dict[str, pytest.Item] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            self._items[item.nodeid] = item
            for mark in item.iter_markers("normative"):
                for statement in mark.args[1:]:
                    self.tests.setdefault((mark.args[0], statement), {}).setdefault(label(item), True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.passed and report.when != "call":
            return
        item = self._items[report.nodeid]
        if not report.passed:
            lines = report.longreprtext.strip().splitlines()
            self.failed.append(f"{item.name}: {lines[-1] if lines else report.outcome}")
        for mark in item.iter_markers("normative"):
            for statement in mark.args[1:]:
                self.tests[mark.args[0], statement][label(item)] &= report.passed

    def rows(self, version: str, client_duties: bool) -> list[Row]:
        found: list[Row] = []
        reasons = untested(version)
        for statement in statements(version):
            tests = self.tests.get((version, statement.id), {})
            if (statement.binds == "client") is not client_duties or (client_duties and not tests):
                continue
            broken = [name for name, passed in tests.items() if not passed]
            result = f"FAIL: {', '.join(broken)}" if broken else "pass"
            found.append(Row(statement.id, statement.asks, tuple(sorted(tests)), result if tests else reasons.get(statement.id, "no test")))
        return found


def render(recorder: Recorder) -> str:
    """The text of the document."""
    parts = [INTRODUCTION, "| version | statements that bind a server | with a test | pass |\n|---|---|---|---|"]
    for version in TABLES:
        parts.append("| {} | {} | {} | {} |".format(version, *counts(recorder.rows(version, False))))
    for version in TABLES:
        for client_duties in (False, True):
            title = "duties of clients that the broker checks" if client_duties else "statements that bind a server"
            parts.append(f"\n## MQTT {version}: {title}\n\n| statement | asks | tests | result |\n|---|---|---|---|")
            for row in recorder.rows(version, client_duties):
                names = ", ".join(f"`{name}`" for name in row.tests) or "–"
                parts.append(f"| {row.id} | {row.asks} | {names} | {row.result} |")
    return "\n".join(parts) + "\n"


def parse(text: str) -> dict[str, list[Row]]:
    """The rows of a document from `render`, by version."""
    rows: dict[str, list[Row]] = {}
    version = ""
    for line in text.splitlines():
        heading = re.match(r"## MQTT ([\d.]+):", line)
        if heading:
            version = heading[1]
        elif line.startswith("| MQTT-"):
            id, asks, tests, result = line.strip("| ").split(" | ")
            rows.setdefault(version, []).append(Row(id, asks, tuple(re.findall(r"`([^`]+)`", tests)), result))
    return rows


def counts(rows: list[Row]) -> tuple[int, int, int]:
    """The numbers of statements, of those with a test, and of those with only passing tests."""
    return len(rows), sum(bool(row.tests) for row in rows), sum(row.result == "pass" for row in rows)


def main() -> int:
    recorder = Recorder()
    arguments = ["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-m", "normative", *map(str, files()), *sys.argv[1:]]
    status = pytest.main(arguments, plugins=[recorder])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(status)
    DOCUMENT.write_text(render(recorder), encoding="utf-8")
    print()
    for version in TABLES:
        bind, tested, passed = counts(recorder.rows(version, False))
        print(f"MQTT {version:5}  {bind} statements bind a server, {tested} have a test, {passed} pass")
    for line in recorder.failed:
        print(f"FAILED {line}")
    print(f"written: {DOCUMENT.relative_to(Path.cwd()) if DOCUMENT.is_relative_to(Path.cwd()) else DOCUMENT}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
