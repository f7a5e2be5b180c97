"""JSON Web Tokens and the keys that verify them: a token counts only if it was signed with the secret."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from fuzz.guided.target import Target
from fuzz.verdict import Finding
from mqttbroker.auth.jwt_keys import JwtKeyError, keys_of_jwks, keys_of_pem, keys_of_secret
from mqttbroker.auth.jwt_tokens import TokenError, TokenVerifier, looks_like_token
from mqttbroker.auth.permissions import PermissionsReader
from mqttbroker.config.settings import Jwt

SECRET = "0123456789abcdef0123456789abcdef"
ALGORITHMS = ("HS256",)
SIGNED, KEY_SET, PEM = b"\x01", b"\x02", b"\x03"  # first byte of an input
KEY_ALGORITHMS = ("RS256", "PS256", "ES256", "ES384", "EdDSA", "HS256")
RSA = {"kty": "RSA", "n": base64.urlsafe_b64encode(b"\xc1" * 255 + b"\x01").decode().rstrip("="), "e": "AQAB"}
# RFC 8032, test 1.
PUBLIC = b"""-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=
-----END PUBLIC KEY-----
"""
OKP = {"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo", "kid": "e"}


class Tokens(Target):
    """A token as it is; with `SIGNED` a line of header and one of claims; with `KEY_SET` or `PEM` a file of keys."""

    modules = ("mqttbroker.auth.jwt_tokens", "mqttbroker.auth.jwt_keys", "mqttbroker.auth.permissions")
    max_bytes = 800
    words = (
        b'"alg":"HS256"',
        b'"alg":"none"',
        b'"typ":"JWT"',
        b'"kid":"k"',
        b'"crit":["b64"]',
        b'"exp":9999999999',
        b'"exp":1',
        b'"nbf":',
        b'"iat":',
        b'"iss":"me"',
        b'"aud":["broker"]',
        b'"sub":"pump"',
        b'"acl":{"publish":["a/#"]}',
        b"\n{",
        b"null",
        b"1e400",
        b"[[",
        b'"kty":"OKP"',
        b'"kty":"EC"',
        b'"crv":"P-256"',
        b'"keys":[',
        b"-----BEGIN PUBLIC KEY-----\n",
    )

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.keys = keys_of_secret(SECRET, False, ALGORITHMS)
        self.verifier = TokenVerifier(
            Jwt(algorithms=ALGORITHMS, secret=SECRET, issuer="me", audience=("broker",), claims=(("tenant", "t"),)),
            PermissionsReader(),
        )

    def check(self, data: bytes) -> None:
        kind, rest = data[:1], data[1:]
        try:
            if kind == KEY_SET:
                keys_of_jwks(rest, KEY_ALGORITHMS, False)
            elif kind == PEM:
                keys_of_pem(rest, ("RS256",))
        except JwtKeyError as error:
            if not str(error).isprintable() or "\n" in str(error):
                raise Finding(f"not one line: {error}") from None
        if kind not in (KEY_SET, PEM):
            self._verify(_signed(rest) if kind == SIGNED else data.decode("latin-1"))

    def _verify(self, text: str) -> None:
        if not looks_like_token(text):
            return
        try:
            token = self.verifier.verify(text, self.keys)
            identity = token.identity("c", "pump", time.time())
        except TokenError as error:
            if not str(error).isprintable():
                raise Finding(f"not one line: {error}") from None
            return
        head, claims, signature = text.split(".")
        if _decoded(signature) != _signature(f"{head}.{claims}"):
            raise Finding(f"accepted with another signature: {text}")
        header, body = json.loads(_decoded(head)), json.loads(_decoded(claims))
        if header["alg"] != "HS256" or "crit" in header:
            raise Finding(f"accepted with {header}")
        audience = body["aud"] if isinstance(body["aud"], list) else [body["aud"]]
        tenant = body["tenant"] if isinstance(body["tenant"], list) else [body["tenant"]]
        if int(body["exp"]) < time.time() - 11 or body["iss"] != "me" or "broker" not in audience or "t" not in tenant:
            raise Finding(f"accepted with {body}")
        if identity.username != body["sub"] or not identity.username:
            raise Finding(f"{identity.username!r} is not {body}")

    def seeds(self) -> Iterator[bytes]:
        claims: dict[str, Any] = {"sub": "pump", "exp": 9_999_999_999, "iss": "me", "aud": "broker", "tenant": "t"}
        for more in ({}, {"nbf": 1, "iat": 1}, {"aud": ["x", "broker"]}, {"acl": {"pub": ["a/#"], "sub": ["b/+"]}},
                     {"acl": [{"permission": "allow", "action": "publish", "topic": "a"}]},
                     {"exp": 1}, {"sub": 5}, {"exp": None}, {"tenant": ["u", 1]}):  # fmt: skip
            yield SIGNED + b'{"alg":"HS256","typ":"JWT"}\n' + json.dumps({**claims, **more}).encode()
        yield SIGNED + b'{"alg":"none"}\n' + json.dumps(claims).encode()
        yield _signed(b'{"alg":"HS256"}\n' + json.dumps(claims).encode()).encode()
        yield (
            KEY_SET
            + json.dumps({"keys": [RSA, OKP, {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}, {"kty": "oct", "k": "AA"}]}).encode()
        )
        yield PEM + PUBLIC

    def changed(self, data: bytes, random: Random) -> bytes:
        """A value or name of the JSON replaced by another word, or one character of a token changed."""
        fields = re.split(rb'("[^"]*"|[0-9]+)', data)
        if len(fields) < 3:
            return data
        at = random.randrange(1, len(fields), 2)
        fields[at] = random.choice((*self.words, b"1", b"-1", b'""', b"{}", b"true", b"1.5", random.choice(fields[1::2])))
        return b"".join(fields)


def _signed(data: bytes) -> str:
    header, _, claims = data.partition(b"\n")
    text = ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (header, claims))
    return f"{text}.{base64.urlsafe_b64encode(_signature(text)).decode().rstrip('=')}"


def _signature(text: str) -> bytes:
    return hmac.new(SECRET.encode(), text.encode(), hashlib.sha256).digest()


def _decoded(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
