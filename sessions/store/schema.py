"""The tables of the durable store, and their migrations.

One transaction takes a database from any older version to the newest, after a backup of the older one is beside it. A
database that is newer, foreign or damaged is refused and not changed.

`PRAGMA user_version` counts the migrations of a database; sqlite-utils records each by name in ``_sqlite_migrations``.
A table with a compound key has no rowid, so that a row is stored once. The payload is the last column, so that reading
the small columns follows no overflow pages.
"""

from __future__ import annotations

import importlib
import logging
import os
import sqlite3
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from sessions.store.disk import sync_directory
from sessions.store.interface import StoreError

if TYPE_CHECKING:
    from sqlite_utils import Database

# "MQTB": identifies the broker's database among SQLite files.
APPLICATION_ID = 0x4D515442
MIGRATION_SET = "sessions"
# What `MIGRATIONS` make of an empty database, as a script: loading sqlite-utils takes a third of the start of a broker.
NEWEST = Path(__file__).with_name("newest_schema.sql")
# The first version with UPDATE ... FROM.
OLDEST_SQLITE = (3, 33, 0)
HEADER_BYTES = 100  # of a database file

Migration = Callable[["Database"], None]

logger = logging.getLogger(__name__)


def _table(db: Database, name: str, columns: dict[str, type], pk: str = "", null: str = "") -> None:
    """Create a table whose columns are NOT NULL except those named in ``null``."""
    db.table(name).create(columns, pk=pk or None, not_null=set(columns) - {pk} - set(null.split()))


def create_tables(db: Database) -> None:
    """Version 1."""
    session = {"session_id": int, "client_id": str, "version": int, "expiry_interval": int}
    away = {"disconnected_at": float, "will": bytes, "will_due": float}
    _table(db, "sessions", {**session, **away}, "session_id", " ".join(away))
    db.table("sessions").create_index(["client_id"], unique=True)
    db.execute(
        "CREATE TABLE subscriptions (session_id INTEGER NOT NULL, topic_filter TEXT NOT NULL,"
        " qos INTEGER NOT NULL, options INTEGER NOT NULL, subscription_id INTEGER NOT NULL,"
        " PRIMARY KEY (session_id, topic_filter)) WITHOUT ROWID"
    )
    origin = {"properties": bytes, "publisher": str, "timestamp": int, "expires_at": int}
    message = {"topic": str, "qos": int, "retain": int, **origin, "payload": bytes}
    _table(db, "messages", {"id": int, **message}, "id")
    db.execute(
        "CREATE TABLE queue (session_id INTEGER NOT NULL, seq INTEGER NOT NULL,"
        " message_id INTEGER NOT NULL, shared INTEGER NOT NULL, qos INTEGER NOT NULL,"
        " retain INTEGER NOT NULL, subscription_ids BLOB NOT NULL, packet_id INTEGER NOT NULL,"
        " state INTEGER NOT NULL, size INTEGER NOT NULL, PRIMARY KEY (session_id, seq))"
        " WITHOUT ROWID"
    )
    # Only entries of shared messages are looked up by message.
    db.execute("CREATE INDEX queue_shared ON queue (message_id) WHERE shared = 1")
    db.execute(
        "CREATE TABLE received (session_id INTEGER NOT NULL, packet_id INTEGER NOT NULL, PRIMARY KEY (session_id, packet_id)) WITHOUT ROWID"
    )
    _table(db, "retained", {"topic": str, "qos": int, **origin, "payload": bytes})
    db.table("retained").create_index(["topic"], unique=True)
    db.execute(
        "CREATE TABLE stream_ends (stream TEXT NOT NULL, partition INTEGER NOT NULL,"
        " end_offset INTEGER NOT NULL, PRIMARY KEY (stream, partition)) WITHOUT ROWID"
    )


def add_username(db: Database) -> None:
    """Version 2: the username of a session's client, NULL if it is anonymous."""
    db.execute("ALTER TABLE sessions ADD COLUMN username TEXT")


def add_rules(db: Database) -> None:
    """Version 3: the name of the access rules of a session, NULL for the global rules."""
    db.execute("ALTER TABLE sessions ADD COLUMN rules TEXT")


def add_expiry(db: Database) -> None:
    """Version 4: the expiry of a queued message, with an index; 0 or NULL for never."""
    db.execute("ALTER TABLE queue ADD COLUMN expires_at INTEGER")
    db.execute("UPDATE queue SET expires_at = m.expires_at FROM messages AS m WHERE m.id = queue.message_id AND m.expires_at > 0")
    db.execute("CREATE INDEX queue_expiry ON queue (expires_at) WHERE expires_at > 0")


def add_producers(db: Database) -> None:
    """Version 5: the numbers that producers have stored in streams."""
    db.execute(
        "CREATE TABLE producers (stream TEXT NOT NULL, user_name TEXT NOT NULL, producer_id TEXT NOT NULL,"
        " last INTEGER NOT NULL, missing BLOB NOT NULL, used INTEGER NOT NULL,"
        " PRIMARY KEY (stream, user_name, producer_id)) WITHOUT ROWID"
    )


