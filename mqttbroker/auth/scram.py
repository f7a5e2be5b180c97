"""The server side of SCRAM-SHA-256 (RFC 5802, RFC 7677).

A client that does not prove that it knows the password learns nothing, not even whether the user exists; the server
proves that it has the user's credentials. There is no I/O, clock or randomness here: the caller gives the nonce.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import re
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Final

METHOD: Final = "SCRAM-SHA-256"

_FIRST = re.compile(r"((?:n|y|p=[A-Za-z0-9.-]+),(?:a=([^,]*))?,)(n=([^,]+),r=([!-+\--~]+)(?:,[A-Za-z]=[^,]+)*)")
_FINAL = re.compile(r"(c=([A-Za-z0-9+/=]+),r=([!-+\--~]+)(?:,[A-Za-z]=[^,]+)*),p=([A-Za-z0-9+/=]+)")

_AWAIT_FIRST = 0
_AWAIT_FINAL = 1
_DONE = 2
_FAILED = 3


class ScramError(Exception):
    """The proof is wrong, or a message is malformed."""


class Credentials:
    """The server's record of a password: enough to verify a proof, not to make one."""

    def __init__(self, iterations: int, salt: bytes, stored_key: bytes, server_key: bytes) -> None:
        self.iterations = iterations
        self.salt = salt
        self.stored_key = stored_key
        self.server_key = server_key


def derive(password: bytes, salt: bytes, iterations: int) -> Credentials:
    """The credentials for a password; the time taken is in proportion to ``iterations``."""
    salted = hashlib.pbkdf2_hmac("sha256", password, salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    stored_key = hashlib.sha256(client_key).digest()
    return Credentials(iterations, salt, stored_key, hmac.digest(salted, b"Server Key", "sha256"))


class Exchange:
    """One authentication: `step` takes the client's first and final messages.

    ``find`` returns credentials for any user name, invented ones for an unknown user.  ``username`` is authenticated
    once ``done``.
    """

    def __init__(self, find: Callable[[str], Credentials], nonce: str) -> None:
        self._find = find
        self._nonce = nonce
        self._state = _AWAIT_FIRST
        self.username = ""

    @property
    def done(self) -> bool:
        return self._state == _DONE

    def step(self, data: bytes) -> bytes:
        """The answer to a message. Raises ScramError, which ends the exchange."""
        handle, following = _STEPS[self._state]
        self._state = _FAILED
        try:
            answer = handle(self, data.decode("utf-8"))
        except UnicodeDecodeError:
            raise ScramError("not UTF-8") from None
        self._state = following
        return answer.encode()

    def _first(self, text: str) -> str:
        match = _FIRST.fullmatch(text)
        if match is None:
            raise ScramError("not a client-first-message")
        self._header, authorized, self._client_first, name, client_nonce = match.groups()
        if self._header.startswith("p="):
            raise ScramError("channel binding is not supported")
        self.username = _unescaped(name)
        if authorized and _unescaped(authorized) != self.username:
            raise ScramError("authorization as another user is not supported")
        self._nonce = client_nonce + self._nonce
        credentials = self._credentials = self._find(self.username)
        salt = b64encode(credentials.salt).decode()
        self._server_first = f"r={self._nonce},s={salt},i={credentials.iterations}"
        return self._server_first

    def _final(self, text: str) -> str:
        match = _FINAL.fullmatch(text)
        if match is None:
            raise ScramError("not a client-final-message")
        without_proof, binding, nonce, encoded = match.groups()
        if binding != b64encode(self._header.encode()).decode() or nonce != self._nonce:
            raise ScramError("channel binding or nonce differ")
        message = f"{self._client_first},{self._server_first},{without_proof}".encode()
        signature = hmac.digest(self._credentials.stored_key, message, "sha256")
        proof = _decoded(encoded)
        if len(proof) != len(signature):
            raise ScramError("wrong proof")
        client_key = bytes(a ^ b for a, b in zip(proof, signature))
        if not hmac.compare_digest(hashlib.sha256(client_key).digest(), self._credentials.stored_key):
            raise ScramError("wrong proof")
        return "v=" + b64encode(hmac.digest(self._credentials.server_key, message, "sha256")).decode()

    def _over(self, text: str) -> str:
        raise ScramError("the exchange is over")


# The handler of a message in each state, and the next state.
_STEPS: Final = {
    _AWAIT_FIRST: (Exchange._first, _AWAIT_FINAL),
    _AWAIT_FINAL: (Exchange._final, _DONE),
    _DONE: (Exchange._over, _FAILED),
    _FAILED: (Exchange._over, _FAILED),
}


def _unescaped(name: str) -> str:
    """Decode a saslname: ``=2C`` is a comma, ``=3D`` an equals sign; any other ``=`` is an error."""
    if re.search("=(?!2C|3D)", name):
        raise ScramError("not a user name")
    return name.replace("=2C", ",").replace("=3D", "=")


def _decoded(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except binascii.Error:
        raise ScramError("not base64") from None
