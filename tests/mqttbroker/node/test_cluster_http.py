"""Metrics of a node: those of several cores as one page, and its own."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mqttbroker.node.metrics import Families, node_page
from sessions.counters import Counters

CORE = """\
# HELP m_total Messages
# TYPE m_total counter
m_total{qos="1"} 3
m_total{qos="2"} 4
# TYPE depth gauge
depth 7.5
# TYPE took_seconds histogram
took_seconds_bucket{le="+Inf"} 2
took_seconds_count 2
took_seconds_sum 0.5
"""


def test_samples_of_a_metric_stand_together_with_the_shard_of_each() -> None:
    families = Families()
    for shard in ("0", "3"):
        families.add(text_string_to_metric_families(CORE), shard)
    families.add(text_string_to_metric_families("up 1"))
    text = generate_latest(families).decode()
    assert text.count("# TYPE m_total counter") == 1
    found = {family.name: family.samples for family in text_string_to_metric_families(text)}
    assert set(found) == {"m", "depth", "took_seconds", "up"}
    assert {(one.labels["shard"], one.labels["qos"], one.value) for one in found["m"]} == {
        ("0", "1", 3.0), ("0", "2", 4.0), ("3", "1", 3.0), ("3", "2", 4.0)
    }  # fmt: skip
    assert [one.labels for one in found["depth"]] == [{"shard": "0"}, {"shard": "3"}]
    assert len(found["took_seconds"]) == 6
    assert found["up"][0].labels == {}


def test_links_that_are_missing_and_streams_that_fail_are_metrics() -> None:
    core = dict.fromkeys(("lag", "bus_lag", "epoch_changes", "starts", "snapshots", "resident"), 0)
    view = {
        "nodes": [{"node": "a", "owns": [0, 1]}],
        "generation": 3,
        "shards": [
            {"shard": 0, "core": {**core, "role": "owner", "bus_lag": 7, "links_missing": [1, 2], "stream_problem": "no leader"}},
            {"shard": 1, "core": {**core, "role": "standby", "links_missing": [], "stream_problem": None}},
            {"shard": 2, "core": None},
        ],
    }
    lines = node_page(view, [], Counters(), {0: None}).decode().splitlines()
    for name, values in {"bus_lag_records": (7, 0), "links_missing": (2, 0), "streams_failing": (1, 0)}.items():
        for shard, role, value in zip("01", ("owner", "standby"), values):
            assert f'mqttbroker_cluster_{name}{{role="{role}",shard="{shard}"}} {value:.1f}' in lines
