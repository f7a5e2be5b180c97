"""Passwords that were verified before, so that clients reconnect without a hash, also after a restart of the broker.

A record is a keyed digest (HMAC-SHA-256) of a user, its line of the password file, and the password: another line is
another record. The records are in a file of the data directory, the key is in memory only: in a file of a tmpfs, which
outlives the process but not the machine. A file of another key, or a changed or torn one, is detected by its digest and
ignored.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import hmac
import logging
import os
import stat
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mqttbroker.auth.replace_file import replace_file
from mqttbroker.system.defects import report_defect

log = logging.getLogger("mqttbroker.auth")

FILE = "proven_passwords"  # in the data directory
MAGIC = b"mqttbroker proven passwords 1\n"
KEY_BYTES = 32
ID_BYTES = 16
PROOF_BYTES = 32
RECORD_BYTES = ID_BYTES + PROOF_BYTES
WRITE_INTERVAL = 1.0  # seconds between two writes, and one more for each RECORDS_PER_SECOND records
RECORDS_PER_SECOND = 10_000
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


class KeyFileError(Exception):
    """The reason why there is no key that outlives the process."""


class ProvenPasswords:
    """Up to ``capacity`` proven passwords, one of each line; the one used longest ago is replaced. 0 = none.

    Before `load` they are in memory only, under a random key. ``capacity`` records take about 200 bytes of memory each.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._key = os.urandom(KEY_BYTES)
        self._proofs: OrderedDict[bytes, bytes] = OrderedDict()  # by id of user and line
        self._file: Path | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._scheduled = False
        self._changed = False
        self._failure = ""  # of the last write

    def __len__(self) -> int:
        return len(self._proofs)

    def has(self, username: str, line: str, password: bytes) -> bool:
        """Whether this password was verified for this line of the password file."""
        key = self._id(username, line)
        proof = self._proofs.get(key)
        if proof is None or not hmac.compare_digest(proof, self._proof(key, password)):
            return False
        self._proofs.move_to_end(key)
        return True

    def add(self, username: str, line: str, password: bytes) -> None:
        """The password was verified: add its record."""
        if self.capacity == 0:
            return
        key = self._id(username, line)
        if key not in self._proofs and len(self._proofs) >= self.capacity:
            self._proofs.popitem(last=False)
        self._proofs[key] = self._proof(key, password)
        self._schedule_write()

    def forget(self, username: str, line: str) -> None:
        """The line is no longer in the password file: delete its record."""
        if self._proofs.pop(self._id(username, line), None) is not None:
            self._schedule_write()

    def _id(self, username: str, line: str) -> bytes:
        name = username.encode("utf-8", "surrogatepass")
        text = b"line" + len(name).to_bytes(4, "big") + name + line.encode("utf-8", "surrogatepass")
        return hmac.digest(self._key, text, "sha256")[:ID_BYTES]

    def _proof(self, key: bytes, password: bytes) -> bytes:
        return hmac.digest(self._key, b"proof" + key + password, "sha256")

    # --- the file -----------------------------------------------------------------------------------------------------

    def load(self, data_dir: Path, key_file: Path | None, loop: asyncio.AbstractEventLoop) -> None:
        """Read the records of an earlier process, and from now on write changes to the file.

        ``key_file`` None = one in a tmpfs. Without a key file the passwords are remembered in memory only, and the
        reason is logged.
        """
        if self.capacity == 0:
            return
        try:
            self._key = read_key(key_file or find_key_file(data_dir), data_dir)
        except KeyFileError as error:
            log.warning("event=passwords_remembered_in_memory reason=%s", error)
            return
        self._file = data_dir / FILE
        self._loop = loop
        self._writer = ThreadPoolExecutor(1, "proven-passwords")
        self._proofs.clear()
        self._read(self._file)
        log.info("event=proven_passwords_loaded records=%d", len(self._proofs))

    def _read(self, file: Path) -> None:
        try:
            with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
                data = opened.read(len(MAGIC) + PROOF_BYTES + self.capacity * RECORD_BYTES)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("event=proven_passwords_unreadable file=%s reason=%s", file, error.strerror)
            return
        digest, body = data[len(MAGIC) : len(MAGIC) + PROOF_BYTES], data[len(MAGIC) + PROOF_BYTES :]
        if not data.startswith(MAGIC) or not hmac.compare_digest(digest, hmac.digest(self._key, body, "sha256")):
            return  # of another key, or damaged
        for start in range(0, len(body), RECORD_BYTES):
            self._proofs[body[start : start + ID_BYTES]] = body[start + ID_BYTES : start + RECORD_BYTES]

    def _schedule_write(self) -> None:
        if self._loop is not None and not self._scheduled:
            self._scheduled = True
            self._loop.call_later(WRITE_INTERVAL + len(self._proofs) / RECORDS_PER_SECOND, self._start_write)
        self._changed = True

    def _start_write(self) -> None:
        self._scheduled = False
        if self._writer is not None and self._changed:
            self._changed = False
            report_defect(self._writer.submit(self._write, dict(self._proofs)), "proven_passwords")

    def _write(self, proofs: Mapping[bytes, bytes]) -> None:
        """Replace the file; called in the writer's thread. No fsync: after a power failure the key is gone, too."""
        assert self._file is not None
        body = b"".join(key + proof for key, proof in proofs.items())
        digest = hmac.digest(self._key, body, "sha256")
        failure = replace_file(self._file, (MAGIC, digest, body), durable=False)
        if failure and failure != self._failure:
            log.warning("event=proven_passwords_not_written file=%s reason=%s", self._file, failure)
        self._failure = failure

    def stop(self) -> None:
        """Write the changes that are not written yet."""
        writer, self._loop = self._writer, None
        if writer is not None:
            self._start_write()
            self._writer = None
            writer.shutdown(wait=True)


