"""Backs up a data directory, also of a running broker, and restores it.

A backup is of one commit of the database, with the streams up to exactly the ends that this commit has. It waits until a
running broker's database has what the commit log had at the beginning, and takes the log of a broker that was killed; so
it contains everything that was acknowledged before it began. It gets its name when it is complete, checked and on disk.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bridge_spark.log.backup import DamagedLog, backup_lock, copy_partition
from bridge_spark.log.check import partitions
from bridge_spark.log.high_watermark import published_end
from bridge_spark.log.incarnation import copy_incarnation
from bridge_spark.log.record_batch import SegmentError
from bridge_spark.log.stream_files import DELETED_FILE, DESCRIPTION_FILE, STREAMS
from mqttbroker import __version__
from mqttbroker.admin.data.repair import DATABASE, in_use
from mqttbroker.admin.data.version import FILE as VERSION_FILE
from mqttbroker.core.access.ban_list import BAN_FILE
from sessions.store.check import TABLES, check_database
from sessions.store.commit_log.survey import last_position, survey
from sessions.store.damage import is_corrupt
from sessions.store.database import lock_directory
from sessions.store.database_copy import copy_database, forget_log, tables_position
from sessions.store.disk import sync_directory, sync_file
from sessions.store.log_repair import database_identity, logged_records
from sessions.store.recovery import LOG_DIRECTORY

MANIFEST = "backup.json"
FORMAT = 1
READ_BYTES = 1 << 20
OTHER_FILES = (BAN_FILE, VERSION_FILE)
# How long a backup waits for the database of a running broker, and how often it looks, in seconds.
TABLES_WAIT = 60.0
TABLES_STEP = 0.05


class BackupError(Exception):
    """A backup cannot be made or used; the text is one line."""


class NotEmpty(BackupError):
    """The target of a backup is there already."""


def back_up(data_dir: Path, target: Path) -> str:
    """Copy the data directory to the directory `target`; returns one line about its contents.

    Raises `NotEmpty` if `target` exists and is not empty, another `BackupError` if the data is damaged; `OSError` or `sqlite3.Error` if
    something cannot be read or written.
    """
    target = target.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise NotEmpty(f"{target}: is not an empty directory")
    if not (data_dir / DATABASE).exists():
        raise BackupError(f"{data_dir / DATABASE}: there is none; durability off keeps none")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.unfinished-{os.getpid()}")
    unfinished.mkdir()
    try:
        with backup_lock(data_dir / STREAMS):
            summary = _copy(data_dir, unfinished)
        _sync_tree(unfinished)
        os.rename(unfinished, target)
    except (DamagedLog, SegmentError) as error:
        raise BackupError(f"{error}; see mqttbroker check-store") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    sync_directory(target.parent)
    return f"{target}: {summary}"


def _copy(data_dir: Path, target: Path) -> str:
    streams = data_dir / STREAMS
    found = partitions(streams) if streams.is_dir() else []
    # A partition that the database does not know ends at its high watermark, read before the database is copied: a
    # later one would include commits that the copy does not have.
    ends = {key: published_end(streams / key[0] / str(key[1])) for key in found}
    live = in_use(data_dir)
    logged = _wait_for_tables(data_dir) if live else _copy_log(data_dir, target)
    try:
        copy_database(data_dir / DATABASE, target / DATABASE)
        if live:
            forget_log(target / DATABASE)
    except sqlite3.Error as error:
        if not is_corrupt(error):
            raise
        raise BackupError(f"{data_dir / DATABASE}: {error}; see mqttbroker check-store") from None
    state = check_database(target / DATABASE)
    if state.problems or state.ends is None:
        problem = "; ".join(state.problems[:1]) or "the stream ends cannot be read"
        raise BackupError(f"{data_dir / DATABASE}: {problem}; see mqttbroker check-store")
    ends.update(state.ends)
    # The first start appends the records of the copied log.
    reached = {**ends, **{key: max(end, ends.get(key, 0)) for key, (_, end) in logged.items()}}
    ends.update({key: min(start, ends[key]) if key in ends else start for key, (start, _) in logged.items()})
    streams_in_backup: dict[str, dict[str, int]] = {}
    for (stream, number), end in sorted(ends.items()):
        place = f"{stream}/{number}"
        start = copy_partition(streams / place, target / STREAMS / place, end)
        streams_in_backup[place] = {"start": start, "end": end}
    for stream in sorted({stream for stream, _ in ends}):
        for file in (DESCRIPTION_FILE, DELETED_FILE):
            with suppress(FileNotFoundError):
                shutil.copyfile(streams / stream / file, target / STREAMS / stream / file)
        _copy_incarnation(streams / stream, target / STREAMS / stream, reached)
    for name in OTHER_FILES:
        if (data_dir / name).exists():
            shutil.copyfile(data_dir / name, target / name)
    manifest = {
        "format": FORMAT,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "broker": __version__,
        "counts": state.counts,
        "streams": streams_in_backup,
        "files": _files(target),
    }
    (target / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return _summary(manifest)


def _copy_incarnation(directory: Path, target: Path, reached: dict[tuple[str, int], int]) -> None:
    """A restored backup continues with other records than the original, behind the offsets `reached`."""
    numbers = [number for stream, number in reached if stream == directory.name]
    with suppress(ValueError):  # it is damaged: the restored stream gets one that no reader knows
        copy_incarnation(directory, target, [reached.get((directory.name, number), 0) for number in range(max(numbers) + 1)])


def _wait_for_tables(data_dir: Path) -> dict[tuple[str, int], tuple[int, int]]:
    """Return when the database of a running broker has everything that its commit log has now."""
    position = last_position(data_dir / LOG_DIRECTORY)
    for _ in range(int(TABLES_WAIT / TABLES_STEP)):
        if tables_position(data_dir / DATABASE) >= position:
            return {}
        time.sleep(TABLES_STEP)
    raise BackupError(f"{data_dir / DATABASE}: is behind the commit log for {TABLES_WAIT} seconds; see /readyz")


def _copy_log(data_dir: Path, target: Path) -> dict[tuple[str, int], tuple[int, int]]:
    """Copy the commit log of a broker that was killed; returns the offsets that it has of each partition."""
    found = survey(data_dir / LOG_DIRECTORY, database_identity(data_dir / DATABASE))
    if found.damage:
        raise BackupError(f"{found.damage[0]}; see mqttbroker check-store")
    offsets: dict[tuple[str, int], tuple[int, int]] = {}
    for part in logged_records(found):
        key, end = (part.stream, part.partition), part.first_offset + len(part.messages)
        offsets[key] = offsets.get(key, (part.first_offset, end))[0], end
    (target / LOG_DIRECTORY).mkdir()
    for segment in found.segments:
        shutil.copyfile(segment.path, target / LOG_DIRECTORY / segment.path.name)
    return offsets


def _summary(manifest: dict[str, Any]) -> str:
    counts = [f"{manifest['counts'].get(table, 0)} {noun}" for table, noun in TABLES.items()]
    records = sum(part["end"] - part["start"] for part in manifest["streams"].values())
    size = sum(file["bytes"] for file in manifest["files"].values())
    return f"{', '.join(counts)}, {records} stream offsets, {size} bytes"


def _files(directory: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below `directory`, by its path in it."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            name = path.relative_to(directory).as_posix()
            files[name] = {"bytes": path.stat().st_size, "sha256": digest}
    return files


def _sync_tree(directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        sync_directory(path) if path.is_dir() else sync_file(path)
    sync_directory(directory)


def restore(backup: Path, data_dir: Path) -> str:
    """Copy a backup into an empty data directory; returns one line about its contents.

    Raises `BackupError` if the backup differs from its manifest or the directory is not empty, `StoreError` if a broker
    uses the directory, `OSError` if something cannot be read or written.
    """
    manifest = _read_manifest(backup)
    data_dir.mkdir(parents=True, exist_ok=True)
    lock = lock_directory(data_dir)
    try:
        if any(path.name != "lock" for path in data_dir.iterdir()):
            raise BackupError(f"{data_dir}: is not empty; move its contents away first")
        streams = data_dir / f"{STREAMS}.restoring"
        database = data_dir / f"{DATABASE}.restoring"
        log = data_dir / f"{LOG_DIRECTORY}.restoring"
        try:
            if (backup / LOG_DIRECTORY).is_dir():
                shutil.copytree(backup / LOG_DIRECTORY, log)
            if (backup / STREAMS).is_dir():
                shutil.copytree(backup / STREAMS, streams)
            shutil.copyfile(backup / DATABASE, database)
            _sync_tree(data_dir)
        except BaseException:
            shutil.rmtree(streams, ignore_errors=True)
            shutil.rmtree(log, ignore_errors=True)
            database.unlink(missing_ok=True)
            raise
        if streams.is_dir():
            os.rename(streams, data_dir / STREAMS)
        if log.is_dir():
            os.rename(log, data_dir / LOG_DIRECTORY)
        os.rename(database, data_dir / DATABASE)
        for name in OTHER_FILES:
            if (backup / name).exists():
                shutil.copyfile(backup / name, data_dir / name)
                sync_file(data_dir / name)
        sync_directory(data_dir)
    finally:
        os.close(lock)
    return f"{data_dir}: {_summary(manifest)}"


def _read_manifest(backup: Path) -> dict[str, Any]:
    """The manifest of a backup, whose files are checked against it."""
    try:
        manifest: dict[str, Any] = json.loads((backup / MANIFEST).read_bytes())
        version, files, _ = manifest["format"], manifest["files"], _summary(manifest)
    except FileNotFoundError:
        raise BackupError(f"{backup}: no backup, it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BackupError(f"{backup / MANIFEST}: damaged: {error!r}") from None
    if version != FORMAT:
        raise BackupError(f"{backup / MANIFEST}: format {version}; this program's is {FORMAT}")
    found = _files(backup)
    for name, expected in files.items():
        if found.get(name) != expected:
            fault = "is damaged" if name in found else "is missing"
            raise BackupError(f"{backup / name}: {fault}")
    if DATABASE not in files:
        raise BackupError(f"{backup / MANIFEST}: names no database")
    return manifest
