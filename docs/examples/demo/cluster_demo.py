"""``make cluster-demo``: sensors publish to a cluster of three nodes on three Kafka brokers, Spark writes their stream to a table.

While they publish, a node and a Kafka broker are killed with SIGKILL, and started again later. The table is compared with the
published readings as by ``make demo``, with the same exit status. Clients reach the nodes through a small balancer, as they
would in production, and connect again when their node dies.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from demo import (
    BROKER_CONFIG,
    WINDOW,
    DemoError,
    Ingest,
    Sensor,
    arrived,
    compare,
    run_command,
    show,
    stderr_in,
    summary,
)
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from support.local_kafka import LIBRARIES, KafkaMissing, LocalKafka, free_ports

from bridge_spark.tables.ingest_config import IngestConfig
from bridge_spark.tables.ingest_session import make_session

CLUSTER = "demo"
NODES = 3
SHARDS = 3
READY_SECONDS = 90.0
PUBLISH_SECONDS = 300.0
RETAINED_SECONDS = 20.0
SESSION_EXPIRY = 3600
PUBLISH_AT_LEAST = 20.0  # seconds for the sensor with most readings, so that the faults are in the middle of them
PART = 25  # readings between two pauses
INGEST_SECONDS = 120.0  # without a new row, as long as readings at QoS 1 and 2 are missing
STALLED_SECONDS = 15.0  # readings at QoS 0 may be missing, so the table is complete when it grows no more


# --- the nodes ----------------------------------------------------------------------------------------------------


class Node:
    """One node: ``mqttbroker serve`` with its own ports and directory, which it keeps when it is killed."""

    def __init__(self, number: int, directory: Path, kafka: Sequence[str]) -> None:
        self.name = f"node-{number}"
        self.directory = directory / self.name
        self.directory.mkdir()
        (self.port,) = free_ports(1)
        self.http_port, link_port = range_of_ports(SHARDS + 1), range_of_ports(SHARDS + 1)
        self.process: subprocess.Popen[bytes] | None = None
        self._config = self.directory / "broker.toml"
        servers = ", ".join(f'"{server}"' for server in kafka)
        self._config.write_text(
            f'{BROKER_CONFIG}\n[cluster]\nengine = "kafka"\nid = "{CLUSTER}"\nbootstrap_servers = [{servers}]\n'
            f'node = "{self.name}"\nlink_host = "127.0.0.1"\nlink_port = {link_port}\nshards = {SHARDS}\nfsync = false\n',
            encoding="utf-8",
        )

    def start(self) -> None:
        command = [sys.executable, "-P", "-m", "mqttbroker", "serve", "--config", str(self._config)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--http-port", str(self.http_port)]
        command += ["--data-dir", str(self.directory / "data"), "--log-level", "info"]
        with (self.directory / "broker.log").open("ab") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def ready(self) -> bool:
        """Whether it says that it serves clients. Raises `DemoError` if it has ended."""
        if self.process is None or self.process.poll() is not None:
            said = (self.directory / "broker.log").read_text(encoding="utf-8", errors="replace")
            raise DemoError(f"{self.name} has ended: " + " ".join(said.split()[-40:]))
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.HTTPError):
            return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


def range_of_ports(size: int) -> int:
    """The first of so many consecutive free ports."""
    while True:
        (first,) = free_ports(1)
        with ExitStack() as held, suppress(OSError):
            for port in range(first, first + size):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def wait_until_ready(nodes: Sequence[Node]) -> None:
    until = time.monotonic() + READY_SECONDS
    while not all([node.ready() for node in nodes]):
        if time.monotonic() > until:
            raise DemoError(f"not ready after {READY_SECONDS:.0f} s: " + ", ".join(node.name for node in nodes if not node.ready()))
        time.sleep(0.1)


class Balancer:
    """Accepts clients on `port`, and passes each to a node that accepts it. Runs on a thread of its own."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.port = 0
        self._nodes = list(nodes)
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="balancer", daemon=True)

    def __enter__(self) -> Balancer:
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for node in random.sample(self._nodes, len(self._nodes)):
            with suppress(OSError):
                to_node = await asyncio.open_connection("127.0.0.1", node.port)
                break
        else:
            writer.close()
            return
        await asyncio.gather(_pump(reader, to_node[1]), _pump(to_node[0], writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


# --- the sensors --------------------------------------------------------------------------------------------------


class Publisher:
    """Publishes a sensor's readings, with a session that goes on after each reconnect."""

    def __init__(self, sensor: Sensor, port: int, pause: float) -> None:
        self.sent = 0
        self.reconnects = -1
        self._sensor = sensor
        self._pause = pause
        self._pending: set[int] = set()  # packet ids of messages at QoS 1 and 2
        self._done: SimpleQueue[int] = SimpleQueue()
        client = self._client = paho.Client(
            CallbackAPIVersion.VERSION2, f"sensor-{sensor.name}", protocol=paho.MQTTv5, reconnect_on_failure=True
        )
        client.max_inflight_messages_set(WINDOW)
        client.reconnect_delay_set(1, 2)
        client.on_connect = self._connected
        client.on_publish = self._published
        properties: Any = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = SESSION_EXPIRY
        client.connect_async("127.0.0.1", port, keepalive=10, clean_start=paho.MQTT_CLEAN_START_FIRST_ONLY, properties=properties)
        self.thread = threading.Thread(target=self._run, name=f"sensor-{sensor.name}", daemon=True)

    def _run(self) -> None:
        self._client.loop_start()
        while not self._client.is_connected():
            time.sleep(0.05)
        sensor = self._sensor
        meta = json.dumps({"sensor": sensor.name, "unit": sensor.unit, "readings": len(sensor.readings)})
        self._publish(f"sensors/{sensor.name}/meta", meta, 1, True)
        for number, (moment, value) in enumerate(sensor.readings):
            self._publish(sensor.topic, json.dumps({"seq": number, "ts": moment, "value": value}), number % 3)
            self.sent = number + 1
            if number % PART == 0:
                time.sleep(self._pause)
        while self._pending:
            self._settle()
        self._client.disconnect()
        self._client.loop_stop()

    def _publish(self, topic: str, payload: str, qos: int, retain: bool = False) -> None:
        number = self._client.publish(topic, payload, qos, retain).mid
        if qos:
            self._pending.add(number)
        while len(self._pending) >= WINDOW:
            self._settle()

    def _settle(self) -> None:
        with suppress(Empty):
            self._pending.discard(self._done.get(timeout=0.1))

    def _connected(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        if not reason.is_failure:
            self.reconnects += 1

    def _published(self, client: Any, userdata: Any, number: int, reason: Any, properties: Any) -> None:
        self._done.put(number)


def retained_topics(port: int, count: int) -> set[str]:
    """The topics whose retained messages a new subscriber receives."""
    found: set[str] = set()
    complete = threading.Event()

    def arrived_one(client: Any, userdata: Any, message: Any) -> None:
        found.add(message.topic)
        if len(found) == count:
            complete.set()

    def connected(client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        client.subscribe("sensors/+/meta", qos=1)

    client = paho.Client(CallbackAPIVersion.VERSION2, "demo-reader", protocol=paho.MQTTv5)
    client.on_connect = connected
    client.on_message = arrived_one
    client.connect("127.0.0.1", port)
    client.loop_start()
    complete.wait(RETAINED_SECONDS)
    client.disconnect()
    client.loop_stop()
    return found


# --- the demo -----------------------------------------------------------------------------------------------------


@contextmanager
def running_cluster(directory: Path, console: Console) -> Iterator[tuple[LocalKafka, list[Node]]]:
    """Three Kafka brokers and three nodes that serve clients. Raises DemoError."""
    kafka_files = directory / "kafka"
    kafka_files.mkdir()
    console.print(
        "Kafka starts" if LIBRARIES.exists() else "Maven downloads Kafka, which may take some minutes; then it starts",
        highlight=False,
        soft_wrap=True,
    )
    try:
        with LocalKafka(kafka_files, 3) as kafka:
            console.print("3 Kafka brokers run; the nodes start", highlight=False)
            nodes = [Node(number, directory, kafka.bootstrap) for number in range(1, NODES + 1)]
            try:
                for node in nodes:
                    node.start()
                wait_until_ready(nodes)
                yield kafka, nodes
            finally:
                for node in nodes:
                    node.stop()
    except KafkaMissing as missing:
        raise DemoError(str(missing)) from None


class Faults:
    """Kills a node and a Kafka broker while the readings are published, and starts both again."""

    def __init__(self, console: Console, kafka: LocalKafka, nodes: list[Node]) -> None:
        self._console = console
        self._kafka = kafka
        self._nodes = nodes
        self._steps = [(0.25, self._kill_node), (0.45, self._kill_broker), (0.6, self._start_broker), (0.75, self._start_node)]

    def reached(self, share: float) -> None:
        """So much of the readings is published."""
        while self._steps and share >= self._steps[0][0]:
            self._steps.pop(0)[1]()

    def finish(self) -> None:
        self.reached(1.0)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def _kill_node(self) -> None:
        self._say(f"kill -9 {self._nodes[0].name}")
        self._nodes[0].kill()

    def _kill_broker(self) -> None:
        self._say("kill -9 Kafka broker 2")
        self._kafka.broker(2).kill()

    def _start_broker(self) -> None:
        self._say("Kafka broker 2 starts again")
        self._kafka.broker(2).start()

    def _start_node(self) -> None:
        self._say(f"{self._nodes[0].name} starts again")
        self._nodes[0].start()


def publish(publishers: list[Publisher], total: int, faults: Faults, bars: Progress, bar: Any) -> None:
    """Publish all readings, with faults on the way. Raises `DemoError` if that takes too long."""
    until = time.monotonic() + PUBLISH_SECONDS
    for publisher in publishers:
        publisher.thread.start()
    while any(publisher.thread.is_alive() for publisher in publishers):
        sent = sum(publisher.sent for publisher in publishers)
        bars.update(bar, completed=sent)
        faults.reached(sent / total)
        if time.monotonic() > until:
            raise DemoError(f"not all readings are acknowledged after {PUBLISH_SECONDS:.0f} s")
        time.sleep(0.05)
    bars.update(bar, completed=total)
    faults.finish()


def demo(console: Console, sensors: list[Sensor], directory: Path) -> bool:
    """Run the demo; returns whether nothing is missing or doubled. Raises DemoError and IngestError."""
    total = sum(len(sensor.readings) for sensor in sensors)
    table = directory / "tables" / "readings"
    bars = Progress(TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
    with running_cluster(directory, console) as (kafka, nodes), Balancer(nodes) as balancer:
        console.print(
            "3 nodes serve clients: " + ", ".join(f"{node.name} on port {node.port}" for node in nodes) + "; Spark starts",
            highlight=False,
            soft_wrap=True,
        )
        with stderr_in(directory / "spark-start.log"):
            spark = make_session(IngestConfig(()))
        try:
            pause = PUBLISH_AT_LEAST / (max(len(sensor.readings) for sensor in sensors) / PART)
            publishers = [Publisher(sensor, balancer.port, pause) for sensor in sensors]
            with bars:
                published = bars.add_task("published", total=total)
                ingested = bars.add_task("in the table", total=total)
                source = {"bootstrap_servers": ",".join(kafka.bootstrap), "cluster_id": CLUSTER}
                ingest = Ingest(spark, source, table, lambda rows: bars.update(ingested, completed=rows))
                ingest.thread.start()
                try:
                    publish(publishers, total, Faults(bars.console, kafka, nodes), bars, published)
                    retained = retained_topics(balancer.port, len(sensors))
                    ingest.wait_for(sum(sensor.published(1) + sensor.published(2) for sensor in sensors), INGEST_SECONDS)
                    ingest.wait_for(total, STALLED_SECONDS)
                finally:
                    ingest.finish()
            if not ingest.rows:
                raise DemoError(f"Spark has written nothing to the table in {INGEST_SECONDS:.0f} s")
            show(console, summary(spark, table))
            console.print("A kill may lose messages at QoS 0, and double some at QoS 1:", highlight=False, soft_wrap=True)
            kept = compare(console, sensors, arrived(spark, table), ingest.bad)
        finally:
            spark.stop()
    console.print(
        f"reconnects of {len(publishers)} sensors: {sum(publisher.reconnects for publisher in publishers)}; "
        f"retained meta messages: {len(retained)} of {len(sensors)}",
        highlight=False,
    )
    return kept and len(retained) == len(sensors)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(
        "cluster-demo", "From sensors over three nodes and three Kafka brokers to a Spark table, with kills.",
        "the data of nodes and Kafka, and the table", demo, arguments,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
