"""Clients, subscriptions and bans of a whole cluster, at the HTTP server of each node: the pages of all cores as one list."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol
from urllib.parse import quote

from mqttbroker.admin.control.slices import MAX_PAGE, ControlError, Cursors
from mqttbroker.admin.http.access import Right
from mqttbroker.admin.http.bans import BAN, BAN_KEY, NEW_BAN, OF_PROTOCOL, ban_key, check_new_ban, http_ban_page
from mqttbroker.admin.http.clients import CLIENT, CLIENT_DETAIL, CLIENT_FILTERS, CLIENT_ID, EXACT_FILTER, SUBSCRIPTION, TOPIC
from mqttbroker.admin.http.operations import CURSOR, LIMIT, Call, page, route
from mqttbroker.admin.http.parameters import Field, decode_cursor, encode_cursor
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import Answer, Route
from mqttbroker.admin.http.schemas import INTEGER, TEXT, Schema, array, described, record
from mqttbroker.core.access.ban_list import OPERATOR
from mqttbroker.core.access.bans import Bans
from mqttbroker.core.sessions.own_shard import shard_of
from mqttbroker.node.core_http import CoreAnswer, CoreAway, away_text

LEAST_BAN: Final = 1.0  # seconds that a copied ban lasts at least
LEAST_READ: Final = 50  # items that a core is asked for at once, unless a page has fewer

Item = dict[str, Any]
Key = Callable[[Item], Any]

UNANSWERED = record(
    "Unanswered", shard=INTEGER, node=described(TEXT, '"" = no node owns the shard'), reason=described(TEXT, "why it is not in the list")
)


class Cores(Protocol):
    """As `CoreHttp`."""

    count: int

    async def ask(
        self, shard: int, method: str, path: str, query: Mapping[str, str] = {}, body: Mapping[str, Any] | None = None
    ) -> CoreAnswer: ...


class _Source:
    """The items of one core in a list, read in pieces."""

    def __init__(self, cores: Cores, shard: int, path: str, query: Mapping[str, str], size: int) -> None:
        self.shard = shard
        self.items: deque[Item] = deque()
        self.more = True  # there may be items behind those read
        self.failure: CoreAway | None = None
        self._cores = cores
        self._path = path
        self._query = {**query, "limit": str(size)}

    async def read(self) -> None:
        """Read on until there are items, or no more."""
        try:
            while self.more and not self.items:
                answer = await self._cores.ask(self.shard, "GET", self._path, self._query)
                found = answer.json()
                if answer.status != 200:
                    raise CoreAway(answer.node, _detail(found, answer.status))
                try:
                    self.items += found["items"]
                    following = found["next_cursor"]
                except (KeyError, TypeError):
                    raise CoreAway(answer.node, "answers with something else than a page") from None
                self.more = following is not None
                self._query["cursor"] = following or ""
        except CoreAway as away:
            self.failure, self.more = away, False


class MergedList:
    """The items of all cores in the order of ``key``, or those of one shard behind those of the other without it.

    A core that does not answer is asked no more: what it has left is missing in all further pages.
    """

    def __init__(self, sources: Sequence[_Source], key: Key | None = None, descending: bool = False) -> None:
        self._sources = sources
        self._key = key
        self._descending = descending

    async def next(self, limit: int) -> list[Item]:
        """The next items."""
        found: list[Item] = []
        while len(found) < limit:
            left = [source for source in self._sources if source.items or source.more]
            needed = left if self._key is not None else left[:1]
            if not needed:
                break
            if all(source.items for source in needed):
                found.append(self._chosen(needed).items.popleft())
            else:
                await asyncio.gather(*(source.read() for source in left if not source.items))
        return found

    @property
    def more(self) -> bool:
        return any(source.items or source.more for source in self._sources)

    @property
    def unanswered(self) -> list[Item]:
        """The cores whose items are missing, as `UNANSWERED` describes them."""
        return [
            {"shard": source.shard, "node": source.failure.node, "reason": str(source.failure)}
            for source in self._sources if source.failure is not None
        ]  # fmt: skip

    def _chosen(self, ready: list[_Source]) -> _Source:
        """The source of the next item."""
        key = self._key
        if key is None:
            return ready[0]
        return (max if self._descending else min)(ready, key=lambda source: key(source.items[0]))


class ClusterLists:
    """Routes as those of `mqttbroker.admin.http.api`, over all cores. All methods run on the thread of the HTTP server.

    ``http_bans`` are those of that server.
    """

    def __init__(self, cores: Cores, http_bans: Bans) -> None:
        self._http_bans = http_bans
        self._cores = cores
        self._cursors: Cursors[MergedList] = Cursors()

    def routes(self) -> list[Route]:
        lists, operate = Right.LIST, Right.OPERATE
        done = Answer("done")
        return [
            route("GET", "/clients", self._clients, lists, "Clients and their sessions on all nodes", _page(CLIENT),
                  [*CLIENT_FILTERS, LIMIT, CURSOR], tag="clients", errors=(404,)),
            route("GET", "/clients/{client_id}", self._client, lists, "One client and its session", CLIENT_DETAIL,
                  [CLIENT_ID], tag="clients", errors=(404,)),
            route("GET", "/clients/{client_id}/subscriptions", self._client_subscriptions, lists,
                  "Subscriptions of a client", page(SUBSCRIPTION), [CLIENT_ID, LIMIT, CURSOR], tag="clients", errors=(404,)),
            route("POST", "/clients/{client_id}/disconnect", self._disconnect, operate,
                  "Disconnect a client of any node (reason code 0x98); its session stays", None, [CLIENT_ID], done=done,
                  action="disconnect_client", tag="clients", errors=(404,)),
            route("DELETE", "/clients/{client_id}", self._delete_session, operate,
                  "Disconnect a client and delete its session; its will is published", None, [CLIENT_ID], done=done,
                  action="delete_session", tag="clients", errors=(404,)),
            route("GET", "/subscriptions", self._subscriptions, lists, "Subscriptions on all nodes to exactly a filter",
                  _page(SUBSCRIPTION), [EXACT_FILTER, LIMIT, CURSOR], tag="subscriptions", errors=(404,)),
            route("GET", "/receivers", self._receivers, lists, "Subscriptions on all nodes that get the messages of a topic",
                  _page(SUBSCRIPTION), [TOPIC, LIMIT, CURSOR], tag="subscriptions", errors=(404,)),
            route("GET", "/bans", self._bans, lists, "Bans in force on any node; of HTTP senders, at this one", _page(BAN),
                  [OF_PROTOCOL, LIMIT, CURSOR], tag="bans", errors=(404,)),
            route("POST", "/bans", self._ban, operate,
                  "Ban clients of MQTT on all nodes; those that are connected are disconnected", record(disconnected=INTEGER),
                  body=NEW_BAN, action="ban", tag="bans"),
            route("DELETE", "/bans", self._lift_ban, operate,
                  "Lift the bans of exactly these clients on all nodes, or senders at this one", None, [OF_PROTOCOL, *BAN_KEY],
                  done=done, action="lift_ban", tag="bans", errors=(404,)),
        ]  # fmt: skip

    # -- clients ---------------------------------------------------------------------

    async def _clients(self, call: Call) -> Any:
        key = _KEYS[call["sort"]]
        return await self._page(call, "/clients", _query(call, CLIENT_FILTERS), key, call["order"] == "desc")

    async def _client(self, call: Call) -> Any:
        return await self._of_client(call, "GET")

    async def _client_subscriptions(self, call: Call) -> Any:
        return await self._of_client(call, "GET", "/subscriptions", _query(call, [LIMIT, CURSOR]))

    async def _disconnect(self, call: Call) -> None:
        await self._of_client(call, "POST", "/disconnect")

    async def _delete_session(self, call: Call) -> None:
        await self._of_client(call, "DELETE")

    async def _of_client(self, call: Call, method: str, path: str = "", query: Mapping[str, str] = {}) -> Any:
        """The answer of the core of a client's shard."""
        client_id = call["client_id"]
        shard = shard_of(client_id, self._cores.count)
        try:
            answer = await self._cores.ask(shard, method, f"/clients/{quote(client_id, safe='')}{path}", query)
        except CoreAway as away:
            raise RequestError(503, away_text(shard, away)) from None
        return _answered(shard, answer)

    # -- subscriptions -----------------------------------------------------------------

    async def _subscriptions(self, call: Call) -> Any:
        return await self._page(call, "/subscriptions", _query(call, [EXACT_FILTER]))

    async def _receivers(self, call: Call) -> Any:
        return await self._page(call, "/receivers", _query(call, [TOPIC]))

    # -- bans ----------------------------------------------------------------------------

    async def _bans(self, call: Call) -> Any:
        if call["protocol"] == "http":
            return {**http_ban_page(self._http_bans, call), "unanswered": []}
        return await self._page(call, "/bans", {}, joined=_joined_bans)

    async def _ban(self, call: Call) -> Any:
        check_new_ban(call)
        body = {field.name: call[field.name] for field in NEW_BAN if call[field.name] not in (None, "")}
        answers = await self._of_all("POST", "/bans", {}, body)
        return {"disconnected": sum(_answered(shard, answer)["disconnected"] for shard, answer in enumerate(answers))}

    async def _lift_ban(self, call: Call) -> None:
        key = ban_key(call)
        if call["protocol"] == "http":
            lifted = bool(self._http_bans.lift(*key))
        else:
            answers = await self._of_all("DELETE", "/bans", _query(call, BAN_KEY))
            for shard, answer in enumerate(answers):
                if answer.status != 404:
                    _answered(shard, answer)
            lifted = any(answer.status != 404 for answer in answers)
        if not lifted:
            raise RequestError(404, "there is no such ban")

    async def _of_all(self, method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any] | None = None) -> list[CoreAnswer]:
        """The answers of all cores. Raises RequestError, 503, that names those that give none; the others have done it."""
        shards = range(self._cores.count)
        asked = await asyncio.gather(*(self._cores.ask(shard, method, path, query, body) for shard in shards), return_exceptions=True)
        away = [away_text(shard, one) for shard, one in zip(shards, asked) if isinstance(one, CoreAway)]
        if away:
            raise RequestError(503, f"not done everywhere, so repeat it: {'; '.join(away)}")
        answers: list[CoreAnswer] = []
        for one in asked:
            if isinstance(one, BaseException):
                raise one
            answers.append(one)
        return answers

    # -- pages -----------------------------------------------------------------------------

    async def _page(
        self,
        call: Call,
        path: str,
        query: Mapping[str, str],
        key: Key | None = None,
        descending: bool = False,
        joined: Callable[[list[Item]], list[Item]] | None = None,
    ) -> Any:
        """The next page of a list; with ``joined`` the whole list is read first, and goes through it."""
        limit = call["limit"]
        parts = decode_cursor(call["cursor"], int)
        if parts is not None:
            try:
                listing = self._cursors.take(int(parts[0]))
            except ControlError as error:
                raise RequestError(404, str(error), "cursor") from None
        else:
            # Items that a page leaves over are kept for the next one, so all cores together are asked for about two pages at once.
            size = MAX_PAGE if joined is not None else min(limit, max(LEAST_READ, 2 * limit // self._cores.count))
            sources = [_Source(self._cores, shard, path, query, size) for shard in range(self._cores.count)]
            if joined is not None:
                await asyncio.gather(*map(_read_all, sources))
                whole = joined([item for source in sources for item in source.items])
                for source in sources:
                    source.items.clear()
                sources[0].items.extend(whole)
            listing = MergedList(sources, key, descending)
        items = await listing.next(limit)
        following = encode_cursor(self._cursors.open(listing)) if listing.more else None
        return {"items": items, "next_cursor": following, "unanswered": listing.unanswered}


async def copy_bans(cores: Cores, shard: int) -> int:
    """Have the core of a shard ban those whom operators have banned at other cores; returns how many bans it lacked.

    Bans are not in the log of a shard, so a core that has taken it over knows only those that it had before. Raises CoreAway.
    """
    own, *others = (_Source(cores, each, "/bans", {}, MAX_PAGE) for each in (shard, *(n for n in range(cores.count) if n != shard)))
    await asyncio.gather(_read_all(own), *map(_read_all, others))
    if own.failure is not None:
        raise own.failure
    known = {_ban_place(ban) for ban in own.items}
    wanted = [ban for ban in _joined_bans([ban for other in others for ban in other.items]) if ban["cause"] == OPERATOR]
    missing = [ban for ban in wanted if _ban_place(ban) not in known]
    for ban in missing:
        body = {name: ban[name] for name in ("address", "username", "client_id", "reason") if ban[name]}
        if ban["seconds_left"] is not None:
            body["seconds"] = max(LEAST_BAN, ban["seconds_left"])
        answer = await cores.ask(shard, "POST", "/bans", {}, body)
        if answer.status != 200:
            raise CoreAway(answer.node, _detail(answer.json(), answer.status))
    return len(missing)


async def _read_all(source: _Source) -> None:
    """Read everything that a core has."""
    found: list[Item] = []
    while source.more:
        await source.read()
        found += source.items
        source.items.clear()
    source.items.extend(found)


def _joined_bans(bans: list[Item]) -> list[Item]:
    """Bans of the same clients for the same cause, which each core has by itself, as one: the one that ends last."""

    def left(ban: Item) -> float:
        seconds = ban["seconds_left"]
        return float("inf") if seconds is None else float(seconds)

    found: dict[tuple[str, ...], Item] = {}
    for ban in bans:
        place = _ban_place(ban)
        known = found.get(place)
        if known is None or left(ban) > left(known):
            found[place] = ban
    return [found[place] for place in sorted(found)]


def _ban_place(ban: Item) -> tuple[str, ...]:
    return (ban["address"], ban["username"], ban["client_id"], ban["cause"])


# The values by which cores sort clients, as their pages have them.
_KEYS: Mapping[str, Key] = {
    "client_id": lambda item: item["client_id"],
    "connected_at": lambda item: (item["connected_at"] or 0.0, item["client_id"]),
    "disconnected_at": lambda item: (item["disconnected_at"] or 0.0, item["client_id"]),
    "subscriptions": lambda item: (item["subscriptions"], item["client_id"]),
    "queued_messages": lambda item: (item["queued_messages"], item["client_id"]),
}


def _page(items: Schema) -> Schema:
    """A page of a list of several cores."""
    missing = described(array(UNANSWERED), "cores whose items are not in the list, in this page and in those that follow")
    return record(**page(items)["properties"], unanswered=missing)


def _query(call: Call, fields: Sequence[Field]) -> dict[str, str]:
    """The parameters of a request that have no default value, as they were sent."""
    values = {field.name: call[field.name] for field in fields if field.required or call[field.name] != field.default}
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}


def _answered(shard: int, answer: CoreAnswer) -> Any:
    """The JSON of an answer; None without one. Raises RequestError as the core does."""
    try:
        found = answer.json()
    except CoreAway as away:
        raise RequestError(503, away_text(shard, away)) from None
    if answer.status >= 400:
        field = str(found.get("field", "")) if isinstance(found, dict) else ""
        raise RequestError(answer.status, _detail(found, answer.status), field)
    return found


def _detail(problem: Any, status: int) -> str:
    """The line of a problem."""
    detail = problem.get("detail") if isinstance(problem, dict) else None
    return str(detail) if detail else f"answers with status {status}"
