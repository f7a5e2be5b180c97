"""The password file: users and hashes in the format of `mosquitto_passwd`.

Hashes are compared in constant time. A file is replaced atomically and is readable by its owner only.

A line is ``user:hash``, with one of the hashes

- ``$argon2id$v=19$m=47104,t=1,p=1$salt$key`` (the one that `hash_password` makes),
- ``$7$iterations$salt$key``: PBKDF2 with HMAC-SHA-512,
- ``$6$salt$key``: SHA-512 of password and salt,
- ``$scram-sha-256$iterations$salt$stored_key$server_key``, also for SCRAM-SHA-256.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import os
import re
import stat
from base64 import b64decode, b64encode
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mqttbroker.auth import scram
from mqttbroker.auth.replace_file import rewrite_file

if TYPE_CHECKING:
    import argon2

# A hash above these limits would keep a thread busy for many seconds; it is taken for a mistake.
MAX_ITERATIONS = 10_000_000
MAX_ARGON2_KIB = 1 << 20
MAX_ARGON2_PASSES = 100
MAX_ARGON2_LANES = 64

_ENCODED = re.compile(r"\$argon2id\$v=19\$m=([0-9]{1,8}),t=([0-9]{1,4}),p=([0-9]{1,4})\$[A-Za-z0-9+/]{11,}\$[A-Za-z0-9+/]{16,}")
# Each client computes them when it connects, and may be a small device; RFC 7677 requires at least 4096.
SCRAM_ITERATIONS = 15_000
_KEY_BYTES = 64
_MAX_NAME_BYTES = 65535
PASSWORD_FILE_MODES = 0o600 | stat.S_IRGRP  # permissions that a rewritten password file keeps


class PasswordFileError(Exception):
    """One line: the file, its line and the reason."""


class Hash(Protocol):
    """A stored password. ``kind`` names its algorithm."""

    kind: str

    def verify(self, password: bytes) -> bool:
        """Whether this is the password. May take a second; safe in any thread."""


@cache
def _argon2() -> argon2.PasswordHasher:
    """With the parameters of Mosquitto 2.1, recommended by OWASP: 46 MiB, one pass, one lane.

    A broker without such passwords does not load the library, which takes 1 MB.
    """
    import argon2

    return argon2.PasswordHasher(time_cost=1, memory_cost=47104, parallelism=1)


class Argon2id:
    kind = "argon2id"

    def __init__(self, encoded: str) -> None:
        match = _ENCODED.fullmatch(encoded)
        if match is None:
            raise ValueError("not an argon2id hash")
        memory, passes, lanes = map(int, match.groups())
        if memory > MAX_ARGON2_KIB or passes > MAX_ARGON2_PASSES or lanes > MAX_ARGON2_LANES:
            raise ValueError("argon2id hash is too expensive to check")
        self._encoded = encoded

    def verify(self, password: bytes) -> bool:
        from argon2.exceptions import InvalidHashError, VerificationError

        try:
            return _argon2().verify(self._encoded, password)
        except (VerificationError, InvalidHashError):
            return False


class Pbkdf2:
    kind = "pbkdf2-sha512"

    def __init__(self, iterations: str, salt: str, key: str) -> None:
        self._iterations = _iterations(iterations)
        self._salt = _decoded(salt, "salt")
        self._key = _key(key)

    def verify(self, password: bytes) -> bool:
        key = hashlib.pbkdf2_hmac("sha512", password, self._salt, self._iterations, _KEY_BYTES)
        return hmac.compare_digest(key, self._key)


class Sha512:
    kind = "sha512"

    def __init__(self, salt: str, key: str) -> None:
        self._salt = _decoded(salt, "salt")
        self._key = _key(key)

    def verify(self, password: bytes) -> bool:
        return hmac.compare_digest(hashlib.sha512(password + self._salt).digest(), self._key)


class Scram:
    kind = "scram-sha-256"

    def __init__(self, iterations: str, salt: str, stored_key: str, server_key: str) -> None:
        self.credentials = scram.Credentials(
            _iterations(iterations),
            _decoded(salt, "salt"),
            _key(stored_key, 32),
            _key(server_key, 32),
        )

    def verify(self, password: bytes) -> bool:
        stored = self.credentials
        derived = scram.derive(password, stored.salt, stored.iterations)
        return hmac.compare_digest(derived.stored_key, stored.stored_key)


def _iterations(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,8}", text) or not 1 <= int(text) <= MAX_ITERATIONS:
        raise ValueError(f"iterations must be 1–{MAX_ITERATIONS}")
    return int(text)


def _decoded(text: str, what: str) -> bytes:
    try:
        decoded = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{what} is not base64") from None
    if not decoded:
        raise ValueError(f"{what} is empty")
    return decoded


def _key(text: str, size: int = _KEY_BYTES) -> bytes:
    key = _decoded(text, "hash")
    if len(key) != size:
        raise ValueError(f"hash has {len(key)} bytes, not {size}")
    return key


def parse_hash(text: str) -> Hash:
    """The stored password in ``text``; ValueError with the reason."""
    if text.startswith("$argon2id$"):
        return Argon2id(text)
    parts = text.split("$")
    if len(parts) == 5 and parts[1] == "7":
        return Pbkdf2(*parts[2:])
    if len(parts) == 4 and parts[1] == "6":
        return Sha512(*parts[2:])
    if len(parts) == 6 and parts[1] == "scram-sha-256":
        return Scram(*parts[2:])
    if not text.startswith("$"):
        raise ValueError("the password is not hashed (mqttbroker passwd does it, or mosquitto_passwd -U)")
    raise ValueError("unknown kind of hash, must be $argon2id$, $7$, $6$ or $scram-sha-256$")


def hash_password(password: bytes) -> str:
    """An argon2id hash with a new salt."""
    return _argon2().hash(password)


def scram_password(password: bytes) -> str:
    """Credentials for SCRAM-SHA-256 with a new salt."""
    made = scram.derive(password, os.urandom(16), SCRAM_ITERATIONS)
    parts = (b64encode(part).decode() for part in (made.salt, made.stored_key, made.server_key))
    return f"$scram-sha-256${made.iterations}$" + "$".join(parts)


class Passwords:
    """The users of one file. Immutable, and safe in any thread.

    ``fingerprints`` has the hash in the file by user; if it changes, so did the password.
    """

    def __init__(self, hashes: Mapping[str, Hash], fingerprints: Mapping[str, str]) -> None:
        self.hashes = hashes
        self.fingerprints = fingerprints
        self._decoys = list(hashes.values()) or [parse_hash(hash_password(os.urandom(16)))]
        self._decoy_key = os.urandom(32)
        self._scram = {name: stored.credentials for name, stored in hashes.items() if isinstance(stored, Scram)}

    def verify(self, username: str, password: bytes) -> bool:
        """Whether this is the user's password.

        For an unknown user the hash of a known one is computed, always of the same one, so that the time taken does not
        reveal whether the user exists.
        """
        stored = self.hashes.get(username)
        if stored is not None:
            return stored.verify(password)
        digest = hmac.digest(self._decoy_key, username.encode("utf-8", "surrogatepass"), "sha256")
        self._decoys[int.from_bytes(digest[:8], "big") % len(self._decoys)].verify(password)
        return False

    def scram(self, username: str) -> scram.Credentials:
        """A user's SCRAM credentials; for any other user, invented ones that are always the same and match nothing."""
        stored = self._scram.get(username)
        if stored is not None:
            return stored
        model = next(iter(self._scram.values()), None)
        secret = hmac.digest(self._decoy_key, b"scram" + username.encode(), "sha512")
        size = 16 if model is None else len(model.salt)
        iterations = SCRAM_ITERATIONS if model is None else model.iterations
        return scram.Credentials(iterations, secret[:size], os.urandom(32), os.urandom(32))


