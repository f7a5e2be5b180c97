"""A short run of `make chaos-cluster`."""

from __future__ import annotations

import pytest
from chaos.record import MISSING_1, MISSING_2, ORDER, TWICE
from chaos.verdict import findings
from chaos_cluster.log_proof import LOGGED, ONCE, OWNERS, VOID
from chaos_cluster.run import BOTH, CUTS, KAFKA, NODE, SLOW, STOP, chaos, faults, spread
from chaos_cluster.wills import WILLS


@pytest.mark.slow("kills nodes and Kafka brokers, cuts their links, and takes two minutes")
def test_nothing_is_lost_when_nodes_kafka_brokers_and_links_fail() -> None:
    record, summary = chaos("short", {NODE: 1, KAFKA: 1, BOTH: 1, STOP: 1, **spread(3), SLOW: 1})
    assert not findings(record), f"{summary}\n{findings(record)}"
    rows = (MISSING_1, MISSING_2, TWICE, ORDER, WILLS, LOGGED, VOID, ONCE, OWNERS)
    assert all(record.checked[row] for row in rows), summary


def test_the_schedule_has_each_fault_and_depends_only_on_the_seed() -> None:
    counts = {NODE: 3, KAFKA: 2, BOTH: 1, STOP: 4, **spread(5), SLOW: 2}
    schedule = faults("seed", counts, 3, 3)
    assert schedule == faults("seed", counts, 3, 3) != faults("another seed", counts, 3, 3)
    assert {kind: sum(fault.kind == kind for fault in schedule) for kind in counts} == counts
    assert all(fault.other_node(3) in {0, 1, 2} - {fault.node} for fault in schedule)


def test_cuts_are_of_all_kinds_in_turn() -> None:
    assert list(spread(5).values()) == [2, 2, 1] and sum(spread(50).values()) == 50 and set(spread(0)) == set(CUTS)
