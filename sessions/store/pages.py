"""Reads a damaged SQLite file page by page, without SQLite.

Nothing is written, and damage is no error: readable rows are returned as records, unreadable places are listed in
`PageFile.damage`. Free pages are not read, so that deleted rows do not return.

Pages are in the database file, newer ones in the write-ahead log beside it (sqlite.org/fileformat2.html). A frame of
the log is valid if its checksum continues the one before it, so frames behind a damaged one are still valid; frames
behind the last commit are ignored. SQLite has no checksum per page: a byte changed inside a value is not detected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from struct import Struct, error, unpack, unpack_from

MAGIC = b"SQLite format 3\0"
DEFAULT_PAGE_BYTES = 4096
SHOWN_DAMAGE = 100  # places listed one by one; the rest is counted

_PENDING_BYTE = 0x40000000
_WAL_HEADER = Struct(">8I")
_FRAME_HEADER = Struct(">6I")
_WAL_MAGIC = 0x377F0682  # + 1: checksums in big-endian words

# Page types in the pointer map.
_ROOT, _FREE, _OVERFLOW_FIRST, _OVERFLOW, _TREE = 1, 2, 3, 4, 5
# Types of b-tree pages; an interior page of a table has no rows.
_INTERIOR_INDEX, _INTERIOR_TABLE, _LEAF_INDEX, _LEAF_TABLE = 2, 5, 10, 13
_KINDS = (_INTERIOR_INDEX, _INTERIOR_TABLE, _LEAF_INDEX, _LEAF_TABLE)

_INTEGERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}

Record = tuple[object, ...]


class _Unreadable(Exception):
    """These bytes are not valid in a SQLite file."""


class PageFile:
    """The pages of the database at `path` as of its last commit.

    Raises `OSError` if the file cannot be opened; an unreadable sector is damage.
    """

    def __init__(self, path: Path) -> None:
        self.damage: list[str] = []
        self._unnamed = 0
        self._path = path
        self._file = os.open(path, os.O_RDONLY)
        self._newer: dict[int, bytes] = {}
        header = os.pread(self._file, 100, 0)
        self._wal_pages = 0
        self.page_bytes = _page_bytes(header) or self._wal_page_bytes() or DEFAULT_PAGE_BYTES
        self._pending = _PENDING_BYTE // self.page_bytes + 1  # SQLite never uses this page
        self._read_wal()
        header = (self.page(1) or b"")[:100]
        self.header: bytes | None = header if _page_bytes(header) else None
        if self.header is None:
            self._note("the file header cannot be read")
        self._usable = self.page_bytes - (self.header[20] if self.header else 0)
        self.page_count = self._wal_pages or self._count_pages()
        self._free = self._freelist()

    @property
    def user_version(self) -> int | None:
        """The schema version, None if the header cannot be read."""
        return unpack(">i", self.header[60:64])[0] if self.header else None

    @property
    def application_id(self) -> int | None:
        """The application id, None if the header cannot be read."""
        return unpack(">I", self.header[68:72])[0] if self.header else None

    def _count_pages(self) -> int:
        """The number of pages in the file, at most as many as the header says."""
        in_file = os.fstat(self._file).st_size // self.page_bytes
        header = self.header
        if header is None or header[24:28] != header[92:96]:
            return in_file
        in_header: int = unpack(">I", header[28:32])[0]
        if in_header > in_file:
            self._note(f"the file ends after page {in_file}: {in_header - in_file} pages are missing")
        return min(in_header, in_file)

    def close(self) -> None:
        os.close(self._file)

    def notes(self) -> list[str]:
        """One line for each place that could not be read."""
        if not self._unnamed:
            return self.damage
        return [*self.damage, f"{self._unnamed} more places cannot be read"]

    def _note(self, text: str) -> None:
        if len(self.damage) < SHOWN_DAMAGE:
            self.damage.append(text)
        else:
            self._unnamed += 1

    # -- pages ----------------------------------------------------------------

    def page(self, number: int) -> bytes | None:
        """The newest committed version of a page, None if it is missing or incomplete."""
        newer = self._newer.get(number)
        if newer is not None:
            return newer
        try:
            data = os.pread(self._file, self.page_bytes, (number - 1) * self.page_bytes)
        except (OSError, OverflowError):
            return None
        return data if len(data) == self.page_bytes else None

    def _wal(self) -> bytes:
        try:
            return Path(f"{self._path}-wal").read_bytes()
        except OSError:
            return b""

    def _wal_page_bytes(self) -> int:
        wal = self._wal()[:32]
        if len(wal) < 32 or _WAL_HEADER.unpack(wal)[0] & ~1 != _WAL_MAGIC:
            return 0
        size: int = _WAL_HEADER.unpack(wal)[2]
        return size

    def _read_wal(self) -> None:
        """Read the committed frames of the write-ahead log."""
        wal = memoryview(self._wal())
        if len(wal) < 32 + 24:
            return
        magic, _, _, _, salt1, salt2, *before = _WAL_HEADER.unpack(wal[:32])
        if magic & ~1 != _WAL_MAGIC:
            self._note("write-ahead log: its header cannot be read")
            magic = _WAL_MAGIC
            salt1, salt2 = _FRAME_HEADER.unpack_from(wal, 32)[2:4]
        words = Struct(f"{'>' if magic & 1 else '<'}{self.page_bytes // 4}I")
        head = Struct(f"{'>' if magic & 1 else '<'}2I")
        pending: dict[int, bytes] = {}
        bad: list[str] = []
        frame_bytes = 24 + self.page_bytes
        for number, at in enumerate(range(32, len(wal) - frame_bytes + 1, frame_bytes), 1):
            page, committed, *salts_and_sum = _FRAME_HEADER.unpack_from(wal, at)
            if salts_and_sum[:2] == [salt1, salt2]:
                found = _checksum(before, head.unpack_from(wal, at))
                found = _checksum(found, words.unpack_from(wal, at + 24))
                if found == salts_and_sum[2:]:
                    pending[page] = bytes(wal[at + 24 : at + frame_bytes])
                else:
                    bad.append(f"write-ahead log: frame {number} (page {page}) is damaged")
                    committed = 0
            else:
                committed = 0
            before = salts_and_sum[2:]
            if committed:
                self._newer.update(pending)
                self._wal_pages = committed
                pending.clear()
                for text in bad:
                    self._note(text)
                bad.clear()

    def _map_page(self, number: int) -> int:
        """The page of the pointer map with the type of page `number`."""
        each = self._usable // 5 + 1
        found = (number - 2) // each * each + 2
        return found + 1 if found == self._pending else found

    def _map(self, map_page: int) -> bytes | None:
        """A page of the pointer map, None if it is damaged."""
        data = self.page(map_page)
        if data is None:
            return None
        count = min(self._usable // 5, self.page_count - map_page)
        types = bytearray(data[: 5 * count : 5])
        unused = self._pending - map_page - 1
        if 0 <= unused < count:
            del types[unused]
        return data if not types.translate(None, b"\1\2\3\4\5") else None

    def _freelist(self) -> set[int]:
        """The free pages, as far as their list can be read."""
        free: set[int] = set()
        trunk = unpack(">I", self.header[32:36])[0] if self.header else 0
        while 1 < trunk <= self.page_count and trunk not in free:
            free.add(trunk)
            data = self.page(trunk)
            if data is None:
                break
            trunk, count = unpack_from(">2I", data)
            if count <= self._usable // 4 - 2:
                free.update(unpack_from(f">{count}I", data, 8))
        return free

    # -- records --------------------------------------------------------------

    def records(self) -> Iterator[tuple[int | None, Record]]:
        """Every row of every table and index as (rowid or None, values), in no order.

        The rowid is None for a row of a table WITHOUT ROWID and an entry of an index. An INTEGER PRIMARY KEY is NULL in
        the values, as it is the rowid.
        """
        mapped = self.header is None or unpack(">I", self.header[52:56])[0] != 0
        map_page, kinds = 0, None
        for number in range(1, self.page_count + 1):
            kind = 0
            if mapped and number > 1:
                if self._map_page(number) != map_page:
                    map_page = self._map_page(number)
                    kinds = self._map(map_page)
                    if kinds is None and map_page < self.page_count:
                        self._note(f"page {map_page}: the pointer map cannot be read")
                if number == map_page:
                    continue
                if kinds is not None and number > map_page:
                    kind = kinds[5 * (number - map_page - 1)]
            if number == self._pending or kind in (_FREE, _OVERFLOW_FIRST, _OVERFLOW):
                continue
            if kind or number not in self._free:
                yield from self._rows(number, kind in (_ROOT, _TREE))

    def _rows(self, number: int, is_tree_page: bool) -> Iterator[tuple[int | None, Record]]:
        """The rows of a page; unless `is_tree_page`, its type is not known and it may have none."""
        data = self.page(number)
        start = 100 if number == 1 else 0
        if data is None or data[start] not in _KINDS:
            if is_tree_page or data is None:
                self._note(f"page {number} cannot be read")
            return
        kind = data[start]
        if kind == _INTERIOR_TABLE:
            return
        (count,) = unpack_from(">H", data, start + 3)
        pointers = start + (12 if kind == _INTERIOR_INDEX else 8)
        lost = 0
        if pointers + 2 * count > len(data):
            count = 0
            lost = 1
        for cell in unpack_from(f">{count}H", data, pointers):
            try:
                if cell < pointers + 2 * count:
                    raise _Unreadable
                yield self._cell(data, cell, kind)
            except (_Unreadable, IndexError, ValueError, error):
                lost += 1
        if lost and is_tree_page:
            self._note(f"page {number}: {lost} of {max(count, lost)} rows cannot be read")

    def _cell(self, data: bytes, at: int, kind: int) -> tuple[int | None, Record]:
        if kind == _INTERIOR_INDEX:
            at += 4
        size, at = _varint(data, at)
        rowid: int | None = None
        if kind == _LEAF_TABLE:
            rowid, at = _varint(data, at)
            if rowid >= 1 << 63:
                rowid -= 1 << 64
        return rowid, _decode(self._payload(data, at, size, kind))

    def _payload(self, data: bytes, at: int, size: int, kind: int) -> bytes:
        usable = self._usable
        most = usable - 35 if kind == _LEAF_TABLE else (usable - 12) * 64 // 255 - 23
        if size <= most:
            if at + size > usable:
                raise _Unreadable
            return data[at : at + size]
        if size > self.page_count * self.page_bytes:
            raise _Unreadable
        least = (usable - 12) * 32 // 255 - 23
        local = least + (size - least) % (usable - 4)
        local = local if local <= most else least
        if at + local + 4 > usable:
            raise _Unreadable
        parts = [data[at : at + local]]
        (following,) = unpack_from(">I", data, at + local)
        left = size - local
        while left > 0:
            page = self.page(following) if 1 < following <= self.page_count else None
            if page is None:
                raise _Unreadable
            parts.append(page[4 : 4 + min(left, usable - 4)])
            left -= usable - 4
            (following,) = unpack_from(">I", page)
        if following != 0:
            raise _Unreadable
        return b"".join(parts)


def _page_bytes(header: bytes) -> int:
    """The page size in the header of a database; 0 if it is not a valid header."""
    if len(header) < 100 or not header.startswith(MAGIC):
        return 0
    size: int = unpack(">H", header[16:18])[0]
    size = 65536 if size == 1 else size
    return size if size >= 512 and size & (size - 1) == 0 and header[20] <= size - 480 else 0


def _checksum(before: list[int], words: tuple[int, ...]) -> list[int]:
    first, second = before
    for index in range(0, len(words), 2):
        first = (first + words[index] + second) & 0xFFFFFFFF
        second = (second + words[index + 1] + first) & 0xFFFFFFFF
    return [first, second]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for _ in range(8):
        byte = data[at]
        at += 1
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at
    return value << 8 | data[at], at + 1


def _decode(payload: bytes) -> Record:
    """The values of a record, which fill the payload exactly."""
    body, at = _varint(payload, 0)
    kinds: list[int] = []
    end = body
    while at < end:
        kind, at = _varint(payload, at)
        kinds.append(kind)
    if at != end:
        raise _Unreadable
    values: list[object] = []
    for kind in kinds:
        size = _INTEGERS.get(kind, 0)
        if kind == 0:
            values.append(None)
        elif size:
            values.append(int.from_bytes(payload[body : body + size], "big", signed=True))
        elif kind == 7:
            size = 8
            values.append(unpack(">d", payload[body : body + 8])[0])
        elif kind in (8, 9):
            values.append(kind - 8)
        elif kind >= 12:
            size = (kind - 12) // 2
            part = payload[body : body + size]
            values.append(part.decode() if kind & 1 else part)
        else:
            raise _Unreadable
        body += size
    if body != len(payload):
        raise _Unreadable
    return tuple(values)
