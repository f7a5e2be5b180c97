#!/usr/bin/env python3
"""The effect of one abusive client on others: 50 pairs at 20 messages per second, beside each kind of abuse.

    python bench/bystanders.py [--seconds 10] [--rounds 3] [--retained 1000000] [--workers 0] [--control] [NAME ...]

Runs without abuse alternate with the others on the same broker, so that other load on the machine affects all of them;
figures are medians over the rounds. With ``--control`` the abuse is also directed at a second broker on the machine:
that part of the effect is competition for processors. Latency is that of the pairs; a hold is CPU time in which the
broker's loop, or a connection worker's, served no other client (bench/probe.py). With one worker all pairs are on the
link of the abusive client, with more of them a part is. The broker is the one that Python imports, compiled or plain, as
the output says, or that in the tree BENCH_SOURCE.
"""

from __future__ import annotations

import argparse
import itertools
import math
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pauses
import runner
from py_load import framed, text

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import abuse.connections  # noqa: E402
import abuse.messages  # noqa: E402
import abuse.subscriptions  # noqa: E402, F401
from abuse.kinds import KINDS  # noqa: E402
from abuse.target import Ports, Target, raise_file_limit  # noqa: E402

BYSTANDERS = "--scenario p2p --publishers 50 --subscribers 50 --rate 20 --qos 1".split()
USER = "slow"


def publish(topic: str, payload: bytes, qos: int = 0, retain: bool = False) -> bytes:
    return framed(0x30 | qos << 1 | retain, text(topic) + (b"\0\1" if qos else b"") + payload)


def subscribe(topic_filter: str, qos: int = 0) -> bytes:
    return framed(0x82, b"\0\1" + text(topic_filter) + bytes((qos,)))


def client(port: int, name: str, buffer: int = 0, connect: bytes | None = None) -> socket.socket:
    """A 3.1.1 connection that has received its CONNACK; with ``connect``, one that has only sent those bytes."""
    line = socket.socket()
    if buffer:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    line.connect(("127.0.0.1", port))
    line.settimeout(1)
    line.sendall(connect or framed(0x10, text("MQTT") + b"\x04\x02\0\0" + text(name)))
    if connect is None:
        line.recv(4, socket.MSG_WAITALL)
    return line


# --- abuse: each runs until `ended` is set, and returns a summary ---------------------------------------------------


def stalled(port: int, ended: threading.Event, qos: int) -> str:
    """A subscriber that does not read, and a publisher that sends it 8 MB per second."""
    reader = client(port, f"stalled{qos}", 4096)
    reader.sendall(subscribe("stalled/#", qos))
    writer = client(port, f"writer{qos}")
    chunk = publish("stalled/1", b"x" * 4096, qos) * 20
    sent = timeouts = 0
    while not ended.wait(0.01):
        try:
            writer.sendall(chunk)
            sent += len(chunk)
            if qos:
                writer.recv(1 << 16)
        except TimeoutError:
            timeouts += 1
    reader.close()
    writer.close()
    return f"sent {sent / 1e6:.0f} MB, blocked {timeouts} s"


def replaying(port: int, ended: threading.Event, topic_filter: str, retained: int) -> str:
    """A client that subscribes to all retained messages again and again, and reads as fast as it can."""
    whole = sum(len(chunk) for chunk in retaining(retained))
    times = size = 0
    while not ended.is_set():
        line = client(port, f"replaying{times}")
        line.sendall(subscribe(topic_filter))
        # Messages of the pairs arrive in between, so that a few of the last retained ones are not read.
        left = whole
        with suppress(TimeoutError):
            while left > 0 and not ended.is_set():
                left -= len(line.recv(1 << 20))
        line.close()
        size += whole - left
        times += 1
    return f"read {size / 1e6:.0f} MB in {times} subscriptions"


def large(port: int, ended: threading.Event, rate: float = 0) -> str:
    """Packets of 10 MB from one client to another, ``rate`` per second or, if that is 0, one after the other."""
    reader = client(port, "large-reader")
    reader.sendall(subscribe("large/#", 1))
    writer = client(port, "large-writer")
    packet = publish("large/1", b"x" * 10_000_000, 1)
    writer.settimeout(30)
    reader.settimeout(30)
    sent = 0

    def read() -> None:
        seen = acknowledged = 0
        with suppress(OSError):
            while True:
                got = len(reader.recv(1 << 20))
                if not got:
                    return
                seen += got
                if seen >= len(packet):
                    seen -= len(packet)
                    acknowledged += 1
                    reader.sendall(b"\x40\x02" + acknowledged.to_bytes(2, "big"))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    while not ended.wait(1 / rate if rate else 0):
        writer.sendall(packet)
        writer.recv(4, socket.MSG_WAITALL)
        sent += 1
    for line in (writer, reader):
        line.shutdown(socket.SHUT_RDWR)
        line.close()
    return f"{sent} packets"


