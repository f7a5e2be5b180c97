"""The fields of a message that a stream stores."""

from __future__ import annotations

from sessions.message import Message


def stored_fields(message: Message) -> tuple[object, ...]:
    return (
        message.topic,
        message.payload,
        message.qos,
        message.retain,
        message.properties,
        message.publisher,
        message.timestamp,
    )
