"""sessions.store.schema: a database is backed up and migrated completely, or refused and not changed."""

from __future__ import annotations

import gzip
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database
from support.broker_process import BrokerProcess
from support.newest_schema import migrated, newest_schema
from support.paths import VECTORS
from support.raw_client import RawClient

from mqttbroker.codec.packets import Pubcomp, Publish, Pubrec, Pubrel
from mqttbroker.codec.properties import Properties
from sessions.store import schema
from sessions.store.interface import StoreError
from sessions.store.schema import APPLICATION_ID, MIGRATIONS, prepare
from sessions.store.schema import NEWEST as NEWEST_SCRIPT

NEWEST = len(MIGRATIONS)


def add_note(db: Database) -> None:
    db.table("sessions").add_column("note", str)


def fail_halfway(db: Database) -> None:
    db.execute("DROP TABLE retained")
    raise sqlite3.OperationalError("no more")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "broker.db"


@pytest.fixture
def connection(path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path, isolation_level=None)
    yield connection
    connection.close()


def version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def test_a_new_database_gets_the_newest_schema(connection: sqlite3.Connection, path: Path) -> None:
    prepare(connection, str(path))
    assert version(connection) == NEWEST
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    db = Database(connection)
    assert {
        "sessions",
        "subscriptions",
        "messages",
        "queue",
        "received",
        "retained",
        "stream_ends",
        "producers",
        "stream_readers",
        "stream_offsets",
    } <= set(db.table_names())
    assert [row["name"] for row in db["_sqlite_migrations"].rows] == [migration.__name__ for migration in MIGRATIONS]
    assert list(path.parent.glob("*.backup")) == []


def test_preparing_twice_changes_nothing(connection: sqlite3.Connection, path: Path) -> None:
    prepare(connection, str(path))
    before = list(connection.iterdump())
    prepare(connection, str(path))
    assert list(connection.iterdump()) == before


def test_an_older_database_is_migrated_after_a_backup(connection: sqlite3.Connection, path: Path) -> None:
    prepare(connection, str(path))
    connection.execute("INSERT INTO sessions VALUES (1, 'c', 5, 10, NULL, NULL, NULL, 'u', NULL, NULL)")
    before = list(connection.iterdump())
    prepare(connection, str(path), (*MIGRATIONS, add_note))
    assert version(connection) == NEWEST + 1
    assert connection.execute("SELECT client_id, note FROM sessions").fetchall() == [("c", None)]
    with sqlite3.connect(f"{path}.v{NEWEST}.backup") as backup:
        assert list(backup.iterdump()) == before
        assert version(backup) == NEWEST
    backup.close()
    assert list(path.parent.glob("*.part")) == []


def test_sessions_of_version_1_have_no_username_or_permissions_and_the_global_rules(connection: sqlite3.Connection, path: Path) -> None:
    prepare(connection, str(path), MIGRATIONS[:1])
    connection.execute("INSERT INTO sessions VALUES (1, 'c', 5, 10, NULL, NULL, NULL)")
    prepare(connection, str(path))
    assert connection.execute("SELECT client_id, username, rules, permissions FROM sessions").fetchall() == [("c", None, None, None)]


def test_entries_of_version_3_get_the_expiry_of_their_message(connection: sqlite3.Connection, path: Path) -> None:
    prepare(connection, str(path), MIGRATIONS[:3])
    for key, expires_at in ((1, 0), (2, 77)):
        connection.execute("INSERT INTO messages VALUES (?, 't', 1, 0, x'', 'p', 5, ?, x'')", (key, expires_at))
        connection.execute("INSERT INTO queue VALUES (1, ?1, ?1, 0, 1, 0, x'', 0, 0, 1)", (key,))
    prepare(connection, str(path))
    assert connection.execute("SELECT seq, expires_at FROM queue").fetchall() == [(1, None), (2, 77)]


