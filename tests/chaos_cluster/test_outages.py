"""`Outages` counts a gap to its end, for the fault that was its cause."""

from __future__ import annotations

from chaos_cluster.outages import Outages


def outages(faults: dict[float, str], *acknowledged: float) -> dict[str, list[float]]:
    """The outages of one shard."""
    found = Outages(1, 0.0)
    for now in acknowledged:
        found.acknowledged(0, now)
    for now, kind in faults.items():
        found.fault(kind, now)
    return found.longest()


def test_an_outage_lasts_from_the_last_acknowledgement_to_the_next_one() -> None:
    assert outages({1.0: "kill"}, 0.5, 0.75, 4.0, 4.25) == {"kill": [3.25]}


def test_an_acknowledgement_behind_the_begin_of_a_fault_does_not_end_its_outage() -> None:
    assert outages({1.0: "kill"}, 0.75, 1.25, 7.25, 7.5) == {"kill": [6.0]}


def test_an_outage_that_ends_behind_the_next_fault_counts_for_its_cause() -> None:
    assert outages({1.0: "stop", 6.0: "kill"}, 0.75, 1.25, 8.25, 8.5) == {"stop": [7.0], "kill": [0.25]}


def test_a_gap_that_had_just_begun_counts_for_the_fault_within_it() -> None:
    assert outages({1.0: "stop", 6.0: "kill"}, 0.75, 1.25, 5.75, 8.0) == {"stop": [4.5], "kill": [2.25]}


def test_the_worst_shard_counts_and_faults_are_told_apart_by_kind() -> None:
    found = Outages(2, 0.0)
    found.fault("kill", 1.0)
    found.fault("kill", 10.0)
    found.fault("cut", 20.0)
    for shard, times in enumerate(([0.5, 2.5, 9.5, 9.75, 10.25, 19.75, 20.25], [0.5, 3.5, 9.75, 14.75, 19.75, 21.75])):
        for now in times:
            found.acknowledged(shard, now)
    longest = found.longest()
    assert longest["cut"] == [2.0] and longest["kill"][0] == 7.0 and len(longest["kill"]) == 2
    assert not found.all_acknowledged_since(20.5) and found.all_acknowledged_since(20.25)
    assert [line.split()[-3:] for line in found.table().splitlines()[1:]] == [["2", "9.5", "9.5"], ["1", "2.0", "2.0"]]
