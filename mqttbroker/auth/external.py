"""Authentication by a plug-in in another process: the HTTP callback, or one that the operator has written.

Logins wait in a bounded, fair queue, and a bounded number of them is with the plug-in. A plug-in that raises, hangs or
answers nonsense refuses that login; one that blocks or ends its process refuses those that it has, and is started again.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mqttbroker.auth.answer_cache import AnswerCache
from mqttbroker.auth.background import BackgroundAuthenticator
from mqttbroker.auth.login_queue import SHORT, TOO_MANY_BYTES, TOO_MANY_LOGINS, LoginQueue, WaitingLogin
from mqttbroker.auth.permissions import PermissionsError, PermissionsReader
from mqttbroker.auth.plugin_process import PluginConnection, PluginFailed, PluginProcess, PluginSpec
from mqttbroker.codec.data_types import text_of
from mqttbroker.codec.reason_codes import (
    BAD_USER_NAME_OR_PASSWORD,
    BANNED,
    NOT_AUTHORIZED,
    QUOTA_EXCEEDED,
    SERVER_BUSY,
    MQTTError,
)
from mqttbroker.core.access.bans import Bans
from mqttbroker.core.access.policy import BAN_IN_FORCE, WRONG_CREDENTIALS, AuthenticationRequest, Identity
from mqttbroker.core.terms.deadline import Deadline
from mqttbroker.system.defects import keep_running

log = logging.getLogger("mqttbroker.auth")

GRACE = 1.0  # seconds after the plug-in's timeout until its process counts as stuck
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds until a process that ended is started again
REPEATED = 10.0  # seconds until the same reason of failures is logged again
SKIPPED = 50  # waiting logins that are refused or dropped in one iteration of the event loop


@dataclass(frozen=True)
class ExternalTerms:
    """Times in seconds, sizes in bytes."""

    max_concurrent: int
    max_waiting: int
    max_bytes: int
    max_wait: float
    cache_ttl: float
    cache_bytes: int


class ExternalLogin(WaitingLogin):
    """A login that waits for the plug-in, or is with it."""

    def __init__(self, request: AuthenticationRequest, fields: bytes, address: str) -> None:
        super().__init__(address, request.size + len(fields) if request.size >= SHORT else 0)
        self.request = request
        self.fields = fields  # JSON
        self.timer: Deadline | None = None  # until it is refused because it waits for too long


class _Call:
    """A login that is with the plug-in. ``timer`` = until the process counts as stuck."""

    def __init__(self, login: ExternalLogin, timer: Deadline) -> None:
        self.login = login
        self.timer = timer


class _Process:
    """A process and the calls that it has."""

    def __init__(self, connection: PluginConnection) -> None:
        self.connection = connection
        self.calls: dict[int, _Call] = {}


class ExternalAuthenticator(BackgroundAuthenticator):
    """Has logins decided by the plug-in of ``spec``.

    Starts its process, and raises PluginFailed if the plug-in cannot be loaded.
    """

    def __init__(self, kind: str, spec: PluginSpec, terms: ExternalTerms, bans: Bans) -> None:
        super().__init__(kind)
        self.terms = terms
        self._spec = self._next_spec = spec
        self._bans = bans
        self._permissions = PermissionsReader()
        self._unconnected = PluginProcess(spec, kind)  # the last process that was started
        self._unconnected.start()
        self._cache = AnswerCache(terms.cache_ttl, terms.cache_bytes)
        self._queue: LoginQueue[ExternalLogin] = LoginQueue()
        self._process: _Process | None = None  # the one that gets new logins
        self._retired: list[_Process] = []  # with calls of before a reload
        self._calls = 0
        self._suspect_calls = 0
        self._next_number = 0
        self._pause = FIRST_PAUSE
        self._start_scheduled = False
        self.failures = 0  # logins without a decision
        self.restarts = 0  # starts of a process after another one has ended
        self._unlogged = 0  # failures since the last one was logged
        self._logged = ("", 0.0)  # the last reason, and when
        self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()

    # -- the life of the process ------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop, update_clock: Callable[[], object]) -> None:
        super().start(loop, update_clock)
        self._run(self._connect(self._unconnected))

    def stop(self) -> None:
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        self._unconnected.close()
        if self._process is None and not self._tasks:
            self._unconnected.sock.close()
        for process in [self._process, *self._retired]:
            if process is not None:
                process.connection.kill()

    async def reload(self) -> list[str]:
        """Load the plug-in again, in a new process; the old one finishes the logins that it has."""
        spec = self._next_spec
        try:
            process = await self._start_process(spec)
        except PluginFailed as error:
            return [f"{self.kind}: {error}"]
        self._spec = spec
        self._cache = AnswerCache(self.terms.cache_ttl, self.terms.cache_bytes)
        old, self._process = self._process, None
        if old is not None:
            self._retired.append(old)
            self._end_if_idle(old)
        await self._connect(process)
        log.info("event=authenticator_reloaded authenticator=%s", self.kind)
        return []

    def configure(self, spec: PluginSpec, terms: ExternalTerms) -> None:
        """Use other settings; those of the plug-in from the next reload on."""
        self._next_spec = spec
        self.terms = terms

    async def _start_process(self, spec: PluginSpec) -> PluginProcess:
        """Raises PluginFailed."""
        process = self._unconnected = PluginProcess(spec, self.kind)
        await self._loop.run_in_executor(None, process.start)
        return process

    async def _connect(self, process: PluginProcess) -> None:
        connection = PluginConnection(process, self._answered, self._lost)
        try:
            await connection.open()
        except BaseException:
            process.close()
            raise
        if self._stopped:
            connection.kill()
            return
        self._process = _Process(connection)
        self._start_calls()

    def _run(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _lost(self, connection: PluginConnection) -> None:
        """The process has ended."""
        process = self._process_of(connection)
        if process is None or self._stopped:
            return
        lost, process.calls = process.calls, {}
        for call in lost.values():
            self._end_call(call)
            self._refuse(call.login, "the process of the authenticator ended")
        if process is self._process:
            self._process = None
            log.error("event=authenticator_ended authenticator=%s seconds_until_restart=%g", self.kind, self._pause)
            self._loop.call_later(self._pause, lambda: self._run(keep_running("authenticator", self._start_again)))
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        else:
            self._retired.remove(process)

    async def _start_again(self) -> None:
        if self._process is not None or self._stopped:
            return
        try:
            process = await self._start_process(self._spec)
        except PluginFailed as error:
            log.error("event=authenticator_not_started authenticator=%s reason=%s", self.kind, error)
            self._loop.call_later(self._pause, lambda: self._run(keep_running("authenticator", self._start_again)))
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            return
        if self._process is None:  # no reload was faster
            self.restarts += 1
            await self._connect(process)
        else:
            process.close()

    def _process_of(self, connection: PluginConnection) -> _Process | None:
        processes = [process for process in (self._process, *self._retired) if process is not None]
        return next((process for process in processes if process.connection is connection), None)

    def _end_if_idle(self, process: _Process) -> None:
        if process is not self._process and not process.calls:
            process.connection.kill()

    # -- logins -----------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Logins that are not with the plug-in yet."""
        return len(self._queue)

    @property
    def in_progress(self) -> int:
        """Logins that are with the plug-in."""
        return self._calls

    @property
    def up(self) -> bool:
        """Whether there is a process that takes logins."""
        return self._process is not None

    def authenticate(self, request: AuthenticationRequest) -> None:
        if request.method is not None:
            request.ignore()
            return
        fields = login_fields(request)
        cached = self._remembered(fields) if self.terms.cache_ttl else None
        if cached is not None:
            self._decide(request, cached)
            return
        login = ExternalLogin(request, fields, self._bans.network(request.peer))
        if login.size and self._queue.size + login.size > self.terms.max_bytes:
            request.reject(QUOTA_EXCEEDED, TOO_MANY_BYTES)
            return
        self._queue.add(login, self._suspects(request))
        login.timer = Deadline(self._loop, self.terms.max_wait, self._time_out, login)
        if len(self._queue) > self.terms.max_waiting:
            newest = self._queue.pop_newest()
            self._stop_timer(newest)
            if newest.request.waiting:
                newest.request.reject(SERVER_BUSY, TOO_MANY_LOGINS)
        self._start_calls()

    def _remembered(self, fields: bytes) -> dict[str, Any] | None:
        """The remembered answer to a login; None if there is none, or if its permission has ended."""
        answer = self._cache.get(self._cache.digest(fields), self._loop.time())
        expires_at = None if answer is None else answer.get("expires_at")
        if isinstance(expires_at, (int, float)) and expires_at <= time.time():
            return None
        return answer

    def _start_calls(self) -> None:
        """Give waiting logins to the plug-in."""
        skipped = 0
        while self._process is not None and self._calls < self.terms.max_concurrent:
            login = self._queue.pop(self._suspect_calls < max(1, self.terms.max_concurrent // 2))
            if login is None:
                return
            request = login.request
            if not request.waiting:
                self._stop_timer(login)
            elif self._bans.refuses(request.peer, request.username, self._loop.time()):
                self._stop_timer(login)
                self._update_clock()
                request.reject(BANNED, BAN_IN_FORCE)
            elif not login.suspect and self._suspects(request):
                self._queue.add(login, True)
            else:
                self._call(self._process, login)
                continue
            skipped += 1
            if skipped == SKIPPED:
                self._start_later()
                return

    def _call(self, process: _Process, login: ExternalLogin) -> None:
        self._next_number += 1
        number = self._next_number
        timer = Deadline(self._loop, self._spec.timeout + GRACE, self._stuck, process)
        process.calls[number] = _Call(login, timer)
        self._calls += 1
        self._suspect_calls += login.suspect
        process.connection.send(number, login.fields)

    def _answered(self, connection: PluginConnection, answer: dict[str, Any]) -> None:
        """Called with an answer of a process."""
        process = self._process_of(connection)
        call = None if process is None else process.calls.pop(answer.get("id", 0), None)
        if process is None or call is None:
            return
        self._end_call(call)
        self._pause = FIRST_PAUSE
        login = call.login
        if "error" in answer:
            self._refuse(login, str(answer["error"]))
        else:
            if process is self._process:  # no answer of a plug-in that a reload has replaced
                # Also if the client has left: it asks again soon.
                self._cache.put(self._cache.digest(login.fields), answer, self._loop.time())
            self._update_clock()
            try:
                self._decide(login.request, answer)
            except Exception:
                log.exception("event=defect in=%s client=%s", self.kind, login.request.client_id)
                login.request.unavailable("the authenticator failed")
        self._end_if_idle(process)
        self._start_calls()

    def _decide(self, request: AuthenticationRequest, answer: dict[str, Any]) -> None:
        result = answer.get("result")
        if result == "ignore":
            request.ignore()
        elif result == "deny":
            if request.username is None and request.password is None:
                request.reject(NOT_AUTHORIZED, "the authenticator refused the client")
            else:
                request.fail(BAD_USER_NAME_OR_PASSWORD, WRONG_CREDENTIALS)
        else:
            try:
                identity = self._identity(request, answer)
            except ValueError as error:
                self._log_failure(request, f"invalid answer: {error}")
                request.unavailable("the authenticator failed")
                return
            if identity.expires_at and identity.expires_at <= time.time():
                request.reject(NOT_AUTHORIZED, "the login has expired")
            else:
                request.accept(identity)

    def _identity(self, request: AuthenticationRequest, answer: dict[str, Any]) -> Identity:
        """Raises ValueError with the reason."""
        username = _text(answer, "username")
        expires_at = answer.get("expires_at")
        if expires_at is not None:
            if isinstance(expires_at, bool) or not isinstance(expires_at, (int, float)) or not math.isfinite(expires_at):
                raise ValueError("the expiry is no Unix time")
            if expires_at <= 0:
                raise ValueError("the expiry is no Unix time")
        acl = answer.get("acl")
        try:
            permissions = None if acl is None else self._permissions.of_claim(acl)
        except PermissionsError as error:
            raise ValueError(f"acl: {error}") from None
        return Identity(
            (request.username or None) if username is None else username,
            _text(answer, "client_id"),
            permissions,
            0.0 if expires_at is None else float(expires_at),
        )

    def _suspects(self, request: AuthenticationRequest) -> bool:
        return self._bans.suspects(request.peer, request.username or "", self._loop.time())

    def _refuse(self, login: ExternalLogin, reason: str) -> None:
        self._log_failure(login.request, reason)
        self._update_clock()
        if login.request.waiting:
            login.request.unavailable("the authenticator failed")

    def _log_failure(self, request: AuthenticationRequest, reason: str) -> None:
        """Log the reason of a failure once, and again after `REPEATED` seconds, with the count of those meanwhile."""
        self.failures += 1
        self._unlogged += 1
        now = self._loop.time()
        last_reason, last_time = self._logged
        if reason == last_reason and now - last_time < REPEATED:
            return
        self._logged = (reason, now)
        log.warning("event=authenticator_failed authenticator=%s client=%s address=%s reason=%s failures=%d",
                    self.kind, request.client_id, request.peer, reason, self._unlogged)  # fmt: skip
        self._unlogged = 0

    def _time_out(self, login: ExternalLogin) -> None:
        """A login has waited for too long, in the queue or for its answer."""
        login.timer = None
        if login.request.waiting:
            self._refuse(login, "no answer in time")

    def _stuck(self, process: _Process) -> None:
        """The plug-in has not even noticed its own timeout: it blocks the event loop of its process."""
        log.error("event=authenticator_stuck authenticator=%s", self.kind)
        process.connection.kill()

    def _end_call(self, call: _Call) -> None:
        self._calls -= 1
        self._suspect_calls -= call.login.suspect
        call.timer.cancel()
        self._stop_timer(call.login)

    def _stop_timer(self, login: ExternalLogin) -> None:
        if login.timer is not None:
            login.timer.cancel()
            login.timer = None

    def _start_later(self) -> None:
        if not self._start_scheduled:
            self._start_scheduled = True
            self._loop.call_soon(self._start_scheduled_calls)

    def _start_scheduled_calls(self) -> None:
        self._start_scheduled = False
        if not self._stopped:
            self._start_calls()


def login_fields(request: AuthenticationRequest) -> bytes:
    """The fields of `mqttbroker.auth.plugin.Login` in JSON, the password in Base64."""
    password = request.password
    address, _, port = request.peer.rpartition(":")
    return json.dumps(
        {
            "client_id": request.client_id,
            "username": request.username,
            "password": None if password is None else base64.b64encode(password).decode(),
            "address": address if port.isdecimal() else "local",
            "listener": request.listener,
            "certificate_name": request.certificate_name,
            "version": request.version,
        }
    ).encode()


def _text(answer: dict[str, Any], name: str) -> str | None:
    found = answer.get(name)
    if found is None:
        return None
    try:
        text = text_of(found.encode("utf-8")) if isinstance(found, str) and len(found) <= 65_535 else ""
    except (MQTTError, UnicodeEncodeError):
        text = ""
    if not text or len(text.encode("utf-8")) > 65_535:
        raise ValueError(f"the {name} is no MQTT string")
    return text
