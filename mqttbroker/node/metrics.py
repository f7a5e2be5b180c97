"""The text of a node's `/metrics`: its own figures, and those of its cores with a label ``shard``, by Prometheus' client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from mqttbroker.admin.control.views import WorkerStatus
from mqttbroker.admin.metrics.text import counter_families, worker_families
from sessions.counters import COUNTERS, Counters


def node_page(view: dict[str, Any], workers: Sequence[WorkerStatus], counters: Counters, cores: Mapping[int, str | None]) -> bytes:
    """The text; ``cores`` has that of each core of this node that owns its shard, None if it gives none."""
    families = Families()
    families.add(node_families(view))
    families.add(front_families(workers, counters))
    up = GaugeMetricFamily("mqttbroker_core_up", "1 if a core of this node that owns its shard gives its metrics.", labels=["shard"])
    for shard, text in cores.items():
        up.add_metric([str(shard)], text is not None)
    families.add([up])
    for shard, text in cores.items():
        families.add(text_string_to_metric_families(text or ""), str(shard))
    # Prometheus' client would give the name of this counter the suffix `_total`.
    name = "mqttbroker_cluster_generation"
    generation = f"# HELP {name} Changes of the assignment of shards to nodes\n# TYPE {name} counter\n{name} {view['generation']}\n"
    return generation.encode() + generate_latest(families)


class Families(Collector):
    """Families of several processes: those of the same name are one."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def add(self, families: Iterable[Metric], shard: str = "") -> None:
        """Add the samples of these, with a label for a ``shard``."""
        for family in families:
            whole = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = {**sample.labels, "shard": shard} if shard else sample.labels
                whole.samples.append(sample._replace(labels=labels))

    def collect(self) -> Iterator[Metric]:
        return iter(self._families.values())


def node_families(view: dict[str, Any]) -> Iterator[Metric]:
    """The state of a cluster as one of its nodes knows it."""
    prefix = "mqttbroker_cluster_"
    yield GaugeMetricFamily(prefix + "nodes", "Nodes in the cluster", value=len(view["nodes"]))
    shards = GaugeMetricFamily(prefix + "shards", "Shards that each node owns", labels=["node"])
    for node in view["nodes"]:
        shards.add_metric([node["node"]], len(node["owns"]))
    yield shards
    cores = [(one["shard"], one["core"]) for one in view["shards"] if one["core"] is not None]
    for key, name, made, text in (
        ("lag", "log_lag_records", GaugeMetricFamily, "Records of its log that a core of this node has not read"),
        ("bus_lag", "bus_lag_records", GaugeMetricFamily, "Records of the other logs that a core of this node has not read"),
        ("epoch_changes", "epoch_changes", CounterMetricFamily, "Takeovers that a core of this node has seen"),
        ("starts", "core_starts", CounterMetricFamily, "Starts of a core of this node"),
        ("snapshots", "snapshots", CounterMetricFamily, "Snapshots that a core of this node has written"),
        ("resident", "core_resident_bytes", GaugeMetricFamily, "Resident memory of a core of this node"),
        ("links_missing", "links_missing", GaugeMetricFamily,
         "Cores that own another shard to which a core of this node has no link"),
        ("stream_problem", "streams_failing", GaugeMetricFamily,
         "1 if a core of this node cannot copy messages to the topics of streams now"),
    ):  # fmt: skip
        family = made(prefix + name, text, labels=["shard", "role"])
        for shard, core in cores:
            family.add_metric([str(shard), core["role"]], _number(core[key]))
        yield family


def _number(value: Any) -> float:
    """A number, how many a list has, or whether there is a text."""
    if isinstance(value, list):
        return len(value)
    return value if isinstance(value, (int, float)) else value is not None


def front_families(workers: Sequence[WorkerStatus], counters: Counters) -> Iterator[Metric]:
    """A node's workers, and what was refused before a client had a core."""
    yield from worker_families(workers, {"link_bytes"})
    yield from counter_families((counter, counters.total(counter)) for counter in COUNTERS if counter.by_front)
    limits = CounterMetricFamily(
        "mqttbroker_limits_reached",
        "Times that a limit refused, delayed or closed something, by the name of the setting.",
        labels=["limit"],
    )
    for name, count in counters.limits_reached.items():
        limits.add_metric([name], count)
    yield limits
