"""The administration API below /api/v1: clients, subscriptions, retained messages, bans, streams, the broker itself.

Parameters, bodies and answers are described where the operations are, and `openapi` makes its document of them. Errors
are problem details (RFC 9457), whose ``field`` names the parameter or key that is wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from bridge_spark.log.stream_log import StreamLogs
from mqttbroker import __version__
from mqttbroker.admin.control.bans import MAX_BAN
from mqttbroker.admin.control.control import Controls
from mqttbroker.admin.control.runner import BrokerStopping, ControlRunner
from mqttbroker.admin.control.sessions import SORTS
from mqttbroker.admin.control.slices import ControlError
from mqttbroker.admin.control.views import BanView, BrokerStatus, SessionDetail, SessionFilter, SessionSummary, SubscriptionView
from mqttbroker.admin.data.backup import BackupError, NotEmpty
from mqttbroker.admin.http.access import Right
from mqttbroker.admin.http.consumers import CONSUMERS, describe
from mqttbroker.admin.http.message_json import (
    LEVEL,
    MESSAGE,
    level_json,
    message_fields,
    message_json,
    payload_of,
    properties_of,
)
from mqttbroker.admin.http.operations import CURSOR, LIMIT, Call, page, page_of, route
from mqttbroker.admin.http.parameters import (
    MAX_NAME,
    MAX_TEXT,
    Field,
    Filter,
    LongCursors,
    Network,
    Seconds,
    Topic,
    Word,
    decode_cursor,
    encode_cursor,
)
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import Answer, Route
from mqttbroker.admin.http.schemas import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    TEXT,
    Schema,
    array,
    described,
    nullable,
    record,
)
from mqttbroker.admin.http.streams import StreamAccess
from mqttbroker.admin.metrics.consumer_lag import ConsumerLag
from mqttbroker.config.setting_kinds import Boolean, Choice
from mqttbroker.config.settings import LOG_LEVELS
from mqttbroker.core.access.bans import Bans
from mqttbroker.logs.levels import ALL, AREAS, LevelView, LogLevels

T = TypeVar("T")

VERSIONS = {3: "3.1", 4: "3.1.1", 5: "5.0"}
NEVER = 0xFFFFFFFF  # seconds of a Session Expiry Interval that is no limit
MAX_LEVEL_SECONDS = 86_400

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
ACCESS = record("Access", name=TEXT, role=TEXT, rights=array(described(TEXT, "status, list, content, operate, administer")))
LISTENER = record(
    "Listener", type=TEXT, address=TEXT, ports=array(INTEGER), clients=described(INTEGER, "open connections that sent CONNECT")
)
SETTING = record(
    "Setting",
    key=TEXT,
    value=described({}, "as in the file; secrets are ***"),
    source=described(TEXT, 'the file, variable or flag that set it; "default"'),
)

LOG_LEVEL = record(
    "LogLevel",
    level=TEXT,
    seconds_left=described(nullable(NUMBER), "until the level of the configuration; null = until the next reload"),
    configured=described(TEXT, "the level of the configuration, which may differ from the one in force"),
    areas=array(record(area=TEXT, level=TEXT, seconds_left=nullable(NUMBER), configured=TEXT)),
)

BACKUP_NAME = Word(1, 100, r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", "a name of A-Z a-z 0-9 _ . -")
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
STREAM_NAME = Field("name", Word(1), "the name of a stream")


RELOADED = record(
    "Reloaded",
    problems=array(described(TEXT, "one line")),
    applied=array(described(TEXT, "a key whose new value is in force")),
    restart_needed=array(described(TEXT, "a key whose new value waits for the next start")),
)


class Operations(NamedTuple):
    """The operations of the API. ``listeners`` and ``configuration`` return the objects of `LISTENER` and `SETTING`.

    ``reload`` returns the object of `RELOADED`. ``back_up`` copies the data
    directory to a new directory of that name, in a thread, and returns one line; None = there is no place for backups.
    ``salvaged`` is the reason of the alarm `store_salvaged`, "" = there is none.
    """

    controls: Controls
    runner: ControlRunner
    listeners: Callable[[], list[dict[str, Any]]]
    configuration: Callable[[], list[dict[str, Any]]]
    log_levels: LogLevels
    reload: Callable[[], Awaitable[dict[str, list[str]]]]
    back_up: Callable[[str], str] | None
    salvaged: Callable[[], str]


class Api:
    """The operations. ``http_bans`` are those of the HTTP server, on whose thread all methods run."""

    def __init__(
        self,
        operations: Operations,
        logs: StreamLogs | None,
        consumers: ConsumerLag | None,
        stream_access: StreamAccess,
        http_bans: Bans,
    ) -> None:
        self._operations = operations
        self._controls = operations.controls
        self._logs = logs
        self._consumers = consumers
        self._stream_access = stream_access
        self._http_bans = http_bans
        self._backing_up = False
        self._cursors = LongCursors()

    # --- the table ------------------------------------------------------------------------------------------------

    def routes(self) -> list[Route]:
        """All operations."""
        status, lists, content = Right.STATUS, Right.LIST, Right.CONTENT
        operate, administer = Right.OPERATE, Right.ADMINISTER
        done = Answer("done")
        return [
            route("GET", "/access", self._sender, Right.NONE, "The sender of this request, and its rights", ACCESS,
                        tag="broker"),
            route("GET", "/status", self._status, status, "Counters and gauges", {"type": "object"},
                        tag="broker"),
            route("GET", "/listeners", self._listeners, lists, "Listeners", record(items=array(LISTENER)),
                        tag="broker"),
            route("GET", "/configuration", self._configuration, lists,
                        "Settings in force, with the place that set each", record(items=array(SETTING)),
                        [Field("prefix", Word(), "keys that begin with this", "")], tag="broker"),
            route("GET", "/log/level", self._level, lists, "The levels of the log", LOG_LEVEL, tag="broker"),
            route("PUT", "/log/level", self._set_level, administer, "Change a level of the log", LOG_LEVEL,
                        body=[Field("level", Choice(*LOG_LEVELS), "the level"),
                              Field("area", Choice(*AREAS), "of these lines; absent = of those of areas without a level", ALL),
                              Field("seconds", Seconds(MAX_LEVEL_SECONDS), "how long; absent = until the next reload", None)],
                        action="set_log_level", tag="broker"),
            route("POST", "/reload", self._reload, administer, "Reload the configuration, as SIGHUP does",
                        RELOADED, action="reload", tag="broker"),
            route("POST", "/backup", self._back_up, administer,
                        "Back up now, to a directory below http.backup_dir", record(summary=TEXT),
                        body=[Field("name", BACKUP_NAME, "the name of the directory")], action="backup", tag="broker",
                        errors=(409, 500)),
            route("POST", "/publish", self._publish, operate, "Publish a message in the name of the broker",
                        record(recipients=described(INTEGER, "subscriptions and streams that got it")),
                        body=message_fields(Field("topic", Topic(MAX_TEXT), "a topic name"),
                                            Field("retain", Boolean(), "retain the message", False)),
                        action="publish", tag="messages", errors=(409,)),

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

            route("GET", "/retained", self._retained, content, "Retained messages that match a filter",
                        page(MESSAGE), [Field("filter", Filter(), "a topic filter", "#"), LIMIT, CURSOR],
                        tag="messages", errors=(404,)),
            route("DELETE", "/retained", self._clear_retained, operate,
                        "Delete the retained messages that match a filter", record(deleted=INTEGER),
                        [Field("filter", Filter(), "a topic filter")], action="delete_retained", tag="messages",
                        errors=(409,)),
            route("GET", "/retained/levels", self._levels, content, "One level of the tree of retained topics",
                        page(LEVEL), [Field("parent", Word(), "the levels before; absent = none", None), LIMIT, CURSOR],
                        tag="messages", errors=(404,)),
            route("GET", "/retained/message", self._retained_message, content, "The retained message of a topic",
                        MESSAGE, [TOPIC], tag="messages", errors=(404,)),
            route("PUT", "/retained/message", self._set_retained, operate,
                        "Publish a retained message in the name of the broker", record(recipients=INTEGER), [TOPIC],
                        body=message_fields(low=1), action="set_retained", tag="messages", errors=(409,)),
            route("DELETE", "/retained/message", self._delete_retained, operate,
                        "Delete the retained message of a topic", None, [TOPIC], done=done,
                        action="delete_retained", tag="messages", errors=(404, 409)),

            route("GET", "/bans", self._bans, lists, "Bans in force", page(BAN), [OF_PROTOCOL, LIMIT, CURSOR],
                        tag="bans", errors=(404,)),
            route("POST", "/bans", self._ban, operate,
                        "Ban clients of MQTT; those that are connected are disconnected", record(disconnected=INTEGER),
                        body=NEW_BAN,
                        action="ban", tag="bans"),
            route("DELETE", "/bans", self._lift_ban, operate, "Lift the bans of exactly these clients or senders",
                        None, [OF_PROTOCOL, *BAN_KEY], done=done, action="lift_ban", tag="bans", errors=(404,)),

            route("GET", "/streams/{name}/consumers", self._stream_consumers, Right.NONE,
                        "Consumers of a stream and their lag", record(items=array(CONSUMERS)), [STREAM_NAME],
                        tag="streams", errors=(404,)),
            route("DELETE", "/streams/{name}/consumers/{consumer}", self._forget_consumer, Right.NONE,
                        "Forget a consumer until it reports again", None,
                        [STREAM_NAME, Field("consumer", Word(1), "the name of a consumer")], done=done,
                        action="forget_consumer", tag="streams", errors=(404,)),
        ]  # fmt: skip

    async def _call(self, future: Future[T]) -> T:
        return await asyncio.wrap_future(future)

    # --- the broker -------------------------------------------------------------------------------------------------

    async def _sender(self, call: Call) -> Any:
        sender = call.principal
        rights = [str(right.name).lower() for right in Right if right in sender.rights]
        return {"name": sender.name, "role": sender.role, "rights": rights}

    async def _status(self, call: Call) -> Any:
        status = await self._call(self._operations.runner.call(self._controls.status))
        return {"version": __version__, "store_salvaged": self._operations.salvaged() or None, **status_json(status)}

    async def _listeners(self, call: Call) -> Any:
        return {"items": await self._call(self._operations.runner.call(self._operations.listeners))}

    async def _configuration(self, call: Call) -> Any:
        settings = self._operations.configuration()
        return {"items": [each for each in settings if each["key"].startswith(call["prefix"])]}

    async def _level(self, call: Call) -> Any:
        return log_level_json(await self._call(self._operations.runner.call(self._operations.log_levels.views)))

    async def _set_level(self, call: Call) -> Any:
        levels = self._operations.log_levels
        await self._call(self._operations.runner.call(levels.change, call["level"], call["area"], call["seconds"]))
        return await self._level(call)

    async def _reload(self, call: Call) -> Any:
        return await self._operations.reload()

    async def _back_up(self, call: Call) -> Any:
        back_up = self._operations.back_up
        if back_up is None:
            raise RequestError(409, "there is no place for backups: set http.backup_dir")
        if self._backing_up:
            raise RequestError(409, "another backup is not finished")
        self._backing_up = True
        try:
            return {"summary": await asyncio.to_thread(back_up, call["name"])}
        except BackupError as error:
            raise RequestError(409, str(error), "name" if isinstance(error, NotEmpty) else "") from None
        finally:
            self._backing_up = False

    # --- clients ----------------------------------------------------------------------------------------------------

    async def _clients(self, call: Call) -> Any:
        where = SessionFilter(call["prefix"], call["contains"], call["connected"], call["username"], call["listener"], call["address"])
        descending = call["order"] == "desc"
        if call["sort"] == "client_id":
            cursor = self._cursors.decode(call["cursor"], str)
            found = await self._call(self._operations.runner.scan(
                self._controls.sessions.page, where, "" if cursor is None else cursor[0], call["limit"], descending
            ))  # fmt: skip
            return page_of(map(client_json, found.sessions), self._cursors.encode(found.after) if found.after else None)
        parts = self._cursors.decode(call["cursor"], (int, float), str)
        after = None if parts is None else (parts[0], parts[1])
        ordered = await self._call(self._operations.runner.scan(
            self._controls.sessions.sorted_page, call["sort"], descending, where, after, call["limit"]
        ))  # fmt: skip
        following = self._cursors.encode(*ordered.after) if ordered.after else None
        return page_of(map(client_json, ordered.sessions), following)

    async def _client(self, call: Call) -> Any:
        detail = await self._call(self._operations.runner.call(self._controls.sessions.detail, call["client_id"]))
        if detail is None:
            raise RequestError(404, f"no session {call['client_id']!r}", "client_id")
        return client_detail_json(detail)

    async def _disconnect(self, call: Call) -> None:
        if not await self._call(self._operations.runner.call(self._controls.sessions.disconnect, call["client_id"])):
            raise RequestError(404, f"no connected client {call['client_id']!r}", "client_id")

    async def _delete_session(self, call: Call) -> None:
        if not await self._call(self._operations.runner.scan(self._controls.sessions.delete, call["client_id"])):
            raise RequestError(404, f"no session {call['client_id']!r}", "client_id")

    async def _client_subscriptions(self, call: Call) -> Any:
        client_id = call["client_id"]
        if await self._call(self._operations.runner.call(self._controls.sessions.detail, client_id)) is None:
            raise RequestError(404, f"no session {client_id!r}", "client_id")
        return await self._subscription_page(call, self._controls.subscriptions.open_client, client_id)

    async def _subscriptions(self, call: Call) -> Any:
        return await self._subscription_page(call, self._controls.subscriptions.open_subscribers, call["filter"])

    async def _receivers(self, call: Call) -> Any:
        return await self._subscription_page(call, self._controls.subscriptions.open_receivers, call["topic"])

    async def _subscription_page(self, call: Call, begin: Callable[[str], int], of: str) -> Any:
        cursor = await self._cursor(call, begin, of)
        found = await self._next(self._operations.runner.scan(self._controls.subscriptions.page, cursor, call["limit"]))
        return page_of(map(subscription_json, found.subscriptions), encode_cursor(found.cursor) if found.cursor else None)

    async def _cursor(self, call: Call, begin: Callable[..., int], *of: str | None) -> int:
        """The cursor of the request, or a new one."""
        parts = decode_cursor(call["cursor"], int)
        if parts is not None:
            return int(parts[0])
        return await self._call(self._operations.runner.call(begin, *of))

    async def _next(self, future: Future[T]) -> T:
        """The page of a cursor; RequestError, 404, if it is past its end."""
        try:
            return await self._call(future)
        except BrokerStopping:
            raise
        except ControlError as error:
            raise RequestError(404, str(error), "cursor") from None

    # --- messages ---------------------------------------------------------------------------------------------------

    async def _retained(self, call: Call) -> Any:
        cursor = await self._cursor(call, self._controls.retained.open, call["filter"])
        found = await self._next(self._operations.runner.scan(self._controls.retained.page, cursor, call["limit"]))
        readable = (message for message in found.messages if call.principal.may_read(message.topic))
        return page_of(map(message_json, readable), encode_cursor(found.cursor) if found.cursor else None)

    async def _levels(self, call: Call) -> Any:
        principal = call.principal
        cursor = await self._cursor(call, self._controls.retained.open_levels, call["parent"])
        readable = None if principal.rules is None else principal.may_read
        found = await self._next(self._operations.runner.scan(self._controls.retained.levels, cursor, call["limit"], readable))
        return page_of(map(level_json, found.levels), encode_cursor(found.cursor) if found.cursor else None)

    async def _retained_message(self, call: Call) -> Any:
        topic = call["topic"]
        if not call.principal.may_read(topic):
            raise RequestError(403, f"{call.principal.name} may not read topic {topic!r}", "topic")
        message = await self._call(self._operations.runner.call(self._controls.retained.message, topic))
        if message is None:
            raise RequestError(404, f"no retained message of topic {topic!r}", "topic")
        return message_json(message)

    async def _clear_retained(self, call: Call) -> Any:
        return {"deleted": await self._clear(call["filter"], call.principal.may_publish)}

    async def _clear(self, topic_filter: str, may_clear: Callable[[str], bool]) -> int:
        """Delete retained messages; RequestError, 409, if they are the broker's."""
        try:
            return await self._call(self._operations.runner.scan(self._controls.retained.clear, topic_filter, may_clear))
        except BrokerStopping:
            raise
        except ControlError as error:
            raise RequestError(409, str(error)) from None

    async def _delete_retained(self, call: Call) -> None:
        topic = call["topic"]
        self._check_publish(call, topic)
        if not await self._clear(topic, call.principal.may_publish):
            raise RequestError(404, f"no retained message of topic {topic!r}", "topic")

    async def _set_retained(self, call: Call) -> Any:
        if not _payload(call):
            raise RequestError(400, "payload: is required, or payload_base64", "payload")
        return await self._publish(call, True)

    async def _publish(self, call: Call, retain: bool | None = None) -> Any:
        self._check_publish(call, call["topic"])
        try:
            recipients = await self._call(self._operations.runner.scan(
                self._controls.messages.publish, call["topic"], _payload(call), call["qos"],
                call["retain"] if retain is None else retain, properties_of(call.values),
                call["message_expiry_interval"],
            ))  # fmt: skip
        except BrokerStopping:
            raise
        except ControlError as error:
            raise RequestError(409, str(error)) from None
        return {"recipients": recipients}

    @staticmethod
    def _check_publish(call: Call, topic: str) -> None:
        if not call.principal.may_publish(topic):
            raise RequestError(403, f"{call.principal.name} may not publish to topic {topic!r}", "topic")

    # --- bans -------------------------------------------------------------------------------------------------------

    async def _bans(self, call: Call) -> Any:
        if call["protocol"] == "http":
            return http_ban_page(self._http_bans, call)
        parts = decode_cursor(call["cursor"], int)
        runner, control = self._operations.runner, self._controls.bans
        cursor = int(parts[0]) if parts is not None else await self._call(runner.call(control.open))
        listed = await self._next(runner.call(control.page, cursor, call["limit"]))
        items = (ban_json(ban, "mqtt") for ban in listed.bans)
        return page_of(items, encode_cursor(listed.cursor) if listed.cursor else None)

    async def _ban(self, call: Call) -> Any:
        check_new_ban(call)
        disconnected = await self._call(self._operations.runner.scan(
            self._controls.bans.ban, call["address"], call["username"], call["client_id"], call["seconds"], call["reason"]
        ))  # fmt: skip
        return {"disconnected": disconnected}

    async def _lift_ban(self, call: Call) -> None:
        key = ban_key(call)
        if call["protocol"] == "http":
            lifted = self._http_bans.lift(*key)
        else:
            lifted = await self._call(self._operations.runner.call(self._controls.bans.lift, *key))
        if not lifted:
            raise RequestError(404, "there is no such ban")

    # --- streams ----------------------------------------------------------------------------------------------------

    async def _stream_consumers(self, call: Call) -> Any:
        name = self._stream_access.check_name(call["name"], call.principal, self._stream_access.sees)
        assert self._consumers is not None
        try:
            found = await asyncio.to_thread(self._consumers.consumers, name)
        except KeyError:  # it was deleted meanwhile
            raise RequestError(404, f"no stream {name!r}", "name") from None
        return {"items": [describe(consumer, time.time()) for consumer in found]}

    async def _forget_consumer(self, call: Call) -> None:
        """For operators, and for those that read the stream and so report its consumers."""
        access = self._stream_access
        allowed = access.sees if Right.OPERATE in call.principal.rights else access.reads
        name = access.check_name(call["name"], call.principal, allowed)
        assert self._consumers is not None
        try:
            known = await asyncio.to_thread(self._consumers.forget, name, call["consumer"])
        except KeyError:  # it was deleted meanwhile
            known = False
        if not known:
            raise RequestError(404, f"stream {name!r} has no consumer {call['consumer']!r}", "consumer")


def _payload(call: Call) -> bytes:
    try:
        return payload_of(call.values)
    except ValueError as error:
        raise RequestError(400, f"payload_base64: {error}", "payload_base64") from None


def log_level_json(views: Sequence[LevelView]) -> dict[str, Any]:
    """Levels as `LOG_LEVEL` describes them."""
    general, *areas = views
    return {
        "level": general.level,
        "seconds_left": general.seconds_left,
        "configured": general.configured,
        "areas": [view._asdict() for view in areas],
    }


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


def status_json(status: BrokerStatus) -> dict[str, Any]:
    """Counters and gauges by name, nested as in `BrokerStatus`."""
    values: dict[str, Any] = _plain(status)
    values["logins"] = [{"authenticator": by, "outcome": outcome, "count": count}
                        for (by, outcome), count in status.logins.items()]  # fmt: skip
    values["connects_refused"] = [{"listener": listener, "reason": reason, "count": count}
                                  for (listener, reason), count in status.connects_refused.items()]  # fmt: skip
    values["drops_by_listener"] = [
        {"listener": listener, "cause": cause, "count": count} for (listener, cause), count in status.drops_by_listener.items() if count
    ]
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value
