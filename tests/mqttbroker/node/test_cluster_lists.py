"""Clients, subscriptions and bans of all cores as one list, with cores in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from mqttbroker.admin.http.access import VIEW, Principal, Right
from mqttbroker.admin.http.bans import BAN_KEY, NEW_BAN, OF_PROTOCOL
from mqttbroker.admin.http.clients import CLIENT_FILTERS, EXACT_FILTER
from mqttbroker.admin.http.operations import CURSOR, LIMIT, Call
from mqttbroker.admin.http.parameters import Field
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.core.access.bans import Bans, BanTerms
from mqttbroker.core.sessions.own_shard import shard_of
from mqttbroker.node.core_http import CoreAnswer, CoreAway
from mqttbroker.node.lists import ClusterLists, copy_bans

SHARDS = 3
OPERATOR = Principal("test", "operator", VIEW | Right.OPERATE, frozenset())


class FakeCores:
    """Cores that answer from memory: ``lists`` has the items of each, by path and shard. ``away`` are those that do not answer."""

    def __init__(self) -> None:
        self.count = SHARDS
        self.lists: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self.away: dict[int, str] = {}
        self.statuses: dict[int, tuple[int, Any]] = {}
        self.asked: list[tuple[int, str, str, dict[str, str], Any]] = []

    async def ask(
        self, shard: int, method: str, path: str, query: Mapping[str, str] = {}, body: Mapping[str, Any] | None = None
    ) -> CoreAnswer:
        self.asked.append((shard, method, path, dict(query), body))
        if shard in self.away:
            raise CoreAway(f"node-{shard}", self.away[shard])
        status, answer = self.statuses.get(shard, (200, None))
        if answer is None and status == 200:
            first = int(query.get("cursor", "0"))
            last = first + int(query.get("limit", "1000"))
            items = self.lists.get((path, shard), [])
            answer = {"items": items[first:last], "next_cursor": str(last) if last < len(items) else None}
        return CoreAnswer(status, b"" if answer is None else json.dumps(answer).encode(), "application/json", f"node-{shard}")


def client(client_id: str, **values: Any) -> dict[str, Any]:
    return {"client_id": client_id, "connected_at": None, "disconnected_at": None, "subscriptions": 0, "queued_messages": 0,
            **values}  # fmt: skip


def call(*fields: Field, **values: Any) -> Call:
    return Call(OPERATOR, {field.name: values.get(field.name, field.default) for field in fields} | values)


def clients_call(**values: Any) -> Call:
    return call(*CLIENT_FILTERS, LIMIT, CURSOR, **values)


@pytest.fixture
def cores() -> FakeCores:
    return FakeCores()


@pytest.fixture
def lists(cores: FakeCores) -> ClusterLists:
    return ClusterLists(cores, Bans(BanTerms()))


async def all_clients(lists: ClusterLists, limit: int, **values: Any) -> tuple[list[str], list[int]]:
    """The client ids of all pages, and the sizes of these."""
    found, sizes, cursor = [], [], None
    while True:
        page = await lists._clients(clients_call(limit=limit, cursor=cursor, **values))
        found += [item["client_id"] for item in page["items"]]
        sizes.append(len(page["items"]))
        cursor = page["next_cursor"]
        if cursor is None:
            return found, sizes


def spread(cores: FakeCores, names: list[str], **values: Any) -> None:
    for name in names:
        cores.lists.setdefault(("/clients", shard_of(name, SHARDS)), []).append(client(name, **values))


@pytest.mark.parametrize("limit", [1, 7, 100, 1000])
async def test_pages_of_clients_are_in_order_and_have_each_client_once(lists: ClusterLists, cores: FakeCores, limit: int) -> None:
    names = sorted(f"device-{number}" for number in range(333))
    spread(cores, names)
    found, sizes = await all_clients(lists, limit)
    assert found == names
    assert all(size == limit for size in sizes[:-1])


async def test_one_core_may_have_all_of_a_page(lists: ClusterLists, cores: FakeCores) -> None:
    cores.lists["/clients", 1] = [client(f"a{number:03}") for number in range(200)]
    cores.lists["/clients", 2] = [client(f"b{number:03}") for number in range(3)]
    assert (await all_clients(lists, 100))[0] == [f"a{n:03}" for n in range(200)] + ["b000", "b001", "b002"]


async def test_clients_are_sorted_by_other_values_in_both_directions(lists: ClusterLists, cores: FakeCores) -> None:
    cores.lists["/clients", 0] = [client("x", queued_messages=9), client("c", queued_messages=2)]
    cores.lists["/clients", 2] = [client("b", queued_messages=9), client("a", queued_messages=1)]
    assert (await all_clients(lists, 1, sort="queued_messages", order="desc"))[0] == ["x", "b", "c", "a"]
    cores.lists["/clients", 0] = [client("a"), client("c", connected_at=7.5)]
    cores.lists["/clients", 2] = [client("b", connected_at=2.5)]
    assert (await all_clients(lists, 10, sort="connected_at"))[0] == ["a", "b", "c"]


async def test_filters_are_those_of_the_request(lists: ClusterLists, cores: FakeCores) -> None:
    await lists._clients(clients_call(connected=True, username="", prefix="p"))
    assert [asked[3] for asked in cores.asked] == [{"prefix": "p", "username": "", "connected": "true", "limit": "66"}] * SHARDS


async def test_a_core_that_does_not_answer_is_named_in_each_page(lists: ClusterLists, cores: FakeCores) -> None:
    cores.lists["/clients", 0] = [client("a"), client("c")]
    cores.away[1] = "no answer within 5 s"
    cores.statuses[2] = (403, {"detail": "role viewer is needed"})
    missing = [{"shard": 1, "node": "node-1", "reason": "no answer within 5 s"},
               {"shard": 2, "node": "node-2", "reason": "role viewer is needed"}]  # fmt: skip
    first = await lists._clients(clients_call(limit=1))
    assert [item["client_id"] for item in first["items"]] == ["a"]
    assert first["unanswered"] == missing
    cores.away.clear()
    second = await lists._clients(clients_call(limit=1, cursor=first["next_cursor"]))
    assert [item["client_id"] for item in second["items"]] == ["c"]
    assert (second["unanswered"], second["next_cursor"]) == (missing, None)


async def test_a_cursor_is_good_for_one_page(lists: ClusterLists, cores: FakeCores) -> None:
    spread(cores, ["a", "b", "c"])
    cursor = (await lists._clients(clients_call(limit=1)))["next_cursor"]
    await lists._clients(clients_call(limit=1, cursor=cursor))
    with pytest.raises(RequestError) as refused:
        await lists._clients(clients_call(limit=1, cursor=cursor))
    assert (refused.value.status, refused.value.field) == (404, "cursor")


async def test_something_else_than_a_page_is_no_answer(lists: ClusterLists, cores: FakeCores) -> None:
    cores.statuses[0] = (200, {"nodes": []})
    page = await lists._clients(clients_call())
    assert page["unanswered"] == [{"shard": 0, "node": "node-0", "reason": "answers with something else than a page"}]


async def test_the_core_of_a_client_is_asked_for_it(lists: ClusterLists, cores: FakeCores) -> None:
    shard = shard_of("a/b ü", SHARDS)
    cores.statuses[shard] = (204, None)
    await lists._disconnect(call(client_id="a/b ü"))
    assert cores.asked == [(shard, "POST", "/clients/a%2Fb%20%C3%BC/disconnect", {}, None)]
    cores.statuses[shard] = (404, {"detail": "no connected client", "field": "client_id"})
    with pytest.raises(RequestError, match="no connected client") as refused:
        await lists._disconnect(call(client_id="a/b ü"))
    assert (refused.value.status, refused.value.field) == (404, "client_id")
    cores.away[shard] = "no node owns the shard"
    with pytest.raises(RequestError, match=f"shard {shard} of node-{shard}: no node owns the shard") as refused:
        await lists._delete_session(call(client_id="a/b ü"))
    assert refused.value.status == 503


async def test_subscriptions_of_one_core_follow_those_of_another(lists: ClusterLists, cores: FakeCores) -> None:
    for shard in range(SHARDS):
        cores.lists["/subscriptions", shard] = [{"client_id": f"{shard}-{number}"} for number in (2, 1)]
    found: list[str] = []
    cursor = None
    for _ in range(3):
        page = await lists._subscriptions(call(EXACT_FILTER, LIMIT, CURSOR, filter="a/#", limit=2, cursor=cursor))
        found += [item["client_id"] for item in page["items"]]
        cursor = page["next_cursor"]
    assert cursor is None
    assert found == [f"{shard}-{number}" for shard in range(SHARDS) for number in (2, 1)]
    assert {asked[3]["filter"] for asked in cores.asked} == {"a/#"}


def ban(client_id: str, seconds: float | None, cause: str = "operator") -> dict[str, Any]:
    return {"address": "", "username": "", "client_id": client_id, "cause": cause, "reason": "spam", "seconds_left": seconds}


async def test_a_ban_of_all_cores_is_in_the_list_once(lists: ClusterLists, cores: FakeCores) -> None:
    cores.lists["/bans", 0] = [ban("b", 5.0), ban("a", 1.0)]
    cores.lists["/bans", 1] = [ban("a", None)]
    cores.lists["/bans", 2] = [ban("b", 7.0)]
    found = await lists._bans(call(OF_PROTOCOL, LIMIT, CURSOR, limit=1))
    assert found["items"] == [ban("a", None)]
    found = await lists._bans(call(OF_PROTOCOL, LIMIT, CURSOR, limit=1, cursor=found["next_cursor"]))
    assert (found["items"], found["next_cursor"], found["unanswered"]) == ([ban("b", 7.0)], None, [])


async def test_bans_are_set_and_lifted_at_all_cores(lists: ClusterLists, cores: FakeCores) -> None:
    cores.statuses = {shard: (200, {"disconnected": shard}) for shard in range(SHARDS)}
    assert await lists._ban(call(*NEW_BAN, username="eve", seconds=60.0)) == {"disconnected": 3}
    assert cores.asked == [(shard, "POST", "/bans", {}, {"username": "eve", "seconds": 60.0}) for shard in range(SHARDS)]
    cores.statuses = {0: (404, {"detail": "there is no such ban"}), 1: (204, None), 2: (404, {"detail": "there is no such ban"})}
    await lists._lift_ban(call(OF_PROTOCOL, *BAN_KEY, username="eve"))
    cores.statuses[1] = cores.statuses[0]
    with pytest.raises(RequestError, match="there is no such ban"):
        await lists._lift_ban(call(OF_PROTOCOL, *BAN_KEY, username="eve"))
    with pytest.raises(RequestError, match="a ban needs an address"):
        await lists._ban(call(*NEW_BAN))


async def test_a_ban_that_a_core_does_not_have_is_not_reported_as_done(lists: ClusterLists, cores: FakeCores) -> None:
    cores.statuses = {shard: (200, {"disconnected": 0}) for shard in range(SHARDS)}
    cores.away[2] = "no answer within 5 s"
    with pytest.raises(RequestError, match="repeat it: shard 2 of node-2: no answer within 5 s") as refused:
        await lists._ban(call(*NEW_BAN, username="eve"))
    assert refused.value.status == 503


async def test_bans_of_http_senders_are_those_of_this_node(lists: ClusterLists, cores: FakeCores) -> None:
    page = await lists._bans(call(OF_PROTOCOL, LIMIT, CURSOR, protocol="http"))
    assert page == {"items": [], "next_cursor": None, "unanswered": []}
    with pytest.raises(RequestError, match="there is no such ban"):
        await lists._lift_ban(call(OF_PROTOCOL, *BAN_KEY, protocol="http", address="10.0.0.1"))
    assert cores.asked == []


async def test_a_core_that_took_a_shard_over_gets_the_bans_of_operators(cores: FakeCores) -> None:
    cores.lists["/bans", 0] = [ban("known", None)]
    cores.lists["/bans", 1] = [ban("known", None), ban("eve", 60.0), ban("guess", 5.0, "failed_logins")]
    cores.lists["/bans", 2] = [ban("mallory", None), ban("eve", 59.0)]
    assert await copy_bans(cores, 0) == 2
    assert [(asked[0], asked[4]) for asked in cores.asked if asked[1] == "POST"] == [
        (0, {"client_id": "eve", "reason": "spam", "seconds": 60.0}), (0, {"client_id": "mallory", "reason": "spam"})
    ]  # fmt: skip


async def test_bans_are_copied_from_those_cores_that_answer(cores: FakeCores) -> None:
    cores.lists["/bans", 1] = [ban("eve", None)]
    cores.away[2] = "no answer within 5 s"
    assert await copy_bans(cores, 0) == 1
    cores.away[0] = "its core does not serve yet"
    with pytest.raises(CoreAway, match="does not serve yet"):
        await copy_bans(cores, 0)
