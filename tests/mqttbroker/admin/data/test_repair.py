"""Damaged data directories: what check reports, what repair keeps, and the start of the broker."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.damaged_log import DAMAGES, batches
from support.full_store import CHANGES, overwrite, page_kinds
from support.raw_client import RawClient

from bridge_spark.log.segment_names import segment_file_name
from mqttbroker.admin.data.repair import DATABASE, check, repair, set_aside
from mqttbroker.codec.packets import Puback, Publish
from mqttbroker.codec.properties import Properties
from sessions.store.interface import StoreError
from sessions.store.pages import PageFile

STREAM = {"streams": {"s": {"filters": ["s/#"], "partitions": 1, "segment_bytes": "4KiB", "seal": False}}}
COUNT = 400

Start = Callable[..., BrokerProcess]


def forever(receive_maximum: int = 500) -> Properties:
    properties = Properties()
    properties.session_expiry_interval = 0xFFFFFFFF
    properties.receive_maximum = receive_maximum
    return properties


def fill(broker: BrokerProcess) -> None:
    """Fill the queue of a disconnected client and a stream with `COUNT` messages, and retain one."""
    away = RawClient(broker.port)
    away.connect("away", clean_start=False, properties=forever())
    away.subscribe("s/#", options=1)
    away.close()
    publisher = RawClient(broker.port)
    publisher.connect("publisher")
    for number in range(COUNT):
        payload = b"%d " % number + b"x" * (number % 300)
        publisher.send(Publish(f"s/{number % 7}", payload, qos=1, packet_id=number + 1))
        if number % 20 == 19:  # the stream gets several batches
            for _ in range(20):
                assert publisher.expect(Puback).reason_code == 0
    publisher.send(Publish("kept", b"value", qos=1, retain=True, packet_id=1))
    publisher.expect(Puback)
    publisher.close()


def queued(broker: BrokerProcess) -> list[int]:
    """The numbers in the queue of the client ``away``."""
    last = RawClient(broker.port)
    last.connect("last")
    assert last.publish("s/last", b"-1", 1) == 0
    last.close()
    away = RawClient(broker.port)
    assert away.connect("away", clean_start=False, properties=forever()).session_present
    found: list[int] = []
    while not found or found[-1] >= 0:
        found.append(int(away.take().payload.split()[0]))
    away.close()
    return found[:-1]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data_dir = tmp_path_factory.mktemp("sound") / "data"
    with BrokerProcess(data_dir, STREAM) as broker:
        fill(broker)
    return data_dir


@pytest.fixture
def data_dir(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "data")
    return tmp_path / "data"


QUEUE = (int, int, int, int, int, int, bytes, int, int, int, int)
MESSAGES = (type(None), str, int, int, bytes, str, int, int, bytes)
STREAM_ENDS = (str, int, int)


def page_of(data_dir: Path, kind: str, row: tuple[type, ...]) -> int:
    """The number of a page of this kind whose rows have these types."""
    database = data_dir / DATABASE
    for page in page_kinds(database)[kind]:
        pages = PageFile(database)
        rows = list(pages._rows(page, True))
        pages.close()
        if rows and all(tuple(map(type, record)) == row for _, record in rows):
            return page
    raise AssertionError("no such page")


def damage_batch(data_dir: Path, number: int) -> tuple[int, int]:
    directory = data_dir / "streams" / "s" / "0"
    first, batch, data = batches(directory)[number]
    (directory / segment_file_name(first)).write_bytes(DAMAGES["checksum"](data, batch))
    return batch.first_offset, batch.end_offset


def test_an_undamaged_directory(data_dir: Path) -> None:
    findings = check(data_dir)
    assert findings.problems == []
    assert findings.lines[0].startswith("mqttbroker.db: 1 sessions, 1 subscriptions, 400 messages, 400 queue")
    assert findings.lines[1].startswith("streams/s/0: 400 offsets from 0 to 400, ")
    assert repair(data_dir) == [] and set_aside(data_dir) == []


def test_the_directory_of_a_running_broker_is_checked_and_not_repaired(data_dir: Path, start_broker: Start) -> None:
    broker = start_broker(data_dir=data_dir, config=STREAM)
    client = RawClient(broker.port)
    client.connect("c")
    for number in range(50):
        client.send(Publish("s/1", b"%d" % number, qos=1, packet_id=number + 1))
        assert check(data_dir).problems == []
    with pytest.raises(StoreError, match="in use"):
        repair(data_dir)
    client.close()


def test_database_and_log_agree_after_a_repair(data_dir: Path) -> None:
    page = page_of(data_dir, "leaf index", QUEUE)
    overwrite(data_dir / DATABASE, page, CHANGES["zeros"])
    lost = damage_batch(data_dir, 2)
    problems = check(data_dir).problems
    assert any(line.startswith("mqttbroker.db: ") for line in problems)
    assert any(f"offsets {lost[0]} to {lost[1] - 1}" in line for line in problems)
    lines = repair(data_dir)
    assert any("put aside as mqttbroker.db.corrupt-" in line for line in lines)
    assert any(f"page {page} cannot be read" in line for line in lines)
    findings = check(data_dir)
    assert findings.problems == []
    assert [line for line in findings.lines if "put aside, damaged" in line]
    assert len(set_aside(data_dir)) == 2
    assert repair(data_dir) == []


def test_lost_stream_ends_are_taken_from_the_log(data_dir: Path) -> None:
    overwrite(data_dir / DATABASE, page_of(data_dir, "leaf index", STREAM_ENDS), CHANGES["zeros"])
    lines = repair(data_dir)
    assert "streams/s/0: ends at offset 400, not 0" in lines
    assert check(data_dir).problems == []


def test_a_missing_stream(data_dir: Path, start_broker: Start) -> None:
    shutil.rmtree(data_dir / "streams")
    assert check(data_dir).problems == ["streams/s/0: is missing; the database ends at offset 400"]
    repair(data_dir)
    findings = check(data_dir)
    assert findings.problems == ["streams/s/stream.json: is missing"]
    broker = start_broker(data_dir=data_dir, config=STREAM)
    assert json.loads(broker.get("/streams/s"))["partitions"][0]["high_watermark"] == 400
    assert check(data_dir).problems == []


def test_an_older_database_with_a_longer_log(data_dir: Path, start_broker: Start) -> None:
    connection = sqlite3.connect(data_dir / DATABASE)
    connection.execute("UPDATE stream_ends SET end_offset = 100")
    connection.commit()
    connection.close()
    assert "readers have seen offsets up to 400" in check(data_dir).problems[0]
    assert repair(data_dir)[-1] == "streams/s/0: ends at offset 400, not 100"
    start_broker(data_dir=data_dir, config=STREAM)


def test_a_foreign_database_is_not_repaired(data_dir: Path) -> None:
    connection = sqlite3.connect(data_dir / DATABASE)
    connection.execute("PRAGMA application_id = 1")
    connection.close()
    with pytest.raises(StoreError, match="not a database of this broker"):
        repair(data_dir)


# -- the broker ---------------------------------------------------------------


def damages() -> dict[str, Callable[[Path], object]]:
    def index_page(data_dir: Path) -> None:
        overwrite(data_dir / DATABASE, page_of(data_dir, "leaf index", QUEUE), CHANGES["noise"])

    return {
        "header": lambda data_dir: overwrite(data_dir / DATABASE, 1, CHANGES["zeros"]),
        "no database": lambda data_dir: (data_dir / DATABASE).write_bytes(b"x" * 9000),
        "queue": index_page,
        "half the file": lambda data_dir: os.truncate(data_dir / DATABASE, (data_dir / DATABASE).stat().st_size // 2),
        "log tail": lambda data_dir: os.truncate(max((data_dir / "streams/s/0").glob("*.seg")), 100),
        "stream.json": lambda data_dir: (data_dir / "streams/s/stream.json").write_text("{"),
    }


@pytest.mark.parametrize("damage", damages())
def test_a_broker_starts_with_what_can_be_read(data_dir: Path, start_broker: Start, damage: str) -> None:
    damages()[damage](data_dir)
    before = {path: path.read_bytes() for path in data_dir.rglob("*.*") if path.is_file()}
    broker = start_broker(data_dir=data_dir, config=STREAM)
    broker.wait_for_log("event=store_corrupt reason=")
    broker.wait_for_log("event=store_repaired what=.*put aside")
    assert broker.get("/readyz")
    after = [path.read_bytes() for path in data_dir.rglob("*") if path.is_file()]
    for path, data in before.items():
        if path.suffix in (".db", ".json") or ".damaged" in path.name:
            assert data in after, f"{path} is nowhere as it was"
    metrics = broker.get("/metrics").decode()
    if damage != "stream.json":
        assert "mqttbroker_store_set_aside_files 1.0" in metrics
        broker.wait_for_log("event=damaged_file_kept file=")
    if damage in ("header", "log tail", "stream.json"):
        assert queued(broker) == list(range(COUNT))
        reader = RawClient(broker.port)
        reader.connect("reader")
        reader.subscribe("kept")
        assert reader.wait_for(Publish).payload == b"value"
        reader.close()
    reason = json.loads(broker.get("/api/v1/status"))["store_salvaged"]
    assert reason.startswith("repaired at this start: ") and f"store: {reason}" in json.loads(broker.get("/readyz"))["warnings"]
    broker.wait_for_log("event=alarm_raised alarm=store_salvaged")
    (alarm,) = json.loads(broker.get("/api/v1/alarms"))["active"]
    assert (alarm["name"], alarm["reason"]) == ("store_salvaged", reason)
    assert 'mqttbroker_alarm{alarm="store_salvaged"} 1.0' in broker.get("/metrics").decode()
    # It serves, and finds no damage at the next start.
    client = RawClient(broker.port)
    client.connect("c")
    client.send(Publish("s/1", b"9999", qos=1, packet_id=1))
    assert client.expect(Puback).reason_code == 0
    client.close()
    first = len(broker.lines)
    broker.restart()
    assert not [line for line in broker.lines[first:] if "store_corrupt" in line]
    assert check(data_dir).problems == []
    # The alarm lasts as long as damaged files are in the data directory.
    files = set_aside(data_dir)
    kept = json.loads(broker.get("/api/v1/status"))["store_salvaged"]
    if not files:
        assert kept is None
        return
    assert kept.startswith("damaged files are kept: ") and all(str(path.relative_to(data_dir)) in kept for path in files)
    broker.wait_for_log("event=alarm_raised alarm=store_salvaged", after=first)
    if damage != "header":  # the broker looks for files every ten seconds
        return
    for path in files:
        path.unlink()
    broker.wait_for_log("event=alarm_cleared alarm=store_salvaged", after=first)
    assert json.loads(broker.get("/api/v1/status"))["store_salvaged"] is None
    assert "warnings" not in json.loads(broker.get("/readyz"))


def test_on_corrupt_store_refuse(data_dir: Path) -> None:
    overwrite(data_dir / DATABASE, 1, CHANGES["zeros"])
    before = (data_dir / DATABASE).read_bytes()
    broker = BrokerProcess(data_dir, {"on_corrupt_store": "refuse", **STREAM})
    with pytest.raises(AssertionError):
        broker.start()
    assert f"run mqttbroker repair-store {data_dir}" in broker.log
    assert (data_dir / DATABASE).read_bytes() == before and set_aside(data_dir) == []
    broker._ended_by_test = True
    broker.close()


def meet_damage(broker: BrokerProcess) -> str:
    """Read the damaged queue, which the start does not, and return the reason in /readyz."""
    assert broker.get("/readyz")
    away = RawClient(broker.port)
    answer = away.connect("away", clean_start=False, properties=forever())
    assert answer.reason_code != 0
    away.close()
    with pytest.raises(urllib.error.HTTPError) as caught:
        broker.get("/readyz")
    assert caught.value.code == 503
    reason = caught.value.read().decode()
    assert "malformed" in reason
    return reason


@pytest.fixture
def damaged_queue(data_dir: Path) -> Path:
    overwrite(data_dir / DATABASE, page_of(data_dir, "leaf table", MESSAGES), CHANGES["zeros"])
    return data_dir


def test_damage_found_while_running_is_repaired_by_a_restart(damaged_queue: Path, start_broker: Start) -> None:
    broker = start_broker(data_dir=damaged_queue, config=STREAM)
    assert "a restart repairs it" in meet_damage(broker)
    broker.restart()
    broker.wait_for_log("event=store_repaired what=.*put aside")
    assert broker.get("/readyz")
    found = queued(broker)
    assert 0 < len(found) < COUNT and found == sorted(found)


def test_changes_are_refused_while_the_database_cannot_be_written(damaged_queue: Path, start_broker: Start) -> None:
    broker = start_broker(data_dir=damaged_queue, config={**STREAM, "apply_interval": "200ms"})
    keeper = RawClient(broker.port)
    keeper.connect("keeper", clean_start=False, properties=forever())
    keeper.subscribe("queued/#", options=1)
    keeper.close()
    away = RawClient(broker.port)
    assert away.connect("away", clean_start=True).reason_code == 0  # its queue is to be deleted
    publisher = RawClient(broker.port)
    publisher.connect("publisher")
    accepted = 0
    while publisher.publish("queued/1", b"%d" % accepted, 1) == 0:
        accepted += 1
    with pytest.raises(urllib.error.HTTPError) as caught:
        broker.get("/readyz")
    assert "malformed; changes are refused, a restart repairs it" in caught.value.read().decode()
    assert publisher.publish("unkept", b"", 0) == 0
    assert publisher.publish("queued/1", b"", 1) >= 0x80
    for client in (away, publisher):
        client.close()
    broker.restart()
    broker.wait_for_log("event=store_repaired what=.*put aside")
    assert broker.get("/readyz")
    with RawClient(broker.port) as last:
        last.connect("last")
        assert last.publish("queued/1", b"last", 1) == 0
    keeper = RawClient(broker.port)
    assert keeper.connect("keeper", clean_start=False, properties=forever()).session_present
    found = [keeper.take().payload for _ in range(accepted + 1)]
    assert found == [*(b"%d" % number for number in range(accepted)), b"last"]
    keeper.close()
    away = RawClient(broker.port)
    assert not away.connect("away", clean_start=False, properties=forever()).session_present
    away.close()


def test_readyz_names_repair_store_if_a_restart_does_not_repair(damaged_queue: Path, start_broker: Start) -> None:
    broker = start_broker(data_dir=damaged_queue, config={"on_corrupt_store": "refuse", **STREAM})
    assert "repair-store" in meet_damage(broker)
