"""The versions of the formats in a data directory, and the program that used it last.

Each file has the version of its own format, and a newer one is refused where it is read. ``version.json`` adds the name of the
program, so that the refusal can say which one to install.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bridge_spark.log import record_batch, stream_config
from bridge_spark.log.files import replace_file
from bridge_spark.log.sealed import footer
from bridge_spark.log.stream_files import DESCRIPTION_FILE, STREAMS
from mqttbroker import __version__
from mqttbroker.admin.data.repair import DATABASE
from sessions.store.check import open_to_read
from sessions.store.commit_log import segment
from sessions.store.recovery import LOG_DIRECTORY
from sessions.store.schema import MIGRATIONS

FILE = "version.json"
STORE, COMMIT_LOG, STREAM = "store schema", "commit log", "streams"
# The newest version of each format that this program reads and writes. The oldest that it reads is 1.
FORMATS = {
    STORE: len(MIGRATIONS),
    COMMIT_LOG: segment.FORMAT_VERSION,
    STREAM: stream_config.FORMAT_VERSION,
    "segments": record_batch.FORMAT_VERSION,
    "sealed segments": footer.FORMAT_OF_COMPACTED,
}


class Found(NamedTuple):
    """The newest version of a format in a directory; None if no file has it."""

    name: str
    version: int | None

    @property
    def newer(self) -> bool:
        """Whether this program refuses it."""
        return self.version is not None and self.version > FORMATS[self.name]


def formats_text() -> str:
    """The formats of this program, for ``--version``."""
    return ", ".join(f"{name} {version}" for name, version in FORMATS.items())


def last_program(data_dir: Path) -> str:
    """The version of the program that used the directory last; "" if it is unknown."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((data_dir / FILE).read_bytes())["program"])
    return ""


def record_program(data_dir: Path) -> None:
    """Record that this program uses the directory now. Raises `OSError`."""
    if last_program(data_dir) != __version__:
        replace_file(data_dir / FILE, (json.dumps({"program": __version__}) + "\n").encode())


def with_programs(error: Exception, data_dir: Path) -> str:
    """The error, with both programs if another one used the directory last."""
    last = last_program(data_dir)
    if last in ("", __version__):
        return str(error)
    return f"{error} ({data_dir} was last used by mqttbroker {last}, this is {__version__}; see docs/upgrade.md)"


def found_formats(data_dir: Path) -> Iterator[Found]:
    """The formats of the store, the commit log and the streams. Raises `OSError` or `sqlite3.Error` for a file that cannot be read."""
    yield Found(STORE, _schema(data_dir / DATABASE))
    yield Found(COMMIT_LOG, max(_log_versions(data_dir / LOG_DIRECTORY), default=None))
    yield Found(STREAM, max(_stream_versions(data_dir / STREAMS), default=None))


def copies(data_dir: Path) -> list[Path]:
    """The copies of the database that migrations made."""
    return sorted(data_dir.glob(f"{DATABASE}.v*.backup"))


def _schema(database: Path) -> int | None:
    if not database.exists():
        return None
    connection = open_to_read(database)
    try:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])
    finally:
        connection.close()


def _log_versions(directory: Path) -> Iterator[int]:
    for path in segment.segment_files(directory) if directory.is_dir() else []:
        with open(path, "rb") as file, suppress(segment.BadHeader):
            yield segment.decode_header(file.read(segment.HEADER_BYTES)).version


def _stream_versions(directory: Path) -> Iterator[int]:
    for path in directory.glob(f"*/{DESCRIPTION_FILE}"):
        with suppress(ValueError, KeyError, TypeError):
            yield int(json.loads(path.read_bytes())["format_version"])
