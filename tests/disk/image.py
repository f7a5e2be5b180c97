"""The states in which a power loss may leave a directory, from a record of the calls that changed it.

Synced data is there. A write without a later successful sync of its file may be on the disk completely, in part (by
sectors), or not at all; a name without a later sync of its directory may be there or not. Changes of one name reach
the disk in their order, and a renaming is a change of two names. After a failed sync the writes before it stay uncertain
(Linux marks the pages clean) until the same bytes are written again and synced.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from disk.layer import CREATE, MKDIR, RENAME, SYNC, TRUNCATE, UNLINK, WRITE, Call

SECTOR = 512
PENDING, UNCERTAIN, SYNCED = range(3)
# The index of the write-ahead log, which is rebuilt when the database is opened, and a file that is only locked.
VOLATILE = ("-shm", "/lock")


class Change:
    """A write, or a truncation to ``offset`` when ``data`` is None."""

    def __init__(self, offset: int, data: memoryview | None) -> None:
        self.offset = offset
        self.data = data
        self.state = PENDING


class File:
    def __init__(self) -> None:
        self.disk = bytearray()  # the content that is certain, before the changes
        self.changes: list[Change] = []

    def sync(self, failed: bool) -> None:
        for change in self.changes:
            if change.state == PENDING:
                change.state = UNCERTAIN if failed else SYNCED
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
        """One of the contents that the file may have after a power loss."""
        content = bytearray(self.disk)
        style = rng.choice(("nothing", "everything", "beginning", "anything"))
        uncertain = [change for change in self.changes if change.state != SYNCED]
        reached = rng.randrange(len(uncertain)) if uncertain else 0
        order = {change: number for number, change in enumerate(uncertain)}
        for change in self.changes:
            number = order.get(change)
            if number is None or style == "everything" or (style == "beginning" and number < reached):
                _apply(content, change)
            elif style == "anything" or (style == "beginning" and number == reached):
                _apply_torn(content, change, rng)
        return content


class Folder:
    """A directory: the names that are certain, and later changes as (name, file or directory, None if removed)."""

    def __init__(self) -> None:
        self.disk: dict[str, Entry] = {}
        self.now: dict[str, Entry] = {}
        self.changes: list[tuple[str, Entry | None]] = []

    def set(self, name: str, entry: Entry | None) -> None:
        self.changes.append((name, entry))
        _rename(self.now, name, entry)

    def sync(self) -> None:
        self.disk = dict(self.now)
        self.changes.clear()

    def left(self, rng: Random) -> dict[str, Entry]:
        names = dict(self.disk)
        style = rng.choice(("nothing", "everything", "beginning", "anything"))
        reached = rng.randrange(len(self.changes) + 1)
        lost: set[str] = set()  # names with a change that is not on the disk, so that no later one of them is
        for number, (name, entry) in enumerate(self.changes):
            chosen = rng.random() < 0.5 if style == "anything" else number < reached
            concerned = name.split("\0")
            if style == "everything" or (style != "nothing" and chosen and lost.isdisjoint(concerned)):
                _rename(names, name, entry)
            else:
                lost.update(concerned)
        return names


Entry = File | Folder


class Disk:
    """The directory ``root`` after the calls of one process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = Folder()
        self._files: dict[int, File] = {}

    def apply(self, call: Call) -> None:
        """Apply the next call. AssertionError if it contradicts the calls before it."""
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
                # Atomic: the old name is removed if and only if the new one is there.
                folder.set(f"{name}\0{fresh}", folder.now[name])

    def _sync(self, call: Call) -> None:
        try:
            entry: Entry | None = self._at(call.path)
        except KeyError:
            entry = None  # renamed or unlinked since it was opened
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
        """AssertionError unless the directory is as the calls left it, so that the record is complete."""
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
        """Create in ``target`` one of the states that the directory may have after a power loss now."""
        self._leave(self.top, target, rng)

    def leave_everything(self, target: Path) -> None:
        """Create in ``target`` the state that a kill of the process leaves."""
        self._leave_everything(self.top, target)

    def _leave_everything(self, folder: Folder, target: Path) -> None:
        target.mkdir(exist_ok=True)
        for name, entry in folder.now.items():
            if isinstance(entry, Folder):
                self._leave_everything(entry, target / name)
            else:
                (target / name).write_bytes(entry.newest())

    def _leave(self, folder: Folder, target: Path, rng: Random) -> None:
        target.mkdir(exist_ok=True)
        for name, entry in folder.left(rng).items():
            if isinstance(entry, Folder):
                self._leave(entry, target / name, rng)
            else:
                (target / name).write_bytes(entry.left(rng))


def _rename(names: dict[str, Entry], name: str, entry: Entry | None) -> None:
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
    """Apply some of the sectors of a write, or perhaps a truncation."""
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
