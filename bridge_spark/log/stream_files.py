"""The description of a stream: `stream.json` in its directory, or `deleted.json` after the stream was deleted.

The partitions of a deleted stream stay, without records, so that a stream created again under the name continues with the
offsets after the last one: an offset from before is an expired one, never that of another record.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge_spark.log.files import replace_file, sync_directory, write_all
from bridge_spark.log.high_watermark import WATERMARK_BYTES, WATERMARK_FILE, Watermark, encode_watermark, published_end
from bridge_spark.log.stream_config import FORMAT_VERSION, StreamLogDamage, StreamLogError

STREAMS = "streams"  # directory of all streams, in a broker's data directory
DESCRIPTION_FILE = "stream.json"
DELETED_FILE = "deleted.json"
CONSUMERS_DIRECTORY = "consumers"

logger = logging.getLogger(__name__)


def read_description(directory: Path) -> dict[str, Any] | None:
    """The description of the stream in `directory`; None if there is none.

    Raises `StreamLogDamage`, or `StreamLogError` if a newer program wrote it.
    """
    path = directory / DESCRIPTION_FILE
    try:
        known: dict[str, Any] = json.loads(path.read_bytes())
        version, _ = known["format_version"], known["partitions"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise StreamLogDamage(f"{path} is damaged: {error!r}") from None
    if not 1 <= version <= FORMAT_VERSION:
        raise StreamLogError(f"{path}: format {version}, but this program reads up to format {FORMAT_VERSION}")
    return known


def partitions_refused(known: Mapping[str, Any], partitions: int) -> str:
    """Why a stream of the description `known` cannot have this number of partitions; "" if it can."""
    if known["partitions"] == partitions:
        return ""
    return (f"has {known['partitions']} partitions and cannot get {partitions}, as keys would move: set partitions = "
            f"{known['partitions']}, or give the stream another name")  # fmt: skip


def write_description(directory: Path, description: Mapping[str, Any]) -> None:
    """Replace the description; the stream is not deleted any more.  Raises `OSError`."""
    replace_file(directory / DESCRIPTION_FILE, (json.dumps(description, indent=2) + "\n").encode())
    (directory / DELETED_FILE).unlink(missing_ok=True)


def created_streams(streams: Path, configured: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """The definitions of the streams that were created at run time, by name.

    Raises `StreamLogDamage` for a damaged description: its stream could be one of them, and would miss messages. That
    of a stream in `configured` is made anew.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in _names(streams):
        try:
            description = read_description(streams / name)
        except StreamLogDamage:
            if name not in configured:
                raise
            continue
        if description is not None and isinstance(description.get("definition"), dict):
            found[name] = description["definition"]
    return found


def deleted_streams(streams: Path) -> list[str]:
    """The names of the streams that were deleted, and not created again."""
    return [
        name for name in _names(streams) if (streams / name / DELETED_FILE).exists() and not (streams / name / DESCRIPTION_FILE).exists()
    ]


def _names(streams: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(streams) if entry.is_dir()) if streams.is_dir() else []


def mark_deleted(directory: Path) -> None:
    """From now on the stream is deleted: a start after a crash does what is left to do.  Raises `OSError`."""
    os.replace(directory / DESCRIPTION_FILE, directory / DELETED_FILE)
    sync_directory(directory)


def end_partition(directory: Path, end: int) -> None:
    """Let a partition begin and end at the offset `end`, so that readers see none of its records.  Raises `OSError`.

    It needs no room on the disk: streams are deleted to make some.
    """
    fd = os.open(directory / WATERMARK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        write_all(fd, encode_watermark(Watermark(end, end, 0, end)), 0)
        os.ftruncate(fd, WATERMARK_BYTES)
        os.fdatasync(fd)
    finally:
        os.close(fd)


def remove_files(directory: Path, ends: Sequence[tuple[int, int]]) -> None:
    """Remove the files of a deleted stream: the segments before the end of each partition, given as (number, end).

    Segments that the stream gets once it is created again stay.
    """
    shutil.rmtree(directory / CONSUMERS_DIRECTORY, ignore_errors=True)
    for number, end in ends:
        partition = directory / str(number)
        for name in os.listdir(partition):
            if name[:20].isdigit() and len(name) > 20 and int(name[:20]) < end:
                (partition / name).unlink(missing_ok=True)


def finish_deletions(streams: Path, ends: Mapping[tuple[str, int], int]) -> None:
    """Do what a crash left of deletions; `ends` are the offsets of the store.  Raises `OSError`."""
    for name in deleted_streams(streams):
        finish_deletion(streams / name, {key[1]: end for key, end in ends.items() if key[0] == name})


def finish_deletion(directory: Path, ends: Mapping[int, int]) -> None:
    """Do what a crash left of the deletion of one stream; `ends` are the offsets of the store by partition."""
    reached = []
    for number in sorted(int(entry) for entry in os.listdir(directory) if entry.isdigit()):
        partition = directory / str(number)
        published = published_end(partition)
        end = max(published, ends.get(number, 0))
        if published != end or any(name[:20].isdigit() for name in os.listdir(partition)):
            end_partition(partition, end)
        reached.append((number, end))
    remove_files(directory, reached)
