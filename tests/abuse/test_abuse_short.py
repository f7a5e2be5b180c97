"""A few kinds of `make abuse` against one broker, and tests of its checks."""

from __future__ import annotations

from pathlib import Path

import pytest

import abuse.run as abuse_run
from abuse.kinds import KINDS, Kind
from abuse.packets import Answered, acknowledgement, connect, mqtt_answers, publish, split, subscribe, websocket_answers
from abuse.run import Bystanders, Result, judge, measure, percentile
from abuse.target import Target, raise_file_limit, start
from mqttbroker.codec.packets import Connect, Publish, Subscribe, decode


def quiet(target: Target) -> None:
    """No abuse."""


def test_well_behaved_clients_are_served_beside_abuse(tmp_path: Path) -> None:
    raise_file_limit()
    target = start(tmp_path, "1")
    bystanders = Bystanders(target.ports.tcp)
    results = []
    try:
        for kind in KINDS.values():
            if kind.short:
                target.answered = Answered()
                results.append(measure(kind, target, bystanders, 0.0, 0.2))
        results.append(measure(Kind("none", "nothing", quiet), target, bystanders, 0.0, 0.1))
        judge(results, bystanders.end())
    finally:
        bystanders.close()
        target.close()
    assert len(results) > 10
    problems = {result.kind.name: result.problems for result in results if result.problems}
    assert not problems, problems
    assert all(result.row.count("|") == 8 for result in results)


@pytest.mark.slow("each kind against a broker of its own, about 8 minutes together")
@pytest.mark.parametrize("name", KINDS)
def test_each_kind(name: str) -> None:
    raise_file_limit()
    result = abuse_run.run(KINDS[name], "1", 0.5, 2.0)
    assert not result.problems, result.problems


def test_there_are_at_least_forty_kinds() -> None:
    assert len(KINDS) >= 40


def test_problems_are_found() -> None:
    result = Result(Kind("k", "nothing", quiet))
    periods = {"k quiet": [0.1] * 100, "k during": [0.1] * 90 + [9.0] * 10, "k after": [0.1]}
    judge([result], {"periods": periods, "lost": 0, "unacknowledged": 0, "errors": []})
    assert result.problems == [] and percentile(result.during, 0.99) == 9.0 and percentile(result.quiet, 0.5) == 0.1
    judge([result], {"periods": {"k during": [3000.0]}, "lost": 2, "unacknowledged": 1, "errors": ["closed"]})
    assert len(result.problems) == 4
    silent = Result(Kind("k", "nothing", quiet))
    judge([silent], {"periods": {}, "lost": 0, "unacknowledged": 0, "errors": []})
    assert "not served" in silent.problems[0]


def test_packets_are_what_they_say() -> None:
    for version in (4, 5):
        will = ("w", b"x", 1)
        packet, _ = decode(connect("c", version, will=will, expiry=5, will_delay=3, login=("u", "p")), version)
        assert isinstance(packet, Connect) and (packet.client_id, packet.username, packet.will.topic) == ("c", "u", "w")
        packet, _ = decode(publish("t", b"x", 1, 7, True, version), version)
        assert isinstance(packet, Publish) and (packet.topic, packet.qos) == ("t", 1)
        assert (packet.packet_id, packet.retain) == (7, True)
        packet, _ = decode(subscribe(["a", "b"], 1, version=version), version)
        assert isinstance(packet, Subscribe) and [part.topic_filter for part in packet.subscriptions] == ["a", "b"]


def test_answers_are_read() -> None:
    data = b"\x20\x03\0\x97\0" + publish("t") + acknowledgement(4, 1) + b"\xe0\x02\x95\0" + b"\x40\x03\0\x01"
    packets, rest = split(data)
    assert rest == b"\x40\x03\0\x01" and len(packets) == 4
    refused = ["CONNACK Quota exceeded (0x97)", "PUBACK", "DISCONNECT Packet too large (0x95)"]
    assert list(mqtt_answers(packets, 5)) == refused
    assert list(mqtt_answers(split(b"\x20\x02\0\x05")[0], 4)) == ["CONNACK 5 (not authorized)"]
    assert websocket_answers(b"\x8a\x00\x88\x02\x03\xea\x82\x7e\x01") == (
        ["WebSocket pong", "WebSocket close 1002"],
        b"\x82\x7e\x01",
    )
