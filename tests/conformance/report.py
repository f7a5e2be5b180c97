"""``make conformance``: run the table, say how it stands, and write docs/conformance.md.

Rule: what the document says of a statement is what its tests did in this run, and every statement that binds a server
is in it: with tests, or with the reason why there can be none.
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

What the MQTT standards ask of a server, statement by statement, and the test that fails when the broker does not do
it. `make conformance` runs the tests and writes this page. Names without a file are cases of `tests/conformance/`:
packets that go over a socket, and what must come back. Duties of clients are here where the broker can tell that they
are broken and must not go along. Paraphrases are ours; the standard's own words are at
[3.1.1](https://docs.oasis-open.org/mqtt/mqtt/v3.1.1/mqtt-v3.1.1.html) and
[5.0](https://docs.oasis-open.org/mqtt/mqtt/v5.0/mqtt-v5.0.html).
"""


class Statement(NamedTuple):
    id: str
    asks: str
    binds: str  # "server", "client" or "both"


class Row(NamedTuple):
    """A statement in the document; ``tests`` are names, ``result`` is "pass", "FAIL: …" or why there is no test."""

    id: str
    asks: str
    tests: tuple[str, ...]
    result: str


def statements(version: str) -> list[Statement]:
    lines = TABLES[version].read_text(encoding="utf-8").splitlines()
    return [Statement(*line.split("\t")) for line in lines]


def untested(version: str) -> dict[str, str]:
    """Statement -> why it has no test."""
    lines = (HERE / "untested.tsv").read_text(encoding="utf-8").splitlines()
    return {id: why for of, id, why in (line.split("\t") for line in lines) if of == version}


def files() -> list[Path]:
    """The modules with tests that name statements."""
    return sorted(path for path in TESTS.rglob("test_*.py") if "mark.normative" in path.read_text(encoding="utf-8"))


def label(item: pytest.Item) -> str:
    """How the document calls a test: a case by its name, others by file and function."""
    spec = getattr(item, "callspec", None)
    if spec is not None and "case" in spec.params:
        return str(spec.params["case"].name)
    return item.nodeid.split("[")[0].removeprefix("tests/")


class Recorder:
    """A pytest plugin that keeps what became of each test, and the statements it names."""

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
            said = report.longreprtext.strip().splitlines()
            self.failed.append(f"{item.name}: {said[-1] if said else report.outcome}")
        for mark in item.iter_markers("normative"):
            for statement in mark.args[1:]:
                self.tests[mark.args[0], statement][label(item)] &= report.passed

    def rows(self, version: str, duties_of_clients: bool) -> list[Row]:
        found: list[Row] = []
        reasons = untested(version)
        for statement in statements(version):
            tests = self.tests.get((version, statement.id), {})
            if (statement.binds == "client") is not duties_of_clients or (duties_of_clients and not tests):
                continue
            broken = [name for name, passed in tests.items() if not passed]
            result = f"FAIL: {', '.join(broken)}" if broken else "pass"
            found.append(Row(statement.id, statement.asks, tuple(sorted(tests)),
                result if tests else reasons.get(statement.id, "no test")))
        return found


def render(recorder: Recorder) -> str:
    """The document."""
    parts = [INTRODUCTION, "| version | statements that bind a server | with a test | pass |\n|---|---|---|---|"]
    for version in TABLES:
        parts.append("| {} | {} | {} | {} |".format(version, *counts(recorder.rows(version, False))))
    for version in TABLES:
        for duties_of_clients in (False, True):
            title = "duties of clients that the broker checks" if duties_of_clients else "what binds a server"
            parts.append(f"\n## MQTT {version}: {title}\n\n| statement | asks | tests | result |\n|---|---|---|---|")
            for row in recorder.rows(version, duties_of_clients):
                names = ", ".join(f"`{name}`" for name in row.tests) or "–"
                parts.append(f"| {row.id} | {row.asks} | {names} | {row.result} |")
    return "\n".join(parts) + "\n"


def parse(text: str) -> dict[str, list[Row]]:
    """The rows of the document by version: what `render` wrote."""
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
    """Statements, those with a test, those whose tests pass."""
    return len(rows), sum(bool(row.tests) for row in rows), sum(row.result == "pass" for row in rows)


def main() -> int:
    recorder = Recorder()
    arguments = ["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-m", "normative", *map(str, files()),
        *sys.argv[1:]]
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
