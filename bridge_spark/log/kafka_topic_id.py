"""Kafka's id of a topic, which a topic of the same name that is created again does not have.

aiokafka knows requests for metadata up to version 5; ids are in version 10, of Kafka 2.8.
"""

from __future__ import annotations

from typing import Any, ClassVar

from aiokafka.errors import for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields

_HALF = 1 << 64
_Text = CompactString("utf-8")


class _TopicIds(Response):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 10
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("brokers", CompactArray(("node_id", Int32), ("host", _Text), ("port", Int32), ("rack", _Text), ("tags", TaggedFields))),
        ("cluster_id", _Text),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", _Text),
                ("high", Int64),
                ("low", Int64),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("authorized_operations", Int32),
        ("tags", TaggedFields),
    )


class _TopicIdsStruct(RequestStruct):  # type: ignore[misc]
    FLEXIBLE_VERSION = True
    API_KEY = 3
    API_VERSION = 10
    RESPONSE_TYPE = _TopicIds
    SCHEMA = Schema(
        ("topics", CompactArray(("high", Int64), ("low", Int64), ("name", _Text), ("tags", TaggedFields))),
        ("create", Boolean),
        ("cluster_operations", Boolean),
        ("topic_operations", Boolean),
        ("tags", TaggedFields),
    )


class _TopicIdsRequest(Request[_TopicIdsStruct]):  # type: ignore[misc]
    API_KEY: ClassVar[int] = 3

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def build(self, request_struct_class: type[_TopicIdsStruct]) -> _TopicIdsStruct:
        return request_struct_class([(0, 0, self._topic, {})], False, False, False, {})


async def topic_id(client: Any, topic: str) -> str:
    """The id of a topic in hexadecimal digits; empty if Kafka is older than 2.8.  ``client`` is an `AIOKafkaClient`.

    Raises `KafkaError`.
    """
    try:
        answer = await client.send(client.get_random_node(), _TopicIdsRequest(topic))
    except NotImplementedError:
        return ""
    ((code, _, high, low, *_),) = answer.topics
    if code:
        raise for_code(code)(topic)
    return f"{(high % _HALF) << 64 | low % _HALF:032x}"
