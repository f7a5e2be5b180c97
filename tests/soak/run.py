"""``make soak``: clients come, go and publish for minutes to hours, and the broker holds as much memory at the end as
after a tenth of the time.

The broker runs without the garbage collector, so that every reference cycle stays. For each sample all clients end
their sessions and all retained messages are deleted. The seed decides what the clients do.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from support.broker_process import BrokerProcess
from support.raw_client import RawClient
from support.stream_client import StreamClient, WebSocketStream, tcp_socket

from mqttbroker.codec.packets import Packet, Puback, Pubcomp, Publish, Pubrec, Pubrel, Subscribe, Subscription, Unsubscribe, Will
from mqttbroker.codec.properties import Properties

CLIENTS = 60
FILTERS = [f"t/{number}/#" for number in range(150)] + [f"t/+/{number}" for number in range(50)] + ["#", "+/1/+"]
RETAINED = [f"r/{number}" for number in range(30)]
ROUTES = 200
NEVER = 0xFFFFFFFF

CONFIG = f"""
sys_interval = "0s"
[limits]
route_cache_size = {ROUTES}
max_queued_messages = 200
queue_high_watermark_messages = 50
backpressure_wait = "10ms"
[[listeners]]
[[listeners]]
type = "ws"
port = 0
"""

# Tolerated growth between a tenth of the time and the end.
BLOCKS = 0.02, 1500
OBJECTS = 0.05, 200
RESIDENT = 0.10, 8 << 20


class Soak:
    """One broker and its clients, by client id; a client that is not in ``clients`` is disconnected."""

    def __init__(self, seed: str, directory: Path) -> None:
        self.random = random.Random(seed)
        self.path = directory / "soak"
        program = [str(Path(__file__).with_name("broker.py"))]
        self.broker = BrokerProcess(config=CONFIG, env={"SOAK_SOCKET": str(self.path)}, program=program).start()
        self.broker.wait_for_log("event=started")
        websocket = next(line for line in self.broker.lines if "type=ws " in line)
        self.websocket_port = int(websocket.rpartition("port=")[2].split()[0])
        self.clients: dict[str, RawClient] = {}
        self.counts: dict[str, int] = {}
        self.published = 0
        self.samples: list[dict[str, Any]] = []

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.broker.close()

    # --- load -----------------------------------------------------------------------------------------------------

    def work(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.step(100)

    def step(self, count: int) -> None:
        """Do ``count`` random steps."""
        steps = [self.connect, self.connect, self.subscribe, self.unsubscribe, self.publish, self.publish, self.publish]
        steps += [self.retain, self.disconnect, self.lose, self.half_open, self.refused]
        for _ in range(count):
            step = self.random.choice(steps)
            client_id = f"c{self.random.randrange(CLIENTS)}"
            try:
                step(client_id)
            except (ConnectionError, TimeoutError):  # a publisher that a takeover or a limit has closed
                self.drop(client_id)
            self.counts[step.__name__] = self.counts.get(step.__name__, 0) + 1

    def drop(self, client_id: str) -> None:
        client = self.clients.pop(client_id, None)
        if client is not None:
            client.close()

    def open(self, version: int) -> RawClient:
        if self.random.random() < 0.3:
            return StreamClient(WebSocketStream(tcp_socket(self.websocket_port)), version)
        return RawClient(self.broker.port, version)

    def connect(self, client_id: str) -> None:
        """Connect, or take over the connection that the client has."""
        chance = self.random
        version = chance.choice([4, 5, 5])
        client = self.open(version)
        fields: dict[str, Any] = {"clean_start": chance.random() < 0.4}
        properties = Properties()
        will_properties = Properties()
        if version == 5:
            properties.session_expiry_interval = chance.choice([0, 0, 1, NEVER])
            properties.topic_alias_maximum = chance.choice([0, 5])
            properties.receive_maximum = chance.choice([1, 20, 65535])
            will_properties.will_delay_interval = chance.choice([0, 1])
            fields["properties"] = properties
        if chance.random() < 0.3:
            fields["will"] = Will(self.topic(), b"will", chance.randrange(3), False, will_properties)
        connack = client.connect(client_id, **fields)
        assert connack.reason_code == 0, connack
        old = self.clients.pop(client_id, None)
        self.clients[client_id] = client
        if old is not None:
            old.close()
        self.read(client)

    def topic(self) -> str:
        """A topic that was never used, or one of a few."""
        self.published += 1
        last = str(self.published) if self.random.random() < 0.7 else str(self.random.randrange(50))
        return f"t/{self.random.randrange(150)}/{last}"

    def some(self, client_id: str) -> RawClient | None:
        """The client if it is connected, after it has read all packets."""
        client = self.clients.get(client_id)
        if client is not None:
            self.read(client)
        return client

    def read(self, client: RawClient) -> None:
        answers = [answer for packet in client.ping() if (answer := answer_to(packet)) is not None]
        if answers and self.random.random() < 0.9:  # else they stay in flight
            client.send(*answers)

    def subscribe(self, client_id: str) -> None:
        client = self.some(client_id)
        if client is None:
            return
        filters = self.random.sample(FILTERS, self.random.randint(1, 3))
        if self.random.random() < 0.3:
            filters.append("$share/g/" + self.random.choice(FILTERS))
        if self.random.random() < 0.3:
            filters.append("r/+")
        properties = Properties()
        if client.version == 5 and self.random.random() < 0.2:
            properties.subscription_identifiers.append(self.random.randint(1, 1000))
        options = [Subscription(name, self.random.randrange(3)) for name in filters]
        client.send(Subscribe(client.next_packet_id(), options, properties))
        self.read(client)

    def unsubscribe(self, client_id: str) -> None:
        client = self.some(client_id)
        if client is not None:
            client.send(Unsubscribe(client.next_packet_id(), self.random.sample(FILTERS, 3)))
            self.read(client)

    def publish(self, client_id: str) -> None:
        client = self.some(client_id)
        if client is None:
            return
        for _ in range(self.random.randint(1, 5)):
            qos = self.random.randrange(3)
            properties = Properties()
            if client.version == 5 and self.random.random() < 0.3:
                properties.topic_alias = self.random.randint(1, 5)
            if client.version == 5 and self.random.random() < 0.2:
                properties.message_expiry_interval = 1
            packet_id = client.next_packet_id() if qos else 0
            payload = b"x" * self.random.choice([0, 10, 1000])
            client.send(Publish(self.topic(), payload, qos, False, False, packet_id, properties))
        self.read(client)

    def retain(self, client_id: str) -> None:
        client = self.some(client_id)
        if client is not None:
            payload = b"x" * self.random.choice([0, 10, 1000])
            client.send(Publish(self.random.choice(RETAINED), payload, 0, True))
            self.read(client)

    def disconnect(self, client_id: str) -> None:
        client = self.clients.pop(client_id, None)
        if client is not None:
            client.disconnect(0x04 if client.version == 5 and self.random.random() < 0.5 else 0)

    def lose(self, client_id: str) -> None:
        self.drop(client_id)

    def half_open(self, client_id: str) -> None:
        """A connection that ends before or inside its CONNECT."""
        with self.open(5) as client:
            client.send(b"\x10\x20\x00\x04MQTT"[: self.random.randrange(8)])

    def refused(self, client_id: str) -> None:
        with self.open(5) as client:
            properties = Properties()
            properties.authentication_method = "NONE"
            client.connect("refused", properties=properties)

    # --- samples --------------------------------------------------------------------------------------------------

    def sample(self) -> dict[str, Any]:
        """The broker's memory and objects when all sessions have ended and its caches are full."""
        for client_id in list(self.clients):
            self.drop(client_id)
        with RawClient(self.broker.port, 5) as client:
            client.connect("sampler")
            for name in FILTERS:
                client.subscribe(name, options=0)
            for topic in RETAINED:
                client.send(Publish(topic, b"", 0, True))
            for name in FILTERS:
                client.unsubscribe(name)
            for number in range(2 * ROUTES):
                client.send(Publish(f"cached/{number}", b"", 0))
            client.disconnect()
        for number in range(CLIENTS):
            with RawClient(self.broker.port, 5) as client:
                client.connect(f"c{number}", clean_start=True)
                client.disconnect()
        before: dict[str, Any] = {"blocks": 0}
        for _ in range(16):  # wills with a delay, and periodic work of the broker
            time.sleep(0.5)
            held = self.state()
            if abs(held["blocks"] - before["blocks"]) <= 50:
                break
            before = held
        with self.broker._new_line:
            del self.broker.lines[:-1000]
        self.samples.append(held)
        return held

    def state(self) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            asked.connect(str(self.path))
            data = b""
            while part := asked.recv(1 << 16):
                data += part
        found: dict[str, Any] = json.loads(data)
        return found


