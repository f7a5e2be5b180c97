"""Connections to Kafka."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from mqttbroker.cluster.kafka_connection import connection
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
