"""Groups of streams over HTTP: listed, reset and deleted. Their lag stands with that of other consumers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.admin.control.groups import GROUP_PREFIX, GroupControl, GroupStatus, parse_reset, position
from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.http.access import Right
from mqttbroker.admin.http.operations import Call, route
from mqttbroker.admin.http.parameters import Field, Word
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import Answer, Route
from mqttbroker.admin.http.schemas import INTEGER, TEXT, array, described, record
from mqttbroker.admin.http.streams import StreamAccess

_OFFSETS = array(record(partition=INTEGER, offset=INTEGER))
GROUP = record(
    "Group",
    group=TEXT,
    filter=described(TEXT, "of the messages that it reads; empty = all of the stream"),
    offsets=described(_OFFSETS, "the lowest of each partition that is not acknowledged"),
    in_flight=described(INTEGER, "messages that members have and have not acknowledged"),
    redelivered=described(INTEGER, "messages returned by members that left, since the start"),
    refused=described(INTEGER, "negative acknowledgements, since the start"),
    members=array(record(client_id=TEXT, partitions=array(INTEGER))),
)
_STREAM = Field("name", Word(1), "the name of a stream")
_GROUP = Field("group", Word(1), "the name of a group")


class ResetTarget(Word):
    """Where a reset goes; the pattern of the document has values that are certainly accepted."""

    def __init__(self) -> None:
        super().__init__(1, 4000, "^(earliest|latest|[1-9][0-9]{0,2}[mhd])$")

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("must be a string")
        self.check_length(value)
        return value


_TO = Field(
    "to",
    ResetTarget(),
    "earliest, latest, offset:N, offset:P=N,…, a Unix time, an ISO 8601 time, or a duration back such as 1h",
)


class GroupRoutes:
    """The operations. Their methods run on the HTTP server's thread, the changes on the event loop."""

    def __init__(self, logs: StreamLogs, groups: GroupControl, access: StreamAccess, runner: ControlRunner) -> None:
        self._logs = logs
        self._groups = groups
        self._access = access
        self._runner = runner

    def routes(self) -> list[Route]:
        """All operations."""
        path = "/streams/{name}/groups"
        return [
            route("GET", path, self._list_groups, Right.NONE, "The groups of a stream", record(items=array(GROUP)),
                  [_STREAM], tag="streams", errors=(404,)),
            route("POST", path + "/{group}/reset", self._reset_group, Right.OPERATE,
                  "Have a group continue at other offsets", record(offsets=_OFFSETS), [_STREAM, _GROUP], body=[_TO],
                  action="reset_group", tag="streams", errors=(404,)),
            route("DELETE", path + "/{group}", self._delete_group, Right.OPERATE, "Delete a group and its offsets", None,
                  [_STREAM, _GROUP], done=Answer("done"), action="delete_group", tag="streams", errors=(404,)),
        ]  # fmt: skip

    async def _list_groups(self, call: Call) -> Any:
        name = self._access.check_name(call["name"], call.principal, self._access.sees)
        found = await asyncio.wrap_future(self._runner.call(self._groups.all))
        groups = [group for group in found.get(name, []) if group.name.startswith(GROUP_PREFIX)]
        return {"items": [_described(group) for group in groups]}

    async def _reset_group(self, call: Call) -> Any:
        name = self._access.check_name(call["name"], call.principal, self._access.sees)
        try:
            start = parse_reset(call["to"], time.time_ns() // 1000)
        except ValueError as error:
            raise RequestError(400, f"to: {error}", "to") from None
        try:
            partitions = self._logs.config(name).partitions
        except KeyError:
            raise RequestError(404, f"no stream {name!r}", "name") from None
        bounds = await asyncio.wrap_future(self._runner.call(self._groups.bounds, name, partitions))
        groups = await asyncio.wrap_future(self._runner.call(self._groups.all))
        group = next((each for each in groups.get(name, []) if each.name == GROUP_PREFIX + call["group"]), None)
        if group is None:
            raise RequestError(404, f"stream {name} has no group {call['group']!r}", "group")
        positions: list[int] = []
        for partition in range(partitions):
            found = position(start, partition, bounds[partition])
            if found is None and start.offsets:
                found = group.offsets[partition]
            elif found is None:
                found = await asyncio.to_thread(self._logs.offset_for_timestamp, name, partition, start.time)
            positions.append(found)
        if not await asyncio.wrap_future(self._runner.call(self._groups.reset, name, call["group"], positions)):
            raise RequestError(404, f"stream {name} has no group {call['group']!r}", "group")
        return {"offsets": [{"partition": number, "offset": offset} for number, offset in enumerate(positions)]}

    async def _delete_group(self, call: Call) -> None:
        name = self._access.check_name(call["name"], call.principal, self._access.sees)
        if not await asyncio.wrap_future(self._runner.call(self._groups.forget, name, call["group"])):
            raise RequestError(404, f"stream {name} has no group {call['group']!r}", "group")


def _described(group: GroupStatus) -> dict[str, Any]:
    return {
        "group": group.name.removeprefix(GROUP_PREFIX),
        "filter": group.topic_filter,
        "offsets": [{"partition": number, "offset": offset} for number, offset in sorted(group.offsets.items())],
        "in_flight": group.in_flight,
        "redelivered": group.redelivered,
        "refused": group.refused,
        "members": [{"client_id": member.client_id, "partitions": member.partitions} for member in group.members],
    }
