"""Verification of JSON Web Tokens (RFC 7519): signature, times, issuer, audience, and the claims that name the client."""

from __future__ import annotations

import base64
import binascii
import json
import re
import sys
from typing import Any, Final

import jwt
from jwt import exceptions

from mqttbroker.auth.jwt_keys import KeySet
from mqttbroker.auth.permissions import PermissionsError, PermissionsReader
from mqttbroker.config.settings import Jwt
from mqttbroker.core.access.policy import Identity, Permissions

_COMPACT: Final = re.compile(r"eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*")
MAX_NAME_BYTES: Final = 65_535  # of a user name or client id
MAX_TIME: Final = 1 << 53  # Unix seconds; a later expiry is no other
MAX_TRIES: Final = 4  # keys that a token without a key id is checked with
TOKEN_BYTES: Final = 300  # of a `Token` beside its texts and claims
CLAIM_BYTES: Final = 200  # of a required claim beside its values
VALUE_BYTES: Final = 16  # of a value beside its text

_REASONS: Final[dict[type[Exception], str]] = {
    exceptions.ExpiredSignatureError: "the token has expired",
    exceptions.ImmatureSignatureError: "the token is not valid yet",
    exceptions.InvalidAudienceError: "the token is for another audience",
    exceptions.InvalidIssuerError: "the token is of another issuer",
}


class TokenError(Exception):
    """Why a token is refused; ``genuine`` if its signature is right."""

    def __init__(self, reason: str, genuine: bool = False) -> None:
        super().__init__(reason)
        self.genuine = genuine


class UnknownKeyError(TokenError):
    """No key of the set has the token's key id."""

    def __init__(self) -> None:
        super().__init__("the token is signed by an unknown key")


class Token:
    """The claims of a verified token. ``required`` are those that must have a certain value, with their values."""

    def __init__(
        self,
        username: str,
        client_id: str | None,
        permissions: Permissions | None,
        expires_at: float,
        required: list[tuple[str, str, list[str]]],
    ) -> None:
        self.username = username
        self.client_id = client_id
        self.permissions = permissions
        self.expires_at = expires_at  # Unix seconds, with the leeway; 0 = never
        self._required = required

    @property
    def size(self) -> int:
        """The memory that it takes, in bytes, at most."""
        size = TOKEN_BYTES + sys.getsizeof(self.username) + sys.getsizeof(self.client_id)
        for _, _, values in self._required:  # name and pattern are shared by all tokens
            size += CLAIM_BYTES + sum(VALUE_BYTES + sys.getsizeof(value) for value in values)
        return size if self.permissions is None else size + self.permissions.size

    def identity(self, client_id: str, username: str | None, now: float) -> Identity:
        """The identity of a client with this token, at ``now`` in Unix seconds. Raises TokenError."""
        if self.expires_at and self.expires_at <= now:
            raise TokenError("the token has expired", True)
        for name, pattern, values in self._required:
            if expected(pattern, client_id, username) not in values:
                raise TokenError(f"the token has another {name}", True)
        return Identity(self.username, self.client_id, self.permissions, self.expires_at)


def expected(pattern: str, client_id: str, username: str | None) -> str | None:
    """The value of a claim for a client; None if it has no user name where one is needed."""
    parts = pattern.split("%u")
    if len(parts) > 1 and username is None:
        return None
    return (username or "").join(part.replace("%c", client_id) for part in parts)


def looks_like_token(text: str) -> bool:
    """Whether this may be a token: three parts in base64url, of which the first is a JSON object."""
    return text.startswith("eyJ") and _COMPACT.fullmatch(text) is not None


