"""Samples of the recent past: the ring, and what the API has of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.api_client import ACCESS, Api
from support.broker_process import BrokerProcess
from support.patience import PATIENCE
from support.raw_client import RawClient

from mqttbroker.admin.metrics.history import MAX_STREAMS, History, _Quantile
from mqttbroker.admin.metrics.latency import BUCKETS, Histogram

Start = Callable[..., BrokerProcess]
pytestmark = pytest.mark.one_build


def listed(history: History, after: float) -> tuple[list[float], dict[str, list[float | None]]]:
    found = history.since(after).to_json()
    return found["times"], found["series"]


def test_ring_keeps_the_last_samples_in_their_order() -> None:
    history = History(3)
    assert listed(history, 0.0) == ([], {})
    for number in range(5):
        history.add(100.0 + number, {"a": number, "b": number / 2})
    assert listed(history, 0.0) == ([102.0, 103.0, 104.0], {"a": [2, 3, 4], "b": [1, 1.5, 2]})
    assert listed(history, 103.0) == ([104.0], {"a": [4], "b": [2]})
    history.add(105.0, {"a": 5, "b": 2.5})
    assert listed(history, 0.0)[1]["a"] == [3, 4, 5]
    assert listed(history, 105.0) == ([], {"a": [], "b": []})


def test_series_begin_and_end_with_their_values() -> None:
    history = History(2)
    history.add(1.0, {"old": 1})
    history.add(2.0, {"new": 2})
    assert listed(history, 0.0)[1] == {"old": [1, None], "new": [None, 2]}
    history.add(3.0, {"new": 3})
    assert listed(history, 0.0)[1] == {"new": [2, 3]}


def test_memory_of_the_ring_is_bounded() -> None:
    history = History(100)
    for number in range(300):
        history.add(float(number), {f"stream/{number}/records": 1.0})
    assert len(history.since(0.0).series) == 100
    assert history.max_bytes == (1 + 40 + 2 * MAX_STREAMS) * 800
    assert listed(History(0), 0.0) == ([], {})


def test_quantile_is_that_of_what_was_measured_since_the_last_one() -> None:
    histogram = Histogram("any", "")
    quantile = _Quantile(histogram)
    assert quantile.next() is None
    for _ in range(100):
        histogram.observe(0.03)
    assert quantile.next() == 0.05
    histogram.observe(0.5)
    assert quantile.next() == 0.5
    histogram.observe(math.inf)
    assert quantile.next() == BUCKETS[-1]  # the largest bound that is finite
    assert quantile.next() is None


def test_api_has_the_samples_of_counters_latencies_and_streams(start_broker: Start) -> None:
    config = {
        "http": {"access": ACCESS, "history_interval": "1s", "history_length": "1m"},
        "streams": {"plant": {"filters": ["plant/#"], "partitions": 2}},
    }
    broker = start_broker(config=config)
    api = Api(broker, "viewer")
    with RawClient(broker.port) as client:
        client.connect("sensor")
        for number in range(7):
            client.publish(f"plant/{number}", b"1", 1)
        found: Any = api.get("/history")
        assert (found["interval"], found["length"]) == (1, 60)
        assert (found["values"]["clients"], found["values"]["stream/plant/records"]) == (1, 7)
        assert found["values"]["publish_received"] == 7 and not any(key.startswith("latency/") for key in found["values"])
        until = time.monotonic() + PATIENCE
        while found["series"].get("stream/plant/records", [0])[-1:] != [7]:
            assert time.monotonic() < until
            found = api.get("/history")
        assert found["series"]["clients"][-1] == 1 and found["series"]["drops/queue_full"][-1] == 0
        assert max(each or 0 for each in found["series"]["latency/commit"]) > 0
        assert found["times"] == sorted(found["times"]) and found["times"][-1] <= found["now"]
        last = found["times"][-1]
        assert all(moment > last for moment in api.get("/history", since=last)["times"])
    assert api.refused(400, "since", "GET", "/history", since="yesterday") == ('since: must be Unix time in seconds, got "yesterday"')


def test_history_may_be_off_and_begins_anew_with_a_start(start_broker: Start) -> None:
    broker = start_broker(config={"http": {"access": ACCESS, "history_length": "0s"}})
    found = Api(broker).get("/history")
    assert (found["times"], found["series"], found["values"]["clients"]) == ([], {}, 0)
