"""Password checks in a few threads beside the event loop.

The queue of logins is bounded and served round robin by client address, so that an address that guesses passwords does
not delay the others. Each login is answered within ``timeout`` seconds, with Server busy at the latest. Only the hash
is computed in a thread; all state belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import sys
import threading
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Optional

from mqttbroker.auth.passwords import Passwords
from mqttbroker.auth.scram import METHOD, Exchange, ScramError
from mqttbroker.codec.reason_codes import (
    BAD_AUTHENTICATION_METHOD,
    BAD_USER_NAME_OR_PASSWORD,
    NOT_AUTHORIZED,
    SERVER_BUSY,
)
from mqttbroker.core.policy import WRONG_CREDENTIALS, AuthenticationRequest

log = logging.getLogger("mqttbroker")

WORKERS = 2
NICENESS = 10  # of the worker threads on Linux, where threads have their own: the event loop takes precedence
CAPACITY = 10_000  # queued logins


class Login:
    """A request with a password: queued, then ``running`` in a thread, and ``done`` once answered."""

    def __init__(self, request: AuthenticationRequest, passwords: Passwords) -> None:
        assert request.username is not None and request.password is not None
        self.request = request
        self.passwords = passwords
        self.username: str = request.username
        self.password: bytes = request.password
        self.host = request.peer.rpartition(":")[0]
        self.timer: Optional[asyncio.TimerHandle] = None
        self.running = False
        self.done = False


class ScramLogin:
    """A SCRAM exchange and the passwords it started with."""

    def __init__(self, passwords: Passwords, nonce: str) -> None:
        self.passwords = passwords
        self.exchange = Exchange(passwords.scram, nonce)


def _lower_priority() -> None:
    """Lower the scheduling priority of the current thread."""
    if sys.platform == "linux":
        niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def new_nonce() -> str:
    return secrets.token_urlsafe(18)


class Authenticator:
    """Answers authentication requests by the users in ``passwords``.

    ``timeout`` is in seconds, ``capacity`` in queued logins; ``nonce`` gives nonces for SCRAM.
    """

    def __init__(
        self,
        passwords: Passwords,
        timeout: float,
        workers: int = WORKERS,
        capacity: int = CAPACITY,
        nonce: Callable[[], str] = new_nonce,
    ) -> None:
        self.passwords = passwords
        self.timeout = timeout
        self.capacity = capacity
        self.waiting = 0
        self._free = workers
        self._new_nonce = nonce
        self._pool = ThreadPoolExecutor(workers, "authentication", _lower_priority)
        self._queues: OrderedDict[str, deque[Login]] = OrderedDict()  # by host; the next one to be served is first
        # Passwords that were right before are accepted without a hash, for many devices that reconnect at once: by
        # user, the fingerprint in the file and a keyed digest of the password.
        self._known: dict[str, tuple[str, bytes]] = {}
        self._key = os.urandom(32)

    def start(self, loop: asyncio.AbstractEventLoop, update_clock: Callable[[], object]) -> None:
        """``update_clock`` sets the broker's clock; it is called before each answer."""
        self._loop = loop
        self._update_clock = update_clock

    def stop(self) -> None:
        """Drop all logins; no request is answered after this."""
        self._queues.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def replace(self, passwords: Passwords) -> set[str]:
        """Use other passwords from now on; returns the users whose password was changed or removed."""
        before, after = self.passwords.fingerprints, passwords.fingerprints
        self.passwords = passwords
        changed = {name for name, fingerprint in before.items() if after.get(name) != fingerprint}
        for name in changed:
            self._known.pop(name, None)
        return changed

    def submit(self, request: AuthenticationRequest) -> None:
        """Check the password; the answer comes now or later."""
        login = Login(request, self.passwords)
        if self._is_known(login):
            request.accept()
            return
        if self.waiting >= self.capacity:
            self._make_room()
        login.timer = self._loop.call_later(self.timeout, self._time_out, login)
        self._queues.setdefault(login.host, deque()).append(login)
        self.waiting += 1
        self._start_logins()

    def continue_exchange(self, request: AuthenticationRequest) -> None:
        """Take one step of an enhanced authentication.  The client computes the hash, so this takes no thread."""
        if request.method != METHOD:
            request.reject(BAD_AUTHENTICATION_METHOD, f"the only method is {METHOD}")
            return
        if request.exchange is None:
            request.exchange = ScramLogin(self.passwords, self._new_nonce())
        login: ScramLogin = request.exchange
        exchange = login.exchange
        try:
            answer = exchange.step(request.client_data or b"")
        except ScramError:
            request.reject(NOT_AUTHORIZED, WRONG_CREDENTIALS)
            return
        if not exchange.done:
            request.send_challenge(answer)
        elif self._fingerprint(exchange.username) != login.passwords.fingerprints.get(exchange.username):
            request.reject(NOT_AUTHORIZED, WRONG_CREDENTIALS)
        else:
            request.username = exchange.username
            request.server_data = answer
            request.accept()

    def _fingerprint(self, username: str) -> Optional[str]:
        return self.passwords.fingerprints.get(username)

    def _is_known(self, login: Login) -> bool:
        fingerprint, digest = self._known.get(login.username, ("", b""))
        return (
            fingerprint != ""
            and fingerprint == self.passwords.fingerprints.get(login.username)
            and hmac.compare_digest(digest, self._digest(login))
        )

    def _digest(self, login: Login) -> bytes:
        return hmac.digest(self._key, login.password, "sha256")

    def _make_room(self) -> None:
        """Refuse the newest login of the address with the most logins."""
        host = max(self._queues, key=lambda name: len(self._queues[name]))
        self._refuse_as_busy(self._dequeue(host, -1))

    def _dequeue(self, host: str, index: int) -> Login:
        """Remove a login from the queue of its address; that address is served last."""
        queue = self._queues[host]
        login = queue[index]
        del queue[index]
        self.waiting -= 1
        if queue:
            self._queues.move_to_end(host)
        else:
            del self._queues[host]
        return login

    def _start_logins(self) -> None:
        """Give queued logins to the free threads."""
        while self._free > 0 and self._queues:
            login = self._dequeue(next(iter(self._queues)), 0)
            if not login.request.waiting:
                self._end(login)
                continue
            login.running = True
            self._free -= 1
            self._pool.submit(self._check, login)

    def _check(self, login: Login) -> None:
        """Called in a worker thread."""
        right = False
        try:
            right = login.passwords.verify(login.username, login.password)
        except Exception:
            log.exception("event=authentication_failed client=%s", login.request.client_id)
        try:
            self._loop.call_soon_threadsafe(self._checked, login, right)
        except RuntimeError:
            pass  # the broker has stopped

    def _checked(self, login: Login, right: bool) -> None:
        self._free += 1
        if not login.done:
            self._end(login)
            self._update_clock()
            fingerprint = login.passwords.fingerprints.get(login.username, "")
            # The file may have been replaced during the check.
            if right and self.passwords.fingerprints.get(login.username) == fingerprint:
                self._known[login.username] = (fingerprint, self._digest(login))
                login.request.accept()
            else:
                login.request.reject(BAD_USER_NAME_OR_PASSWORD, WRONG_CREDENTIALS)
        self._start_logins()

    def _time_out(self, login: Login) -> None:
        if not login.running:
            queue = self._queues[login.host]
            self._dequeue(login.host, queue.index(login))
        self._refuse_as_busy(login)

    def _refuse_as_busy(self, login: Login) -> None:
        self._end(login)
        self._update_clock()
        login.request.reject(SERVER_BUSY, "too many clients are being authenticated")

    def _end(self, login: Login) -> None:
        login.done = True
        if login.timer is not None:
            login.timer.cancel()
