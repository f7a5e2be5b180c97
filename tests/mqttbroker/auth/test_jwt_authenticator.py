"""The authenticator of tokens: which logins it takes, its queue, its memory, and keys from a URL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.key_server import KeyServer
from support.patience import PATIENCE
from support.tokens import SECRET, jwk, key_set, public_pem, token

from mqttbroker.auth import jwt_authenticator
from mqttbroker.auth.jwt_authenticator import JwtAuthenticator
from mqttbroker.codec.reason_codes import (
    BAD_USER_NAME_OR_PASSWORD,
    NOT_AUTHORIZED,
    QUOTA_EXCEEDED,
    SERVER_BUSY,
    SERVER_UNAVAILABLE,
)
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Jwt
from mqttbroker.core.access.policy import Identity

IGNORED = "ignored"


class Asked:
    """A request that records its answer: the identity, `IGNORED`, or the reason code and whether it is a failure."""

    def __init__(self, password: str | None, username: str | None = "user", client_id: str = "c") -> None:
        self.client_id = client_id
        self.username = username
        self.password = None if password is None else password.encode()
        self.method: str | None = None
        self.size = 0
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.gone = False

    @property
    def waiting(self) -> bool:
        return not self.gone and not self.answer.done()

    def accept(self, identity: Identity) -> None:
        self.answer.set_result(identity)

    def reject(self, reason_code: int, detail: str) -> None:
        self.answer.set_result((reason_code, False, detail))

    def fail(self, reason_code: int, detail: str) -> None:
        self.answer.set_result((reason_code, True, detail))

    def unavailable(self, detail: str) -> None:
        self.reject(SERVER_UNAVAILABLE, detail)

    def ignore(self) -> None:
        self.answer.set_result(IGNORED)


Start = Callable[..., JwtAuthenticator]
REMEMBERED = 1000  # bytes of one remembered token, at most, and more than half of it


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """``start(capacity=…, **settings)`` starts an authenticator, of HS256 tokens if no key is named."""
    started: list[JwtAuthenticator] = []

    def begin(capacity: int = 100, **settings: Any) -> JwtAuthenticator:
        if not any(name in settings for name in ("public_key_file", "jwks_file", "jwks_url")):
            settings = {"algorithms": ("HS256",), "secret": SECRET, **settings}
        authenticator = JwtAuthenticator(Jwt(**{"algorithms": ("RS256",), **settings}), capacity)
        authenticator.start(asyncio.get_running_loop(), lambda: None)
        started.append(authenticator)
        return authenticator

    yield begin
    for authenticator in started:
        authenticator.stop()


@pytest.fixture
def server() -> Iterator[KeyServer]:
    with KeyServer(key_set(jwk("RS256", "a", "a"))) as server:
        yield server


async def ask(authenticator: JwtAuthenticator, password: str | None, **fields: Any) -> Any:
    asked = Asked(password, **fields)
    authenticator.authenticate(asked)
    return await asyncio.wait_for(asked.answer, PATIENCE)


# --- which logins -------------------------------------------------------------------------------------------------


async def test_a_token_in_the_password(start: Start) -> None:
    authenticator = start()
    identity = await ask(authenticator, token("HS256"))
    assert identity.username == "pump"
    for password, username in (("secret", "user"), (None, "user"), (None, None), ("é.b.c", "u"), (None, token("HS256"))):
        assert await ask(authenticator, password, username=username) == IGNORED
    code, failed, detail = await ask(authenticator, token("HS256", "wrong"))
    assert (code, failed, detail) == (BAD_USER_NAME_OR_PASSWORD, True, "the signature of the token is wrong")
    code, failed, detail = await ask(authenticator, token("HS256", exp=1))
    assert (code, failed, detail) == (NOT_AUTHORIZED, False, "the token has expired")


async def test_a_token_in_the_user_name(start: Start) -> None:
    authenticator = start(token_in="username")
    assert (await ask(authenticator, None, username=token("HS256"))).username == "pump"
    assert await ask(authenticator, token("HS256"), username="user") == IGNORED


async def test_enhanced_authentication_is_left_to_others(start: Start) -> None:
    authenticator = start()
    asked = Asked(token("HS256"))
    asked.method = "SCRAM-SHA-256"
    authenticator.authenticate(asked)
    assert await asked.answer == IGNORED


async def test_a_long_token_is_refused(start: Start) -> None:
    authenticator = start(max_token_size=500)
    code, failed, detail = await ask(authenticator, token("HS256", filler="x" * 500))
    assert (code, failed, detail) == (BAD_USER_NAME_OR_PASSWORD, True, "the token is too large")


# --- memory and queue ---------------------------------------------------------------------------------------------


def count_verifications(monkeypatch: pytest.MonkeyPatch, authenticator: JwtAuthenticator) -> list[str]:
    verified: list[str] = []
    original = authenticator._verifier.verify
    monkeypatch.setattr(authenticator._verifier, "verify", lambda text, keys: verified.append(text) or original(text, keys))
    return verified


async def test_a_proven_token_is_verified_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    authenticator = start(max_remembered_bytes=2 * REMEMBERED, claims=(("client", "%c"),))
    verified = count_verifications(monkeypatch, authenticator)
    texts = [token("HS256", client="c", number=number) for number in range(3)]
    for text in (texts[0], texts[0], texts[1], texts[2], texts[2]):
        assert (await ask(authenticator, text)).username == "pump"
    assert verified == texts
    assert len(authenticator._remembered) == 2 and REMEMBERED < authenticator._remembered.size <= 2 * REMEMBERED
    code, failed, detail = await ask(authenticator, texts[2], client_id="other")  # checked for each client
    assert (code, failed, detail) == (NOT_AUTHORIZED, False, "the token has another client")
    assert verified == texts
    assert (await ask(authenticator, texts[0])).username == "pump" and len(verified) == 4
    wrong = token("HS256", "wrong")
    for _ in range(2):
        await ask(authenticator, wrong)
    assert verified[4:] == [wrong, wrong]


async def test_no_token_is_remembered_in_0_bytes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    authenticator = start(max_remembered_bytes=0)
    verified = count_verifications(monkeypatch, authenticator)
    text = token("HS256")
    for _ in range(2):
        assert (await ask(authenticator, text)).username == "pump"
    assert verified == [text] * 2 and len(authenticator._remembered) == authenticator._remembered.size == 0


async def test_a_remembered_token_expires(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    authenticator = start(leeway=0.0)
    text = token("HS256", exp=int(time.time()) + 1000)
    assert (await ask(authenticator, text)).username == "pump"
    real = time.time
    monkeypatch.setattr(jwt_authenticator.time, "time", lambda: real() + 2000)
    assert (await ask(authenticator, text))[2] == "the token has expired"


async def test_many_logins_take_turns_with_the_loop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwt_authenticator, "TURN", 0.0)
    authenticator = start(capacity=5)
    asked = [Asked(token("HS256", number=number)) for number in range(8)]
    asked[3].gone = True
    for each in asked:
        authenticator.authenticate(each)
    # One is verified at once, five wait, and the last two are refused.
    assert [each.answer.done() for each in asked] == [True] + [False] * 5 + [True] * 2
    assert [each.answer.result()[0] for each in asked[6:]] == [SERVER_BUSY] * 2
    turns = 0
    while authenticator._queue:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 4
    assert [each.answer.done() for each in asked[1:6]] == [True, True, False, True, True]


async def test_long_connects_wait_within_a_total(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwt_authenticator, "TURN", 0.0)
    authenticator = start()
    authenticator.max_bytes = 250_000
    asked = [Asked(token("HS256", number=number)) for number in range(5)]
    for each in asked[:4]:
        each.size = 100_000
    for each in asked:
        authenticator.authenticate(each)
    assert asked[3].answer.result()[0] == QUOTA_EXCEEDED
    for index in (0, 1, 2, 4):
        assert (await asked[index].answer).username == "pump"
    assert authenticator._waiting_bytes == 0


# --- keys from files ----------------------------------------------------------------------------------------------


async def test_a_reload_reads_the_keys_again(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(public_pem("RS256", "a"))
    authenticator = start(public_key_file=path)
    old, new = token(name="a"), token(name="b")
    assert (await ask(authenticator, old)).username == "pump"
    path.write_bytes(b"garbage")
    problem = f"jwt.public_key_file: {path}: not a public key or certificate in PEM format"
    assert await authenticator.reload() == [problem]
    assert (await ask(authenticator, old)).username == "pump"
    path.write_bytes(public_pem("RS256", "b"))
    assert await authenticator.reload() == []
    assert (await ask(authenticator, old))[0] == BAD_USER_NAME_OR_PASSWORD  # not remembered either
    assert (await ask(authenticator, new)).username == "pump"
    authenticator.settings = Jwt(algorithms=("RS256",), public_key_file=path, issuer="id")
    assert (await ask(authenticator, new)).username == "pump"  # in force from the reload on
    assert await authenticator.reload() == []
    assert (await ask(authenticator, new))[2] == "the token has no iss"


def test_mistakes_in_files_name_key_file_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for settings, reason in (
        ({"public_key_file": path}, "cannot be read: No such file or directory"),
        ({"jwks_file": path}, "cannot be read: No such file or directory"),
        ({"jwks_url": "https://id", "jwks_cafile": path}, "cannot be read: No such file or directory"),
    ):
        name = list(settings)[-1]
        with pytest.raises(ConfigError) as caught:
            JwtAuthenticator(Jwt(algorithms=("RS256",), **settings), 1)
        assert caught.value.problems == [f"jwt.{name}: {path}: {reason}"]
    path.write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(ConfigError, match="jwt.jwks_file: .*: more than 1048576 bytes"):
        JwtAuthenticator(Jwt(algorithms=("RS256",), jwks_file=path), 1)
    path.write_bytes(b"{}")
    with pytest.raises(ConfigError, match='jwt.jwks_file: .*: not a key set: no list "keys"'):
        JwtAuthenticator(Jwt(algorithms=("RS256",), jwks_file=path), 1)
    with pytest.raises(ConfigError, match="jwt.jwks_cafile: .*: no certificate in PEM format"):
        JwtAuthenticator(Jwt(algorithms=("RS256",), jwks_url="https://id", jwks_cafile=path), 1)
    with pytest.raises(ConfigError, match="jwt.secret: HS256 needs a secret of at least 32 bytes"):
        JwtAuthenticator(Jwt(algorithms=("HS256",), secret="short"), 1)


# --- keys from a URL ----------------------------------------------------------------------------------------------


async def fetched(authenticator: JwtAuthenticator, count: int) -> None:
    """Wait until that many fetches have ended."""
    jwks = authenticator.jwks
    assert jwks is not None
    async with asyncio.timeout(PATIENCE):
        while jwks.successes + jwks.failures < count:
            await asyncio.sleep(0.005)


async def test_the_first_logins_wait_for_the_keys(start: Start, server: KeyServer) -> None:
    authenticator = start(jwks_url=server.url)
    assert (await ask(authenticator, token(name="a", kid="a"))).username == "pump"
    assert server.requests == 1


async def test_an_unknown_key_id_fetches_the_keys_once(start: Start, server: KeyServer) -> None:
    authenticator = start(jwks_url=server.url, jwks_min_interval=60.0)
    assert (await ask(authenticator, token(name="a", kid="a"))).username == "pump"
    assert authenticator.jwks is not None
    authenticator.jwks._next_allowed = 0.0  # as after a minute
    server.body = key_set(jwk("RS256", "a", "a"), jwk("RS256", "b", "b"))  # rotated
    logins = [Asked(token(name="b", kid="b", number=number)) for number in range(5)]
    for asked in logins:
        authenticator.authenticate(asked)
    assert [(await asked.answer).username for asked in logins] == ["pump"] * 5
    assert server.requests == 2


async def test_unknown_key_ids_do_not_fetch_too_often(start: Start, server: KeyServer) -> None:
    authenticator = start(jwks_url=server.url, jwks_min_interval=60.0)
    await fetched(authenticator, 1)
    for number in range(3):
        code, failed, detail = await ask(authenticator, token(name="b", kid=f"unknown-{number}"))
        assert (code, failed, detail) == (BAD_USER_NAME_OR_PASSWORD, False, "the token is signed by an unknown key")
    assert server.requests == 1


async def test_a_key_that_was_removed_is_no_longer_accepted(start: Start, server: KeyServer) -> None:
    authenticator = start(jwks_url=server.url, jwks_refresh=0.05, jwks_min_interval=0.05)
    text = token(name="a", kid="a")
    assert (await ask(authenticator, text)).username == "pump"
    server.body = key_set(jwk("RS256", "b", "b"))
    async with asyncio.timeout(PATIENCE):
        while (answer := await ask(authenticator, text)).__class__ is not tuple:
            await asyncio.sleep(0.01)
    assert answer[0] == BAD_USER_NAME_OR_PASSWORD


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("error", "HTTP status 500"),
        ("redirect", "HTTP status 302"),
        ("silent", "no answer in 2 s"),
        ("slow", "no answer in 2 s"),
        ("huge", "more than 4096 bytes"),
        ("garbage", "not JSON"),
        ("empty", "no key for RS256"),
    ],
)
async def test_the_last_good_keys_stay_in_use(start: Start, server: KeyServer, mode: str, reason: str) -> None:
    authenticator = start(jwks_url=server.url, jwks_refresh=0.05, jwks_min_interval=0.05, jwks_timeout=2.0, jwks_max_size=4096)
    assert (await ask(authenticator, token(name="a", kid="a"))).username == "pump"
    assert authenticator.problems == []
    if mode in ("garbage", "empty"):
        server.body = b"<html>" if mode == "garbage" else key_set()
    else:
        server.mode = mode
    jwks = authenticator.jwks
    assert jwks is not None
    async with asyncio.timeout(PATIENCE):
        while jwks.failures < 2:
            await asyncio.sleep(0.01)
    assert (await ask(authenticator, token(name="a", kid="a", number=2))).username == "pump"
    assert authenticator.problems == [f"jwt: {server.url}: {reason}; the last keys stay in use"]
    # Whether an unknown key is right cannot be known.
    assert (await ask(authenticator, token(name="b", kid="b")))[:2] == (SERVER_UNAVAILABLE, False)
    assert jwks.key_count == 1 and 0 < jwks.fetched_at < time.time()
    server.mode = "ok"
    server.body = key_set(jwk("RS256", "b", "b"))
    async with asyncio.timeout(PATIENCE):
        while jwks.error:
            await asyncio.sleep(0.01)
    assert authenticator.problems == []
    assert (await ask(authenticator, token(name="b", kid="b"))).username == "pump"


async def test_without_any_keys_logins_are_refused_as_unavailable(start: Start, server: KeyServer) -> None:
    server.mode = "error"
    authenticator = start(jwks_url=f"{server.url}?key=secret")
    assert (await ask(authenticator, token(name="a", kid="a")))[:2] == (SERVER_UNAVAILABLE, False)
    assert authenticator.problems == [f"jwt: {server.url}?***: HTTP status 500; no keys yet"]


async def test_too_many_logins_that_wait_for_keys(start: Start, server: KeyServer) -> None:
    server.mode = "silent"
    authenticator = start(capacity=2, jwks_url=server.url, jwks_timeout=0.3)
    asked = [Asked(token(name="a", kid="a", number=number)) for number in range(3)]
    for each in asked:
        authenticator.authenticate(each)
    assert asked[2].answer.result()[0] == SERVER_BUSY
    assert [(await each.answer)[0] for each in asked[:2]] == [SERVER_UNAVAILABLE] * 2


async def test_a_reload_fetches_the_keys(start: Start, server: KeyServer) -> None:
    authenticator = start(jwks_url=server.url)
    await fetched(authenticator, 1)
    assert await authenticator.reload() == []
    await fetched(authenticator, 2)
    with KeyServer(key_set(jwk("RS256", "b", "b"))) as other:
        authenticator.settings = Jwt(algorithms=("RS256",), jwks_url=other.url)
        assert await authenticator.reload() == []
        assert (await ask(authenticator, token(name="b", kid="b"))).username == "pump"
        assert (await ask(authenticator, token(name="a", kid="a")))[0] == BAD_USER_NAME_OR_PASSWORD
