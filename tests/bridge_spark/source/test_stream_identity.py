"""Offsets of one stream are refused for another: by name, and by incarnation, over HTTP and by path."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from support.broker_process import BrokerProcess
from support.raw_client import RawClient
from support.spark_session import StreamWriter, message

from bridge_spark.datasource import MqttDataSource, MqttStreamReader
from bridge_spark.log.incarnation import INCARNATION_FILE, read_incarnation
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from bridge_spark.source.storage import StreamError
from mqttbroker.admin.data.backup import back_up, restore

CONFIG = {"allow_anonymous": True, "streams": {"flow": {"filters": ["flow/#"], "partitions": 1}}}


def publish(port: int, first: int, end: int) -> None:
    with RawClient(port) as client:
        client.connect("publisher")
        for number in range(first, end):
            client.publish("flow/a", b"%d" % number, 1)
        client.disconnect()


def reader(**options: str) -> MqttStreamReader:
    found = MqttDataSource(
        {"stream": "flow", "startingOffsets": "earliest", "fetch.numRetries": "0", **options}
        if "url" in options
        else {"stream": "flow", "startingOffsets": "earliest", **options}
    )
    made = found.streamReader(found.schema())  # type: ignore[arg-type]
    assert isinstance(made, MqttStreamReader)
    return made


def read(checkpoint: dict[str, int], **options: str) -> list[int]:
    """The numbers that a query reads from its checkpoint on, whose offsets move on."""
    query = reader(**options)
    try:
        start = dict(checkpoint) or query.initialOffset()
        end = query.latestOffset(start, ReadAllAvailable())
        rows = [row for part in query.partitions(start, end) for batch in query.read(part) for row in batch.to_pylist()]
    finally:
        query.stop()
    checkpoint.clear()
    checkpoint.update(end)
    return [int(row["payload"]) for row in rows]


def refusal(checkpoint: dict[str, int], **options: str) -> str:
    """The error of a query that goes on, which is that of one that repeats its last batch."""
    query = reader(**options)
    try:
        with pytest.raises(StreamError) as of_next:
            query.latestOffset(dict(checkpoint), ReadAllAvailable())
        with pytest.raises(StreamError) as of_repeated:
            query.partitions({}, dict(checkpoint))
    finally:
        query.stop()
    assert str(of_next.value) == str(of_repeated.value) and "\n" not in str(of_next.value)
    return str(of_next.value)


def test_offsets_of_a_stream_with_another_name_are_refused(tmp_path: Path) -> None:
    for name, count in (("flow", 100), ("ev", 150)):
        StreamWriter(tmp_path, name).append(0, [message(number, payload=b"%d" % number) for number in range(count)])
    checkpoint: dict[str, int] = {}
    assert read(checkpoint, path=str(tmp_path)) == [*range(100)]
    assert checkpoint == {"0": 100, "stream=flow": 0}
    assert "option 'stream': the checkpoint is of stream 'flow', not of 'ev'" in refusal(
        checkpoint, path=str(tmp_path), stream="ev", failOnDataLoss="false"
    )


@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
def test_offset_json_of_another_stream_is_refused_when_loading(tmp_path: Path, option: str) -> None:
    for name in ("flow", "ev"):
        StreamWriter(tmp_path, name).append(0, [message(number) for number in range(10)])
    options = {"path": str(tmp_path), option: '{"0": 4, "stream=flow": 0, "filter=#": 0}'}
    MqttDataSource({**options, "stream": "flow"})
    with pytest.raises(StreamError, match=f"the offsets of option '{option}' are of stream 'flow', not of 'ev'"):
        MqttDataSource({**options, "stream": "ev"})


def test_offsets_of_an_earlier_version_take_the_present_stream(tmp_path: Path) -> None:
    with BrokerProcess(data_dir=tmp_path / "data", config=CONFIG) as broker:
        publish(broker.port, 0, 10)
        checkpoint = {"0": 4}
        assert read(checkpoint, url=broker.url) == [*range(4, 10)]
        known = read_incarnation(tmp_path / "data/streams/flow").id
        assert checkpoint == {"0": 10, "stream=flow": 0, f"incarnation={known}": 0}
        assert read(checkpoint, path=str(tmp_path / "data")) == []  # the same stream
        broker.restart(kill=True)
        publish(broker.port, 10, 12)
        assert read(checkpoint, url=broker.url) == [10, 11]


def test_a_data_directory_made_anew_is_another_stream(tmp_path: Path) -> None:
    checkpoint: dict[str, int] = {}
    with BrokerProcess(data_dir=tmp_path / "one", config=CONFIG) as broker:
        publish(broker.port, 0, 10)
        assert read(checkpoint, url=broker.url) == [*range(10)]
    with BrokerProcess(data_dir=tmp_path / "other", config=CONFIG) as broker:
        publish(broker.port, 0, 15)
        before, now = (read_incarnation(tmp_path / name / "streams/flow").id for name in ("one", "other"))
        for place in ({"url": broker.url}, {"path": str(tmp_path / "other")}):
            found = refusal(checkpoint, **place)
            assert f"'flow': the checkpoint is of its incarnation {before!r}, not of {now!r}" in found
        position = json.dumps(checkpoint)
        with pytest.raises(StreamError, match=f"'startingOffsets' are of its incarnation {before!r}"):
            MqttDataSource({"url": broker.url, "stream": "flow", "startingOffsets": position})
        accepted = dict(checkpoint)
        assert read(accepted, url=broker.url, acceptIncarnation=before) == [*range(10, 15)]
        assert read(accepted, url=broker.url) == []  # the checkpoint has moved on


def test_a_restored_backup_continues_only_checkpoints_that_it_has_all_messages_of(tmp_path: Path) -> None:
    ahead: dict[str, int] = {}
    behind: dict[str, int] = {}
    with BrokerProcess(data_dir=tmp_path / "data", config=CONFIG) as broker:
        publish(broker.port, 0, 10)
        assert read(behind, url=broker.url) == [*range(10)]
        back_up(tmp_path / "data", tmp_path / "backup")
        publish(broker.port, 10, 20)
        assert read(ahead, url=broker.url) == [*range(20)]
    original = read_incarnation(tmp_path / "data/streams/flow").id
    assert read(dict(behind), path=str(tmp_path / "backup")) == []
    incarnations = set()
    for number in (1, 2):
        restored = tmp_path / f"restored-{number}"
        restore(tmp_path / "backup", restored)
        with BrokerProcess(data_dir=restored, config=CONFIG) as broker:
            publish(broker.port, 100, 125)
            found = refusal(ahead, url=broker.url)
            assert re.search(f"incarnation '{original}', not of .* restored, .* up to offset 10, and 20 was reached", found)
            assert read(dict(behind), url=broker.url) == [*range(100, 125)]
            reached = dict(behind)
            read(reached, path=str(restored))
        incarnations.add(read_incarnation(restored / "streams/flow").id)
    assert len({original, *incarnations}) == 3
    assert "made anew" in refusal(reached, path=str(tmp_path / "restored-1"))  # one restore does not know the other


def test_a_killed_brokers_backup_has_the_messages_of_its_commit_log(tmp_path: Path) -> None:
    checkpoint: dict[str, int] = {}
    with BrokerProcess(data_dir=tmp_path / "data", config=CONFIG) as broker:
        publish(broker.port, 0, 10)
        assert read(checkpoint, url=broker.url) == [*range(10)]
        broker.kill()
        back_up(tmp_path / "data", tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "restored")
    with BrokerProcess(data_dir=tmp_path / "restored", config=CONFIG) as broker:
        publish(broker.port, 10, 12)
        assert read(checkpoint, url=broker.url) == [10, 11]


def test_a_stream_that_lost_its_end_is_another_one_from_there_on(tmp_path: Path) -> None:
    def logs() -> StreamLogs:
        made = StreamLogs(tmp_path / "streams", [StreamConfig("flow", ["#"])])
        made.recover(None)
        return made

    def append(to: StreamLogs, *numbers: int) -> None:
        to.append({("flow", 0): [message(number, payload=b"%d" % number) for number in numbers]})
        to.sync()
        to.committed()

    first = logs()
    append(first, *range(5))
    behind: dict[str, int] = {}
    assert read(behind, path=str(tmp_path)) == [*range(5)]
    append(first, *range(5, 10))
    ahead: dict[str, int] = dict(behind)
    assert read(ahead, path=str(tmp_path)) == [*range(5, 10)]
    first.close()
    (tmp_path / "streams/flow/0/00000000000000000005.seg").unlink()  # as a power loss with durability "off"
    second = logs()
    append(second, *range(20, 30))
    second.close()
    assert "up to offset 5, and 10 was reached" in refusal(ahead, path=str(tmp_path))
    assert read(behind, path=str(tmp_path)) == [*range(20, 30)]


@pytest.mark.parametrize("damage", ["{", "[]", '{"earlier": [{}]}'])
def test_a_damaged_incarnation_is_one_line_for_readers_and_made_anew_by_the_broker(tmp_path: Path, damage: str) -> None:
    def recover() -> dict[str, Any]:
        logs = StreamLogs(tmp_path / "streams", [StreamConfig("flow", ["#"])])
        logs.recover({})
        logs.close()
        return logs.manifest("flow")

    before = recover()["incarnation"]
    assert recover()["incarnation"] == before
    path = tmp_path / "streams/flow" / INCARNATION_FILE
    path.write_text(damage)
    with pytest.raises(StreamError, match="^mqtt source: .*incarnation.json is damaged: .*$"):
        reader(path=str(tmp_path))
    assert recover()["incarnation"] not in (before, {})
