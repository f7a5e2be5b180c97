"""sessions.store.statements: no statement of the writer reads a whole table."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest
from support.store_cases import Opened, opened, path  # noqa: F401 - fixtures

from sessions.store import statements

# -- plans ------------------------------------------------------------------


TABLES = "sessions subscriptions messages queue received retained stream_ends producers stream_readers stream_offsets".split()
WRITES = {name: value for name, value in vars(statements).items() if isinstance(value, statements.Statement)}


def plan(path: Path, sql: str) -> list[str]:
    numbered = re.findall(r"\?(\d)", sql)
    count = int(max(numbered)) if numbered else sql.count("?")
    connection = sqlite3.connect(path)
    try:
        rows = connection.execute("EXPLAIN QUERY PLAN " + sql, [None] * count).fetchall()
    finally:
        connection.close()
    return [str(row[3]) for row in rows]


def scans(steps: list[str]) -> list[str]:
    """The steps that read a whole table, under its name or an alias."""
    words = [step.split() for step in steps]
    return [" ".join(step) for step in words if step[0] == "SCAN" and step[1] in [*TABLES, "q", "m", "other"]]


@pytest.mark.parametrize("name", sorted(WRITES))
@pytest.mark.parametrize("size", [1, 8, statements.CHUNK])
def test_no_write_scans_a_table(opened: Opened, path: Path, name: str, size: int) -> None:
    opened()
    assert scans(plan(path, WRITES[name].by_size[size])) == []


@pytest.mark.parametrize("sql", [*statements.PURGE, statements.PURGE_END, statements.PAGE_RECEIVED])
def test_no_purge_scans_a_table(opened: Opened, path: Path, sql: str) -> None:
    opened()
    assert scans(plan(path, sql)) == []


def test_a_page_reads_only_its_rows_in_order(opened: Opened, path: Path) -> None:
    opened()
    steps = plan(path, statements.PAGE)
    assert scans(steps) == []
    assert "SEARCH q USING PRIMARY KEY (session_id=? AND seq>?)" in steps
    assert "SEARCH m USING INTEGER PRIMARY KEY (rowid=?)" in steps
    assert not any("TEMP B-TREE" in step for step in steps)


def test_entry_queries_use_an_index_in_order(opened: Opened, path: Path) -> None:
    opened()
    for sql, step in (
        (statements.FIND_UNSENT, "SEARCH queue USING PRIMARY KEY (session_id=? AND seq>?)"),
        (statements.FIND_EXPIRED, "SEARCH queue USING INDEX queue_expiry (expires_at>? AND expires_at<?)"),
        (statements.NEXT_EXPIRY, "SEARCH queue USING COVERING INDEX queue_expiry (expires_at>?)"),
    ):
        steps = plan(path, sql)
        assert step in steps and not any("TEMP B-TREE" in step for step in steps)


def test_shared_messages_are_found_by_the_partial_index(opened: Opened, path: Path) -> None:
    opened()
    for sql in (statements.DELETE_SHARED_MESSAGES.by_size[8], statements.PURGE[1]):
        assert any("INDEX queue_shared (message_id=?)" in step for step in plan(path, sql))
