"""Authentication: passwords are checked beside the event loop, a few at a time.

The rule kept here: a check costs the client that asked for it and nobody else.
Hashes are computed in a few threads; what waits for them is bounded, takes
turns by address, so that one address that guesses does not hold up the others,
and is answered within ``timeout`` seconds, if only with "busy".

Everything but the computing itself happens on the thread of the event loop.
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
from mqttbroker.core.policy import WRONG_CREDENTIALS, Challenge

log = logging.getLogger("mqttbroker")

WORKERS = 2
NICENESS = 10  # of the threads that compute, where a thread has its own: the event loop goes first
CAPACITY = 10_000  # logins that may wait


class Login:
    """One challenge on its way: it waits, is ``running`` in a thread, and is ``done`` once answered."""

    def __init__(self, challenge: Challenge, passwords: Passwords) -> None:
        assert challenge.username is not None and challenge.password is not None
        self.challenge = challenge
        self.passwords = passwords
        self.username: str = challenge.username
        self.password: bytes = challenge.password
        self.host = challenge.peer.rpartition(":")[0]
        self.timer: Optional[asyncio.TimerHandle] = None
        self.running = False
        self.done = False


class Conversation:
    """A SCRAM exchange and the file it goes by."""

    def __init__(self, passwords: Passwords, nonce: str) -> None:
        self.passwords = passwords
        self.exchange = Exchange(passwords.scram, nonce)


def _step_back() -> None:
    """Let whoever else wants to compute go before this thread."""
    if sys.platform == "linux":
        niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def new_nonce() -> str:
    return secrets.token_urlsafe(18)


class Authenticator:
    """Answers challenges by ``passwords``, which may be replaced at any time.  Times in seconds."""

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
        self._pool = ThreadPoolExecutor(workers, "authentication", _step_back)
        self._queues: OrderedDict[str, deque[Login]] = OrderedDict()  # by host; whose turn it is comes first
        # What was right before is right at once, so that a thousand devices that come back
        # together are back together: user -> line of the file and keyed digest of the password.
        self._known: dict[str, tuple[str, bytes]] = {}
        self._key = os.urandom(32)

    def start(self, loop: asyncio.AbstractEventLoop, tell_time: Callable[[], object]) -> None:
        """``tell_time`` is called before an answer."""
        self._loop = loop
        self._tell_time = tell_time

    def stop(self) -> None:
        """Nobody is answered any more."""
        self._queues.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def replace(self, passwords: Passwords) -> set[str]:
        """Judge by another file; gives the users whose password changed or is gone."""
        before, after = self.passwords.fingerprints, passwords.fingerprints
        self.passwords = passwords
        changed = {name for name, line in before.items() if after.get(name) != line}
        for name in changed:
            self._known.pop(name, None)
        return changed

    def submit(self, challenge: Challenge) -> None:
        """Answer now or later."""
        login = Login(challenge, self.passwords)
        if self._is_known(login):
            challenge.accept()
            return
        if self.waiting >= self.capacity:
            self._make_room()
        login.timer = self._loop.call_later(self.timeout, self._give_up, login)
        self._queues.setdefault(login.host, deque()).append(login)
        self.waiting += 1
        self._next()

    def converse(self, challenge: Challenge) -> None:
        """One step of an enhanced authentication.  The client does the computing, so this is short."""
        if challenge.method != METHOD:
            challenge.reject(BAD_AUTHENTICATION_METHOD, f"the only method is {METHOD}")
            return
        if challenge.exchange is None:
            challenge.exchange = Conversation(self.passwords, self._new_nonce())
        conversation: Conversation = challenge.exchange
        exchange = conversation.exchange
        try:
            answer = exchange.step(challenge.data or b"")
        except ScramError:
            challenge.reject(NOT_AUTHORIZED, WRONG_CREDENTIALS)
            return
        if not exchange.done:
            challenge.ask(answer)
        elif self._line(exchange.username) != conversation.passwords.fingerprints.get(exchange.username):
            challenge.reject(NOT_AUTHORIZED, WRONG_CREDENTIALS)
        else:
            challenge.username = exchange.username
            challenge.answer = answer
            challenge.accept()

    def _line(self, username: str) -> Optional[str]:
        return self.passwords.fingerprints.get(username)

    def _is_known(self, login: Login) -> bool:
        line, digest = self._known.get(login.username, ("", b""))
        return (
            line != ""
            and line == self.passwords.fingerprints.get(login.username)
            and hmac.compare_digest(digest, self._digest(login))
        )

    def _digest(self, login: Login) -> bytes:
        return hmac.digest(self._key, login.password, "sha256")

    def _make_room(self) -> None:
        """Turn away the newest of the address that has most waiting."""
        host = max(self._queues, key=lambda name: len(self._queues[name]))
        self._busy(self._take(host, -1))

    def _take(self, host: str, index: int) -> Login:
        """A login that waits, which from now on does not; its address goes to the end."""
        queue = self._queues[host]
        login = queue[index]
        del queue[index]
        self.waiting -= 1
        if queue:
            self._queues.move_to_end(host)
        else:
            del self._queues[host]
        return login

    def _next(self) -> None:
        """Give the free threads work."""
        while self._free > 0 and self._queues:
            login = self._take(next(iter(self._queues)), 0)
            if not login.challenge.waiting:
                self._end(login)
                continue
            login.running = True
            self._free -= 1
            self._pool.submit(self._check, login)

    def _check(self, login: Login) -> None:
        """In a thread of the pool."""
        right = False
        try:
            right = login.passwords.verify(login.username, login.password)
        except Exception:
            log.exception("event=authentication_failed client=%s", login.challenge.client_id)
        try:
            self._loop.call_soon_threadsafe(self._checked, login, right)
        except RuntimeError:
            pass  # the broker has stopped

    def _checked(self, login: Login, right: bool) -> None:
        self._free += 1
        if not login.done:
            self._end(login)
            self._tell_time()
            line = login.passwords.fingerprints.get(login.username, "")
            # What was right by a file that is no longer the file is not right.
            if right and self.passwords.fingerprints.get(login.username) == line:
                self._known[login.username] = (line, self._digest(login))
                login.challenge.accept()
            else:
                login.challenge.reject(BAD_USER_NAME_OR_PASSWORD, WRONG_CREDENTIALS)
        self._next()

    def _give_up(self, login: Login) -> None:
        """The time is over."""
        if not login.running:
            queue = self._queues[login.host]
            self._take(login.host, queue.index(login))
        self._busy(login)

    def _busy(self, login: Login) -> None:
        self._end(login)
        self._tell_time()
        login.challenge.reject(SERVER_BUSY, "too many clients are being authenticated")

    def _end(self, login: Login) -> None:
        login.done = True
        if login.timer is not None:
            login.timer.cancel()
