"""A broker core whose clients are checked by scripted authenticators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mqttbroker.codec.reason_codes import BAD_USER_NAME_OR_PASSWORD
from mqttbroker.core.access.policy import (
    AnonymousPolicy,
    AuthenticationChain,
    AuthenticationRequest,
    Authenticator,
    Identity,
)
from support.core import Core, CoreClient


class Scripted(Authenticator):
    """Answers as ``answer`` does; without it, later."""

    def __init__(self, kind: str, answer: Callable[[AuthenticationRequest], None] | None, checks_credentials: bool = True) -> None:
        super().__init__(kind, checks_credentials)
        self.answer = answer
        self.asked: list[AuthenticationRequest] = []

    def authenticate(self, request: AuthenticationRequest) -> None:
        self.asked.append(request)
        if self.answer is not None:
            self.answer(request)


def accepting(**fields: Any) -> Callable[[AuthenticationRequest], None]:
    return lambda request: request.accept(Identity(**{"username": request.username, **fields}))


def ignoring(request: AuthenticationRequest) -> None:
    request.ignore()


def failing(request: AuthenticationRequest) -> None:
    request.fail(BAD_USER_NAME_OR_PASSWORD, "wrong")


def broken(request: AuthenticationRequest) -> None:
    raise ValueError("a defect")


class ChainCore(Core):
    """A core whose clients are checked by a chain of scripted authenticators. Their addresses can be banned."""

    def chain(self, *authenticators: Authenticator, anonymous: Any = True) -> None:
        self.policy = AuthenticationChain(list(authenticators), AnonymousPolicy(anonymous))

    def open(self, version: int = 5, client_id: str = "c", **fields: Any) -> CoreClient:
        """A client after its CONNECT, accepted or not."""
        client = self.client(version)
        client.connection.peer = "10.0.0.1:1"
        client.connack = client.connect(client_id, **fields)
        return client

    def code(self, version: int = 5, **fields: Any) -> int:
        client = self.open(version, **fields)
        client.close()
        return client.connack.reason_code
