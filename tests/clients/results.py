"""Results of test programs: JUnit's XML, as pytest and CTest write it, and the JSON lines of ``go test -json``."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
DETAIL_CHARACTERS = 160


@dataclass(frozen=True)
class Result:
    """One test; ``detail`` is one line on why it failed or was skipped, and may be empty."""

    test: str
    outcome: str
    detail: str = ""


def from_junit(path: Path) -> list[Result]:
    """The results in a JUnit file.  Raises ValueError if it has none."""
    try:
        cases = list(xml.etree.ElementTree.parse(path).iter("testcase"))
    except xml.etree.ElementTree.ParseError as error:
        raise ValueError(f"{path}: {error}") from None
    if not cases:
        raise ValueError(f"{path}: no test")
    found: dict[str, Result] = {}
    for case in cases:
        result = _junit_case(case)
        before = found.get(result.test)
        if before is None or before.outcome != FAILED:  # a failed test may be followed by an error of its teardown
            found[result.test] = result
    return list(found.values())


def _junit_case(case: xml.etree.ElementTree.Element) -> Result:
    name = case.get("name", "")
    for tag, outcome in (("failure", FAILED), ("error", FAILED), ("skipped", SKIPPED)):
        element = case.find(tag)
        if element is not None:
            if case.get("status") == "notrun":  # CTest calls a test skipped whose program was not built
                outcome = FAILED
            return Result(name, outcome, _one_line(element.get("message") or element.text or ""))
    status = case.get("status", "run")
    return Result(name, PASSED if status == "run" else FAILED, "" if status == "run" else status)


def from_go(lines: Iterable[str]) -> list[Result]:
    """The results of the tests, without their subtests; one that began and has no result has failed.

    Raises ValueError if there is no test.
    """
    output: dict[str, list[str]] = {}
    found: dict[str, Result] = {}
    for line in lines:
        if not line.startswith("{"):
            continue
        event = json.loads(line)
        test = event.get("Test", "")
        if not test or "/" in test:
            continue
        output.setdefault(test, [])
        action = event["Action"]
        if action == "output":
            output[test].append(event["Output"])
        elif action in ("pass", "fail", "skip"):
            outcome = {"pass": PASSED, "fail": FAILED, "skip": SKIPPED}[action]
            found[test] = Result(test, outcome, "" if outcome == PASSED else _go_detail(output[test]))
    if not output:
        raise ValueError("no test")
    return [found.get(test) or Result(test, FAILED, "did not end") for test in output]


def _go_detail(lines: list[str]) -> str:
    """The first line that names a place in a test file."""
    for line in lines:
        if "_test.go:" in line:
            return _one_line(line.split("_test.go:", 1)[1].split(":", 1)[-1])
    return ""


def _one_line(text: str) -> str:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return first if len(first) <= DETAIL_CHARACTERS else first[: DETAIL_CHARACTERS - 1] + "…"
