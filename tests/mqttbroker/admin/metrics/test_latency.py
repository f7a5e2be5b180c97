"""Histograms of latencies, and counters of refused clients and denials, in ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.broker_process import BrokerProcess
from support.core import Core
from support.metric_samples import samples
from support.patience import PATIENCE
from support.raw_client import RawClient

from mqttbroker.codec.packets import Publish
from mqttbroker.codec.properties import Properties


def test_latencies_are_measured_while_messages_are_stored_and_delivered(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    broker = start_broker(config={"streams": {"log": {"filters": ["a/#"]}}})
    names = ("commit", "acknowledgement", "delivery", "event_loop_lag")
    with RawClient(broker.port) as client:
        client.connect("c")
        client.subscribe("a/#", options=0)
        deadline = time.monotonic() + PATIENCE
        while True:
            client.publish("a/1", b"x", 1)
            found = samples(broker.get("/metrics"))
            if all(found[f"mqttbroker_{name}_seconds_count"] for name in names):
                break
            assert time.monotonic() < deadline, found
    for name in names:
        assert 0 <= found[f"mqttbroker_{name}_seconds_sum"] < 20 * found[f"mqttbroker_{name}_seconds_count"]
        assert found[f"mqttbroker_{name}_seconds_bucket/+Inf"] == found[f"mqttbroker_{name}_seconds_count"]


def test_a_sampled_acknowledgement_is_timed_from_its_packet_to_the_end_of_the_commit(tmp_path: Path) -> None:
    taken: list[float] = []
    with Core(tmp_path) as core:
        outbound = core.broker.outbound
        outbound.on_ack_sample = taken.append
        kept = Properties()
        kept.session_expiry_interval = 100
        away = core.connect("away", properties=kept)
        away.subscribe("t")
        away.close()
        publisher = core.connect("p")
        core.eager = False
        for number, wanted in ((1, True), (2, False), (3, True)):
            outbound.ack_sample_wanted = wanted
            publisher.send(Publish("t", b"x", 1, packet_id=number))
            core.advance(0.5)
            core.commit()
            assert not outbound.ack_sample_wanted
        assert taken == [0.5, 0.5]


def test_refused_clients_are_counted_by_listener_and_reason_and_denials_by_action(
    start_broker: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    (tmp_path / "acl").write_text("topic read a/#\n")
    config: dict[str, Any] = {"acl_file": str(tmp_path / "acl"), "limits": {"max_sessions": 1}}
    broker = start_broker(config=config)
    with RawClient(broker.port) as client, RawClient(broker.port) as second:
        assert client.connect("one").reason_code == 0
        assert second.connect("two").reason_code == 0x89
        client.publish("b", b"x", 1)
        client.publish("b", b"x", 1)
        found = samples(broker.get("/metrics"))
    assert found["mqttbroker_connects_refused_total/127.0.0.1:0/server_busy"] == 1
    assert found["mqttbroker_denials_total/publish"] == 2 and found["mqttbroker_connects_total"] == 2