def add_permissions(db: Database) -> None:
    """Version 6: the permissions that a session's last login brought, as JSON, NULL if it brought none."""
    db.execute("ALTER TABLE sessions ADD COLUMN permissions TEXT")


def add_commit_log(db: Database) -> None:
    """Version 7: the identity of the store, and the position of the commit log that the tables are at; ``closed`` is 1 if
    they have all changes. One row, or none before the first start."""
    db.execute(
        "CREATE TABLE commit_log (id INTEGER PRIMARY KEY, identity TEXT NOT NULL, position INTEGER NOT NULL, closed INTEGER NOT NULL)"
    )


def add_stream_readers(db: Database) -> None:
    """Version 8: the readers of streams, and their offsets by partition."""
    db.execute(
        "CREATE TABLE stream_readers (reader_id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, session_id INTEGER NOT NULL,"
        " name TEXT NOT NULL, stream TEXT NOT NULL, topic_filter TEXT NOT NULL, start TEXT NOT NULL,"
        " options INTEGER NOT NULL, created INTEGER NOT NULL)"
    )
    db.execute(
        "CREATE TABLE stream_offsets (reader_id INTEGER NOT NULL, partition INTEGER NOT NULL, position INTEGER NOT NULL,"
        " reserved INTEGER NOT NULL, pending BLOB NOT NULL, PRIMARY KEY (reader_id, partition)) WITHOUT ROWID"
    )


MIGRATIONS: tuple[Migration, ...] = (
    create_tables,
    add_username,
    add_rules,
    add_expiry,
    add_producers,
    add_permissions,
    add_commit_log,
    add_stream_readers,
)


def _newer(version: int, known: int) -> str:
    return f"schema version {version} is newer than this program's {known}; use the newer program"


def refused_header(path: Path) -> str:
    """Why this program cannot open the database, as far as its file's header tells; "" if there is no reason or no file.

    A damaged header is none: the start repairs it. A running broker may be using the file. Raises `OSError`.
    """
    try:
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
    except FileNotFoundError:
        return ""
    if len(header) < HEADER_BYTES or not header.startswith(b"SQLite format 3\0"):
        return ""
    version, application = (int.from_bytes(header[at : at + 4], "big") for at in (60, 68))
    if application not in (0, APPLICATION_ID):
        return "not a database of this broker"
    return _newer(version, len(MIGRATIONS)) if version > len(MIGRATIONS) else ""


def prepare(connection: sqlite3.Connection, path: str, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Migrate the database to the newest schema; `connection` is in autocommit mode.

    ``path`` names the database in errors; the backup is ``<path>.v<older version>.backup``. Raises `StoreError` if the
    database is newer than this program or not the broker's, and `sqlite3.Error` if it cannot be read or written; it is
    unchanged then.
    """
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    tables = int(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    if tables and application != APPLICATION_ID:
        raise StoreError(f"{path}: not a database of this broker")
    if version > len(migrations):
        raise StoreError(f"{path}: {_newer(version, len(migrations))}")
    if version == len(migrations):
        return
    if not tables and migrations is MIGRATIONS:
        _create_newest(connection)
        return
    backup = f"{path}.v{version}.backup" if tables else ""
    if backup:
        _back_up(connection, backup)
    pending = _import_sqlite_utils().Migrations(MIGRATION_SET)
    for migration in migrations:
        pending(name=migration.__name__)(migration)
    db = as_database(connection)
    with db.atomic():
        pending.apply(db)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
    if backup:
        logger.info("event=store_migrated from=%d to=%d backup=%s", version, len(migrations), backup)


def _create_newest(connection: sqlite3.Connection) -> None:
    try:
        connection.executescript(NEWEST.read_text(encoding="utf-8"))
    except BaseException:
        if connection.in_transaction:
            connection.rollback()
        raise


def as_database(connection: sqlite3.Connection) -> Database:
    """The database by sqlite-utils, for what is seldom done: to load it takes a third of the start of a broker."""
    database: Database = _import_sqlite_utils().Database(connection, recursive_triggers=False, execute_plugins=False)
    return database


def _import_sqlite_utils() -> ModuleType:
    """Import sqlite-utils without the pandas and numpy that it would load: they take a second and 90 MB."""
    hidden = [name for name in ("numpy", "pandas") if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("sqlite_utils")
    finally:
        for name in hidden:
            del sys.modules[name]


def _back_up(connection: sqlite3.Connection, target: str) -> None:
    """Copy the database to `target`, which appears when it is complete and on disk."""
    unfinished = Path(f"{target}.part")
    unfinished.unlink(missing_ok=True)
    copy = sqlite3.connect(unfinished)
    try:
        connection.backup(copy)
    finally:
        copy.close()
    os.replace(unfinished, target)
    sync_directory(unfinished.parent)
