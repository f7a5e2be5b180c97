"""A key set that is read from a URL, and again at intervals and for tokens with an unknown key id.

Each fetch runs in a thread of its own with its own small event loop. If it fails, the last good keys stay in use.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import aiohttp

from mqttbroker.auth.jwt_keys import JwtKeyError, KeySet, keys_of_jwks
from mqttbroker.config.setting_kinds import shown_url
from mqttbroker.config.settings import Jwt

log = logging.getLogger("mqttbroker.auth")

GIVE_UP: Final = 1.0  # seconds beyond the timeout after which a fetch has failed, even if its thread hangs


class FetchError(Exception):
    """One line with the reason."""


async def _get(url: str, timeout: float, max_size: int, context: ssl.SSLContext | None) -> bytes:
    headers = {"Accept": "application/jwk-set+json, application/json", "Accept-Encoding": "identity"}
    async with asyncio.timeout(timeout):
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            async with session.get(url, headers=headers, ssl=context or True, allow_redirects=False) as response:
                if response.status != 200:
                    raise FetchError(f"HTTP status {response.status}")
                data = b""
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > max_size:
                        raise FetchError(f"more than {max_size} bytes")
                return data


def fetch(url: str, timeout: float, max_size: int, cafile: Path | None) -> bytes:
    """The body at a URL; ``timeout`` in seconds for all of it. Raises FetchError."""
    try:
        context = None if cafile is None else ssl.create_default_context(cafile=str(cafile))
        return asyncio.run(_get(url, timeout, max_size, context))
    except TimeoutError:
        raise FetchError(f"no answer in {timeout:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise FetchError(str(error).replace(url, shown_url(url)) or type(error).__name__) from None


class JwksUrl:
    """The key set at ``settings.jwks_url``. ``keys`` is None until the first fetch succeeds.

    ``on_answer`` is called on the event loop after each fetch, whether it succeeded or not; its argument says whether the
    keys have changed.
    """

    def __init__(self, settings: Jwt, on_answer: Callable[[bool], None]) -> None:
        self.settings = settings
        self._on_answer = on_answer
        self.shown = shown_url(str(settings.jwks_url))  # for logs and reports
        self.keys: KeySet | None = None
        self.error = ""  # of the last fetch
        self.fetched_at = 0.0  # Unix seconds of the last successful fetch
        self.successes = 0
        self.failures = 0
        self._fetch = 0  # number of the fetch in progress, 0 = none
        self._started = 0
        self._next_allowed = 0.0  # on the clock of the loop
        self._timer: asyncio.TimerHandle | None = None
        self._give_up: asyncio.TimerHandle | None = None
        self._stopped = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._begin()

    def stop(self) -> None:
        self._stopped = True
        for timer in (self._timer, self._give_up):
            if timer is not None:
                timer.cancel()

    @property
    def key_count(self) -> int:
        return 0 if self.keys is None else len(self.keys.keys)

    @property
    def fetching(self) -> bool:
        return self._fetch != 0

    def request_refresh(self) -> bool:
        """Fetch now unless the last fetch was too recent; returns whether a fetch is in progress, and an answer comes."""
        if not self.fetching and self._loop.time() >= self._next_allowed:
            self._begin()
        return self.fetching

    def refresh(self) -> None:
        """Fetch now, however recent the last fetch was."""
        if not self.fetching:
            self._begin()

    def _begin(self) -> None:
        if self._stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
        settings = self.settings
        self._started += 1
        self._fetch = self._started
        self._next_allowed = self._loop.time() + settings.jwks_min_interval
        self._give_up = self._loop.call_later(settings.jwks_timeout + GIVE_UP, self._answered, self._fetch, None, "no answer in time")
        threading.Thread(target=self._run, args=(self._fetch,), name="jwks", daemon=True).start()

    def _run(self, number: int) -> None:
        """Called in a thread."""
        settings = self.settings
        keys: KeySet | None = None
        error = ""
        try:
            data = fetch(str(settings.jwks_url), settings.jwks_timeout, settings.jwks_max_size, settings.jwks_cafile)
            keys = keys_of_jwks(data, settings.algorithms, False)
        except (FetchError, JwtKeyError) as problem:
            error = str(problem)
        except Exception as problem:
            log.exception("event=defect in=jwks")
            error = type(problem).__name__
        try:
            self._loop.call_soon_threadsafe(self._answered, number, keys, error)
        except RuntimeError:
            pass  # the broker has stopped

    def _answered(self, number: int, keys: KeySet | None, error: str) -> None:
        if number != self._fetch or self._stopped:
            return
        self._fetch = 0
        if self._give_up is not None:
            self._give_up.cancel()
        settings = self.settings
        changed = False
        if keys is None:
            self.failures += 1
            self.error = error
            log.error("event=jwks_failed url=%s reason=%s", self.shown, error)
        else:
            self.successes += 1
            self.fetched_at = time.time()
            changed = self.keys is None or self.keys.text != keys.text
            self.keys = keys
            if self.error or changed:
                log.info("event=jwks_fetched url=%s keys=%d kids=%s", self.shown, self.key_count, kids(keys))
            self.error = ""
        delay = settings.jwks_min_interval if keys is None else settings.jwks_refresh
        self._timer = self._loop.call_later(min(delay, settings.jwks_refresh), self.refresh)
        self._on_answer(changed)


def kids(keys: KeySet) -> str:
    """The key ids for the log."""
    return ",".join(key.kid or "-" for key in keys.keys)