def slow_logins(port: int, ended: threading.Event) -> str:
    """100 logins at a time that take a second of hashing each, and 100 SCRAM exchanges that are not completed."""
    login = framed(0x10, text("MQTT") + b"\x04\xc2\0\0" + text("") + text(USER) + text("guess"))
    scram = b"\x15" + text("SCRAM-SHA-256") + b"\x16" + text(f"n,,n={USER},r=abcdefgh")
    half = framed(0x10, text("MQTT") + b"\x05\x02\0\0" + bytes((len(scram),)) + scram + text("half"))
    lines = []
    rounds = 0
    while True:
        lines = [client(port, "", connect=packet) for _ in range(100) for packet in (login, half)]
        rounds += 1
        if ended.wait(2):
            break
        for line in lines:
            line.close()
    return f"{len(lines) * rounds} clients"


def overlap(port: int, ended: threading.Event, levels: int) -> str:
    """2 ** ``levels`` subscriptions that match every message of a client that publishes to new topics."""
    reader = client(port, "overlap-reader")
    reader.settimeout(60)
    filters = ["+/" + "/".join(names) for names in itertools.product("a+", repeat=levels)]
    for start in range(0, len(filters), 500):
        reader.sendall(framed(0x82, b"\0\1" + b"".join(text(name) + b"\0" for name in filters[start : start + 500])))
        if start % 50_000 == 0:
            reader.recv(1 << 16)
    reader.setblocking(False)
    writer = client(port, "overlap-writer")
    sent = handled = 0
    while not ended.is_set():
        with suppress(TimeoutError):
            chunk = b"".join(publish(f"{sent + number}" + "/a" * levels, b"x") for number in range(1000))
            writer.sendall(chunk)
            sent += 1000
        with suppress(BlockingIOError):
            while got := reader.recv(1 << 16):
                handled += got.count(b"/a" * levels)
    writer.close()
    reader.close()
    return f"sent {sent} messages, received {handled}"


def unsubscribing(port: int, ended: threading.Event) -> str:
    """UNSUBSCRIBE packets of 10 MB, 3.4 million filters each."""
    packet = framed(0xA2, b"\0\1" + b"\0\1x" * 3_400_000)
    sent = 0
    while not ended.is_set():
        line = client(port, f"unsubscriber{sent}")
        line.settimeout(30)
        with suppress(OSError):
            line.sendall(packet)
            line.recv(1 << 16)
        line.close()
        sent += 1
    return f"{sent} packets"


def abandoned(port: int, ended: threading.Event, sessions: int) -> str:
    """A message per second to persistent sessions whose clients have gone."""
    for number in range(sessions):
        hello = framed(0x10, text("MQTT") + b"\x04\0\0\0" + text(f"abandoned{number}"))
        line = client(port, "", connect=hello + subscribe("abandoned/#", 1) + b"\xe0\0")
        line.settimeout(10)
        while line.recv(100):
            pass
        line.close()
    writer = client(port, "abandoner")
    writer.settimeout(10)
    sent = 0
    while not ended.wait(1):
        writer.sendall(publish("abandoned/1", b"x" * 100, 1))
        writer.recv(4, socket.MSG_WAITALL)
        sent += 1
    writer.close()
    return f"{sent} messages"


# Kinds of tests/abuse, which see the broker as they do there.
KINDS_USED = (
    "websocket-empty-frames", "websocket-before-connect", "guessed-passwords", "silent", "unfinished-packets",
    "long-topics", "takeovers", "churn", "ended-subscribers", "resubscriptions", "expiring-sessions", "will-storm",
    "shared-churn", "fan-out", "pings", "qos0-flood",
)  # fmt: skip
# Kinds whose clients come through a listener with limits.
LIMITED = {"limited-messages": "qos0-flood", "limited-connects": "churn", "limited-connections": "silent"}
LISTENER_LIMITS = {
    "MAX_PUBLISH_RATE": "1000",
    "MAX_CONNECT_RATE_PER_ADDRESS": "20",
    "MAX_CONNECTIONS_PER_ADDRESS": "100",
}
PORTS: dict[int, tuple[int, int]] = {}  # by the port of a broker, those of its WebSocket and limited listeners