def parse_passwords(text: str, name: str) -> Passwords:
    """The users in the text of a password file; ``name`` names the file in errors. Raises PasswordFileError."""
    hashes: dict[str, Hash] = {}
    fingerprints: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        username, colon, encoded = (part.strip() for part in line.partition(":"))
        try:
            if not colon:
                raise ValueError('must be "user:hash"')
            if not username or len(username.encode()) > _MAX_NAME_BYTES:
                raise ValueError("the user name must have 1–65535 bytes")
            if username in hashes:
                raise ValueError(f"user {username!r} stands there twice")
            hashes[username] = parse_hash(encoded)
        except ValueError as error:
            raise PasswordFileError(f"{name}:{number}: {error}") from None
        fingerprints[username] = encoded
    return Passwords(hashes, fingerprints)


def check_name(username: str) -> None:
    """Raise ValueError if a password file cannot contain this user name."""
    if not username or username != username.strip() or username.startswith("#"):
        raise ValueError("a user name must not be empty, begin with # or begin or end with a blank")
    if ":" in username or not username.isprintable() or len(username.encode()) > _MAX_NAME_BYTES:
        raise ValueError("a user name must have no colon, no control character and at most 65535 bytes")


def set_password(path: Path, username: str, encoded: str | None) -> bool:
    """Write a user's hash into the file, which is created if missing; None removes the user.

    Returns whether the user was in the file. Raises OSError, and ValueError for an invalid user name or file.
    """
    check_name(username)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None
    changed, known = with_password(text, username, encoded)
    if changed != text:
        rewrite_file(path, changed.encode(), PASSWORD_FILE_MODES)
    return known


def with_password(text: str, username: str, encoded: str | None) -> tuple[str, bool]:
    """Set the hash of a user in the text of a password file, or remove the user if ``encoded`` is None.

    Returns the new text, with comments and in the same order, and whether the user was in the old one.
    """
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    mine = [
        index for index, line in enumerate(lines) if not line.startswith("#") and line.partition(":")[0].strip() == username and ":" in line
    ]
    new = [] if encoded is None else [f"{username}:{encoded}\n"]
    if mine:
        lines[mine[0] : mine[0] + 1] = new
    else:
        lines += new
    return "".join(lines) if mine or new else text, bool(mine)
