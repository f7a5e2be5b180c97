"""The file in which bans outlive a restart, with the counts of right and wrong logins by address and user name.

It has one JSON object per line. Times are Unix times in seconds. A line that cannot be read is logged with its number
and left out; the file is then kept under another name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mqttbroker.auth.replace_file import replace_file
from mqttbroker.core.access.ban_list import BAN_FILE, FOREVER, MAX_NAME, OPERATOR, Ban, Key
from mqttbroker.core.access.bans import FAILED_LOGINS, MAX_REASON, PROTOCOL_ERRORS, RECONNECTS, Bans
from mqttbroker.core.access.offences import MAX_CREDIT, Record
from mqttbroker.core.terms.networks import network_text
from mqttbroker.system.defects import report_defect

log = logging.getLogger("mqttbroker.auth")

MAX_RECORDS = 10_000  # lines of records; one is 1.2 KB at most
MAX_LINE = 4096  # bytes
BAN_DELAY = 1.0  # seconds until a changed ban is written
RECORD_DELAY = 60.0  # likewise, a record
_CAUSES = (OPERATOR, FAILED_LOGINS, PROTOCOL_ERRORS, RECONNECTS)


class BanFile:
    """Keeps the bans of a broker in the data directory, from `load` to `stop`."""

    def __init__(self, bans: Bans) -> None:
        self._bans = bans
        self._file: Path | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._failure = ""  # of the last write

    def load(self, data_dir: Path, loop: asyncio.AbstractEventLoop) -> None:
        """Restore the bans of an earlier process, and write changes from now on."""
        self._file = data_dir / BAN_FILE
        self._loop = loop
        self._writer = ThreadPoolExecutor(1, "bans")
        restored = self._read(self._file)
        if restored:
            log.info("event=bans_restored bans=%d", restored)
        self._bans.on_change = self._changed

    def stop(self) -> None:
        """Write the changes since the last write."""
        self._bans.on_change = None
        if self._writer is not None:
            self._write_later()
            self._writer.shutdown(wait=True)
            self._writer = None

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self, file: Path) -> int:
        """Restore the bans of a file; returns how many."""
        assert self._loop is not None
        try:
            with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
                data = opened.read((2 * len(_CAUSES) * self._bans.terms.max_entries + MAX_RECORDS) * MAX_LINE)
        except FileNotFoundError:
            return 0
        except OSError as error:
            log.warning("event=bans_unreadable file=%s reason=%s", file, error.strerror)
            return 0
        offset = self._loop.time() - time.time()
        bans, damaged = 0, False
        for number, line in enumerate(data.splitlines(), 1):
            try:
                bans += self._restore(json.loads(line), offset)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                damaged = True
                log.warning("event=ban_left_out file=%s line=%d reason=%s", file, number, _reason(error))
        if damaged:
            kept = file.with_name(f"{BAN_FILE}.damaged-{time.strftime('%Y%m%dT%H%M%S')}")
            os.replace(file, kept)
            log.warning("event=damaged_file_kept file=%s", kept)
        return bans

    def _restore(self, row: Any, offset: float) -> bool:
        """Restore one line; true for a ban that is still in force."""
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        cause = row["cause"]
        address, username, client_id = (_text(row, name, MAX_NAME) for name in ("address", "username", "client_id"))
        if address:
            network = ipaddress.ip_network(address)
            address = network_text(network.network_address, network.prefixlen)
        key: Key = (address, username, client_id)
        if cause not in _CAUSES or not any(key):
            raise ValueError("no ban of this broker")
        number = min(1000, int(row["bans"]))
        credit, users = min(MAX_CREDIT, int(row.get("credit", 0))), int(row.get("users", "0"), 16)
        users &= (1 << MAX_CREDIT) - 1
        until = FOREVER if row["until"] is None else float(row["until"]) + offset
        if not row["banned"]:
            if cause == FAILED_LOGINS:
                self._bans.restore_record(key, credit, users, number, until)
            return False
        if until <= offset + time.time():
            return False
        self._bans.restore_ban(Ban(key, cause, until, number, _text(row, "reason", MAX_REASON)), credit, users)
        return True

    # --- writing ------------------------------------------------------------------------------------------------------

    def _changed(self, ban: bool) -> None:
        assert self._loop is not None
        due = self._loop.time() + (BAN_DELAY if ban else RECORD_DELAY)
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._write_later)

    def _write_later(self) -> None:
        """Have the current state written in the writer's thread."""
        assert self._loop is not None and self._writer is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._loop.time()
        writing = self._writer.submit(self._write, self._bans.banned(now), self._bans.records(), time.time() - now)
        report_defect(writing, "ban_file")

    def _write(self, bans: list[Ban], records: list[Record], offset: float) -> None:
        assert self._file is not None
        lines = (json.dumps(row).encode("ascii") + b"\n" for row in _rows(bans, records, offset))
        failure = replace_file(self._file, lines, durable=True)
        if failure and failure != self._failure:
            log.warning("event=bans_not_written file=%s reason=%s", self._file, failure)
        self._failure = failure


def _rows(bans: list[Ban], records: list[Record], offset: float) -> Iterator[dict[str, Any]]:
    notable = [record for record in records if record.credit or record.bans]
    for record in notable[-MAX_RECORDS:]:
        yield _row(record.key, FAILED_LOGINS, False, record.until + offset, record.bans, record)
    for ban in bans:
        until = None if ban.until == FOREVER else ban.until + offset
        yield _row(ban.key, ban.cause, True, until, ban.number, ban.record) | {"reason": ban.reason}


def _row(key: Key, cause: str, banned: bool, until: float | None, bans: int, record: Record | None) -> dict[str, Any]:
    row: dict[str, Any] = dict(zip(("address", "username", "client_id"), key))
    row |= {"cause": cause, "banned": banned, "until": until, "bans": bans}
    if record is not None:
        row |= {"credit": record.credit, "users": f"{record.users:x}"}
    return row


def _text(row: dict[str, Any], name: str, longest: int) -> str:
    value = row.get(name, "")
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(f"{name} must be a text of up to {longest} characters")
    return value


def _reason(error: Exception) -> str:
    return f"no key {error}" if isinstance(error, KeyError) else str(error)