def answer_to(packet: Packet) -> Packet | None:
    if isinstance(packet, Publish) and packet.qos:
        return Puback(packet.packet_id) if packet.qos == 1 else Pubrec(packet.packet_id)
    if isinstance(packet, Pubrec):
        return Pubrel(packet.packet_id)
    return Pubcomp(packet.packet_id) if isinstance(packet, Pubrel) else None


def growth(first: dict[str, Any], last: dict[str, Any]) -> list[str]:
    """The growth beyond the tolerances, one line each."""
    found = []
    checks = [
        ("blocks", first["blocks"], last["blocks"], BLOCKS),
        ("resident bytes", first["resident"], last["resident"], RESIDENT),
    ]
    for name, count in last["types"].items():
        checks.append((f"objects of type {name}", first["types"].get(name, 0), count, OBJECTS))
    for name, before, after, (part, more) in checks:
        if after > before * (1 + part) + more:
            found.append(f"{name}: {before} after a tenth of the time, {after} at the end")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description="Run clients against a broker without garbage collector.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", default="1")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mqttbroker-soak-") as directory:
        soak = Soak(options.seed, Path(directory))
        try:
            for number in range(10):
                soak.work(options.seconds / 10)
                held = soak.sample()
                total = sum(soak.counts.values())
                print(f"{number + 1}/10: {total} steps, {held['blocks']} blocks, {held['resident'] >> 10} KiB", flush=True)
        finally:
            soak.close()
        print(f"soak: seed {options.seed}, {soak.counts}, {soak.published} messages")
        found = growth(soak.samples[0], soak.samples[-1])
    for line in found:
        print(f"soak: {line}")
    print("soak: memory grows" if found else "soak: nothing grows")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