def test_a_broker_opens_a_data_directory_of_version_1(tmp_path: Path) -> None:
    """The vector is a database of schema version 1: a disconnected client with four messages, a retained message, and a
    QoS 2 message that awaits its PUBREL."""
    database = tmp_path / "data" / "mqttbroker.db"
    database.parent.mkdir()
    old = gzip.decompress((VECTORS / "store-v1.db.gz").read_bytes())
    database.write_bytes(old)
    kept = Properties()
    kept.session_expiry_interval = 0xFFFFFFFF
    with BrokerProcess(tmp_path / "data") as broker:
        assert f"event=store_migrated from=1 to={NEWEST} backup={database}.v1.backup" in broker.log
        with RawClient(broker.port) as away:
            assert away.connect("away", clean_start=False, properties=kept).session_present
            assert [away.take().payload for _ in range(4)] == [b"1", b"2", b"3", b"4"]
            away.subscribe("kept")
            assert away.take().payload == b"value"
        with RawClient(broker.port) as publisher:
            assert publisher.connect("publisher", clean_start=False, properties=kept).session_present
            publisher.send(Publish("s/4", b"4", 2, False, True, 77))
            assert publisher.expect(Pubrec).packet_id == 77
            publisher.send(Pubrel(77))
            assert publisher.expect(Pubcomp).packet_id == 77
        with RawClient(broker.port) as away:
            assert away.connect("away", clean_start=False, properties=kept).session_present
            away.expect_nothing()
    backup = database.with_name("mqttbroker.db.v1.backup")
    with closing(sqlite3.connect(database)) as new, closing(sqlite3.connect(backup)) as copy:
        assert (version(new), version(copy)) == (NEWEST, 1)
        copied = list(copy.iterdump())
    database.write_bytes(old)
    with closing(sqlite3.connect(database)) as again:
        assert list(again.iterdump()) == copied


def test_a_failed_migration_keeps_the_older_database(connection: sqlite3.Connection, path: Path) -> None:
    prepare(connection, str(path))
    before = list(connection.iterdump())
    with pytest.raises(sqlite3.OperationalError, match="no more"):
        prepare(connection, str(path), (*MIGRATIONS, add_note, fail_halfway))
    assert list(connection.iterdump()) == before
    assert version(connection) == NEWEST
    prepare(connection, str(path), (*MIGRATIONS, add_note))
    assert version(connection) == NEWEST + 1


def test_a_failed_migration_leaves_a_new_file_empty(connection: sqlite3.Connection, path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError):
        prepare(connection, str(path), (*MIGRATIONS, fail_halfway))
    assert connection.execute("SELECT * FROM sqlite_master").fetchall() == []
    assert version(connection) == 0


def test_a_newer_database_is_refused(connection: sqlite3.Connection, path: Path) -> None:
    prepare(connection, str(path), (*MIGRATIONS, add_note))
    before = list(connection.iterdump())
    with pytest.raises(StoreError) as caught:
        prepare(connection, str(path))
    assert str(caught.value) == (f"{path}: schema version {NEWEST + 1} is newer than this program's {NEWEST}; use the newer program")
    assert list(connection.iterdump()) == before


def test_a_foreign_database_is_refused(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("CREATE TABLE songs (title)")
    with pytest.raises(StoreError) as caught:
        prepare(connection, str(path))
    assert str(caught.value) == f"{path}: not a database of this broker"
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("songs",)]


def test_a_migration_does_not_load_pandas_and_a_new_database_not_even_sqlite_utils(path: Path) -> None:
    program = (
        "import sqlite3, sys; from sessions.store.schema import MIGRATIONS, prepare;"
        "prepare(sqlite3.connect(sys.argv[1], isolation_level=None), sys.argv[1]);"
        "print('sqlite_utils' in sys.modules);"
        "prepare(sqlite3.connect(':memory:', isolation_level=None), '', MIGRATIONS[:1]);"
        "print('sqlite_utils' in sys.modules, [name for name in ('numpy', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "True []"]


def test_the_script_of_the_newest_schema_makes_what_the_migrations_make(connection: sqlite3.Connection, path: Path) -> None:
    prepare(connection, str(path))
    assert NEWEST_SCRIPT.read_text(encoding="utf-8") == newest_schema()
    with closing(migrated()) as other:
        for query in (
            "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name",
            "SELECT id, migration_set, name, length(applied_at), applied_at LIKE '20__-__-__ __:__:__.______+00:00'"
            " FROM _sqlite_migrations ORDER BY id",
            "PRAGMA application_id",
            "PRAGMA user_version",
        ):
            assert connection.execute(query).fetchall() == other.execute(query).fetchall()


def test_a_new_database_that_cannot_be_made_is_left_empty(
    connection: sqlite3.Connection, path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "script.sql"
    script.write_text(NEWEST_SCRIPT.read_text(encoding="utf-8").replace("PRAGMA user_version", "no PRAGMA user_version"))
    monkeypatch.setattr(schema, "NEWEST", script)
    with pytest.raises(sqlite3.OperationalError, match="syntax error"):
        prepare(connection, str(path))
    assert not connection.in_transaction
    assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
