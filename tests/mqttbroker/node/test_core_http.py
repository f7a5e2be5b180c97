"""Requests that a node forwards to one core."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from mqttbroker.admin.http.access import VIEW, Principal
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.config.settings import Settings
from mqttbroker.node.core_http import CoreAway, CoreHttp

pytestmark = pytest.mark.one_build

SENDER = Principal("auditor", "viewer", VIEW, frozenset())
CERTIFICATE = {"subject": ((("commonName", "auditor"),),)}


class Away:
    """A node whose shards have no owner."""

    def call(self, *_: object) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_exception(CoreAway("", "no node owns the shard"))
        return answer


def request(token: str, certificate: object) -> Any:
    return SimpleNamespace(
        match_info={"shard": "0"},
        rel_url=SimpleNamespace(raw_path_qs="/api/v1/cluster/shards/0/clients"),
        method="GET",
        can_read_body=False,
        headers={"Authorization": f"Bearer {token}"} if token else {},
        transport=SimpleNamespace(get_extra_info=lambda name: certificate if name == "peercert" else None),
    )


@pytest.mark.parametrize("token, certificate, status", [("", CERTIFICATE, 403), ("t", CERTIFICATE, 503), ("", None, 503)])
async def test_a_core_is_not_asked_with_the_certificate_of_the_node(token: str, certificate: object, status: int) -> None:
    shards: Any = SimpleNamespace(cluster=SimpleNamespace(shards=1))
    runner: Any = Away()
    cores = CoreHttp(shards, runner, Settings)
    with pytest.raises(RequestError) as refused:
        await cores._forward(request(token, certificate), SENDER)
    assert refused.value.status == status