def find_key_file(data_dir: Path) -> Path:
    """The key file of this data directory in a tmpfs. Raises KeyFileError if there is none."""
    digest = hashlib.sha256(os.fsencode(os.path.realpath(data_dir))).hexdigest()[:16]
    runtime = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]  # of a systemd service
    for directory in (runtime, os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"):
        if directory and os.access(directory, os.W_OK | os.X_OK) and is_in_memory(Path(directory)):
            return Path(directory) / f"mqttbroker-{os.geteuid()}-{digest}.key"
    raise KeyFileError("no tmpfs for the key, set logins.key_file")


def is_in_memory(path: Path) -> bool:
    """Whether a file or directory is in a file system that a power failure empties."""
    device = path.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    # The mounts are "id parent device … - type source options"; see proc(5).
    mounts = (line.split(" - ", 1) for line in lines)
    return any(m[0].split()[2] == name and m[1].split()[0] in _MEMORY_FILE_SYSTEMS for m in mounts if len(m) == 2)


def read_key(path: Path, data_dir: Path) -> bytes:
    """The key in a file, which is created if missing.

    Raises KeyFileError for a file that others could have made or read.
    """
    try:
        # O_NONBLOCK: a FIFO of this name must not stop the start.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror or error}") from None
    with open(handle, "r+b", buffering=0) as file:
        fcntl.flock(handle, fcntl.LOCK_EX)
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            raise KeyFileError(f"{path}: not a file of this user alone")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise KeyFileError(f"{path}: other users may read or write it")
        if found.st_dev == data_dir.stat().st_dev and not is_in_memory(path):
            raise KeyFileError(f"{path}: on the same disk as the data directory")
        key = file.read(KEY_BYTES + 1) or b""
        if not key:
            key = os.urandom(KEY_BYTES)
            file.write(key)
        if len(key) != KEY_BYTES:
            raise KeyFileError(f"{path}: has not {KEY_BYTES} bytes")
        return key
