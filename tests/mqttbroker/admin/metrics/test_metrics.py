"""``/metrics``, ``/livez`` and ``/readyz`` of a broker, and each cause of a dropped message."""

from __future__ import annotations

import copy
import urllib.error
from collections.abc import Callable
from pathlib import Path

from support.broker_process import BrokerProcess
from support.core import Core
from support.metric_samples import drops, samples
from support.raw_client import RawClient

from mqttbroker.admin.http.api import status_json
from mqttbroker.admin.metrics.figures import Metrics
from mqttbroker.admin.metrics.text import metrics_text
from mqttbroker.codec.packets import Publish
from mqttbroker.codec.properties import Properties


def test_metrics_over_http(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(config={"sys_interval": "0s", "streams": {"log": {"filters": ["a/#"], "partitions": 1}}})
    with RawClient(broker.port) as client:
        client.connect("c")
        client.subscribe("a/#", "b", options=0)
        for qos in (0, 1, 2):
            client.publish("a/1", b"x", qos, retain=True)
        client.ping()
        found = samples(broker.get("/metrics"))
        assert found["mqttbroker_clients_connected"] == found["mqttbroker_sessions"] == 1
        assert found["mqttbroker_listener_clients/127.0.0.1:0"] == 1
        assert found["mqttbroker_subscriptions"] == 2
        assert found["mqttbroker_retained_messages"] == 1
        assert found["mqttbroker_publish_received_total"] == found["mqttbroker_publish_sent_total"] == 3
        assert found["mqttbroker_packets_received_total"] == 1 + 1 + 3 + 1 + 1
        assert found["mqttbroker_store_failures_total"] == 0
        assert found["mqttbroker_stream_high_watermark/0/log"] == 3
        assert found["mqttbroker_protocol_errors_total"] == 0
        client.send(b"\x00\x00")
        client.expect_closed()
        assert samples(broker.get("/metrics"))["mqttbroker_protocol_errors_total"] == 1
    assert broker.get("/livez") and broker.get("/readyz")
    try:
        broker.get("/none")
    except urllib.error.HTTPError as error:
        assert error.code == 404


def test_each_drop_is_counted_by_its_cause(tmp_path: Path) -> None:
    with Core(tmp_path, max_queued_messages=1, max_retained_messages=1) as core:
        publisher = core.connect("p")
        away = core.connect("away", 4, clean_start=False)
        away.subscribe("q", options=1)
        away.close()
        soon = Properties()
        soon.message_expiry_interval = 1
        publisher.publish("q", b"", 1, properties=soon)
        publisher.publish("q", b"", 1)
        core.advance(2)
        core.connect("away", 4, clean_start=False)
        small = Properties()
        small.maximum_packet_size = 20
        core.connect("small", properties=small).subscribe("large", options=0)
        publisher.publish("large", b"x" * 100)
        publisher.publish("$SYS/x", b"")
        slow = core.connect("slow")
        slow.subscribe("slow", options=0)
        slow.connection.outbox.pause()
        for _ in range(5):
            publisher.publish("slow", b"x" * 1_000_000)
        assert publisher.publish("kept", b"x", 1, retain=True) < 0x80
        assert publisher.publish("kept", b"y", 1, retain=True) < 0x80
        assert publisher.publish("one/too/many", b"x", 1, retain=True) == 0x97
        core.eager = False
        publisher.send(Publish("q", b"", 1, False, False, 900))
        core.fail()
        causes = dict.fromkeys(core.control.status().drops, 1)
        # In test_bounds, test_memory, test_send_rates and, of a cluster, test_links.
        elsewhere = ("queue_full_oldest", "total_full", "memory_full", "refused", "memory", "rate", "no_member")
        causes.update(dict.fromkeys(elsewhere, 0))
        status = core.control.status()
        assert status.drops == causes
        found = samples(metrics_text(Metrics(None), status))
        assert {cause: drops(found, cause) for cause in causes} == causes
        assert found["mqttbroker_store_failures_total"] == 1


def test_drops_are_counted_by_listener(tmp_path: Path) -> None:
    """At its publisher's if a message is refused, else at that of the client that does not get it."""
    with Core(tmp_path, max_queued_messages=1) as core:
        publisher = core.connect("p")
        publisher.publish("$SYS/x", b"")
        core.terms = copy.copy(core.terms)
        core.terms.listener = "unix:/other"
        small = Properties()
        small.maximum_packet_size = 20
        core.connect("small", properties=small).subscribe("large", options=0)
        stays = core.connect("stays", 4, clean_start=False)
        stays.subscribe("q", options=1)
        stays.connection.ready = False
        for _ in range(3):
            publisher.publish("q", b"", 1)
        publisher.publish("large", b"x" * 100)
        stays.close()
        for _ in range(4):
            publisher.publish("q", b"", 1)
        status = core.control.status()
        own = publisher.connection.terms.listener
        expected = {
            (own, "not_authorized"): 1,
            ("unix:/other", "too_large"): 1,
            ("unix:/other", "queue_full"): 2,
            ("", "queue_full"): 4,
        }
        assert {key: count for key, count in status.drops_by_listener.items() if count} == expected
        assert status.drops["queue_full"] == 6 and sum(status.drops.values()) == 8
        found = samples(metrics_text(Metrics(None), status))
        for (listener, cause), count in expected.items():
            assert found[f"mqttbroker_messages_dropped_total/{cause}/{listener}"] == count
        listed = status_json(status)["drops_by_listener"]
        assert {(each["listener"], each["cause"]): each["count"] for each in listed} == expected
