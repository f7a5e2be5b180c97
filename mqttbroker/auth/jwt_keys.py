"""Keys that verify the signatures of tokens: from a secret, a PEM file or a JSON Web Key Set (RFC 7517).

Each key accepts the algorithms of its own type only, so that a public key never serves as the secret of an HS algorithm.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from jwt.algorithms import ECAlgorithm, HMACAlgorithm, OKPAlgorithm, RSAAlgorithm
from jwt.exceptions import PyJWTError

MAX_KEYS: Final = 100  # of a key set
MIN_RSA_BITS: Final = 2048
MAX_RSA_BITS: Final = 8192
_SECRET_BYTES: Final = {"HS256": 32, "HS384": 48, "HS512": 64}  # at least (RFC 7518, section 3.2)
_CURVES: Final = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
_RSA: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
# Members of a JSON Web Key that make a public key or a secret, by its type.
_MEMBERS: Final = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x"), "oct": ("k",)}


class JwtKeyError(Exception):
    """One line with the reason, which never shows a key."""


class VerificationKey:
    """A key and the algorithms that it is used with; ``name`` is its type in messages."""

    def __init__(self, key: Any, name: str, algorithms: Sequence[str], kid: str | None = None) -> None:
        self.key = key
        self.name = name
        self.algorithms = algorithms
        self.kid = kid


class KeySet:
    """The keys of one source; ``text`` is the source, which is compared to see whether the keys have changed."""

    def __init__(self, keys: Sequence[VerificationKey], text: bytes) -> None:
        self.keys = keys
        self.text = text

    def candidates(self, kid: str | None, algorithm: str) -> list[VerificationKey]:
        """The keys that a token with this header may be signed by; of a key set only those with its key id."""
        return [key for key in self.keys if algorithm in key.algorithms and (kid is None or key.kid is None or key.kid == kid)]


def keys_of_secret(secret: str, is_base64: bool, algorithms: Sequence[str]) -> KeySet:
    """The key for HS algorithms. Raises JwtKeyError."""
    key = secret.encode()
    if is_base64:
        try:
            key = base64.b64decode(
                secret + "=" * (-len(secret) % 4), altchars=b"-_" if "-" in secret or "_" in secret else None, validate=True
            )
        except (binascii.Error, ValueError):
            raise JwtKeyError("not base64") from None
    _check_secret(key, algorithms)
    return KeySet([VerificationKey(key, "a secret", algorithms)], key)


def _check_secret(key: bytes, algorithms: Sequence[str]) -> None:
    for algorithm in algorithms:
        if len(key) < _SECRET_BYTES[algorithm]:
            raise JwtKeyError(f"{algorithm} needs a secret of at least {_SECRET_BYTES[algorithm]} bytes")


def keys_of_pem(data: bytes, algorithms: Sequence[str]) -> KeySet:
    """The public key in a PEM file, or of the certificate there. Raises JwtKeyError."""
    key: Any
    if b"PRIVATE KEY" in data:
        raise JwtKeyError("a private key; the broker needs the public one only")
    try:
        if b"BEGIN CERTIFICATE" in data:
            key = x509.load_pem_x509_certificate(data).public_key()
        else:
            key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise JwtKeyError("not a public key or certificate in PEM format") from None
    name, usable = _uses(key)
    for algorithm in algorithms:
        if algorithm not in usable:
            raise JwtKeyError(f"{name}, which {algorithm} does not use")
    return KeySet([VerificationKey(key, name, tuple(algorithms))], data)


def _uses(key: Any) -> tuple[str, tuple[str, ...]]:
    """The type of a public key, and the algorithms that use it. Raises JwtKeyError for a type that is not supported."""
    if isinstance(key, rsa.RSAPublicKey):
        if not MIN_RSA_BITS <= key.key_size <= MAX_RSA_BITS:
            raise JwtKeyError(f"an RSA key of {key.key_size} bits; must be {MIN_RSA_BITS}–{MAX_RSA_BITS}")
        return "an RSA key", _RSA
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES:
        return f"an EC key on {key.curve.name}", (_CURVES[key.curve.name],)
    if isinstance(key, (ed25519.Ed25519PublicKey, ed448.Ed448PublicKey)):
        return "an EdDSA key", ("EdDSA",)
    raise JwtKeyError("a key of a type that is not supported")


def keys_of_jwks(data: bytes, algorithms: Sequence[str], with_secrets: bool) -> KeySet:
    """The keys in a key set that are for signatures by ``algorithms``. Raises JwtKeyError, also if there is none.

    Keys of other types and uses are left out, as are secrets unless ``with_secrets``.
    """
    try:
        document: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise JwtKeyError("not JSON") from None
    items = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(items, list):
        raise JwtKeyError('not a key set: no list "keys"')
    if len(items) > MAX_KEYS:
        raise JwtKeyError(f"more than {MAX_KEYS} keys")
    keys: list[VerificationKey] = []
    reasons: list[str] = []
    for number, item in enumerate(items):
        try:
            found = _key_of_jwk(item, algorithms, with_secrets)
        except JwtKeyError as error:
            reasons.append(f"key {number}: {error}")
        else:
            if found is not None:
                keys.append(found)
    if not keys:
        raise JwtKeyError("no key for " + ", ".join(algorithms) + "".join(f"; {reason}" for reason in reasons[:3]))
    return KeySet(keys, data)


def _key_of_jwk(item: Any, algorithms: Sequence[str], with_secrets: bool) -> VerificationKey | None:
    """A key of a key set; None if it is for something else. Raises JwtKeyError for a malformed one."""
    if not isinstance(item, Mapping):
        raise JwtKeyError("not an object")
    kind, kid = item.get("kty"), item.get("kid")
    if kid is not None and not isinstance(kid, str):
        raise JwtKeyError("kid is not a string")
    operations = item.get("key_ops", ["verify"])
    if item.get("use", "sig") != "sig" or not isinstance(operations, list) or "verify" not in operations:
        return None
    if not isinstance(kind, str):
        raise JwtKeyError("kty is not a string")
    if kind not in _MEMBERS or (kind == "oct" and not with_secrets):
        return None
    # Without the members of a private key, if an issuer publishes them.
    public = {"kty": kind, **{name: item[name] for name in _MEMBERS[kind] if name in item}}
    try:
        if kind == "oct":
            key: Any = HMACAlgorithm.from_jwk(public)
            name, usable = "a secret", tuple(each for each in _SECRET_BYTES if each in algorithms)
        else:
            made: dict[str, Any] = {"RSA": RSAAlgorithm, "EC": ECAlgorithm, "OKP": OKPAlgorithm}
            key = made[kind].from_jwk(public)
            name, usable = _uses(key)
    except (PyJWTError, ValueError, TypeError, AttributeError, binascii.Error, UnsupportedAlgorithm):
        raise JwtKeyError(f"not a valid key of type {kind}") from None
    stated = item.get("alg")
    accepted = tuple(each for each in algorithms if each in usable and stated in (None, each))
    if not accepted:
        return None
    if kind == "oct":
        _check_secret(key, accepted)
    return VerificationKey(key, name, accepted, kid)
