"""Three Kafka brokers for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.kafka import KafkaCluster


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with KafkaCluster(tmp_path_factory.mktemp("kafka")) as cluster:
        yield cluster
