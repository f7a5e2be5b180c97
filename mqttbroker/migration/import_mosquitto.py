"""A directory from which this broker starts as a Mosquitto would: configuration, users, access rules and database."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mqttbroker.admin.data.files import PRIVATE, set_umask
from mqttbroker.admin.data.repair import DATABASE
from mqttbroker.auth.acl import AclError, parse_acl
from mqttbroker.auth.passwords import PasswordFileError, parse_passwords
from mqttbroker.config.load import load_settings
from mqttbroker.migration.mosquitto_configuration import (
    Configuration,
    ConfigurationError,
    NotCarried,
    convert,
    files_of,
)
from mqttbroker.migration.mosquitto_database import DatabaseError, decode_database
from mqttbroker.migration.mosquitto_rows import Counts, Rows
from sessions.store.writer import SqliteStore
from sessions.write_set import WriteSet

SETTINGS_FILE = "mqttbroker.toml"
DATA_DIRECTORY = "data"


class ImportFailed(Exception):
    """Nothing can be imported; the text is one line that names file and place."""


class Imported(NamedTuple):
    """``database`` is the file that ``counts`` are of, None if there was none."""

    database: Path | None
    counts: Counts
    not_carried: list[NotCarried]


def import_mosquitto(configuration: Path, database: Path | None, target: Path) -> Imported:
    """Convert the configuration, the files that it names, and the database into a new or empty directory.

    ``database`` replaces the one that the configuration names. Raises ImportFailed, ConfigError if the result is no
    valid configuration, StoreError and OSError.
    """
    try:
        found = convert(configuration)
        rows, source = _read_database(found, database)
        copies = _copies(found, target)
    except (ConfigurationError, PasswordFileError, AclError) as error:
        raise ImportFailed(str(error)) from error
    if target.exists() and any(target.iterdir()):
        raise ImportFailed(f"{target}: not empty")
    set_umask(PRIVATE)
    target.mkdir(parents=True, exist_ok=True)
    for copy, text in copies.items():
        copy.write_text(text, encoding="utf-8")
    found.settings["data_dir"] = str((target / DATA_DIRECTORY).resolve())
    settings_file = target / SETTINGS_FILE
    settings_file.write_text(_toml(found, configuration), encoding="utf-8")
    load_settings(settings_file)
    if rows is None:
        return Imported(None, Counts(0, 0, 0, 0), found.not_carried)
    _store(target / DATA_DIRECTORY / DATABASE, rows.write_sets())
    not_carried = found.not_carried + [NotCarried(str(source), reason) for reason in rows.not_carried]
    return Imported(source, rows.counts, not_carried)


def _read_database(found: Configuration, given: Path | None) -> tuple[Rows | None, Path | None]:
    path = given
    if path is None:
        path = found.location / found.database
        if not found.persistence or not path.exists():
            return None, None
    try:
        database = decode_database(path.read_bytes())
    except DatabaseError as error:
        raise ImportFailed(f"{path}: {error}") from error
    return Rows(database, path.stat().st_mtime), path


def _copies(found: Configuration, target: Path) -> dict[Path, str]:
    """Files of users and access rules in ``target``, each once, with their texts; the settings name them then."""
    texts: dict[Path, str] = {}
    copies: dict[str, Path] = {}  # by their source
    for table, key in files_of(found):
        source: str = table[key]
        if source not in copies:
            text = Path(source).read_text(encoding="utf-8")
            if key == "password_file":
                parse_passwords(text, source)
            else:
                parse_acl(text, source)
            number = sum(copy.name.startswith(key) for copy in texts) + 1
            copies[source] = target.resolve() / (key if number == 1 else f"{key}_{number}")
            texts[copies[source]] = text
        table[key] = str(copies[source])
    return texts


def _toml(found: Configuration, source: Path) -> str:
    lines = [f"# Converted from {source} by mqttbroker import-mosquitto", *_pairs(found.settings)]
    for name, table in (("limits", found.limits), ("log", found.log)):
        if table:
            lines += ["", f"[{name}]", *_pairs(table)]
    for listener in found.listeners:
        lines += ["", "[[listeners]]", *_pairs(listener)]
    for bridge in found.bridges:
        lines += ["", "[[bridges]]", *_pairs({key: value for key, value in bridge.items() if key != "topics"})]
        for topic in bridge["topics"]:
            lines += ["", "[[bridges.topics]]", *_pairs(topic)]
    return "\n".join(lines) + "\n"


def _pairs(table: dict[str, Any]) -> Iterable[str]:
    """Strings, numbers, booleans and lists of them are written in TOML as in JSON."""
    return (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items())


def _store(path: Path, write_sets: Iterable[WriteSet]) -> None:
    """Store everything, or raise the first error."""
    failures: list[Exception] = []
    room = threading.Semaphore(4)  # write sets that wait for the store

    def done(write_set: WriteSet, error: Exception | None) -> None:
        if error is not None:
            failures.append(error)
        room.release()

    store = SqliteStore(path, "commit", None)
    store.recover()
    store.start(done, lambda write_set, pages: None)
    try:
        for write_set in write_sets:
            room.acquire()
            if failures:
                break
            store.submit(write_set)
    finally:
        store.stop()
    if failures:
        raise failures[0]
