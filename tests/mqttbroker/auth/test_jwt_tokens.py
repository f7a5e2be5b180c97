"""Tokens and keys: every algorithm, every refusal, every mistake in a key file."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import dsa, ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st
from support.tokens import ALGORITHMS, SECRET, jwk, key_set, private_pem, public_pem, signing_key, token

from mqttbroker.auth.jwt_keys import JwtKeyError, KeySet, keys_of_jwks, keys_of_pem, keys_of_secret
from mqttbroker.auth.jwt_tokens import Token, TokenError, TokenVerifier, UnknownKeyError, looks_like_token
from mqttbroker.auth.permissions import PermissionsReader
from mqttbroker.config.settings import Jwt

PUBLIC = [name for name in ALGORITHMS if not name.startswith("HS")]


def keys_for(algorithm: str, name: str = "") -> KeySet:
    if algorithm.startswith("HS"):
        return keys_of_secret(SECRET, False, (algorithm,))
    return keys_of_pem(public_pem(algorithm, name), (algorithm,))


def verify(text: str, keys: KeySet | None = None, **settings: Any) -> Token:
    chosen = Jwt(**{"algorithms": ("RS256",), **settings})
    return TokenVerifier(chosen, PermissionsReader()).verify(text, keys or keys_for(chosen.algorithms[0]))


def encoded(part: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


# --- algorithms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm(algorithm: str) -> None:
    assert verify(token(algorithm), keys_for(algorithm), algorithms=(algorithm,)).username == "pump"
    stored = keys_of_jwks(key_set(jwk(algorithm, kid="k")), (algorithm,), True)
    assert verify(token(algorithm, kid="k"), stored, algorithms=(algorithm,)).username == "pump"
    for keys in (keys_for(algorithm), stored):
        with pytest.raises(TokenError, match="the signature of the token is wrong"):
            verify(token(algorithm, name="other"), keys, algorithms=(algorithm,))


def test_ed448() -> None:
    keys = keys_of_pem(public_pem("EdDSA", "448"), ("EdDSA",))
    assert verify(token("EdDSA", "448"), keys, algorithms=("EdDSA",)).username == "pump"


@pytest.mark.parametrize("algorithm", ["none", "None", "HS256", "RS384", "ES256", "", None, 5])
def test_other_algorithms_are_refused(algorithm: Any) -> None:
    text = f"{encoded({'alg': algorithm, 'typ': 'JWT'})}.{encoded({'sub': 'pump', 'exp': time.time() + 60})}."
    for candidate in (text, text + "AAAA"):
        with pytest.raises(TokenError, match="algorithm of the token is not accepted"):
            verify(candidate)


def test_a_public_key_is_never_a_secret() -> None:
    pem = public_pem("RS256")
    signed = f"{encoded({'alg': 'HS256', 'typ': 'JWT'})}.{encoded({'sub': 'pump', 'exp': time.time() + 60})}"
    signature = base64.urlsafe_b64encode(hmac.digest(pem, signed.encode(), hashlib.sha256)).rstrip(b"=").decode()
    forged = f"{signed}.{signature}"
    with pytest.raises(TokenError, match="algorithm of the token is not accepted"):
        verify(forged)
    # With secrets and RSA keys in one set, the RSA key is no candidate.
    mixed = keys_of_jwks(key_set(jwk("RS256"), jwk("HS256", "other")), ("RS256", "HS256"), True)
    with pytest.raises(TokenError, match="the signature of the token is wrong"):
        verify(forged, mixed, algorithms=("RS256", "HS256"))
    with pytest.raises(JwtKeyError, match="an RSA key, which HS256 does not use"):
        keys_of_pem(pem, ("HS256",))


FIXED, FIXED_KEYS = token("RS256"), keys_for("RS256")


# --- claims -------------------------------------------------------------------------------------------------------


NOW = int(time.time())
DAY = 86_400


@pytest.mark.parametrize(
    ("claims", "settings", "reason"),
    [
        ({"exp": NOW - 60}, {}, "has expired"),
        ({"exp": NOW - 60}, {"leeway": 2.0 * DAY}, None),
        ({"exp": None}, {}, "has no exp"),
        ({"exp": None}, {"require_expiry": False}, None),
        ({"exp": "soon"}, {}, "malformed|invalid claims"),
        ({"exp": 1e300}, {}, None),
        ({"exp": 10**400}, {}, None),
        ({"exp": True}, {}, "has expired"),
        ({"nbf": NOW + DAY}, {}, "is not valid yet"),
        ({"nbf": NOW + DAY}, {"leeway": 2.0 * DAY}, None),
        ({"nbf": []}, {}, "malformed|invalid claims"),
        ({"iat": NOW + DAY}, {}, "is not valid yet"),
        ({}, {"audience": ("mqtt",)}, "has no aud"),
        ({"aud": "web"}, {"audience": ("mqtt",)}, "is for another audience"),
        ({"aud": ["web", "mqtt"]}, {"audience": ("mqtt", "x")}, None),
        ({"aud": "web"}, {}, None),
        ({}, {"issuer": "https://id"}, "has no iss"),
        ({"iss": "https://id/"}, {"issuer": "https://id"}, "is of another issuer"),
        ({"iss": "https://id"}, {"issuer": "https://id"}, None),
        ({"sub": None}, {}, "has no sub"),
        ({"sub": 7}, {}, "sub is not a name"),
        ({"sub": ""}, {}, "sub is not a name"),
        ({"sub": "a\0b"}, {}, "sub is not a name"),
        ({"sub": "\ud800"}, {}, "sub is not a name"),
        ({"sub": None, "login": "pump"}, {"username_claim": "login"}, None),
        ({"acl": "all"}, {}, "acl: must be a list"),
        ({"acl": {"pub": ["a/#/b"]}}, {}, "acl: not a topic filter"),
        ({"acl": {"pub": ["a/#"]}}, {}, None),
        ({"acl": None}, {}, None),
        ({"acl": "all"}, {"acl_claim": None}, None),
        ({"device": {}}, {"client_id_claim": "device"}, "device is not a name"),
    ],
)
def test_claims(claims: dict[str, Any], settings: dict[str, Any], reason: str | None) -> None:
    text = token(**claims)
    if reason is None:
        assert verify(text, **settings).username == "pump"
        return
    with pytest.raises(TokenError, match=reason) as caught:
        verify(text, **settings)
    assert caught.value.genuine or "malformed" in str(caught.value)


def test_what_a_token_says() -> None:
    text = token(exp=NOW + DAY, device="pump-7", acl={"pub": ["up/%c"]}, sub="fleet")
    identity = verify(text, client_id_claim="device", leeway=10.0).identity("pump-7", None, NOW)
    assert (identity.username, identity.client_id, identity.expires_at) == ("fleet", "pump-7", NOW + DAY + 10)
    assert identity.permissions is not None and identity.permissions.may_publish("pump-7", "fleet", "up/pump-7")
    plain = verify(token(exp=None), require_expiry=False).identity("c", None, NOW)
    assert (plain.client_id, plain.permissions, plain.expires_at) == (None, None, 0.0)


def test_a_token_expires_while_it_is_remembered() -> None:
    found = verify(token(exp=NOW + DAY), leeway=0.0)
    assert found.identity("c", None, NOW + DAY - 0.1).username == "pump"
    with pytest.raises(TokenError, match="has expired"):
        found.identity("c", None, NOW + DAY)


@pytest.mark.parametrize(
    ("pattern", "claim", "right"),
    [
        ("%c", "client", True),
        ("%u", "user", True),
        ("%u:%c", "user:client", True),
        ("%c", "clien", False),
        ("%c", ["other", "client"], True),
        ("%c", [["client"]], False),
        ("%c", {"client": 1}, False),
        ("%c", None, False),
        ("7", 7, True),
        ("true", True, True),
    ],
)
def test_required_claims(pattern: str, claim: Any, right: bool) -> None:
    found = verify(token(device=claim), claims=(("device", pattern),))
    if right:
        assert found.identity("client", "user", NOW).username == "pump"
    else:
        with pytest.raises(TokenError, match="has another device"):
            found.identity("client", "user", NOW)


def test_a_required_user_name_that_the_client_does_not_give() -> None:
    found = verify(token(user=""), claims=(("user", "%u"),))
    with pytest.raises(TokenError, match="has another user"):
        found.identity("client", None, NOW)
    assert verify(token(user="%c"), claims=(("user", "%u"),)).identity("x", "%c", NOW).username == "pump"


# --- headers and shape --------------------------------------------------------------------------------------------


def replaced(part: int, text: str) -> str:
    parts = token().split(".")
    parts[part] = text
    return ".".join(parts)


@pytest.mark.parametrize(
    "make",
    [
        lambda: replaced(0, encoded([])),
        lambda: replaced(0, "eyJ"),
        lambda: replaced(0, "eyJ" + "W" * 4000),
        lambda: replaced(1, ""),
        lambda: replaced(1, encoded("text")),
        lambda: replaced(2, ""),
        lambda: replaced(2, "A"),
        lambda: token(headers={"kid": "x"}).replace(".", "..", 1),
        lambda: f"{encoded({'alg': 'RS256', 'crit': ['exp']})}.{encoded({})}.AAAA",
        lambda: f"{encoded({'alg': 'RS256', 'b64': False})}..AAAA",
        lambda: f"{encoded({'alg': 'RS256', 'kid': 7})}.{encoded({})}.AAAA",
    ],
)
def test_malformed_tokens_are_refused(make: Callable[[], str]) -> None:
    with pytest.raises(TokenError) as caught:
        verify(make())
    assert not caught.value.genuine


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (token(), True),
        ("eyJhbGciOiJub25lIn0..", True),
        ("secret", False),
        ("a.b.c", False),
        ("eyJ.b", False),
        ("eyJh.b.c.d.e", False),
        ("eyJh.b c.d", False),
        ("", False),
    ],
)
def test_what_looks_like_a_token(text: str, expected: bool) -> None:
    assert looks_like_token(text) is expected


@given(st.binary(max_size=60), st.integers(0, 2), st.integers(0, 400), st.booleans())
def test_a_changed_token_is_refused(junk: bytes, part: int, position: int, is_encoded: bool) -> None:
    parts = FIXED.split(".")
    text = base64.urlsafe_b64encode(junk).decode().rstrip("=") if is_encoded else junk.decode("latin-1")
    position = min(position, len(parts[part]))
    parts[part] = parts[part][:position] + text + parts[part][position + len(text) :]
    changed = ".".join(parts)
    if changed == FIXED:
        return
    with pytest.raises(TokenError):
        verify(changed, FIXED_KEYS)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
    st.sampled_from(["sub", "exp", "nbf", "iat", "aud", "iss", "acl", "device", "role"]),
)
def test_claims_of_any_type(value: Any, claim: str) -> None:
    try:
        text = token("HS256", **{claim: value})
    except (TypeError, ValueError):  # the library does not make such a token
        return
    settings = {"algorithms": ("HS256",), "client_id_claim": "device", "claims": (("role", "%c"),), "audience": ("a",)}
    for more in ({}, {"audience": (), "issuer": "i"}, {"audience": (), "claims": (), "require_expiry": False}):
        try:
            identity = verify(text, keys_for("HS256"), **{**settings, **more}).identity("c", None, NOW)
        except TokenError:
            continue
        assert identity.username and identity.username.encode()


# --- key sets -----------------------------------------------------------------------------------------------------


def test_the_key_id_chooses_the_key() -> None:
    keys = keys_of_jwks(key_set(jwk("RS256", "a", "a"), jwk("RS256", "b", "b")), ("RS256",), False)
    assert verify(token(name="b", kid="b"), keys).username == "pump"
    with pytest.raises(UnknownKeyError):
        verify(token(name="b", kid="c"), keys)
    with pytest.raises(TokenError, match="signature"):
        verify(token(name="b", kid="a"), keys)
    assert verify(token(name="b"), keys).username == "pump"  # without a key id each key is tried


def test_keys_for_other_things_are_left_out() -> None:
    algorithms = ("RS256", "ES256")
    document = key_set(
        jwk("RS256", "a", "enc", use="enc"),
        jwk("RS256", "b", "sign", key_ops=["sign"]),
        jwk("RS256", "c", "ps", alg="PS256"),
        jwk("HS256", kid="secret"),
        {"kty": "NEW", "kid": "new"},
        {"kty": "EC", "kid": "broken", "crv": "P-256", "x": "AA", "y": "AA"},
        jwk("ES256", kid="good", alg="ES256"),
        jwk("ES384", kid="curve"),
    )
    assert [key.kid for key in keys_of_jwks(document, algorithms, False).keys] == ["good"]


def test_a_private_key_in_a_set_is_used_as_its_public_key() -> None:
    from jwt.algorithms import RSAAlgorithm

    private = {**RSAAlgorithm.to_jwk(signing_key("RS256"), as_dict=True), "kid": "k"}
    private.pop("key_ops")
    keys = keys_of_jwks(key_set(private), ("RS256",), False)
    assert isinstance(keys.keys[0].key, rsa.RSAPublicKey)
    assert verify(token(kid="k"), keys).username == "pump"


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (b"<html>", "not JSON"),
        (b"[" * 60_000, "not JSON"),
        (b"[]", 'not a key set: no list "keys"'),
        (b'{"keys": {}}', 'not a key set: no list "keys"'),
        (b'{"keys": []}', "no key for RS256"),
        (b'{"keys": [5]}', "no key for RS256; key 0: not an object"),
        (b'{"keys": [{"kty": "RSA", "n": "AQAB"}]}', "key 0: not a valid key of type RSA"),
        (b'{"keys": [{"kty": "RSA", "n": 5, "e": "AQAB"}]}', "key 0: not a valid key of type RSA"),
        (b'{"keys": [{"kty": "RSA", "kid": 5}]}', "key 0: kid is not a string"),
        (key_set(jwk("ES256")), "no key for RS256"),
        (json.dumps({"keys": [{}] * 101}).encode(), "more than 100 keys"),
    ],
)
def test_mistakes_in_a_key_set(document: bytes, reason: str) -> None:
    with pytest.raises(JwtKeyError, match=reason):
        keys_of_jwks(document, ("RS256",), False)


# --- secrets and PEM files ----------------------------------------------------------------------------------------


def pem_of(key: Any) -> bytes:
    pem: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem


@pytest.mark.parametrize(
    ("make", "algorithms", "reason"),
    [
        (lambda: b"", ("RS256",), "not a public key or certificate in PEM format"),
        (lambda: b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", ("RS256",), "not a public key"),
        (lambda: b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", ("RS256",), "not a public key"),
        (lambda: private_pem("RS256"), ("RS256",), "a private key"),
        (lambda: public_pem("RS256"), ("RS256", "ES256"), "an RSA key, which ES256 does not use"),
        (lambda: public_pem("ES384"), ("ES256",), "an EC key on secp384r1, which ES256 does not use"),
        (lambda: public_pem("EdDSA"), ("RS256",), "an EdDSA key, which RS256 does not use"),
        (lambda: pem_of(rsa.generate_private_key(65537, 1024)), ("RS256",), "an RSA key of 1024 bits"),
        (lambda: pem_of(dsa.generate_private_key(1024)), ("RS256",), "a type that is not supported"),
        (lambda: pem_of(ec.generate_private_key(ec.SECP256K1())), ("ES256",), "a type that is not supported"),
    ],
)
def test_mistakes_in_a_pem_file(make: Callable[[], bytes], algorithms: tuple[str, ...], reason: str) -> None:
    with pytest.raises(JwtKeyError, match=reason):
        keys_of_pem(make(), algorithms)


def test_a_certificate_has_a_public_key() -> None:
    key = signing_key("RS256")
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "id")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
    pem = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    assert verify(token(), keys_of_pem(pem, ("RS256",))).username == "pump"


def test_secrets() -> None:
    for text in (base64.b64encode(SECRET.encode()), base64.urlsafe_b64encode(SECRET.encode()).rstrip(b"=")):
        keys = keys_of_secret(text.decode(), True, ("HS512",))
        assert verify(token("HS512"), keys, algorithms=("HS512",)).username == "pump"
    with pytest.raises(JwtKeyError, match="not base64"):
        keys_of_secret("!" * 64, True, ("HS256",))
    for algorithm, size in (("HS256", 32), ("HS384", 48), ("HS512", 64)):
        with pytest.raises(JwtKeyError, match=f"{algorithm} needs a secret of at least {size} bytes"):
            keys_of_secret("s" * (size - 1), False, (algorithm,))
        keys_of_secret("s" * size, False, (algorithm,))
    with pytest.raises(JwtKeyError, match="HS256 needs a secret of at least 32 bytes"):
        keys_of_jwks(key_set({"kty": "oct", "k": "AAAA"}), ("HS256",), True)
