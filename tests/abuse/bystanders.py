"""Well-behaved clients in a process of their own, and their latencies while others abuse the broker.

    python -m abuse.bystanders PORT

Each pair is a publisher and a subscriber with a persistent session, at QoS 1. The command ``period NAME`` on the
standard input begins a period; ``end`` waits for the last messages and prints a JSON object: the latencies of each
period in milliseconds, the messages that were acknowledged and did not arrive, and errors.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import sys
import time

from abuse.packets import CONNACK, PUBACK, PUBLISH, SUBACK, acknowledgement, connect, publish, split, subscribe

PAIRS = 4
INTERVAL = 0.02  # seconds between two messages of one pair
LAST_MESSAGES = 20.0  # seconds for the last ones to arrive
LOGIN = ("bystander", "correct horse")


class Pair:
    """One publisher and its subscriber."""

    def __init__(self, port: int, number: int) -> None:
        self.topic = f"bystander/{number}"
        self.publisher = self.join(port, f"bystander-publisher-{number}", True)
        self.subscriber = self.join(port, f"bystander-subscriber-{number}", False)
        self.subscriber.sendall(subscribe([self.topic], 1))
        self.expect(self.subscriber, SUBACK)
        self.sent = 0
        self.acknowledged = 0
        self.arrived: set[int] = set()
        self.data = {self.publisher: b"", self.subscriber: b""}

    def join(self, port: int, client_id: str, clean: bool) -> socket.socket:
        line = socket.create_connection(("127.0.0.1", port), 30)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(connect(client_id, clean=clean, login=LOGIN, keep_alive=60))
        self.expect(line, CONNACK)
        return line

    def expect(self, line: socket.socket, kind: int) -> None:
        data = b""
        while not (packets := split(data)[0]):
            data += line.recv(1000)
        assert packets[0][0] >> 4 == kind and packets[0][1][-1] < 0x80, packets

    def send(self) -> None:
        self.sent += 1
        payload = struct.pack(">Qd", self.sent, time.monotonic())
        self.publisher.sendall(publish(self.topic, payload, 1, self.sent % 65535 + 1))

    def receive(self, line: socket.socket, latencies: list[float]) -> None:
        received = line.recv(1 << 16)
        if not received:
            raise ConnectionError("the broker closed the connection of a bystander")
        packets, self.data[line] = split(self.data[line] + received)
        for first, body in packets:
            if first >> 4 == PUBACK:
                self.acknowledged += 1
            elif first >> 4 == PUBLISH:
                start = 2 + len(self.topic)
                line.sendall(acknowledgement(PUBACK, int.from_bytes(body[start : start + 2], "big")))
                number, sent = struct.unpack(">Qd", body[start + 2 :])
                if number not in self.arrived:
                    self.arrived.add(number)
                    latencies.append((time.monotonic() - sent) * 1000)

    @property
    def waits(self) -> bool:
        return self.lost > 0 or self.acknowledged < self.sent

    @property
    def lost(self) -> int:
        """Messages that were acknowledged, in the order in which they were sent, and have not arrived."""
        return sum(number not in self.arrived for number in range(1, self.acknowledged + 1))


def main() -> None:
    pairs = [Pair(int(sys.argv[1]), number) for number in range(PAIRS)]
    waiting = selectors.DefaultSelector()
    waiting.register(sys.stdin, selectors.EVENT_READ)
    for pair in pairs:
        for line in (pair.publisher, pair.subscriber):
            waiting.register(line, selectors.EVENT_READ, pair)
    periods: dict[str, list[float]] = {}
    latencies: list[float] = []
    errors: list[str] = []
    turn = 0
    due = time.monotonic()
    ending = 0.0
    print("ready", flush=True)
    while not ending or (any(pair.waits for pair in pairs) and time.monotonic() < ending):
        try:
            if time.monotonic() >= due and not ending:
                due = max(due + INTERVAL / PAIRS, time.monotonic() - 1)
                pairs[turn % PAIRS].send()
                turn += 1
            for key, _ in waiting.select(0.01 if ending else max(0.0, due - time.monotonic())):
                if key.data is not None:
                    key.data.receive(key.fileobj, latencies)
                    continue
                # Not a buffered readline, which would hide a second command from the selector.
                for command in os.read(sys.stdin.fileno(), 1000).decode().splitlines():
                    what, _, period = command.partition(" ")
                    if what == "period":
                        latencies = periods.setdefault(period, [])
                    else:
                        ending = time.monotonic() + LAST_MESSAGES
        except OSError as error:
            errors.append(str(error))
            break
    found = {"periods": periods, "lost": sum(pair.lost for pair in pairs), "errors": errors}
    found["unacknowledged"] = sum(pair.sent - pair.acknowledged for pair in pairs)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
