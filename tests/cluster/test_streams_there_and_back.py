"""Streams from a single broker to a cluster and back, with the commands import-store and export-store: rows, and readers' positions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from support.broker_process import BrokerProcess
from support.cluster_nodes import ClusterNodes
from support.clustered_broker import shared_kafka
from support.command_line import one_line, run
from support.patience import PATIENCE
from support.properties import properties_of
from support.raw_client import RawClient

from bridge_spark.datasource import MqttDataSource, MqttStreamReader
from bridge_spark.source.storage import StreamError
from mqttbroker.codec.packets import Puback, Publish

pytestmark = [pytest.mark.one_build, pytest.mark.slow("starts nodes and three Kafka brokers")]

STREAM = {"lab": {"filters": ["lab/#"], "partitions": 2, "segment_bytes": "4KiB"}}
CONFIG = {"allow_anonymous": True, "streams": STREAM}
READERS = ("$stream/lab", "$share/group/$stream/lab")
SINGLE, CLUSTER, UNCOPIED = range(0, 300), range(300, 400), range(400, 450)


def publish(port: int, numbers: range) -> None:
    """Messages that differ in everything that a row has, each acknowledged."""
    with RawClient(port) as client:
        client.connect(f"publisher-{numbers.start}")
        for number in numbers:
            properties = properties_of(content_type="text", response_topic="r", correlation_data=b"\xff") if number % 3 else None
            if properties is not None and number % 2:
                properties.user_properties = [("mqtt.name", "a"), ("b", str(number)), ("b", "again")]
            client.publish(f"lab/{number % 7}", b"%d" % number, 1 + number % 2, retain=number % 50 == 0, properties=properties)
        client.disconnect()


def rows(**options: str) -> list[dict[str, Any]]:
    found = MqttDataSource({"stream": "lab", "includeUserProperties": "true", **options})
    reader = found.reader(found.schema())  # type: ignore[arg-type]
    read = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    return sorted(read, key=lambda row: (row["partition"], row["offset"]))


def query(checkpoint: dict[str, int], **options: str) -> list[int]:
    """The rows that a streaming query reads from the offsets of its checkpoint on; the offsets are set to those behind them."""
    found = MqttDataSource({"stream": "lab", **options})
    reader = found.streamReader(found.schema())  # type: ignore[arg-type]
    assert isinstance(reader, MqttStreamReader)
    try:
        end = reader.latestOffset(dict(checkpoint), ReadAllAvailable())
        read = [row for part in reader.partitions(dict(checkpoint), end) for batch in reader.read(part) for row in batch.to_pylist()]
    finally:
        reader.stop()
    checkpoint.update(end)
    return numbers(read)


def numbers(found: list[dict[str, Any]]) -> list[int]:
    return sorted(int(row["payload"]) for row in found)


def connect(port: int, reader: str, window: int) -> RawClient:
    client = RawClient(port)
    properties = properties_of(session_expiry_interval=3600, receive_maximum=window)
    client.connect("reader" if reader == READERS[0] else "member", clean_start=False, properties=properties)
    return client


def read(client: RawClient, count: int) -> set[int]:
    """Receive so many messages, and acknowledge them; others may be on their way."""
    found = set()
    for _ in range(count):
        packet = client.wait_for(Publish)
        found.add(int(packet.payload))
        client.send(Puback(packet.packet_id))
    return found


def test_streams_go_there_and_back(tmp_path: Path) -> None:
    done: dict[str, set[int]] = {}
    with BrokerProcess(data_dir=tmp_path / "single", config=CONFIG) as single:
        publish(single.port, SINGLE)
        for reader in READERS:
            with connect(single.port, reader, 10) as client:
                start = properties_of(user_properties=[("stream-offset", "earliest")])
                assert client.subscribe(reader, options=1, properties=start).reason_codes == [1]
                done[reader] = read(client, 25)
                client.ping()
        single.terminate()
    before = rows(path=str(tmp_path / "single"))
    checkpoint = {"0": 0, "1": 0}
    assert query(checkpoint, path=str(tmp_path / "single")) == [*SINGLE]
    (single_id,) = (key.partition("=")[2] for key in checkpoint if key.startswith("incarnation="))
    assert numbers(before) == [*SINGLE]
    cluster = ClusterNodes(shared_kafka(), 2, 2, CONFIG)
    of_kafka = {"kafka.bootstrap.servers": ",".join(cluster.kafka.bootstrap), "clusterId": cluster.id}
    node_config = str(cluster.nodes[0].config)
    bare = tmp_path / "bare.toml"  # without the stream
    lines = Path(node_config).read_text(encoding="utf-8").splitlines(keepends=True)
    bare.write_text("".join(line for line in lines if not line.startswith('"streams"')), encoding="utf-8")
    refused = run("import-store", str(tmp_path / "single"), "--config", str(bare), cwd=tmp_path)
    assert refused.returncode == 1 and "no [streams.lab]: add it" in one_line(refused.stderr)
    imported = run("import-store", str(tmp_path / "single"), "--config", node_config, cwd=tmp_path)
    assert (imported.returncode, imported.stderr) == (0, "")
    assert "2 readers of streams\n" in imported.stdout
    assert f"stream lab -> {cluster.id}.stream.lab: 300 records in 2 partitions, with their offsets\n" in imported.stdout
    assert rows(**of_kafka) == before
    again = run("import-store", str(tmp_path / "single"), "--config", node_config, cwd=tmp_path)
    assert again.returncode == 1 and "the logs must be empty" in one_line(again.stderr)
    with cluster:
        publish(cluster.ports[0], CLUSTER)
        until = time.monotonic() + PATIENCE
        while len(copied := rows(**of_kafka)) < CLUSTER.stop:
            assert time.monotonic() < until
        assert [row for row in copied if int(row["payload"]) < CLUSTER.start] == before
        assert numbers(copied) == [*range(CLUSTER.stop)]
        with pytest.raises(StreamError, match=f"the checkpoint is of its incarnation '{single_id}'"):
            query(dict(checkpoint), **of_kafka)
        assert query(checkpoint, **of_kafka, acceptIncarnation=single_id) == [*CLUSTER]
        publish(cluster.ports[1], UNCOPIED)
        for node in cluster.nodes:
            node.kill()  # cores may not have copied everything, and leave a transaction open
        until = time.monotonic() + PATIENCE
        while (exported := run("export-store", str(tmp_path / "back"), "--config", node_config, cwd=tmp_path)).returncode:
            assert "run, or were killed a moment ago" in exported.stderr and time.monotonic() < until, exported.stderr
        assert exported.stderr == ""
        assert f"{cluster.id}.stream.lab -> stream lab: 450 records in 2 partitions, with their offsets" in exported.stdout
        full = run("export-store", str(tmp_path / "back"), "--config", node_config, cwd=tmp_path)
        assert full.returncode == 1 and one_line(full.stderr).endswith("back: is not an empty directory")
    after = rows(path=str(tmp_path / "back"))
    assert [row for row in after if int(row["payload"]) < CLUSTER.stop] == copied
    assert numbers(after) == [*range(UNCOPIED.stop)]
    assert query(checkpoint, path=str(tmp_path / "back")) == [*UNCOPIED]
    with BrokerProcess(data_dir=tmp_path / "back", config=CONFIG) as back:
        for reader in READERS:
            with connect(back.port, reader, 1000) as client:
                left = UNCOPIED.stop - len(done[reader])
                assert read(client, left) == {*range(UNCOPIED.stop)} - done[reader]
                client.ping()
        publish(back.port, range(450, 460))
        assert numbers(rows(path=str(tmp_path / "back"))) == [*range(460)]
        assert rows(path=str(tmp_path / "back"))[0] == before[0]
        back.terminate()
    checked = run("check-store", str(tmp_path / "back"), cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
