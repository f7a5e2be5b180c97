"""Authentication with JSON Web Tokens.

Tokens are verified on the event loop, for a bounded time in each iteration: a token takes 30 to 460 µs, and a thread would
gain nothing, because the library holds the interpreter's lock. Tokens that were right are remembered by their digest.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from mqttbroker.auth.background import BackgroundAuthenticator
from mqttbroker.auth.jwks_url import JwksUrl
from mqttbroker.auth.jwt_keys import JwtKeyError, KeySet, keys_of_jwks, keys_of_pem, keys_of_secret
from mqttbroker.auth.jwt_tokens import Token, TokenError, TokenVerifier, UnknownKeyError, looks_like_token
from mqttbroker.auth.login_queue import SHORT, TOO_MANY_BYTES, TOO_MANY_LOGINS
from mqttbroker.auth.permissions import PermissionsReader
from mqttbroker.auth.remembered_tokens import RememberedTokens
from mqttbroker.codec.reason_codes import BAD_USER_NAME_OR_PASSWORD, NOT_AUTHORIZED, QUOTA_EXCEEDED, SERVER_BUSY
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Jwt
from mqttbroker.core.access.policy import AuthenticationRequest

TURN: Final = 0.002  # seconds of verification in one iteration of the event loop
MAX_FILE_BYTES: Final = 1 << 20


class _Login:
    """A request with a token; ``retried`` if keys were fetched for it."""

    def __init__(self, request: AuthenticationRequest, text: str) -> None:
        self.request = request
        self.text = text
        self.size = request.size if request.size >= SHORT else 0
        self.retried = False


class JwtAuthenticator(BackgroundAuthenticator):
    """Answers authentication requests that have a token, by the keys that the settings name.

    ``settings`` may be replaced, and are in force from the next `reload` that succeeds. ``capacity`` is in waiting
    requests, and ``max_bytes`` of their CONNECT packets that are long. Raises ConfigError if the keys cannot be read.
    """

    def __init__(self, settings: Jwt, capacity: int, max_bytes: int = 1 << 60) -> None:
        super().__init__("jwt")
        self.settings = settings
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.jwks: JwksUrl | None = None
        self._permissions = PermissionsReader()
        self._verifier = TokenVerifier(settings, self._permissions)
        self._in_force = settings
        self._keys = read_keys(settings)
        self._remembered = RememberedTokens(settings.max_remembered_bytes)
        self._queue: deque[_Login] = deque()
        self._waiting_for_keys: list[_Login] = []
        self._waiting_bytes = 0  # of both
        self._used = 0.0  # of this iteration's turn
        self._scheduled = False
        if settings.jwks_url is not None:
            self.jwks = JwksUrl(settings, self._jwks_answered)

    def start(self, loop: asyncio.AbstractEventLoop, update_clock: Callable[[], object]) -> None:
        super().start(loop, update_clock)
        if self.jwks is not None:
            self.jwks.start(loop)

    def stop(self) -> None:
        self._queue.clear()
        self._waiting_for_keys.clear()
        if self.jwks is not None:
            self.jwks.stop()

    async def reload(self) -> list[str]:
        """Use ``settings`` and read the keys again."""
        loop = asyncio.get_running_loop()
        settings = self.settings
        try:
            keys = await loop.run_in_executor(None, read_keys, settings)
        except ConfigError as error:
            return error.problems
        if settings == self._in_force and _text(keys) == _text(self._keys):
            if self.jwks is not None:
                self.jwks.refresh()
            return []
        self._in_force = settings
        self._verifier = TokenVerifier(settings, self._permissions)
        self._keys = keys
        self._forget_tokens()
        self._replace_jwks()
        return []

    def _replace_jwks(self) -> None:
        """Use the URL of the settings in force. If it is the same, its keys stay in use until others are fetched."""
        settings, old = self._in_force, self.jwks
        if settings.jwks_url is None:
            self.jwks = None
        else:
            self.jwks = JwksUrl(settings, self._jwks_answered)
            if old is not None and (old.settings.jwks_url, old.settings.algorithms) == (settings.jwks_url, settings.algorithms):
                self.jwks.keys = old.keys
            self.jwks.start(self._loop)
        if old is not None:
            old.stop()
            self._jwks_answered(True)

    @property
    def problems(self) -> list[str]:
        """Present problems of the keys, for /readyz."""
        if self.jwks is None or not self.jwks.error:
            return []
        state = "no keys yet" if self.jwks.keys is None else "the last keys stay in use"
        return [f"jwt: {self.jwks.shown}: {self.jwks.error}; {state}"]

    # --- logins ---------------------------------------------------------------------------------------------------

    def authenticate(self, request: AuthenticationRequest) -> None:
        text = self._token_of(request)
        if text is None:
            request.ignore()
        elif len(text) > self._in_force.max_token_size:
            self._refuse(request, TokenError("the token is too large"))
        else:
            token = self._remembered.get(text)
            if token is not None:
                self._accept(request, token)
            elif not self._queue and self._used <= TURN:
                self._check(_Login(request, text))
                self._schedule()
            else:
                login = _Login(request, text)
                if self._may_wait(login):
                    self._queue.append(login)
                    self._schedule()

    def _token_of(self, request: AuthenticationRequest) -> str | None:
        """The token; None if the client has something else."""
        if request.method is not None:
            return None
        text = request.username
        if self._in_force.token_in == "password":
            if request.password is None or not request.password.isascii():
                return None
            text = request.password.decode("ascii")
        return text if text is not None and looks_like_token(text) else None

    def _may_wait(self, login: _Login) -> bool:
        """Whether there is room for one more waiting request; refuses it if not."""
        if len(self._queue) + len(self._waiting_for_keys) >= self.capacity:
            login.request.reject(SERVER_BUSY, TOO_MANY_LOGINS)
            return False
        if login.size and self._waiting_bytes + login.size > self.max_bytes:
            login.request.reject(QUOTA_EXCEEDED, TOO_MANY_BYTES)
            return False
        self._waiting_bytes += login.size
        return True

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._scheduled = False
        self._used = 0.0
        self._update_clock()
        while self._queue and self._used <= TURN:
            login = self._queue.popleft()
            self._waiting_bytes -= login.size
            if login.request.waiting:
                self._check(login)
        if self._queue:
            self._schedule()

    def _check(self, login: _Login) -> None:
        """Verify a token, and answer unless keys have to be fetched first."""
        began = time.perf_counter()
        keys = self._keys if self.jwks is None else self.jwks.keys
        try:
            if keys is None:
                raise UnknownKeyError
            token = self._verifier.verify(login.text, keys)
        except UnknownKeyError as error:
            self._unknown_key(login, error)
        except TokenError as error:
            self._refuse(login.request, error)
        else:
            self._remembered.add(login.text, token)
            self._accept(login.request, token)
        finally:
            self._used += time.perf_counter() - began

    def _unknown_key(self, login: _Login, error: UnknownKeyError) -> None:
        jwks = self.jwks
        if jwks is None:
            self._refuse(login.request, error)
        elif not login.retried and jwks.request_refresh():
            if self._may_wait(login):
                self._waiting_for_keys.append(login)
        elif jwks.keys is None or jwks.error:
            login.request.unavailable("the keys for tokens cannot be fetched")
        else:  # the key may be newer than the last fetch, so this does not count towards a ban
            login.request.reject(BAD_USER_NAME_OR_PASSWORD, str(error))

    def _jwks_answered(self, changed: bool) -> None:
        """Keys were fetched, or not."""
        if changed:
            self._forget_tokens()
        for login in self._waiting_for_keys:
            login.retried = True
            self._queue.append(login)
        self._waiting_for_keys.clear()
        if self._queue:
            self._schedule()

    def _accept(self, request: AuthenticationRequest, token: Token) -> None:
        try:
            identity = token.identity(request.client_id, request.username, time.time())
        except TokenError as error:
            self._refuse(request, error)
        else:
            request.accept(identity)

    def _refuse(self, request: AuthenticationRequest, error: TokenError) -> None:
        if error.genuine:  # no guess, so it does not count towards a ban
            request.reject(NOT_AUTHORIZED, str(error))
        else:
            request.fail(BAD_USER_NAME_OR_PASSWORD, str(error))

    def _forget_tokens(self) -> None:
        self._remembered = RememberedTokens(self._in_force.max_remembered_bytes)


def _text(keys: KeySet | None) -> bytes | None:
    return None if keys is None else keys.text


def read_keys(settings: Jwt) -> KeySet | None:
    """The keys in the settings or in the file that they name; None for a URL. Raises ConfigError."""
    algorithms = settings.algorithms
    if settings.secret is not None:
        key = "jwt.secret" if settings.secret_file is None else f"jwt.secret_file: {settings.secret_file}"
        try:
            return keys_of_secret(settings.secret, settings.secret_base64, algorithms)
        except JwtKeyError as error:
            raise ConfigError([f"{key}: {error}"]) from None
    key = "jwt.public_key_file" if settings.public_key_file is not None else "jwt.jwks_file"
    path = settings.public_key_file or settings.jwks_file or settings.jwks_cafile
    if path is None:
        return None
    if settings.jwks_url is not None:
        key = "jwt.jwks_cafile"
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise JwtKeyError(f"more than {MAX_FILE_BYTES} bytes")
        if settings.public_key_file is not None:
            return keys_of_pem(data, algorithms)
        if settings.jwks_file is not None:
            return keys_of_jwks(data, algorithms, True)
        if b"BEGIN CERTIFICATE" not in data:
            raise JwtKeyError("no certificate in PEM format")
    except OSError as error:
        raise ConfigError([f"{key}: {path}: cannot be read: {error.strerror or error}"]) from None
    except JwtKeyError as error:
        raise ConfigError([f"{key}: {path}: {error}"]) from None
    return None
