"""The administration API below /api/v1: the broker itself, consumers of streams, and the families of other modules.

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
from mqttbroker.admin.control.control import Controls
from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.control.views import BrokerStatus
from mqttbroker.admin.data.backup import BackupError, NotEmpty
from mqttbroker.admin.http.access import Right
from mqttbroker.admin.http.bans import BanRoutes
from mqttbroker.admin.http.clients import ClientRoutes
from mqttbroker.admin.http.consumers import CONSUMERS, describe
from mqttbroker.admin.http.messages import MessageRoutes
from mqttbroker.admin.http.operations import Call, route
from mqttbroker.admin.http.parameters import (
    Field,
    Seconds,
    Word,
)
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import Answer, Route
from mqttbroker.admin.http.schemas import (
    INTEGER,
    NUMBER,
    TEXT,
    array,
    described,
    nullable,
    record,
)
from mqttbroker.admin.http.streams import StreamAccess
from mqttbroker.admin.metrics.consumer_lag import ConsumerLag
from mqttbroker.config.setting_kinds import Choice
from mqttbroker.config.settings import LOG_LEVELS
from mqttbroker.core.access.bans import Bans
from mqttbroker.logs.levels import ALL, AREAS, LevelView, LogLevels

T = TypeVar("T")

MAX_LEVEL_SECONDS = 86_400

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
    """The operations of this module, and those on messages, clients and bans. ``http_bans`` are those of the HTTP server, on whose thread all methods run."""

    def __init__(
        self,
        operations: Operations,
        logs: StreamLogs | None,
        consumers: ConsumerLag | None,
        stream_access: StreamAccess,
        http_bans: Bans,
    ) -> None:
        self._operations = operations
        controls, runner = operations.controls, operations.runner
        self._status_of = controls.status
        self._families = [
            *MessageRoutes(controls.messages, controls.retained, runner).routes(),
            *ClientRoutes(controls.sessions, controls.subscriptions, runner).routes(),
            *BanRoutes(controls.bans, runner, http_bans).routes(),
        ]
        self._logs = logs
        self._consumers = consumers
        self._stream_access = stream_access
        self._backing_up = False

    # --- the table ------------------------------------------------------------------------------------------------

    def routes(self) -> list[Route]:
        """All operations."""
        status, lists, administer = Right.STATUS, Right.LIST, Right.ADMINISTER
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
            *self._families,

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
        status = await self._call(self._operations.runner.call(self._status_of))
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


def log_level_json(views: Sequence[LevelView]) -> dict[str, Any]:
    """Levels as `LOG_LEVEL` describes them."""
    general, *areas = views
    return {
        "level": general.level,
        "seconds_left": general.seconds_left,
        "configured": general.configured,
        "areas": [view._asdict() for view in areas],
    }


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
