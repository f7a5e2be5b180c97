"""docs/conformance.md and the tests agree."""

from __future__ import annotations

import re

import pytest

from conformance import report
from conformance.cases import BROKERS, CASES

ROWS = report.parse(report.DOCUMENT.read_text(encoding="utf-8"))
CASES_BY_STATEMENT: dict[tuple[str, str], set[str]] = {}
for case in CASES:
    for number, ids in case.ids.items():
        for statement in ids:
            CASES_BY_STATEMENT.setdefault(("5" if number >= 5 else "3.1.1", statement), set()).add(case.name)


def test_cases_have_unique_names_and_known_brokers() -> None:
    names = [case.name for case in CASES]
    assert sorted(names) == sorted(set(names))
    assert {case.broker for case in CASES} == set(BROKERS)


@pytest.mark.parametrize("version", report.TABLES)
def test_every_statement_that_binds_a_server_has_a_test_or_a_reason(version: str) -> None:
    known = {statement.id for statement in report.statements(version)}
    assert {id for of, id in CASES_BY_STATEMENT if of == version} <= known
    listed = {row.id: row for row in ROWS[version]}
    assert listed.keys() <= known
    for statement in report.statements(version):
        reason = report.untested(version).get(statement.id)
        if statement.binds != "client":
            row = listed[statement.id]
            assert bool(row.tests) is (reason is None), f"{statement.id} needs a test or a reason, not both"
            assert row.tests or row.result == reason
        assert statement.id not in listed or listed[statement.id].asks == statement.asks


@pytest.mark.parametrize("version", report.TABLES)
def test_the_document_names_the_tests_that_exist(version: str) -> None:
    for row in ROWS[version]:
        cases = {name for name in row.tests if "::" not in name}
        assert cases == CASES_BY_STATEMENT.get((version, row.id), set()), f"{row.id}: run make conformance"
        for name in set(row.tests) - cases:
            file, function = name.split("::")
            assert re.search(rf"^(async )?def {function}\(", (report.TESTS / file).read_text(encoding="utf-8"), re.MULTILINE), name
