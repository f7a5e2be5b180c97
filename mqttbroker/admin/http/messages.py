"""Messages: publishing, and what is retained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mqttbroker.admin.control.messages import MessageControl
from mqttbroker.admin.control.retained import RetainedControl
from mqttbroker.admin.control.runner import BrokerStopping, ControlRunner
from mqttbroker.admin.control.slices import ControlError
from mqttbroker.admin.http.access import Right
from mqttbroker.admin.http.clients import TOPIC
from mqttbroker.admin.http.message_json import LEVEL, MESSAGE, level_json, message_fields, message_json, payload_of, properties_of
from mqttbroker.admin.http.operations import CURSOR, LIMIT, Call, page, page_of, route
from mqttbroker.admin.http.pages import cursor_of, page_behind
from mqttbroker.admin.http.parameters import (
    MAX_TEXT,
    Field,
    Filter,
    Topic,
    Word,
    encode_cursor,
)
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import Answer, Route
from mqttbroker.admin.http.schemas import INTEGER, described, record
from mqttbroker.config.setting_kinds import Boolean


class MessageRoutes:
    """The operations on messages."""

    def __init__(self, messages: MessageControl, retained: RetainedControl, runner: ControlRunner) -> None:
        self._messages = messages
        self._retained_control = retained
        self._runner = runner

    def routes(self) -> list[Route]:
        """The table."""
        content, operate = Right.CONTENT, Right.OPERATE
        done = Answer("done")
        return [
            route("POST", "/publish", self._publish, operate, "Publish a message in the name of the broker",
                        record(recipients=described(INTEGER, "subscriptions and streams that got it")),
                        body=message_fields(Field("topic", Topic(MAX_TEXT), "a topic name"),
                                            Field("retain", Boolean(), "retain the message", False)),
                        action="publish", tag="messages", errors=(409,)),
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
        ]  # fmt: skip

    async def _retained(self, call: Call) -> Any:
        cursor = await cursor_of(self._runner, call, self._retained_control.open, call["filter"])
        found = await page_behind(self._runner.scan(self._retained_control.page, cursor, call["limit"]))
        readable = (message for message in found.messages if call.principal.may_read(message.topic))
        return page_of(map(message_json, readable), encode_cursor(found.cursor) if found.cursor else None)

    async def _levels(self, call: Call) -> Any:
        principal = call.principal
        cursor = await cursor_of(self._runner, call, self._retained_control.open_levels, call["parent"])
        readable = None if principal.rules is None else principal.may_read
        found = await page_behind(self._runner.scan(self._retained_control.levels, cursor, call["limit"], readable))
        return page_of(map(level_json, found.levels), encode_cursor(found.cursor) if found.cursor else None)

    async def _retained_message(self, call: Call) -> Any:
        topic = call["topic"]
        if not call.principal.may_read(topic):
            raise RequestError(403, f"{call.principal.name} may not read topic {topic!r}", "topic")
        message = await asyncio.wrap_future(self._runner.call(self._retained_control.message, topic))
        if message is None:
            raise RequestError(404, f"no retained message of topic {topic!r}", "topic")
        return message_json(message)

    async def _clear_retained(self, call: Call) -> Any:
        return {"deleted": await self._clear(call["filter"], call.principal.may_publish)}

    async def _clear(self, topic_filter: str, may_clear: Callable[[str], bool]) -> int:
        """Delete retained messages; RequestError, 409, if they are the broker's."""
        try:
            return await asyncio.wrap_future(self._runner.scan(self._retained_control.clear, topic_filter, may_clear))
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
            recipients = await asyncio.wrap_future(self._runner.scan(
                self._messages.publish, call["topic"], _payload(call), call["qos"],
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


def _payload(call: Call) -> bytes:
    try:
        return payload_of(call.values)
    except ValueError as error:
        raise RequestError(400, f"payload_base64: {error}", "payload_base64") from None
