"""Logins that wait for a thread, in a fair order.

Addresses take turns. Logins of an address or user name that failed lately stand in a second line, which gets one turn
in `SUSPECT_TURN`, so that guessed passwords do not delay the other logins. A full queue drops from the address with the
most.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Optional

from mqttbroker.auth.passwords import Passwords
from mqttbroker.core.policy import AuthenticationRequest

SUSPECT_TURN = 8


class Login:
    """A request with a password, which is checked by ``passwords``; ``address`` is the one that takes turns."""

    def __init__(self, request: AuthenticationRequest, passwords: Passwords, address: str) -> None:
        assert request.username is not None and request.password is not None
        self.request = request
        self.passwords = passwords
        self.username: str = request.username
        self.password: bytes = request.password
        self.address = address
        self.suspect = False
        self.timed_out = False  # and answered, while its check runs

    @property
    def line(self) -> str:
        """The user's line of the password file; "" for an unknown user."""
        return self.passwords.fingerprints.get(self.username, "")


class LoginQueue:
    """Waiting logins by address."""

    def __init__(self) -> None:
        self._trusted: OrderedDict[str, deque[Login]] = OrderedDict()  # the next address to be served is first
        self._suspects: OrderedDict[str, deque[Login]] = OrderedDict()
        self._turn = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, login: Login, suspect: bool) -> None:
        """Put a login behind those of its address."""
        login.suspect = suspect
        line = self._suspects if suspect else self._trusted
        line.setdefault(login.address, deque()).append(login)
        self._length += 1

    def pop(self, with_suspects: bool = True) -> Optional[Login]:
        """Remove the login whose turn it is; None if there is none."""
        line = self._trusted
        if with_suspects and (not line or (self._suspects and self._turn % SUSPECT_TURN == SUSPECT_TURN - 1)):
            line = self._suspects
        if not line:
            return None
        self._turn += 1
        return self._remove(line, next(iter(line)), False)

    def pop_newest(self) -> Login:
        """Remove the newest login of the address with the most, suspects first."""
        line = self._suspects or self._trusted
        return self._remove(line, max(line, key=lambda address: len(line[address])), True)

    def _remove(self, line: OrderedDict[str, deque[Login]], address: str, newest: bool) -> Login:
        logins = line[address]
        login = logins.pop() if newest else logins.popleft()
        self._length -= 1
        if not logins:
            del line[address]
        elif not newest:
            line.move_to_end(address)
        return login
