"""Alarms: raised and cleared over MQTT, HTTP, in the log and in metrics."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from support.broker_process import BrokerProcess, to_toml
from support.certificates import CertificateFiles
from support.metric_samples import samples
from support.raw_client import RawClient

from mqttbroker.admin.events.alarms import MAX_CLEARED, Alarms
from mqttbroker.codec.packets import Publish


def test_a_condition_is_told_once_when_it_begins_and_once_when_it_ends() -> None:
    told: list[tuple[str, Any]] = []
    alarms = Alarms(lambda topic, payload: told.append((topic, json.loads(payload))))
    alarms.update({"store": "disk full"}, 10.0)
    alarms.update({"store": "disk still full", "memory": "80 %"}, 11.0)
    assert [alarm.reason for alarm in alarms.active] == ["disk still full", "80 %"]
    alarms.update({"memory": "80 %"}, 12.5)
    nobody = {"acknowledged_by": None, "acknowledged_at": None}
    assert told == [
        ("$SYS/broker/alarms/store",
         {"name": "store", "active": True, "reason": "disk full", "since": 10.0, "cleared": None, **nobody}),
        ("$SYS/broker/alarms/memory",
         {"name": "memory", "active": True, "reason": "80 %", "since": 11.0, "cleared": None, **nobody}),
        ("$SYS/broker/alarms/store",
         {"name": "store", "active": False, "reason": "disk still full", "since": 10.0, "cleared": 12.5, **nobody}),
    ]  # fmt: skip
    assert [alarm.name for alarm in alarms.active] == ["memory"] and alarms.raised == 2


def test_an_acknowledged_alarm_is_marked_until_it_ends() -> None:
    told: list[Any] = []
    alarms = Alarms(lambda topic, payload: told.append(json.loads(payload)))
    alarms.update({"store": "disk full"}, 10.0)
    assert alarms.acknowledge("memory", "eve", 11.0) is None
    marked = alarms.acknowledge("store", "ada", 11.0)
    assert marked is not None and (marked.acknowledged_by, marked.acknowledged_at) == ("ada", 11.0)
    assert alarms.acknowledge("store", "eve", 12.0) == marked and len(told) == 2
    alarms.update({"store": "disk still full"}, 13.0)
    assert alarms.active == [marked._replace(reason="disk still full")]
    alarms.update({}, 14.0)
    assert (told[-1]["acknowledged_by"], told[-1]["acknowledged_at"], told[-1]["active"]) == ("ada", 11.0, False)
    alarms.update({"store": "disk full"}, 15.0)
    assert alarms.active[0].acknowledged_by == ""


def test_the_last_cleared_alarms_are_remembered() -> None:
    alarms = Alarms(lambda topic, payload: None)
    for number in range(MAX_CLEARED + 5):
        alarms.update({f"worker/{number}": "down"}, float(number))
    assert [alarm.name for alarm in alarms.cleared][0] == f"worker/{MAX_CLEARED + 3}"
    assert len(alarms.cleared) == MAX_CLEARED


def next_alarm(client: RawClient) -> tuple[str, Any]:
    packet = client.wait_for(Publish)
    return packet.topic.removeprefix("$SYS/broker/alarms/"), json.loads(packet.payload)


def test_a_full_disk_and_an_old_certificate_are_alarms_until_they_are_mended(
    start_broker: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    files = CertificateFiles(tmp_path)
    soon = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    certificate = files.authority.issue_cert("localhost", not_after=soon)
    certificate.private_key_and_cert_chain_pem.write_to_path(str(files.certfile))
    certificate.private_key_pem.write_to_path(str(files.keyfile))
    tables: dict[str, Any] = {
        "alarms": {"disk_free": "1024TiB"},
        **files.config(),
    }
    broker = start_broker(config=tables)
    with RawClient(broker.port) as client:
        client.connect("operator")
        client.subscribe("$SYS/broker/alarms/#", options=0)
        found = dict(next_alarm(client) for _ in range(2))
        assert all(alarm["active"] for alarm in found.values()), found
        name = next(name for name in found if name.startswith("certificate/127.0.0.1:"))
        assert found.keys() == {"disk", name}
        assert "expires at 20" in found[name]["reason"] and "less than" in found["disk"]["reason"]
        listed = json.loads(broker.get("/api/v1/alarms"))
        assert {alarm["name"] for alarm in listed["active"]} == found.keys() and listed["cleared"] == []
        values = samples(broker.get("/metrics"))
        assert values["mqttbroker_alarm/disk"] == 1 and values["mqttbroker_alarms_raised_total"] == 2
        address = name.removeprefix("certificate/")
        assert values[f"mqttbroker_certificate_expiry_timestamp_seconds/{address}"] == int(soon.timestamp())
        broker.config.write_text(to_toml({**tables, "alarms": {"disk_free": "0B", "certificate_expiry": "1s"}}))
        os.kill(broker.pid, signal.SIGHUP)
        ended = dict(next_alarm(client) for _ in range(2))
        assert ended.keys() == found.keys() and not any(alarm["active"] for alarm in ended.values())
        assert all(alarm["cleared"] >= alarm["since"] for alarm in ended.values())
    listed = json.loads(broker.get("/api/v1/alarms"))
    assert listed["active"] == [] and {alarm["name"] for alarm in listed["cleared"]} == found.keys()
    for event in ("raised", "cleared"):
        broker.wait_for_log(f"event=alarm_{event} alarm=disk ")
    assert not any(name.startswith("mqttbroker_alarm/") for name in samples(broker.get("/metrics")))
