"""Clients, their sessions and subscriptions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.control.sessions import SORTS, SessionControl
from mqttbroker.admin.control.subscriptions import SubscriptionControl
from mqttbroker.admin.control.views import SessionDetail, SessionFilter, SessionSummary, SubscriptionView
from mqttbroker.admin.http.access import Right
from mqttbroker.admin.http.operations import CURSOR, LIMIT, Call, page, page_of, route
from mqttbroker.admin.http.pages import cursor_of, page_behind
from mqttbroker.admin.http.parameters import (
    Field,
    Filter,
    LongCursors,
    Network,
    Topic,
    Word,
    encode_cursor,
)
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import Answer, Route
from mqttbroker.admin.http.schemas import BOOLEAN, INTEGER, NUMBER, TEXT, Schema, described, nullable, record
from mqttbroker.config.setting_kinds import Boolean, Choice

VERSIONS = {3: "3.1", 4: "3.1.1", 5: "5.0"}
NEVER = 0xFFFFFFFF  # seconds of a Session Expiry Interval that is no limit

_SESSION: dict[str, Schema] = {
    "client_id": TEXT,
    "username": described(nullable(TEXT), "null = anonymous"),
    "protocol": described(TEXT, "3.1, 3.1.1 or 5.0"),
    "persistent": described(BOOLEAN, "the session outlives its connection"),
    "connected": BOOLEAN,
    "address": described(nullable(TEXT), "null unless connected"),
    "listener": described(nullable(TEXT), "null unless connected"),
    "connected_at": described(nullable(NUMBER), "Unix seconds; null unless connected"),
    "disconnected_at": described(nullable(NUMBER), "Unix seconds; null while connected"),
    "subscriptions": INTEGER,
    "queued_messages": described(INTEGER, "QoS 1 and 2 messages that are not acknowledged"),
    "queued_bytes": INTEGER,
    "in_flight": INTEGER,
    "expiry_interval": described(nullable(INTEGER), "seconds; null = never"),
}

CLIENT = record("Client", **_SESSION)

CLIENT_DETAIL = record(
    "ClientDetail",
    **_SESSION,
    keep_alive=described(nullable(NUMBER), "seconds; null = off"),
    max_in_flight=INTEGER,
    queued_memory_bytes=INTEGER,
    incoming_qos2=described(INTEGER, "QoS 2 publications received and not yet released"),
    retained_pending=described(INTEGER, "subscriptions whose retained messages are still to be sent"),
    has_will=BOOLEAN,
    congested=described(BOOLEAN, "the client's socket takes no more"),
    worker=described(INTEGER, "number of the connection worker that has the socket; 0 = none"),
    bytes_received=described(INTEGER, "in this connection, as MQTT packets: without TLS and WebSocket"),
    bytes_sent=described(INTEGER, "likewise"),
    messages_received=described(INTEGER, "PUBLISH packets received in this connection"),
    messages_sent=described(INTEGER, "PUBLISH packets sent in this connection, or waiting for its socket"),
)

SUBSCRIPTION = record(
    "Subscription",
    client_id=TEXT,
    topic_filter=described(TEXT, "with $share/NAME/ if it is shared"),
    qos=INTEGER,
    no_local=BOOLEAN,
    retain_as_published=BOOLEAN,
    identifier=described(nullable(INTEGER), "the Subscription Identifier"),
    connected=BOOLEAN,
)


PREFIX = Field("prefix", Word(), "client ids that begin with this", "")

CLIENT_ID = Field("client_id", Word(1), "a client id, percent-encoded")

ORDER = Field("order", Choice("asc", "desc"), "ascending or descending", "asc")

CLIENT_FILTERS = [
    PREFIX,
    Field("contains", Word(), "client ids that contain this", ""),
    Field("username", Word(), "of this user", None),
    Field("connected", Boolean(), "connected ones, or others", None),
    Field("listener", Word(), "connected to this listener", None),
    Field("address", Network(), "connected from this address or network", ""),
    Field("sort", Choice("client_id", *SORTS), "the order; with very many sessions, others than client_id are those "
          "of up to five minutes ago", "client_id"),
    ORDER,
]  # fmt: skip

EXACT_FILTER = Field("filter", Filter(True), "a topic filter, with $share/NAME/ or not")

TOPIC = Field("topic", Topic(), "a topic name")


class ClientRoutes:
    """The operations on clients, sessions and subscriptions."""

    def __init__(self, sessions: SessionControl, subscriptions: SubscriptionControl, runner: ControlRunner) -> None:
        self._sessions = sessions
        self._subscription_control = subscriptions
        self._runner = runner
        self._cursors = LongCursors()

    def routes(self) -> list[Route]:
        """The table."""
        lists, operate = Right.LIST, Right.OPERATE
        done = Answer("done")
        return [
            route("GET", "/clients", self._clients, lists, "Clients and their sessions", page(CLIENT),
                        [*CLIENT_FILTERS, LIMIT, CURSOR],
                        tag="clients", errors=(404,)),
            route("GET", "/clients/{client_id}", self._client, lists, "One client and its session", CLIENT_DETAIL,
                        [CLIENT_ID], tag="clients", errors=(404,)),
            route("GET", "/clients/{client_id}/subscriptions", self._client_subscriptions, lists,
                        "Subscriptions of a client", page(SUBSCRIPTION), [CLIENT_ID, LIMIT, CURSOR], tag="clients",
                        errors=(404,)),
            route("POST", "/clients/{client_id}/disconnect", self._disconnect, operate,
                        "Disconnect a client (reason code 0x98); its session stays", None, [CLIENT_ID], done=done,
                        action="disconnect_client", tag="clients", errors=(404,)),
            route("DELETE", "/clients/{client_id}", self._delete_session, operate,
                        "Disconnect a client and delete its session; its will is published", None, [CLIENT_ID],
                        done=done, action="delete_session", tag="clients", errors=(404,)),

            route("GET", "/subscriptions", self._subscriptions, lists, "Subscriptions to exactly a filter",
                        page(SUBSCRIPTION), [EXACT_FILTER, LIMIT, CURSOR], tag="subscriptions", errors=(404,)),
            route("GET", "/receivers", self._receivers, lists, "Subscriptions that get the messages of a topic",
                        page(SUBSCRIPTION), [TOPIC, LIMIT, CURSOR], tag="subscriptions", errors=(404,)),
        ]  # fmt: skip

    async def _clients(self, call: Call) -> Any:
        where = SessionFilter(call["prefix"], call["contains"], call["connected"], call["username"], call["listener"], call["address"])
        descending = call["order"] == "desc"
        if call["sort"] == "client_id":
            cursor = self._cursors.decode(call["cursor"], str)
            found = await asyncio.wrap_future(self._runner.scan(
                self._sessions.page, where, "" if cursor is None else cursor[0], call["limit"], descending
            ))  # fmt: skip
            return page_of(map(client_json, found.sessions), self._cursors.encode(found.after) if found.after else None)
        parts = self._cursors.decode(call["cursor"], (int, float), str)
        after = None if parts is None else (parts[0], parts[1])
        ordered = await asyncio.wrap_future(self._runner.scan(
            self._sessions.sorted_page, call["sort"], descending, where, after, call["limit"]
        ))  # fmt: skip
        following = self._cursors.encode(*ordered.after) if ordered.after else None
        return page_of(map(client_json, ordered.sessions), following)

    async def _client(self, call: Call) -> Any:
        detail = await asyncio.wrap_future(self._runner.call(self._sessions.detail, call["client_id"]))
        if detail is None:
            raise RequestError(404, f"no session {call['client_id']!r}", "client_id")
        return client_detail_json(detail)

    async def _disconnect(self, call: Call) -> None:
        if not await asyncio.wrap_future(self._runner.call(self._sessions.disconnect, call["client_id"])):
            raise RequestError(404, f"no connected client {call['client_id']!r}", "client_id")

    async def _delete_session(self, call: Call) -> None:
        if not await asyncio.wrap_future(self._runner.scan(self._sessions.delete, call["client_id"])):
            raise RequestError(404, f"no session {call['client_id']!r}", "client_id")

    async def _client_subscriptions(self, call: Call) -> Any:
        client_id = call["client_id"]
        if await asyncio.wrap_future(self._runner.call(self._sessions.detail, client_id)) is None:
            raise RequestError(404, f"no session {client_id!r}", "client_id")
        return await self._subscription_page(call, self._subscription_control.open_client, client_id)

    async def _subscriptions(self, call: Call) -> Any:
        return await self._subscription_page(call, self._subscription_control.open_subscribers, call["filter"])

    async def _receivers(self, call: Call) -> Any:
        return await self._subscription_page(call, self._subscription_control.open_receivers, call["topic"])

    async def _subscription_page(self, call: Call, begin: Callable[[str], int], of: str) -> Any:
        cursor = await cursor_of(self._runner, call, begin, of)
        found = await page_behind(self._runner.scan(self._subscription_control.page, cursor, call["limit"]))
        return page_of(map(subscription_json, found.subscriptions), encode_cursor(found.cursor) if found.cursor else None)


def client_json(session: SessionSummary) -> dict[str, Any]:
    """A session as `CLIENT` describes it."""
    return {
        "client_id": session.client_id,
        "username": session.username,
        "protocol": VERSIONS.get(session.protocol_version, str(session.protocol_version)),
        "persistent": session.persistent,
        "connected": session.connected,
        "address": session.address or None,
        "listener": session.listener or None,
        "connected_at": session.connected_at if session.connected else None,
        "disconnected_at": None if session.connected else session.disconnected_at,
        "subscriptions": session.subscriptions,
        "queued_messages": session.queued_messages,
        "queued_bytes": session.queued_bytes,
        "in_flight": session.in_flight,
        "expiry_interval": None if session.expiry_interval == NEVER else session.expiry_interval,
    }


def client_detail_json(detail: SessionDetail) -> dict[str, Any]:
    """A session as `CLIENT_DETAIL` describes it."""
    values = detail._asdict()
    del values["summary"]
    values["keep_alive"] = detail.keep_alive or None
    return {**client_json(detail.summary), **values}


def subscription_json(subscription: SubscriptionView) -> dict[str, Any]:
    """A subscription as `SUBSCRIPTION` describes it."""
    return {**subscription._asdict(), "identifier": subscription.identifier or None}