class TokenVerifier:
    """Verifies tokens by the settings and ``keys``."""

    def __init__(self, settings: Jwt, permissions: PermissionsReader) -> None:
        self._settings = settings
        self._permissions = permissions
        self._options: Any = {
            "verify_aud": bool(settings.audience),
            "verify_iss": settings.issuer is not None,
            "verify_sub": False,
            "verify_jti": False,
            "require": ["exp"] if settings.require_expiry else [],
        }

    def verify(self, text: str, keys: KeySet) -> Token:
        """The claims of the token. Raises TokenError."""
        algorithm, kid = self._header(text)
        candidates = keys.candidates(kid, algorithm)
        if not candidates:
            raise UnknownKeyError
        for key in candidates[:MAX_TRIES]:
            try:
                claims = self._decode(text, key.key, algorithm)
            except exceptions.InvalidSignatureError:
                continue
            return self._token(claims)
        raise TokenError("the signature of the token is wrong")

    def _header(self, text: str) -> tuple[str, str | None]:
        """The algorithm and the key id."""
        part = text.partition(".")[0]
        try:
            header = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        except (ValueError, binascii.Error, RecursionError):
            raise TokenError("the token is malformed") from None
        if not isinstance(header, dict) or "crit" in header or "b64" in header:
            raise TokenError("the token has a header that is not supported")
        algorithm, kid = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in self._settings.algorithms:
            raise TokenError("the algorithm of the token is not accepted")
        if kid is not None and not isinstance(kid, str):
            raise TokenError("the token is malformed")
        return algorithm, kid

    def _decode(self, text: str, key: Any, algorithm: str) -> dict[str, Any]:
        settings = self._settings
        try:
            return jwt.decode(
                text,
                key,
                algorithms=[algorithm],
                options=self._options,
                audience=settings.audience or None,
                issuer=settings.issuer,
                leeway=settings.leeway,
            )
        except exceptions.InvalidSignatureError:
            raise
        except (exceptions.DecodeError, exceptions.InvalidAlgorithmError, exceptions.InvalidKeyError):
            raise TokenError("the token is malformed") from None
        except exceptions.MissingRequiredClaimError as error:
            raise TokenError(f"the token has no {error.claim}", True) from None
        except exceptions.InvalidTokenError as error:
            raise TokenError(_REASONS.get(type(error), "the token has invalid claims"), True) from None
        except (ValueError, OverflowError, TypeError):  # a time that is not one
            raise TokenError("the token has invalid claims", True) from None

    def _token(self, claims: dict[str, Any]) -> Token:
        settings = self._settings
        username = _name_in(claims, settings.username_claim)
        if username is None:
            raise TokenError(f"the token has no {settings.username_claim}", True)
        client_id = _name_in(claims, settings.client_id_claim) if settings.client_id_claim else None
        permissions: Permissions | None = None
        if settings.acl_claim and claims.get(settings.acl_claim) is not None:
            try:
                permissions = self._permissions.of_claim(claims[settings.acl_claim])
            except PermissionsError as error:
                raise TokenError(f"the token's {settings.acl_claim}: {error}", True) from None
        expires_at = 0.0
        if claims.get("exp") is not None:
            expires_at = float(min(int(claims["exp"]), MAX_TIME)) + settings.leeway
        required = [(name, pattern, _values(claims.get(name))) for name, pattern in settings.claims]
        return Token(username, client_id, permissions, expires_at, required)


def _name_in(claims: dict[str, Any], claim: str) -> str | None:
    """The name in a claim; None without the claim. Raises TokenError if MQTT has no such name."""
    name = claims.get(claim)
    if name is None:
        return None
    try:
        valid = isinstance(name, str) and "\0" not in name and 0 < len(name.encode("utf-8")) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        valid = False
    if not valid:
        raise TokenError(f"the token's {claim} is not a name", True)
    return str(name)


def _values(claim: Any) -> list[str]:
    """The values of a claim as text: those of a list, or the one of any other claim."""
    items = claim if isinstance(claim, list) else [claim]
    found = [item for item in items if isinstance(item, str)]
    return found + [json.dumps(item) for item in items if isinstance(item, (bool, int, float))]
