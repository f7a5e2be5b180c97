"""The chain of authenticators: order, outcomes, bans, and what a login brings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chains import ChainCore, Scripted, accepting, broken, failing, ignoring
from support.core import START

from mqttbroker.codec.packets import Connect, Disconnect
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import (
    BAD_AUTHENTICATION_METHOD,
    BAD_USER_NAME_OR_PASSWORD,
    BANNED,
    CLIENT_IDENTIFIER_NOT_VALID,
    NOT_AUTHORIZED,
    SERVER_UNAVAILABLE,
)
from mqttbroker.config.settings import Bans
from mqttbroker.core.access.policy import AuthenticationRequest, Identity


@pytest.fixture
def core(tmp_path: Path) -> Iterator[ChainCore]:
    with ChainCore(tmp_path, others={"bans": Bans(failures=2, address_failures=0)}) as core:
        yield core


def test_the_first_that_does_not_ignore_decides(core: ChainCore) -> None:
    first, second, third = (Scripted(*each) for each in (("one", ignoring), ("two", accepting()), ("three", failing)))
    core.chain(first, second, third)
    with core.open(username="alice", password=b"x") as client:
        assert client.connection.username == "alice" and client.connection.authenticator is second
    assert len(first.asked) == len(second.asked) == 1 and not third.asked
    core.chain(third, second)
    assert core.code(username="alice", password=b"x") == BAD_USER_NAME_OR_PASSWORD
    assert core.broker.connect_handler.logins.counts == {("two", "accepted"): 1, ("three", "rejected"): 1}


@pytest.mark.parametrize(
    "fields, checks_credentials, expected",
    [
        ({}, True, 0),
        ({"username": "alice", "password": b"x"}, True, BAD_USER_NAME_OR_PASSWORD),
        ({"username": "alice"}, True, BAD_USER_NAME_OR_PASSWORD),
        ({"password": b"x"}, True, BAD_USER_NAME_OR_PASSWORD),
        ({"username": "alice", "password": b"x"}, False, 0),
    ],
)
def test_a_client_that_all_ignore(core: ChainCore, fields: dict[str, Any], checks_credentials: bool, expected: int) -> None:
    core.chain(Scripted("one", ignoring, checks_credentials))
    assert core.code(**fields) == expected
    core.chain(Scripted("one", ignoring, checks_credentials), anonymous=False)
    assert core.code(**fields) == (expected or NOT_AUTHORIZED)


def test_a_method_that_all_ignore_is_refused(core: ChainCore) -> None:
    core.chain(Scripted("one", ignoring))
    properties = Properties()
    properties.authentication_method = "GS2-KRB5"
    assert core.code(properties=properties) == BAD_AUTHENTICATION_METHOD


@pytest.mark.parametrize("answer", [broken, lambda request: request.unavailable("the server is down")])
def test_an_authenticator_that_cannot_decide_refuses(core: ChainCore, answer: Callable[[AuthenticationRequest], None]) -> None:
    second = Scripted("two", accepting())
    core.chain(Scripted("one", answer), second)
    assert core.code(username="alice", password=b"x") == SERVER_UNAVAILABLE
    assert core.code(4, username="alice", password=b"x") == 3
    assert core.code() == SERVER_UNAVAILABLE  # nor is it anonymous
    assert not second.asked and core.broker.bans.failed_logins == 0
    assert core.broker.connect_handler.logins.counts == {("one", "unavailable"): 3}


def test_a_failure_counts_once_towards_a_ban(core: ChainCore) -> None:
    core.chain(Scripted("one", ignoring), Scripted("two", ignoring))
    wrong = {"username": "alice", "password": b"x"}
    assert core.code(**wrong) == BAD_USER_NAME_OR_PASSWORD
    assert core.broker.bans.failed_logins == 1
    assert core.code(**wrong) == BAD_USER_NAME_OR_PASSWORD
    assert core.code(**wrong) == BANNED


def test_only_the_first_answer_counts(core: ChainCore) -> None:
    late = Scripted("one", None)
    core.chain(late)
    client = core.client()
    client.send(Connect("c", 5, username="alice", password=b"x"))
    request = late.asked[0]
    assert request.waiting and client.arrived() == []
    request.accept(Identity("alice"))
    assert not request.waiting
    request.fail(BAD_USER_NAME_OR_PASSWORD, "late")
    request.accept(Identity("bob"))
    core.settle()
    assert client.connection.username == "alice" and not client.closed
    assert core.broker.connect_handler.logins.counts == {("one", "accepted"): 1}


def test_an_answer_for_a_client_that_left_changes_nothing(core: ChainCore) -> None:
    late = Scripted("one", None)
    core.chain(late)
    client = core.client()
    client.send(Connect("c", 5, username="alice", password=b"x"))
    client.close()
    late.asked[0].accept(Identity("alice"))
    core.settle()
    assert core.broker.registry.get("c") is None


@pytest.mark.parametrize("version, refused", [(5, CLIENT_IDENTIFIER_NOT_VALID), (4, 2)])
def test_a_login_for_one_client_id(core: ChainCore, version: int, refused: int) -> None:
    core.chain(Scripted("one", accepting(client_id="pump-7")))
    login = {"username": "alice", "password": b"x"}
    assert core.code(version, client_id="pump-8", **login) == refused
    assert core.code(version, client_id="pump-7", **login) == 0
    with core.open(version, client_id="", **login) as client:
        assert client.connection.client_id == "pump-7"
        if version == 5:
            assert client.connack.properties.assigned_client_identifier == "pump-7"


@pytest.mark.parametrize("version", [4, 5])
def test_a_login_expires(core: ChainCore, version: int) -> None:
    core.chain(Scripted("one", accepting(expires_at=START + 60)))
    client = core.open(version, username="alice", password=b"x", keep_alive=0)
    core.advance(59.5)
    assert client.ping() == []
    core.advance(0.5)
    if version == 5:
        assert client.expect(Disconnect).reason_code == NOT_AUTHORIZED
    assert client.closed and client.arrived() == []


def test_the_session_belongs_to_the_user_of_the_login(core: ChainCore) -> None:
    core.chain(Scripted("one", accepting(username="token-user")))
    with core.open(username="anything", password=b"x"):
        pass
    core.open(username="anything", password=b"x", clean_start=False, properties=_kept()).close()
    core.chain(Scripted("one", accepting(username="anything")))
    assert core.code(username="anything", password=b"x") == CLIENT_IDENTIFIER_NOT_VALID
    core.chain(Scripted("one", accepting(username="token-user")))
    assert core.code(username="other", password=b"x") == 0


def _kept() -> Properties:
    properties = Properties()
    properties.session_expiry_interval = 3600
    return properties
