"""Authentication by an HTTP server: a plug-in that the broker runs in its own process, as others.

The login is the JSON body of a POST request. The answer is 204, or 200 with ``{"result": "allow" | "deny" | "ignore"}``
and, with "allow", ``username``, ``client_id``, ``acl`` and ``expire_at`` if they are to be set. Anything else is no
decision.
"""

from __future__ import annotations

import base64
import json
import re
import ssl
from collections.abc import Mapping
from typing import Any

import aiohttp
from yarl import URL

from mqttbroker.auth.plugin import Accepted, Answer, Ignored, Login, Rejected, Unavailable

_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")


class HttpCallback:
    """Asks the server at ``url``, which may have no password in it.

    ``body`` has templates of the values of its keys. A value that is one placeholder is null if the login does not have
    it; elsewhere it is empty then. ``headers`` are sent with each request. ``max_answer`` is in bytes.
    """

    def __init__(
        self,
        url: str,
        body: Mapping[str, str],
        headers: Mapping[str, str],
        cafile: str | None,
        max_concurrent: int,
        max_answer: int,
    ) -> None:
        self._url = URL(url)
        self._body = body
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **headers}
        self._max_answer = max_answer
        self._max_concurrent = max_concurrent
        self._tls = tls_context(cafile) if self._url.scheme == "https" else None
        self._session: aiohttp.ClientSession | None = None

    async def authenticate(self, login: Login) -> Answer:
        body = render(self._body, login)
        if body is None:
            return Rejected()  # a JSON string cannot have this password
        try:
            status, answer = await self._post(body)
        except aiohttp.ClientError as error:
            raise Unavailable(f"{self._url.host}: {type(error).__name__}: {error}") from None
        if status == 204:
            return Accepted()
        if status != 200:
            raise Unavailable(f"{self._url.host}: answered with status {status}")
        return parse(answer)

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_concurrent, ssl=self._tls or True)
            timeout = aiohttp.ClientTimeout(total=None)  # the caller has one
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar, auto_decompress=False)
        async with self._session.post(self._url, data=body, headers=self._headers, allow_redirects=False) as response:
            answer = b""
            while response.status == 200:
                part = await response.content.read(self._max_answer + 1 - len(answer))
                answer += part
                if len(answer) > self._max_answer:
                    response.close()
                    raise Unavailable(f"{self._url.host}: answered with more than {self._max_answer} bytes")
                if not part:
                    break
            else:
                response.close()  # the rest of the answer may be endless
            return response.status, answer

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def tls_context(cafile: str | None) -> ssl.SSLContext:
    """The context that verifies the server, by the authorities of a file or of the system. Raises OSError."""
    if cafile is None:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cafile=cafile)
    except ssl.SSLError:
        raise OSError(f"cafile {cafile}: not PEM, or damaged") from None
    except OSError as error:
        raise OSError(f"cafile {cafile}: {error.strerror}") from None


def render(body: Mapping[str, str], login: Login) -> bytes | None:
    """The body of a request; None if it needs the password as text, and that is not UTF-8."""
    password = login.password
    values: dict[str, str | None] = {
        "username": login.username,
        "password_base64": None if password is None else base64.b64encode(password).decode(),
        "clientid": login.client_id,
        "peerhost": login.address,
        "listener": login.listener,
        "certificate_name": login.certificate_name,
        "version": str(login.version),
    }
    if any("${password}" in template for template in body.values()):
        try:
            values["password"] = None if password is None else password.decode("utf-8")
        except UnicodeDecodeError:
            return None
    return json.dumps({key: _filled(template, values) for key, template in body.items()}).encode()


def _filled(template: str, values: Mapping[str, str | None]) -> str | None:
    whole = _PLACEHOLDER.fullmatch(template)
    if whole is not None:
        return values[whole[1]]
    return _PLACEHOLDER.sub(lambda match: values[match[1]] or "", template)


def parse(data: bytes) -> Answer:
    """The answer in a body. Raises Unavailable."""
    try:
        answer: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise Unavailable("the answer is not JSON") from None
    result = answer.get("result") if isinstance(answer, dict) else None
    if result == "deny":
        return Rejected()
    if result == "ignore":
        return Ignored()
    if result != "allow":
        raise Unavailable('the answer has no "result" of "allow", "deny" or "ignore"')
    if answer.get("is_superuser") is True:
        raise Unavailable('"is_superuser" is not supported: send an "acl"')
    return Accepted(answer.get("username"), answer.get("client_id"), answer.get("acl"), answer.get("expire_at"))
