"""A plug-in that authenticates devices by a table in SQLite: ``devices(name, salt, hash, blocked)``.

    [plugin]
    object = "devices:Devices"
    path = "docs/examples/plugin"
    options = { database = "devices.db" }

Each device may publish and subscribe below ``devices/NAME/``. A user that is not in the table is left to the next
authenticator, such as a password file.
"""

import asyncio
import hashlib
import hmac
import sqlite3
from typing import Optional

from mqttbroker.auth.plugin import Accepted, Answer, Ignored, Login, Rejected


def hash_of(password: bytes, salt: bytes) -> bytes:
    return hashlib.scrypt(password, salt=salt, n=2**14, r=8, p=1)


class Devices:
    def __init__(self, database: str) -> None:
        self._database = database
        with sqlite3.connect(database) as connection:  # an error here prevents the broker's start
            connection.execute("SELECT name, salt, hash, blocked FROM devices LIMIT 1")

    async def authenticate(self, login: Login) -> Answer:
        if login.username is None or login.password is None:
            return Ignored()
        # Only a thread, not the event loop, may wait for the disk or compute a hash.
        right = await asyncio.to_thread(self._check, login.username, login.password)
        if right is None:
            return Ignored()
        if not right:
            return Rejected()
        return Accepted(acl={"all": [f"devices/{login.username}/#"]})

    def _check(self, name: str, password: bytes) -> Optional[bool]:
        """None for an unknown device."""
        with sqlite3.connect(self._database) as connection:
            row = connection.execute("SELECT salt, hash, blocked FROM devices WHERE name = ?", (name,)).fetchone()
        if row is None:
            return None
        salt, expected, blocked = row
        return hmac.compare_digest(hash_of(password, salt), expected) and not blocked
