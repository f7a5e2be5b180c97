"""Writes sessions/store/newest_schema.sql: ``python -P -m support.newest_schema FILE``."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

from sessions.store.schema import APPLICATION_ID, MIGRATION_SET, MIGRATIONS, prepare

HEADER = """\
-- The database of the newest version, as the migrations of sessions/store/schema.py make it of an empty one. Do not edit:
-- PYTHONPATH=.:tests python -P -m support.newest_schema sessions/store/newest_schema.sql
"""


def migrated() -> sqlite3.Connection:
    """An empty database in memory to which all migrations were applied."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    prepare(connection, ":memory:", list(MIGRATIONS))
    return connection


def newest_schema() -> str:
    """The script."""
    with migrated() as connection:
        statements = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")]
    rows = ",\n".join(
        f"  ('{MIGRATION_SET}', '{migration.__name__}', strftime('%Y-%m-%d %H:%M:%f000+00:00', 'now'))" for migration in MIGRATIONS
    )
    return (
        HEADER
        + "BEGIN IMMEDIATE;\n"
        + "".join(f"{statement};\n" for statement in statements)
        + f"INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES\n{rows};\n"
        + f"PRAGMA application_id = {APPLICATION_ID};\nPRAGMA user_version = {len(MIGRATIONS)};\nCOMMIT;\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(newest_schema(), encoding="utf-8")
