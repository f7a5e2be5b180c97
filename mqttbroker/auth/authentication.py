"""Password checks in a few threads beside the event loop.

Logins wait in a bounded `LoginQueue` for as long as the checks make progress; beyond the bound, and while every thread
is stuck, they are refused as busy. Failed logins lead to bans. Only the hash is computed in a thread; all state belongs
to the event loop.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mqttbroker.auth.background import BackgroundAuthenticator
from mqttbroker.auth.login_queue import TOO_MANY_BYTES, TOO_MANY_LOGINS, Login, LoginQueue
from mqttbroker.auth.passwords import Passwords
from mqttbroker.auth.proven_passwords import ProvenPasswords
from mqttbroker.auth.scram import METHOD, Exchange, ScramError
from mqttbroker.codec.reason_codes import (
    BAD_AUTHENTICATION_METHOD,
    BAD_USER_NAME_OR_PASSWORD,
    BANNED,
    NOT_AUTHORIZED,
    QUOTA_EXCEEDED,
    SERVER_BUSY,
)
from mqttbroker.core.access.bans import Bans, BanTerms
from mqttbroker.core.access.policy import BAN_IN_FORCE, WRONG_CREDENTIALS, AuthenticationRequest, Identity
from mqttbroker.core.terms.deadline import Deadline

log = logging.getLogger("mqttbroker.auth")

WORKERS = max(2, min(8, os.cpu_count() or 1))  # each check of argon2id takes 46 MiB
NICENESS = 10  # of the worker threads on Linux, where threads have their own: the event loop takes precedence
CAPACITY = 10_000  # waiting logins
REFUSALS = 50  # waiting logins that are refused or sorted anew in one iteration of the event loop


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


class PasswordAuthenticator(BackgroundAuthenticator):
    """Answers authentication requests by the users in ``passwords``.

    ``timeout`` of one check is in seconds, ``capacity`` in waiting logins, and ``max_bytes``
    in bytes of their long CONNECT packets, also of clients that have left; ``nonce`` gives nonces for SCRAM.
    ``proven`` and ``bans`` are shared with the other authenticators of a broker.
    """

    def __init__(
        self,
        passwords: Passwords,
        timeout: float,
        workers: int = WORKERS,
        capacity: int = CAPACITY,
        nonce: Callable[[], str] = new_nonce,
        proven: ProvenPasswords | None = None,
        bans: Bans | None = None,
        max_bytes: int = 1 << 60,
    ) -> None:
        super().__init__("password_file")
        self.passwords = passwords
        self.timeout = timeout
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.proven = ProvenPasswords(capacity) if proven is None else proven
        self.bans = Bans(BanTerms()) if bans is None else bans
        self._queue: LoginQueue[Login] = LoginQueue()
        self._workers = workers
        self._free = workers
        self._checked_suspects = 0  # in threads now: at most half of them, so that one is soon free for the others
        self._stuck = 0  # threads whose check takes longer than the timeout
        self._start_scheduled = False
        self._new_nonce = nonce
        self._pool = ThreadPoolExecutor(workers, "authentication", _lower_priority)
        self._stopped = False

    @property
    def waiting(self) -> int:
        """Logins that wait for a thread."""
        return len(self._queue)

    def stop(self) -> None:
        """Drop all logins; no request is answered after this."""
        self._stopped = True
        self._queue = LoginQueue()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def replace(self, passwords: Passwords) -> set[str]:
        """Use other passwords from now on; returns the users whose password was changed or removed."""
        before, after = self.passwords.fingerprints, passwords.fingerprints
        self.passwords = passwords
        changed = {name for name, fingerprint in before.items() if after.get(name) != fingerprint}
        for name in changed:
            self.proven.forget(name, before[name])
        self.bans.passwords_changed(changed)
        return changed

    def authenticate(self, request: AuthenticationRequest) -> None:
        if request.method is not None:
            self.continue_exchange(request)
        elif request.username is None or request.password is None or not (request.username or request.password):
            request.ignore()
        elif not request.is_last and request.username not in self.passwords.hashes:
            request.ignore()
        else:
            self.submit(request)

    def submit(self, request: AuthenticationRequest) -> None:
        """Check the password; the answer comes now or later. The caller has refused banned clients."""
        login = Login(request, self.passwords, self.bans.network(request.peer))
        if login.line and self.proven.has(login.username, login.line, login.password):
            self._accept(login)
            return
        if self._stuck == self._workers:
            self._refuse_as_busy(login)
            return
        if login.size and self._queue.size + login.size > self.max_bytes:
            self._update_clock()
            request.reject(QUOTA_EXCEEDED, TOO_MANY_BYTES)
            return
        if len(self._queue) >= self.capacity:
            self._refuse_as_busy(self._queue.pop_newest())
        self._queue.add(login, self._suspects(login))
        self._start_logins()

    def continue_exchange(self, request: AuthenticationRequest) -> None:
        """Take one step of an enhanced authentication. The client computes the hash, so this takes no thread."""
        if request.method != METHOD:
            request.reject(BAD_AUTHENTICATION_METHOD, f"the only method is {METHOD}")
            return
        if request.exchange is None:
            request.exchange = ScramLogin(self.passwords, self._new_nonce())
        login: ScramLogin = request.exchange
        exchange = login.exchange
        now = self._loop.time()
        try:
            answer = exchange.step(request.client_data or b"")
        except ScramError:
            request.username = exchange.username
            request.fail(NOT_AUTHORIZED, WRONG_CREDENTIALS)
            return
        if self.bans.refuses(request.peer, exchange.username, now):
            request.reject(BANNED, BAN_IN_FORCE)
        elif not exchange.done:
            request.send_challenge(answer)
        elif self.passwords.fingerprints.get(exchange.username) != login.passwords.fingerprints.get(exchange.username):
            request.reject(NOT_AUTHORIZED, WRONG_CREDENTIALS)
        else:
            request.username = exchange.username
            request.server_data = answer
            request.accept(Identity(exchange.username))

    def _accept(self, login: Login) -> None:
        login.request.accept(Identity(login.username))

    def _suspects(self, login: Login) -> bool:
        return self.bans.suspects(login.request.peer, login.username, self._loop.time())

    def _start_logins(self) -> None:
        """Give waiting logins to the free threads."""
        refusals = 0
        while self._free > 0:
            login = self._queue.pop(self._checked_suspects < max(1, self._workers // 2))
            if login is None:
                return
            request = login.request
            if not request.waiting:
                pass
            elif self.bans.refuses(request.peer, login.username, self._loop.time()):
                self._update_clock()
                request.reject(BANNED, BAN_IN_FORCE)
            elif not login.suspect and self._suspects(login):
                self._queue.add(login, True)
            else:
                self._free -= 1
                self._checked_suspects += login.suspect
                self._pool.submit(self._check, login, Deadline(self._loop, self.timeout, self._time_out, login))
                continue
            refusals += 1
            if refusals == REFUSALS:
                self._start_later()
                return

    def _start_later(self) -> None:
        if not self._start_scheduled:
            self._start_scheduled = True
            self._loop.call_soon(self._start_scheduled_logins)

    def _start_scheduled_logins(self) -> None:
        self._start_scheduled = False
        if not self._stopped:
            self._start_logins()

    def _check(self, login: Login, timer: Deadline) -> None:
        """Called in a worker thread."""
        right = False
        try:
            right = login.passwords.verify(login.username, login.password)
        except Exception:
            log.exception("event=authentication_failed client=%s", login.request.client_id)
        try:
            self._loop.call_soon_threadsafe(self._checked, login, timer, right)
        except RuntimeError:
            pass  # the broker has stopped

    def _checked(self, login: Login, timer: Deadline, right: bool) -> None:
        timer.cancel()
        self._free += 1
        self._checked_suspects -= login.suspect
        if self._stopped:
            return
        if login.timed_out:
            self._stuck -= 1
        else:
            self._update_clock()
            # The file may have been replaced during the check.
            if right and self.passwords.fingerprints.get(login.username, "") == login.line:
                self.proven.add(login.username, login.line, login.password)
                if login.request.waiting:
                    self._accept(login)
            else:
                login.request.fail(BAD_USER_NAME_OR_PASSWORD, WRONG_CREDENTIALS)
        self._start_logins()

    def _time_out(self, login: Login) -> None:
        """A check takes too long."""
        login.timed_out = True
        self._stuck += 1
        self._refuse_as_busy(login)
        if self._stuck == self._workers:
            self._refuse_all()

    def _refuse_all(self) -> None:
        """Refuse the waiting logins: no thread makes progress."""
        for _ in range(REFUSALS):
            if not self._queue or self._stuck < self._workers:
                return
            self._refuse_as_busy(self._queue.pop_newest())
        self._loop.call_soon(self._refuse_all)

    def _refuse_as_busy(self, login: Login) -> None:
        self._update_clock()
        login.request.reject(SERVER_BUSY, TOO_MANY_LOGINS)
