"""Connections to Kafka."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress

import pytest
import uvloop
from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

from mqttbroker.cluster.kafka.connection import connection
from mqttbroker.config.settings import Cluster

pytestmark = pytest.mark.one_build


@pytest.fixture
def debug() -> Iterator[None]:
    """The level of all lines is debug, as with `log.level`."""
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.DEBUG)
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    """The level of aiokafka's lines is that of the root."""
    level = logging.getLogger("aiokafka").level
    logging.getLogger("aiokafka").setLevel(logging.NOTSET)
    yield
    logging.getLogger("aiokafka").setLevel(level)


@pytest.mark.usefixtures("debug")
def test_requests_to_kafka_are_never_logged() -> None:
    """They have passwords, keys of links and payloads."""
    connection(Cluster(engine="kafka", bootstrap_servers=("127.0.0.1:9092",)))
    assert not logging.getLogger("aiokafka.conn").isEnabledFor(logging.DEBUG)


def test_a_process_that_logs_none_of_its_lines_still_logs_none() -> None:
    """The node and its cores log important ones as events of their own."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    connection(Cluster(engine="kafka", bootstrap_servers=("127.0.0.1:9092",)))
    assert not logging.getLogger("aiokafka.producer.sender").isEnabledFor(logging.ERROR)


def test_a_request_on_a_connection_that_was_just_reset_fails_as_aiokafka_expects() -> None:
    """uvloop raises RuntimeError for it, which would end the tasks that read and write the logs."""
    arguments = connection(Cluster(engine="kafka", bootstrap_servers=("127.0.0.1:9092",)))

    async def reset_and_send() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        conn = AIOKafkaConnection(host, port, client_id="test", security_protocol=arguments["security_protocol"])
        with suppress(TimeoutError):  # nothing answers
            async with asyncio.timeout(0.1):
                await conn.connect()
        conn._reader, conn._writer = await asyncio.open_connection(host, port)
        conn._read_task = asyncio.create_task(asyncio.Event().wait())
        conn._versions = {MetadataRequest.API_KEY: (1, 1)}
        transport = conn._writer.transport
        transport.abort()
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="handler is closed"):
            transport.write(b"as aiokafka writes")
        with pytest.raises(KafkaConnectionError, match="broken: .*handler is closed"):
            conn.send(MetadataRequest([], False))
        assert not conn.connected()
        server.close()

    uvloop.run(reset_and_send())
