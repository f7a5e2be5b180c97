"""The sink in Spark: batches and streams into a real broker, repeated batches, and errors as a user sees them."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from chaos.log_reader import LogReader
from pyspark.sql import SparkSession
from support.broker_process import BrokerProcess
from support.metric_samples import samples
from support.raw_client import RawClient
from support.spark_session import StreamWriter, message, spark

from bridge_spark.sink.options import parse_options
from bridge_spark.sink.writer import write_partition
from bridge_spark.tables.ingest_session import one_line
from mqttbroker.codec.packets import Publish

__all__ = ["spark"]

pytestmark = [pytest.mark.one_build]

ROWS = 5000


@pytest.fixture
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(config={"streams": {"s": {"filters": ["s/#"], "partitions": 2, "dedup": True}}}) as process:
        yield process


def sink(broker: BrokerProcess, **more: str) -> dict[str, str]:
    return {"url": f"mqtt://127.0.0.1:{broker.port}", **more}


def stored(broker: BrokerProcess) -> Counter[int]:
    return Counter(int(record.payload) for record in LogReader(broker.data_dir, "s").records())


def test_a_batch_is_written_once_by_each_producer_id(spark: SparkSession, broker: BrokerProcess) -> None:
    rows = spark.range(ROWS, numPartitions=3).selectExpr(
        "concat('s/', id % 10) AS topic", "string(id) AS payload", "map('unit', 'C') AS user_properties", "tinyint(1 + id % 2) AS qos"
    )
    with RawClient(broker.port) as watcher:
        watcher.connect("watcher")
        watcher.subscribe("s/0", options=0)
        for _ in range(2):
            rows.write.format("mqtt").options(**sink(broker, producerId="job-7")).mode("append").save()
        assert stored(broker) == Counter(range(ROWS))
        seen = [packet for packet in watcher.ping() if isinstance(packet, Publish)]
    assert len(seen) == ROWS // 10
    properties = seen[0].properties
    assert properties is not None and properties.user_properties[2:] == [("unit", "C")]
    assert properties.user_properties[0] in [("producer-id", f"job-7/{partition}") for partition in range(3)]
    rows.write.format("mqtt").options(**sink(broker)).mode("append").save()
    assert stored(broker) == Counter([*range(ROWS), *range(ROWS)])


def test_a_repeated_micro_batch_adds_nothing(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> None:
    """Without Spark's last commit file, the batch is repeated as after a kill of the driver."""
    writer = StreamWriter(tmp_path / "data", partitions=2)
    checkpoint = tmp_path / "checkpoint"

    def run() -> None:
        messages = spark.readStream.format("mqtt").options(stream="sensors", startingOffsets="earliest")
        rows = messages.load(str(tmp_path / "data")).selectExpr("concat('s/', partition) AS topic", "payload")
        query = rows.writeStream.format("mqtt").options(**sink(broker)).option("checkpointLocation", str(checkpoint))
        query.trigger(availableNow=True).start().awaitTermination()

    numbers = iter(range(10_000))
    for batch in range(2):
        for partition in range(2):
            writer.append(partition, [message(0, payload=b"%d" % next(numbers)) for _ in range(200)])
        run()
        last = max((path for path in (checkpoint / "commits").glob("[0-9]*")), key=lambda path: int(path.name))
        assert int(last.name) == batch
        last.unlink()
        (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
        run()
        assert stored(broker) == Counter(range(400 * (batch + 1)))
    metrics = samples(broker.get("/metrics"))
    assert metrics["mqttbroker_stream_repeats_total"] == 800
    assert metrics["mqttbroker_stream_gaps_total"] == metrics["mqttbroker_stream_numbers_invalid_total"] == 0


def test_each_batch_of_foreach_batch_is_a_producer_of_its_own(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data")
    writer.append(0, [message(0, payload=b"%d" % number) for number in range(100)])

    def publish(batch: Any, _: int) -> None:
        for _attempt in range(2):
            rows = batch.selectExpr("'s/1' AS topic", "payload")
            rows.write.format("mqtt").options(**sink(broker, producerId="copy")).mode("append").save()

    messages = (
        spark.readStream.format("mqtt")
        .options(stream="sensors", startingOffsets="earliest", maxOffsetsPerTrigger="50")
        .load(str(tmp_path / "data"))
    )
    messages.writeStream.foreachBatch(publish).option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
        availableNow=True
    ).start().awaitTermination()
    assert stored(broker) == Counter(range(100))
    assert samples(broker.get("/metrics"))["mqttbroker_stream_producers"] == 2


def test_aggregates_in_another_order_are_written_once_with_sort_rows(broker: BrokerProcess) -> None:
    """A first attempt that ends early, and a second one whose rows come in another order."""
    options = parse_options(sink(broker, sortRows="true", maxInFlight="50"))
    numbers = list(range(1000))
    for seed in range(3):
        random.Random(seed).shuffle(numbers)
        batches = [
            pa.record_batch({"topic": [f"s/{number % 7}" for number in part], "payload": [str(number) for number in part]})
            for part in (numbers[:300], numbers[300:])
        ]
        write_partition(options, "query/0", iter(batches))
    assert stored(broker) == Counter(range(1000))


# -- errors ------------------------------------------------------------------------------------------------------------

GOOD = ("'s/1' AS topic", "'x' AS payload")
LINES: list[tuple[dict[str, str], tuple[str, ...], str]] = [
    ({"url": "http://127.0.0.1"}, GOOD,
     "option 'url': 'http://127.0.0.1' is an HTTP address, which is for reading: to write, give mqtt://HOST:PORT"),
    ({"retian": "1"}, GOOD, "option 'retian': unknown, did you mean 'retain'?"),
    ({}, ("'s/1' AS topic", "id AS payload"),
     "column 'payload': bigint, not string or binary: convert it, for example with to_json or CAST"),
    ({}, ("if(id = 2, 's/#', 's/1') AS topic", "'x' AS payload"),
     "column 'topic': 's/#' has a wildcard: '+' and '#' are for subscriptions (partition 0, row 2)"),
    ({}, ("if(id = 1, NULL, 's/1') AS topic", "'x' AS payload"), "column 'topic': NULL (partition 0, row 1)"),
    ({}, (*GOOD, "int(id * 2) AS qos"), "column 'qos': 4 is not 0, 1 or 2 (partition 0, row 2)"),
    ({}, ("'$SYS/x' AS topic", "'x' AS payload"),
     "mqtt://127.0.0.1:{port} refused a message: 0x87 Not authorized (partition 0, row 0)"),
    ({"url": "mqtt://127.0.0.1:{closed}", "delivery.timeoutMs": "200ms"}, GOOD,
     "mqtt://127.0.0.1:{closed} accepted no message for 0.2 s (option 'delivery.timeoutMs'), the last time: "
     "Connection refused"),
]  # fmt: skip


def test_an_error_is_one_line_at_the_top(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> None:
    """Alternates batch and stream: both are refused by the same code."""
    StreamWriter(tmp_path / "data").append(0, [message(number) for number in range(4)])
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = {"port": str(broker.port), "closed": str(closed.getsockname()[1])}
        for number, (changes, columns, line) in enumerate(LINES):
            options = {key: value.format(**ports) for key, value in sink(broker, **changes).items()}
            with pytest.raises(Exception) as caught:
                write(spark, tmp_path, number % 2 == 1, number, columns, options)
            expected = f"mqtt sink: {line.format(**ports)}"
            assert one_line(caught.value) == expected
            text = str(caught.value)
            assert expected in text.splitlines()[0] or expected in text.split("PythonException: ")[-1].splitlines()[1]


def write(spark: SparkSession, root: Path, streaming: bool, number: int, columns: tuple[str, ...], options: dict[str, str]) -> None:
    """Write four rows with an ``id``."""
    if not streaming:
        spark.range(4, numPartitions=1).selectExpr(*columns).write.format("mqtt").options(**options).mode("append").save()
        return
    source: Any = spark.readStream.format("mqtt").options(stream="sensors", startingOffsets="earliest")
    rows = source.load(str(root / "data")).selectExpr("offset AS id").selectExpr(*columns)
    query = rows.writeStream.format("mqtt").options(**options)
    query.option("checkpointLocation", str(root / f"checkpoint-{number}")).trigger(availableNow=True).start().awaitTermination()


def test_overwrite_is_refused(spark: SparkSession, broker: BrokerProcess) -> None:
    with pytest.raises(Exception) as caught:
        spark.range(1).selectExpr(*GOOD).write.format("mqtt").options(**sink(broker)).mode("overwrite").save()
    assert one_line(caught.value) == ("mqtt sink: mode 'overwrite': published messages cannot be replaced: use mode('append')")
