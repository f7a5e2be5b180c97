"""A cluster in the place of a broker: with TEST_CLUSTER=N in the environment each `BrokerProcess` is N nodes.

Its port is one behind which the nodes' ports follow in turn. Log lines and HTTP are those of the first node. All clusters of a process
are on the same Kafka brokers; each has an id, and so topics, of its own, so that no session or retained message is found by another one.
"""

from __future__ import annotations

import atexit
import os
import signal
import tempfile
import uuid
from pathlib import Path
from typing import Any

from support import broker_process
from support.cluster_nodes import READY_SECONDS, ClusterNode, port_ranges, send_signal, wait_until_ready
from support.kafka import KafkaCluster
from support.spread import Spread

SHARDS = 3

_kafka: KafkaCluster | None = None


def shared_kafka() -> KafkaCluster:
    """Three Kafka brokers for this process, from the first call to the end of the process."""
    global _kafka
    if _kafka is None:
        directory = tempfile.TemporaryDirectory(prefix="mqttbroker-kafka-")
        _kafka = KafkaCluster(Path(directory.name)).__enter__()
        atexit.register(directory.cleanup)
        atexit.register(_kafka.close)
    return _kafka


class ClusteredBroker(ClusterNode):
    """The first node, which starts and ends with all others."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        kafka = shared_kafka()
        count = int(os.environ["TEST_CLUSTER"])
        text = self.config.read_text(encoding="utf-8")
        ports = port_ranges(count, SHARDS + 1)
        cluster_id = f"test-{uuid.uuid4().hex[:8]}"

        def configuration(number: int) -> str:
            section = {
                "engine": "kafka", "id": cluster_id, "bootstrap_servers": kafka.bootstrap, "node": f"node-{number}",
                "link_host": "127.0.0.1", "link_address": "127.0.0.1", "link_port": ports[number - 1],
                "shards": SHARDS, "standbys": 0, "fsync": False,
            }  # fmt: skip
            return broker_process.to_toml({"cluster": section}) + text  # in front of tables

        self.config.write_text(configuration(1), encoding="utf-8")
        self._others = [
            ClusterNode(None, configuration(number), **{key: options[key] for key in ("env", "arguments") if key in options})
            for number in range(2, count + 1)
        ]
        self._spread: Spread | None = None

    def launch(self) -> None:
        super().launch()
        for node in self._others:
            node.launch()

    def start(self) -> ClusteredBroker:
        try:
            super().start()
        except BaseException:
            for node in (self, *self._others):
                if node.running:
                    node.kill()
            raise
        return self

    def started(self) -> ClusteredBroker:
        if self._spread is not None:
            self.port = self._own_port
        nodes = [self, *self._others]
        for node in self._others:
            node.started()
        super().started()
        wait_until_ready(nodes, READY_SECONDS)
        self._own_port = self.port
        self._spread = Spread([node.port for node in nodes])
        self.port = self._spread.port
        return self

    def _end(self, how: signal.Signals) -> int:
        if self._spread is not None:
            self._spread.close()
            self._spread = None
            self.port = self._own_port
        running = [node for node in self._others if node.running]
        for node in (self, *running):
            send_signal(node.pid, how)  # to all at once, so that none waits for another one to take its shards over
        for node in running:
            node._end(how)
        return super()._end(how)

    def close(self) -> None:
        for node in self._others:
            node.close()
        super().close()


def use() -> None:
    """Have tests that import `BrokerProcess` from now on get clusters."""
    broker_process.BrokerProcess = ClusteredBroker  # type: ignore[misc]
