"""Keys and JSON Web Tokens made for a test."""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from jwt.algorithms import get_default_algorithms

SECRET = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
CURVES = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}
ALGORITHMS = ("HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", *CURVES, "EdDSA")


@functools.cache
def signing_key(algorithm: str, name: str = "") -> Any:
    """A private key or secret for an algorithm; another one for each name."""
    if algorithm.startswith("HS"):
        return SECRET if not name else f"{name}-{SECRET}"
    if algorithm in CURVES:
        return ec.generate_private_key(CURVES[algorithm])
    if algorithm == "EdDSA":
        return ed448.Ed448PrivateKey.generate() if name == "448" else ed25519.Ed25519PrivateKey.generate()
    return _rsa_key(name)


@functools.cache
def _rsa_key(name: str) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def public_pem(algorithm: str, name: str = "") -> bytes:
    public = signing_key(algorithm, name).public_key()
    pem: bytes = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem


def private_pem(algorithm: str) -> bytes:
    pem: bytes = signing_key(algorithm).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem


def token(algorithm: str = "RS256", name: str = "", kid: str | None = None, headers: Any = None, **claims: Any) -> str:
    """A signed token for the user "pump" that expires in an hour; a claim of None is left out."""
    payload = {"sub": "pump", "exp": int(time.time()) + 3600, **claims}
    payload = {claim: value for claim, value in payload.items() if value is not None}
    head = {**({} if kid is None else {"kid": kid}), **(headers or {})}
    return jwt.encode(payload, signing_key(algorithm, name), algorithm, headers=head)


def jwk(algorithm: str, name: str = "", kid: str | None = None, **more: Any) -> dict[str, Any]:
    """The public key, or the secret, as a JSON Web Key."""
    key = signing_key(algorithm, name)
    public = key if isinstance(key, str) else key.public_key()
    handler = get_default_algorithms()[algorithm]
    made: dict[str, Any] = handler.to_jwk(public.encode() if isinstance(public, str) else public, as_dict=True)
    made.pop("key_ops", None)
    return {**made, **({} if kid is None else {"kid": kid}), **more}


def key_set(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": keys}).encode()
