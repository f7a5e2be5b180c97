"""The nodes of a cluster for tests: `BrokerProcess`es on this machine, whose logs are in a `KafkaCluster`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from mqttbroker.node.shards import MOVING
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.kafka import KafkaCluster, Place, free_ports
from support.processes import children

READY_SECONDS = 120.0  # three nodes start twelve processes, for which a machine with other work needs a minute
TOKEN = "token-of-the-nodes-of-a-test"  # of nodes that are not on the loopback address


def send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class ClusterNode(BrokerProcess):
    """One node."""

    protected = False  # its HTTP server asks for `TOKEN`

    def cores(self) -> dict[int, int]:
        """The process ids of the node's cores, standbys too, by their shard."""
        found = {}
        for child in children(self.pid):
            with suppress(FileNotFoundError):
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                match = re.match(rb"mqttbroker: shard (\d+)|.*\0mqttbroker\.cluster\.core\0(\d+)\0", command, re.DOTALL)
                if match is not None:
                    found[int(match[1] or match[2])] = child
        return found

    def stop_all(self) -> None:
        """Send SIGSTOP to all of the node's processes."""
        for pid in (self.pid, *children(self.pid)):
            send_signal(pid, signal.SIGSTOP)

    def continue_all(self) -> None:
        """Send SIGCONT to all of the node's processes."""
        for pid in (*children(self.pid), self.pid):
            send_signal(pid, signal.SIGCONT)

    def ready(self) -> bool:
        """Whether the node says that it serves its clients, and that no shard is moving."""
        try:
            with urllib.request.urlopen(self.url + "/readyz", timeout=2) as answer:
                return bool(answer.status == 200) and MOVING not in json.load(answer).get("warnings", [])
        except (OSError, urllib.error.HTTPError):
            return False

    def cluster(self) -> Any:
        """The answer of ``GET /api/v1/cluster``."""
        return json.loads(self.get("/api/v1/cluster", {"Authorization": f"Bearer {TOKEN}"} if self.protected else {}))


class ClusterNodes:
    """``count`` nodes with ``shards`` shards; ``config`` are the tables that all of them have.

    The directories of a node are kept while it is down. Starts with ``with``, and then all nodes are ready. ``places`` has one
    for each node, with TLS between them; without it they are all on the loopback address.
    """

    def __init__(
        self,
        kafka: KafkaCluster,
        count: int = 3,
        shards: int = 3,
        config: Mapping[str, Any] | None = None,
        arguments: Sequence[str] = (),
        places: Sequence[Place] = (),
        **cluster: Any,
    ) -> None:
        self.kafka = kafka
        self.id = f"test-{uuid.uuid4().hex[:8]}"
        ports = port_ranges(count, shards + 1)
        self.nodes: list[ClusterNode] = []
        apart = _apart(kafka.directory) if places else {}
        for number, place in enumerate(places or [Place()] * count):
            section = {
                "engine": "kafka",
                "id": self.id,
                "bootstrap_servers": kafka.bootstrap,
                "node": f"node-{number + 1}",
                "link_host": place.host,
                "link_address": place.host,
                "link_port": ports[number],
                "shards": shards,
                "fsync": False,
                **apart,
                **cluster,
            }
            tables = {**(config or {}), "cluster": section}
            if places:
                tables |= {"allow_anonymous": True, "listeners": [{"host": place.host}], "http": {"host": place.host, "token": TOKEN}}
            node = ClusterNode(config=tables, arguments=arguments)
            node.host, node.launcher, node.protected = place.host, place.command, bool(places)
            self.nodes.append(node)

    def __enter__(self) -> ClusterNodes:
        try:
            for node in self.nodes:
                node.launch()
            for node in self.nodes:
                node.started()
            self.wait_until_ready()
        except BaseException:
            self.print_logs()
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.print_logs()
            self.kill()
        for node in self.nodes:
            node.close()

    @property
    def ports(self) -> list[int]:
        """The MQTT ports of all nodes."""
        return [node.port for node in self.nodes]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The hosts and ports of all nodes for MQTT."""
        return [(node.host, node.port) for node in self.nodes]

    def wait_until_ready(self, seconds: float = READY_SECONDS) -> float:
        """Wait until all running nodes are ready; returns the seconds that it took."""
        return wait_until_ready([node for node in self.nodes if node.running], seconds)

    def owner(self, shard: int) -> ClusterNode:
        """The node that owns a shard, as the first running node knows."""
        for node in self.nodes:
            if node.running:
                owner = node.cluster()["shards"][shard]["owner"]
                return next(other for number, other in enumerate(self.nodes, 1) if f"node-{number}" == owner)
        raise AssertionError("no node runs")

    def kill(self) -> None:
        for node in self.nodes:
            if node.running:
                node.continue_all()
                node.kill()

    def print_logs(self) -> None:
        for number, node in enumerate(self.nodes, 1):
            print(f"--- log of node {number}:\n{node.log[-6000:]}")


def _apart(directory: Path) -> dict[str, str]:
    """The settings of nodes that are not on the loopback address: certificates for links, made in ``directory``."""
    files = CertificateFiles(directory)
    return {"link_cafile": str(files.cafile), "link_certfile": str(files.certfile), "link_keyfile": str(files.keyfile)}


def wait_until_ready(nodes: Sequence[ClusterNode], seconds: float) -> float:
    """Wait until all these nodes are ready; returns the seconds that it took."""
    begin = time.monotonic()
    while not all(node.ready() for node in nodes):
        assert time.monotonic() - begin < seconds, f"not ready: {[node.ready() for node in nodes]}"
        time.sleep(0.05)
    return time.monotonic() - begin


def port_ranges(count: int, size: int) -> list[int]:
    """The first ports of ``count`` ranges of ``size`` free ports."""
    found: list[int] = []
    while len(found) < count:
        (first,) = free_ports(1)
        if any(abs(first - other) <= size for other in found):
            continue
        if _all_free(range(first, first + size)):
            found.append(first)
    return found


def _all_free(ports: Sequence[int]) -> bool:
    for port in ports:
        try:
            with socket.create_server(("127.0.0.1", port)):
                pass
        except OSError:
            return False
    return True
