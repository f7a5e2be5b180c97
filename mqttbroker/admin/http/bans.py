"""Bans of MQTT clients and of HTTP senders."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from mqttbroker.admin.control.bans import MAX_BAN, BanControl
from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.control.views import BanView
from mqttbroker.admin.http.access import Right
from mqttbroker.admin.http.operations import CURSOR, LIMIT, Call, page, page_of, route
from mqttbroker.admin.http.pages import page_behind
from mqttbroker.admin.http.parameters import (
    MAX_NAME,
    Field,
    Network,
    Seconds,
    Word,
    decode_cursor,
    encode_cursor,
)
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import Answer, Route
from mqttbroker.admin.http.schemas import INTEGER, NUMBER, TEXT, described, nullable, record
from mqttbroker.config.setting_kinds import Choice
from mqttbroker.core.access.bans import Bans

BAN = record(
    "Ban",
    protocol=described(TEXT, "mqtt or http"),
    address=described(TEXT, 'an address or network; "" = any'),
    username=described(TEXT, '"" = any; a digest of a long one'),
    client_id=described(TEXT, '"" = any; a digest of a long one'),
    cause=described(TEXT, "operator, failed_logins, protocol_errors or reconnects"),
    reason=TEXT,
    bans=described(INTEGER, "of these clients for this cause so far"),
    seconds_left=described(nullable(NUMBER), "null = until it is lifted"),
)

OF_PROTOCOL = Field("protocol", Choice("mqtt", "http"), "of MQTT clients or of HTTP senders", "mqtt")

_BANNED_ADDRESS = Field("address", Network(), "an address or network; absent = any", "")

NEW_BAN = [
    _BANNED_ADDRESS,
    *(Field(name, Word(1, MAX_NAME), "absent = any", "") for name in ("username", "client_id")),
    Field("seconds", Seconds(MAX_BAN), "absent = until it is lifted", None),
    Field("reason", Word(), "for lists and the log", ""),
]

BAN_KEY = [
    _BANNED_ADDRESS,
    *(Field(name, Word(1), "absent = any; of a long one its digest, as in the list", "") for name in ("username", "client_id")),
]


class BanRoutes:
    """The operations on bans. ``http_bans`` are those of the HTTP server, on whose thread all methods run."""

    def __init__(self, bans: BanControl, runner: ControlRunner, http_bans: Bans) -> None:
        self._control = bans
        self._runner = runner
        self._http_bans = http_bans

    def routes(self) -> list[Route]:
        """The table."""
        lists, operate = Right.LIST, Right.OPERATE
        done = Answer("done")
        return [
            route("GET", "/bans", self._bans, lists, "Bans in force", page(BAN), [OF_PROTOCOL, LIMIT, CURSOR],
                        tag="bans", errors=(404,)),
            route("POST", "/bans", self._ban, operate,
                        "Ban clients of MQTT; those that are connected are disconnected", record(disconnected=INTEGER),
                        body=NEW_BAN,
                        action="ban", tag="bans"),
            route("DELETE", "/bans", self._lift_ban, operate, "Lift the bans of exactly these clients or senders",
                        None, [OF_PROTOCOL, *BAN_KEY], done=done, action="lift_ban", tag="bans", errors=(404,)),
        ]  # fmt: skip

    async def _bans(self, call: Call) -> Any:
        if call["protocol"] == "http":
            return http_ban_page(self._http_bans, call)
        parts = decode_cursor(call["cursor"], int)
        runner, control = self._runner, self._control
        cursor = int(parts[0]) if parts is not None else await asyncio.wrap_future(runner.call(control.open))
        listed = await page_behind(runner.call(control.page, cursor, call["limit"]))
        items = (ban_json(ban, "mqtt") for ban in listed.bans)
        return page_of(items, encode_cursor(listed.cursor) if listed.cursor else None)

    async def _ban(self, call: Call) -> Any:
        check_new_ban(call)
        disconnected = await asyncio.wrap_future(self._runner.scan(
            self._control.ban, call["address"], call["username"], call["client_id"], call["seconds"], call["reason"]
        ))  # fmt: skip
        return {"disconnected": disconnected}

    async def _lift_ban(self, call: Call) -> None:
        key = ban_key(call)
        if call["protocol"] == "http":
            lifted = self._http_bans.lift(*key)
        else:
            lifted = await asyncio.wrap_future(self._runner.call(self._control.lift, *key))
        if not lifted:
            raise RequestError(404, "there is no such ban")


def check_new_ban(call: Call) -> None:
    """Raise RequestError, 400, for a ban of all clients."""
    if not (call["address"] or call["username"] or call["client_id"]):
        raise RequestError(400, "address: a ban needs an address, a username or a client_id", "address")


def ban_key(call: Call) -> tuple[str, str, str]:
    """The clients or senders of `BAN_KEY`. Raises RequestError, 404, for all of them."""
    key = call["address"], call["username"], call["client_id"]
    if not any(key):
        raise RequestError(404, "a ban has an address, a username or a client_id")
    return key


def http_ban_page(bans: Bans, call: Call) -> Any:
    """A page of the bans of HTTP senders, in the order of their addresses."""
    after = decode_cursor(call["cursor"], str, str, str, str)
    now = time.monotonic()
    places = {(*ban.key, ban.cause): ban for ban in bans.banned(now)}
    left = sorted(place for place in places if after is None or place > tuple(after))
    shown = left[: call["limit"]]
    found = (places[place] for place in shown)
    views = (BanView(*ban.key, ban.cause, ban.reason, ban.number, ban.until - now) for ban in found)
    following = encode_cursor(*shown[-1]) if len(shown) < len(left) else None
    return page_of((ban_json(view, "http") for view in views), following)


def ban_json(ban: BanView, protocol: str) -> dict[str, Any]:
    """A ban as `BAN` describes it."""
    return {"protocol": protocol, **ban._asdict()}
