"""The incarnation of a stream: whose records its offsets mean.

The file `incarnation.json` in the stream's directory has an id that the broker makes when it first opens the stream, and
the earlier incarnations of a restored backup, each with the end of the records that it shares with this one.  A backup has
no id of its own, so that each restore of it gets another one.  It is a file of its own because older programs write
`stream.json` anew, without what they do not know.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bridge_spark.log.files import replace_file

INCARNATION_FILE = "incarnation.json"
EARLIER_MOST = 100  # restores that are remembered, the last ones

logger = logging.getLogger(__name__)


class Earlier(NamedTuple):
    """An earlier incarnation: before the offsets ``ends``, by partition, its records are those of the later ones."""

    id: str
    ends: tuple[int, ...]


class Incarnation(NamedTuple):
    """``id`` is empty if it is not known."""

    id: str = ""
    earlier: tuple[Earlier, ...] = ()

    def document(self) -> dict[str, Any]:
        """The JSON object in the file and in the manifest."""
        earlier = [{"id": each.id, "ends": list(each.ends)} for each in self.earlier]
        return {**({"id": self.id} if self.id else {}), **({"earlier": earlier} if earlier else {})}


UNKNOWN = Incarnation()


def parse_incarnation(document: Any) -> Incarnation:
    """The inverse of `Incarnation.document`; None is unknown.  Raises `ValueError`, `TypeError` or `KeyError`."""
    if document is None:
        return UNKNOWN
    if not isinstance(document, dict):
        raise TypeError(f"an incarnation is {document!r}")
    earlier = tuple(Earlier(str(each["id"]), tuple(int(end) for end in each["ends"])) for each in document.get("earlier", ()))
    return Incarnation(str(document.get("id", "")), earlier)


def read_incarnation(directory: Path) -> Incarnation:
    """The incarnation of the stream in `directory`; unknown without a file.  Raises `ValueError` if it is damaged, or `OSError`."""
    path = directory / INCARNATION_FILE
    try:
        return parse_incarnation(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return UNKNOWN
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None


def write_incarnation(directory: Path, incarnation: Incarnation) -> None:
    """Raises `OSError`."""
    replace_file(directory / INCARNATION_FILE, (json.dumps(incarnation.document(), indent=2) + "\n").encode())


def make_incarnation(directory: Path) -> Incarnation:
    """The incarnation of the stream in `directory`, which gets an id if it has none, or if its file is damaged.  Raises `OSError`."""
    try:
        found = read_incarnation(directory)
    except ValueError as error:
        logger.warning("event=incarnation_lost reason=%s", error)
        found = UNKNOWN
    return found if found.id else _with_id(directory, found)


def renew_incarnation(directory: Path, ends: Sequence[int]) -> Incarnation:
    """Another one for the stream in `directory`, which lost its records from the offsets `ends` on.  Raises `OSError`."""
    return _with_id(directory, _following(make_incarnation(directory), ends))


def copy_incarnation(directory: Path, target: Path, ends: Sequence[int]) -> None:
    """Write to `target` that of a copy of the stream in `directory`, which has its records before the offsets `ends`.

    Raises `ValueError` if the file is damaged, or `OSError`.
    """
    found = read_incarnation(directory)
    if found != UNKNOWN:
        write_incarnation(target, _following(found, ends) if found.id else found)


def _with_id(directory: Path, incarnation: Incarnation) -> Incarnation:
    made = incarnation._replace(id=uuid.uuid4().hex)
    write_incarnation(directory, made)
    return made


def _following(former: Incarnation, ends: Sequence[int]) -> Incarnation:
    return Incarnation("", (*former.earlier, Earlier(former.id, tuple(ends)))[-EARLIER_MOST:])
