"""A node that starts while no Kafka broker can be reached: it refuses clients, says why, and serves them later."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from support.cluster_nodes import ClusterNode, port_ranges
from support.kafka import free_ports
from support.raw_client import RawClient

pytestmark = [pytest.mark.one_build]


def test_clients_are_refused_with_the_reason_code_for_a_server_that_is_unavailable() -> None:
    (kafka,) = free_ports(1)
    cluster = {
        "engine": "kafka",
        "id": "away",
        "bootstrap_servers": [f"127.0.0.1:{kafka}"],
        "node": "one",
        "link_host": "127.0.0.1",
        "link_address": "127.0.0.1",
        "link_port": port_ranges(1, 3)[0],
        "shards": 2,
        "session_timeout": "2s",
    }
    node = ClusterNode(config={"allow_anonymous": True, "cluster": cluster})
    node.launch()
    try:
        node.started()
        for version, code in ((5, 0x88), (4, 3)):
            with RawClient(node.port, version) as client:
                assert client.connect("client").reason_code == code
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(node.url + "/readyz", timeout=30)
        assert error.value.code == 503 and "kafka" in json.dumps(error.value.read().decode())
    finally:
        node.close()
