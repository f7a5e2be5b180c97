"""Derives the topics of streams from shard 0 of a log until it is killed; a process for tests.

    python stream_deriver.py BOOTSTRAP ID TOPIC

It prints ``derived N`` after each transaction with messages: how many there were in all.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from mqttbroker.cluster.log.view import LogView
from mqttbroker.cluster.streams.topics import StreamSource, StreamTopics
from mqttbroker.config.settings import Stream

CLUSTER = b"testtest"
STREAM = Stream(name="lab", filters=("lab/#",), partitions=2)
MAX_MESSAGE_BYTES = 900_000


def stream_topics(bootstrap: list[str], cluster: str, topic: str, **settings: Any) -> StreamTopics:
    source = StreamSource(cluster, topic, 0, CLUSTER, LogView(0, CLUSTER).state)
    return StreamTopics({"bootstrap_servers": bootstrap}, source, [STREAM], MAX_MESSAGE_BYTES, **settings)


async def main(bootstrap: str, cluster: str, topic: str) -> None:
    topics = stream_topics(bootstrap.split(","), cluster, topic)
    running = asyncio.create_task(topics.run())
    said = 0
    while not running.done():
        if topics.messages > said:
            said = topics.messages
            os.write(1, f"derived {said}\n".encode())
        await asyncio.sleep(0.01)
    running.result()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