def kind_of_abuse(port: int, ended: threading.Event, name: str) -> str:
    """A kind of tests/abuse, again and again."""
    websocket, limited = PORTS[port]
    target = Target("1", Ports(limited if name in LIMITED else port, websocket))
    target.until = math.inf

    def end() -> None:
        ended.wait()
        target.until = 0.0

    threading.Thread(target=end, daemon=True).start()
    while target.running():
        with suppress(OSError):
            KINDS[LIMITED.get(name, name)].abuse(target)
        target.stop()
    return target.answered.summary()


def listeners() -> tuple[dict[str, str], int, int]:
    """Settings of a WebSocket listener and of one with limits, and their ports."""
    websocket, limited = runner.free_port(), runner.free_port()
    settings = {"1__TYPE": "ws", "1__HOST": "127.0.0.1", "1__PORT": str(websocket)}
    settings |= {"2__HOST": "127.0.0.1", "2__PORT": str(limited)}
    settings |= {f"2__{name}": value for name, value in LISTENER_LIMITS.items()}
    return {f"MQTTBROKER_LISTENERS__{name}": value for name, value in settings.items()}, websocket, limited


ABUSES: dict[str, tuple[str, Callable[[int, threading.Event, int], str]]] = {
    "stalled-q0": ("a subscriber that does not read, QoS 0", lambda port, ended, _: stalled(port, ended, 0)),
    "stalled-q1": ("a subscriber that does not read, QoS 1", lambda port, ended, _: stalled(port, ended, 1)),
    "retained-hash": ("`#` over all retained", lambda port, ended, retained: replaying(port, ended, "#", retained)),
    "retained-plus": ("`a/+/b` over all retained", lambda port, ended, retained: replaying(port, ended, "a/+/b", retained)),
    "large": ("packets of 10 MB, one after the other", lambda port, ended, _: large(port, ended)),
    "large-10": ("packets of 10 MB, ten per second", lambda port, ended, _: large(port, ended, 10)),
    "overlap-12": ("2^12 overlapping filters, new topics", lambda port, ended, _: overlap(port, ended, 12)),
    "overlap-16": ("2^16 overlapping filters, new topics", lambda port, ended, _: overlap(port, ended, 16)),
    "unsubscribe": ("UNSUBSCRIBEs of 3.4 million filters", lambda port, ended, _: unsubscribing(port, ended)),
    "abandoned": ("messages to 20,000 abandoned sessions", lambda port, ended, _: abandoned(port, ended, 20_000)),
    "slow-logins": ("logins with slow hashes, incomplete SCRAM exchanges", lambda port, ended, _: slow_logins(port, ended)),
}
for used in (*KINDS_USED, *LIMITED):
    listener = "through a listener with limits: " if used in LIMITED else ""
    ABUSES[used] = (
        listener + KINDS[LIMITED.get(used, used)].what,
        lambda port, ended, _, name=used: kind_of_abuse(port, ended, name),
    )


# --- runs -----------------------------------------------------------------------------------------------------------


def retaining(count: int) -> Iterator[bytes]:
    """PUBLISH packets of ``count`` retained messages, topics a/N/b, in chunks of ten thousand."""
    for low in range(0, count, 10_000):
        numbers = range(low, min(count, low + 10_000))
        yield b"".join(publish(f"a/{number}/b", b"retained", retain=True) for number in numbers)


def fill(port: int, count: int) -> float:
    """Have the broker retain ``count`` messages; returns the seconds it took."""
    start = time.monotonic()
    line = client(port, "filler")
    line.settimeout(300)
    for chunk in retaining(count):
        line.sendall(chunk)
    line.sendall(b"\xc0\0")
    line.recv(2, socket.MSG_WAITALL)
    line.close()
    return time.monotonic() - start


def settle(broker: pauses.Probed) -> None:
    """Wait until the broker is idle."""
    used = broker.cpu()
    while True:
        time.sleep(1)
        before, used = used, broker.cpu()
        if used - before < 0.1 * len(runner.descendants(broker.process.pid)):
            return


def slow_password(directory: Path) -> Path:
    """A password file with one user, whose hash takes about a second to compute."""
    import base64
    import hashlib

    start = time.process_time()
    hashlib.pbkdf2_hmac("sha512", b"x", b"y", 100_000)
    rounds = int(100_000 / (time.process_time() - start))
    blank = [base64.b64encode(bytes(size)).decode() for size in (12, 64)]
    path = directory / "passwords"
    path.write_text(f"{USER}:$7${rounds}${blank[0]}${blank[1]}\n", encoding="ascii")
    path.chmod(0o600)
    return path


