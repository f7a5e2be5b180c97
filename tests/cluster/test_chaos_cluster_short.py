"""A short run of `make chaos-cluster`."""

from __future__ import annotations

import pytest
from chaos.record import MISSING_1, MISSING_2, ORDER, TWICE
from chaos.verdict import findings
from chaos_cluster.run import BOTH, KAFKA, NODE, STOP, chaos, faults


@pytest.mark.slow("kills nodes and Kafka brokers, and takes a minute or two")
def test_nothing_is_lost_when_nodes_and_kafka_brokers_fail() -> None:
    record, summary = chaos("short", {NODE: 2, KAFKA: 1, BOTH: 1, STOP: 2})
    assert not findings(record), f"{summary}\n{findings(record)}"
    assert all(record.checked[row] for row in (MISSING_1, MISSING_2, TWICE, ORDER)), summary


def test_the_schedule_has_each_fault_and_depends_only_on_the_seed() -> None:
    counts = {NODE: 3, KAFKA: 2, BOTH: 1, STOP: 4}
    schedule = faults("seed", counts, 3, 3)
    assert schedule == faults("seed", counts, 3, 3) != faults("another seed", counts, 3, 3)
    assert {kind: sum(fault.kind == kind for fault in schedule) for kind in counts} == counts
