"""Logins that wait for a thread, in a fair order.

Addresses are served round robin, and alternately the newest address, so that a new client need not wait for each of
many addresses. Logins from an address, or of a user name there, with recent failures are in a second line, which is
served once in `SUSPECT_TURN` times, so that guessed passwords do not delay the other logins. A full queue drops a login
of the address with the most.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from mqttbroker.auth.passwords import Passwords
from mqttbroker.core.access.policy import AuthenticationRequest

SUSPECT_TURN = 8
SHORT = 4096  # bytes of a CONNECT packet; shorter ones are limited by their number only
TOO_MANY_LOGINS = "too many clients are being authenticated"  # with Server busy (0x89)
TOO_MANY_BYTES = "too many bytes of clients that are being authenticated"  # with Quota exceeded (0x97)


class WaitingLogin:
    """A member of a `LoginQueue`; ``address`` is served round robin, ``size`` is in bytes."""

    def __init__(self, address: str, size: int) -> None:
        self.address = address
        self.size = size
        self.suspect = False


class Login(WaitingLogin):
    """A request with a password, which is checked by ``passwords``."""

    def __init__(self, request: AuthenticationRequest, passwords: Passwords, address: str) -> None:
        assert request.username is not None and request.password is not None
        super().__init__(address, request.size if request.size >= SHORT else 0)
        self.request = request
        self.passwords = passwords
        self.username: str = request.username
        self.password: bytes = request.password
        self.timed_out = False  # it was answered while its check still runs

    @property
    def line(self) -> str:
        """The user's line of the password file; "" for an unknown user."""
        return self.passwords.fingerprints.get(self.username, "")


L = TypeVar("L", bound=WaitingLogin)


class _Line(Generic[L]):
    """Logins by address. An address is new until it is first served."""

    def __init__(self) -> None:
        self._logins: OrderedDict[str, deque[L]] = OrderedDict()  # the address that waits longest is first
        self._new: OrderedDict[str, bool] = OrderedDict()
        self._newest_is_next = False

    def __bool__(self) -> bool:
        return bool(self._logins)

    def add(self, login: L) -> None:
        logins = self._logins.get(login.address)
        if logins is None:
            logins = self._logins[login.address] = deque()
            self._new[login.address] = True
        logins.append(login)

    def pop(self) -> L:
        newest = self._newest_is_next and bool(self._new)
        self._newest_is_next = not self._newest_is_next
        address = next(reversed(self._new)) if newest else next(iter(self._logins))
        self._new.pop(address, None)
        self._logins.move_to_end(address)
        login = self._logins[address].popleft()
        self._forget_if_empty(address)
        return login

    def pop_newest(self) -> L:
        """The last login of the address with the most."""
        address = max(self._logins, key=lambda name: len(self._logins[name]))
        login = self._logins[address].pop()
        self._forget_if_empty(address)
        return login

    def _forget_if_empty(self, address: str) -> None:
        if not self._logins[address]:
            del self._logins[address]
            self._new.pop(address, None)


class LoginQueue(Generic[L]):
    """Waiting logins."""

    def __init__(self) -> None:
        self._trusted: _Line[L] = _Line()
        self._suspects: _Line[L] = _Line()
        self._turn = 0
        self._length = 0
        self.size = 0  # bytes of its members

    def __len__(self) -> int:
        return self._length

    def add(self, login: L, suspect: bool) -> None:
        """Put a login behind those of its address."""
        login.suspect = suspect
        (self._suspects if suspect else self._trusted).add(login)
        self._length += 1
        self.size += login.size

    def pop(self, with_suspects: bool = True) -> L | None:
        """Remove the login whose turn it is; None if there is none."""
        line = self._trusted
        if with_suspects and (not line or (self._suspects and self._turn % SUSPECT_TURN == SUSPECT_TURN - 1)):
            line = self._suspects
        if not line:
            return None
        self._turn += 1
        return self._removed(line.pop())

    def pop_newest(self) -> L:
        """Remove the newest login of the address with the most, suspects first."""
        return self._removed((self._suspects or self._trusted).pop_newest())

    def _removed(self, login: L) -> L:
        self._length -= 1
        self.size -= login.size
        return login