class Runs:
    """The pairs on one broker while ``target`` is abused."""

    def __init__(self, broker: pauses.Probed, target: pauses.Probed, seconds: float, retained: int) -> None:
        self.broker = broker
        self.target = target
        self.seconds = seconds
        self.retained = retained
        self.program = runner.build_generator().command
        self.latencies: dict[str, list[tuple[float, float]]] = {}
        self.times: dict[str, list[tuple[float, float]]] = {}
        self.summaries: dict[str, str] = {}

    def run(self, name: str) -> None:
        """Run the pairs once, beside the abuse ``name`` or, if that is empty, without any."""
        settle(self.target)
        ended = threading.Event()
        summaries: list[str] = []
        abuse = None
        if name:
            work = ABUSES[name][1]
            abuse = threading.Thread(target=lambda: summaries.append(work(self.target.port, ended, self.retained)), daemon=True)
            abuse.start()
            time.sleep(1)
        start = time.monotonic()
        found = pauses.load(self.program, self.broker, [*BYSTANDERS, "--duration", str(self.seconds)])
        self.times.setdefault(name, []).append((start, time.monotonic()))
        ended.set()
        if abuse is not None:
            abuse.join(60)
        self.summaries[name] = summaries[0] if summaries else ""
        latency = found["latency_us"]
        assert isinstance(latency, dict)
        self.latencies.setdefault(name, []).append((latency["p50"] / 1000, latency["p99"] / 1000))

    def p99(self, name: str) -> float:
        """The median over the rounds, in milliseconds."""
        return statistics.median(p99 for _, p99 in self.latencies[name])


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ABUSES))
    options.add_argument("--seconds", type=float, default=10)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--retained", type=int, default=1_000_000)
    options.add_argument("--workers", type=int, default=0, help="connection workers of each broker")
    options.add_argument("--control", action="store_true", help="abuse a second broker, too")
    given = options.parse_args()
    names = given.names or list(ABUSES)
    with tempfile.TemporaryDirectory() as directory:
        passwords = slow_password(Path(directory))
        settings = {"MQTTBROKER_ALLOW_ANONYMOUS": "true", "MQTTBROKER_PASSWORD_FILE": str(passwords)}
        settings["MQTTBROKER_LIMITS__MAX_RETAINED_MESSAGES"] = "2000000"
        settings["MQTTBROKER_WORKERS"] = str(given.workers)
        raise_file_limit()
        more, *ports = listeners()
        broker = pauses.Probed(Path(directory), settings | more)
        PORTS[broker.port] = (ports[0], ports[1])
        other = broker
        if given.control:
            (Path(directory) / "other").mkdir()
            more, *ports = listeners()
            other = pauses.Probed(Path(directory) / "other", settings | more)
            PORTS[other.port] = (ports[0], ports[1])
            fill(other.port, given.retained)
        start = time.monotonic()
        took = fill(broker.port, given.retained)
        filled = (start, time.monotonic())
        runs = Runs(broker, broker, given.seconds, given.retained)
        control = Runs(broker, other, given.seconds, given.retained)
        for _ in range(given.rounds):
            for name in names:
                runs.run("")
                runs.run(name)
                if given.control:
                    control.run(name)
        events = broker.end()
        if given.control:
            other.end()
    print(f"{broker.build}; {given.retained} retained in {took:.1f} s\n")
    print("| beside | p50 ms | p99 ms | p99 ÷ without abuse | ÷ abuse of the second broker | longest hold ms | of a worker | |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    quiet = runs.p99("")
    for name, rows in runs.latencies.items():
        p50, p99 = statistics.median(p50 for p50, _ in rows), runs.p99(name)
        to_other = f"{p99 / control.p99(name):.2f}" if name in control.latencies else ""
        holds: dict[str, float] = {}
        for start, end in runs.times[name]:
            for kind, durations in pauses.histogram(events, start, end).items():
                holds[kind] = max(holds.get(kind, 0.0), durations[-1])
        what = ABUSES[name][0] if name else "nothing"
        figures = [
            f"{p50:.2f}",
            f"{p99:.2f}",
            f"{p99 / quiet:.2f}",
            to_other,
            f"{holds.get('hold', 0):.1f}",
            f"{holds.get('worker hold', 0):.1f}",
        ]
        print(f"| {what} | {' | '.join(figures)} | {runs.summaries[name]} |")
    pauses.show("while the retained messages were published", pauses.histogram(events, *filled))


if __name__ == "__main__":
    main()
