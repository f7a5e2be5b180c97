"""What a power loss leaves of a directory, from the record of the calls that made it.

Rule: what was synced is there.  Of the rest anything may be: each write that no successful sync of its file followed is
on the disk, or not, or some of its sectors are; a name that no sync of its directory followed is there or not.  A sync
that failed proves nothing about the writes before it, then or later (Linux takes such pages for clean), until the same
bytes are written again.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Optional, Union

from disk.layer import CREATE, MKDIR, RENAME, SYNC, TRUNCATE, UNLINK, WRITE, Call

SECTOR = 512
PENDING, DOUBTFUL, SYNCED = range(3)
# The index of the write-ahead log, made anew by whoever opens the database, and a file that is only locked.
VOLATILE = ("-shm", "/lock")


class Change:
    """A write, or a truncation to ``offset`` when ``data`` is None."""

    def __init__(self, offset: int, data: Optional[memoryview]) -> None:
        self.offset = offset
        self.data = data
        self.state = PENDING


class File:
    def __init__(self) -> None:
        self.disk = bytearray()  # what surely is there, before any of the changes
        self.changes: list[Change] = []

    def sync(self, failed: bool) -> None:
        for change in self.changes:
            if change.state == PENDING:
                change.state = DOUBTFUL if failed else SYNCED
        if all(change.state == SYNCED for change in self.changes):
            for change in self.changes:
                _apply(self.disk, change)
            self.changes.clear()

    def newest(self) -> bytearray:
        content = bytearray(self.disk)
        for change in self.changes:
            _apply(content, change)
        return content

    def left(self, rng: Random) -> bytearray:
        """One of the states in which the file may be found."""
        content = bytearray(self.disk)
        style = rng.choice(("nothing", "everything", "beginning", "anything"))
        unsure = [change for change in self.changes if change.state != SYNCED]
        reached = rng.randrange(len(unsure)) if unsure else 0
        order = {change: number for number, change in enumerate(unsure)}
        for change in self.changes:
            number = order.get(change)
            if number is None or style == "everything" or (style == "beginning" and number < reached):
                _apply(content, change)
            elif style == "anything" or (style == "beginning" and number == reached):
                _apply_torn(content, change, rng)
        return content


class Folder:
    """A directory: names that are there for sure, and changes of names that may be: (name, what it leads to or None)."""

    def __init__(self) -> None:
        self.disk: dict[str, Entry] = {}
        self.now: dict[str, Entry] = {}
        self.changes: list[tuple[str, Optional[Entry]]] = []

    def set(self, name: str, entry: Optional[Entry]) -> None:
        self.changes.append((name, entry))
        _rename(self.now, name, entry)

    def sync(self) -> None:
        self.disk = dict(self.now)
        self.changes.clear()

    def left(self, rng: Random) -> dict[str, Entry]:
        names = dict(self.disk)
        style = rng.choice(("nothing", "everything", "beginning", "anything"))
        reached = rng.randrange(len(self.changes) + 1)
        for number, (name, entry) in enumerate(self.changes):
            chosen = rng.random() < 0.5 if style == "anything" else number < reached
            if style == "everything" or (style != "nothing" and chosen):
                _rename(names, name, entry)
        return names


Entry = Union[File, Folder]


class Disk:
    """The directory ``root`` as the calls of one process leave it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = Folder()
        self._files: dict[int, File] = {}

    def apply(self, call: Call) -> None:
        """One more call happened.  AssertionError if it does not follow from those before."""
        if call.path.endswith(VOLATILE):
            return
        if call.kind == SYNC:
            self._sync(call)
        elif call.kind == WRITE:
            self._files[call.inode].changes.append(Change(call.offset, call.data))
        elif call.kind == TRUNCATE:
            self._files[call.inode].changes.append(Change(call.offset, None))
        else:
            folder, name = self._place(call.path)
            if call.kind == CREATE:
                self._files[call.inode] = File()
                folder.set(name, self._files[call.inode])
            elif call.kind == MKDIR:
                folder.set(name, Folder())
            elif call.kind == UNLINK:
                folder.set(name, None)
            else:
                assert call.kind == RENAME
                target, fresh = self._place(call.other)
                assert target is folder, "only renamings within a directory are modelled"
                # One step: the old name goes when, and only when, the new one comes.
                folder.set(f"{name}\0{fresh}", folder.now[name])

    def _sync(self, call: Call) -> None:
        try:
            entry: Optional[Entry] = self._at(call.path)
        except KeyError:
            entry = None  # a file that was renamed or unlinked since it was opened
        if not isinstance(entry, Folder):
            self._files[call.inode].sync(call.error != 0)
        elif call.error == 0:
            entry.sync()

    def _at(self, path: str) -> Entry:
        entry: Entry = self.top
        for part in Path(path).relative_to(self.root).parts:
            assert isinstance(entry, Folder)
            entry = entry.now[part]
        return entry

    def _place(self, path: str) -> tuple[Folder, str]:
        folder = self._at(str(Path(path).parent))
        assert isinstance(folder, Folder)
        return folder, Path(path).name

    def expect(self, directory: Path) -> None:
        """AssertionError unless the directory is what the calls made of it: none was missed."""
        self._expect(self.top, directory)

    def _expect(self, folder: Folder, directory: Path) -> None:
        seen = {path.name for path in directory.iterdir() if not str(path).endswith(VOLATILE)}
        assert seen == set(folder.now), f"{directory} has {sorted(seen)}, recorded are {sorted(folder.now)}"
        for name, entry in folder.now.items():
            if isinstance(entry, Folder):
                self._expect(entry, directory / name)
            else:
                assert (directory / name).read_bytes() == entry.newest(), f"{directory / name} is not as recorded"

    def leave(self, target: Path, rng: Random) -> None:
        """Make in ``target`` one of the states in which the directory may be found after a power loss now."""
        self._leave(self.top, target, rng)

    def _leave(self, folder: Folder, target: Path, rng: Random) -> None:
        target.mkdir(exist_ok=True)
        for name, entry in folder.left(rng).items():
            if isinstance(entry, Folder):
                self._leave(entry, target / name, rng)
            else:
                (target / name).write_bytes(entry.left(rng))


def _rename(names: dict[str, Entry], name: str, entry: Optional[Entry]) -> None:
    old, _, fresh = name.partition("\0")
    if fresh or entry is None:
        names.pop(old, None)
    if entry is not None:
        names[fresh or old] = entry


def _apply(content: bytearray, change: Change) -> None:
    size = change.offset
    if change.data is not None and size <= len(content):
        content[size : size + len(change.data)] = change.data
        return
    del content[size:]
    content.extend(bytes(size - len(content)))
    if change.data is not None:
        content.extend(change.data)


def _apply_torn(content: bytearray, change: Change, rng: Random) -> None:
    """Some of the sectors, or a truncation or not."""
    if change.data is None:
        if rng.random() < 0.5:
            _apply(content, change)
        return
    start, end = change.offset, change.offset + len(change.data)
    share = rng.choice((0.1, 0.5, 0.9))
    while start < end:
        until = min(end, start - start % SECTOR + SECTOR)
        if rng.random() < share:
            _apply(content, Change(start, change.data[start - change.offset : until - change.offset]))
        start = until
