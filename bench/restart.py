#!/usr/bin/env python3
"""How soon a broker with many stored sessions serves clients after a start, and the memory that it takes.

    restart.py [--sessions N] [--subscriptions N] [--messages N] [--data-dir DIR] [--load SECONDS] [COMMAND ...]

The data directory is written with the store's own statements; each figure is of a process started on a copy of it.
With ``--load`` a broker on that copy first queues QoS 1 messages at full speed for so long and is killed (SIGKILL), so
that the measured start finds the logs of a crash. Prints one line of JSON per start:

    connack_s        from the start of the process to the first CONNACK
    rss_mib          of the broker after that
    idle_rss_mib     the same on an empty data directory
    bytes_per_session  the difference per session, with its subscriptions and its queue
    resume_s         from a returning client's CONNECT to its CONNACK
    queue_s          from there until it has received and acknowledged its whole queue
    cpu_s            processor time of the broker until the first CONNACK
    killed_mib       with --load: the logs that the kill left, MiB (the write-ahead log of SQLite and the commit log)

COMMAND starts the broker (this Python's `mqttbroker`); arguments of `serve` are added to it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runner import build_generator, free_port  # noqa: E402

from sessions.message import Message  # noqa: E402
from sessions.row_kinds import SESSIONS, SUBSCRIPTIONS  # noqa: E402
from sessions.store import statements as sql  # noqa: E402
from sessions.store.writer import SqliteStore  # noqa: E402

DATABASE = "mqttbroker.db"
AT_ONCE = 100_000  # rows of one transaction
NEVER = 0xFFFFFFFF
# An exact filter, one with +, one with #, and two that several sessions have.
FILTERS = ("site/{0}/device/status", "site/{0}/+/alarm", "site/{0}/config/#", "group/{1}/+/state", "all/commands")


def message(key: int, topic: str, payload: bytes, timestamp: int) -> Message:
    made = Message(topic, payload, 1, False, b"", "p", timestamp, 0)
    made.id = key
    return made


def client_id(number: int) -> str:
    return f"device-{number:06d}"


def fill(directory: Path, sessions: int, subscriptions: int, messages: int, size: int = 64) -> None:
    """Create a data directory of disconnected sessions, with subscriptions and queued messages in equal parts.

    Messages have ``size`` bytes and one entry each; consecutive messages are for consecutive sessions.
    """
    store = SqliteStore(directory / DATABASE, "commit", None)
    store.recover()
    connection = store.database.connection
    now = time.time()
    each = subscriptions // sessions
    if each > len(FILTERS):
        raise SystemExit(f"restart: at most {len(FILTERS)} subscriptions per session")
    payload = b"x" * size
    stamp = int(now * 1_000_000)
    connection.execute("PRAGMA synchronous = OFF")
    insert_sessions, insert_subscriptions = (sql.OF_KINDS[kind.number].saved for kind in (SESSIONS, SUBSCRIPTIONS))
    for start in range(0, sessions, AT_ONCE):
        part = range(start, min(start + AT_ONCE, sessions))
        connection.execute("BEGIN IMMEDIATE")
        insert_sessions.run(connection, [(n + 1, client_id(n), 5, NEVER, now, *[None] * 5) for n in part])
        insert_subscriptions.run(connection, [(n + 1, text.format(n, n % 100), 1, 1, 0) for n in part for text in FILTERS[:each]])
        connection.execute("COMMIT")
    for start in range(0, messages, AT_ONCE):
        keys = range(start + 1, min(start + AT_ONCE, messages) + 1)
        connection.execute("BEGIN IMMEDIATE")
        sql.MESSAGES.run(
            connection,
            [message(key, f"site/{key % sessions}/device/status", payload, stamp) for key in keys],
        )
        sql.ENTRIES.run(connection, [(key % sessions + 1, key, key, 0, 1, 0, b"", 0, 0, size, 0) for key in keys])
        connection.execute("COMMIT")
    connection.execute("PRAGMA synchronous = FULL")
    store.stop()


def _text(value: str) -> bytes:
    return len(value).to_bytes(2, "big") + value.encode()


def connect(port: int, name: str, deadline: float) -> socket.socket:
    """Connect with 3.1.1 and a persistent session as soon as the broker answers."""
    body = _text("MQTT") + b"\x04\x00\x00\x3c" + _text(name)
    while True:
        line = socket.socket()
        try:
            line.settimeout(max(0.01, deadline - time.monotonic()))
            line.connect(("127.0.0.1", port))
            line.sendall(bytes((0x10, len(body))) + body)
            if line.recv(4, socket.MSG_WAITALL)[3:] == b"\0":
                return line
            raise SystemExit(f"restart: {name} was refused")
        except OSError:
            line.close()
            if time.monotonic() > deadline:
                raise SystemExit("restart: the broker does not answer") from None
            time.sleep(0.005)


def drain(line: socket.socket, expected: int) -> None:
    """Receive and acknowledge so many QoS 1 messages."""
    line.settimeout(60)
    data = b""
    while expected:
        data += line.recv(1 << 16)
        acks = bytearray()
        at = 0
        while at + 2 <= len(data):
            length, body, shift = 0, at + 1, 0
            while body < len(data) and data[body] & 128:
                length |= (data[body] & 127) << shift
                shift += 7
                body += 1
            if body >= len(data):
                break
            length |= data[body] << shift
            end = body + 1 + length
            if end > len(data):
                break
            topic = body + 3 + int.from_bytes(data[body + 1 : body + 3], "big")
            acks += b"\x40\x02" + data[topic : topic + 2]
            expected -= 1
            at = end
        data = data[at:]
        line.sendall(acks)


def rss(pid: int) -> float:
    """Resident memory of a process, MiB."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def cpu(pid: int) -> float:
    """User and system time of a process, seconds."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def client_with_queue(directory: Path) -> tuple[str, int]:
    """The id of a client with a queue, and the number of its messages."""
    connection = sqlite3.connect(directory / DATABASE)
    try:
        found: tuple[str, int] = connection.execute(
            "SELECT client_id, (SELECT count(*) FROM queue AS q WHERE q.session_id = s.session_id)"
            " FROM sessions AS s WHERE session_id = (SELECT min(session_id) FROM queue)"
        ).fetchone()
    finally:
        connection.close()
    return found


def start(command: list[str], directory: Path, port: int) -> subprocess.Popen[bytes]:
    arguments = ["serve", "--port", str(port), "--http-port", "off", "--data-dir", str(directory), "--log-level", "error"]
    return subprocess.Popen(command + arguments)


def load_and_kill(command: list[str], directory: Path, seconds: float) -> float:
    """Queue messages for ten offline sessions at full speed, then kill the broker; MiB of the logs that it leaves."""
    port = free_port()
    process = start(command, directory, port)
    try:
        connect(port, "first", time.monotonic() + 120).close()
        load = [*build_generator().command, "--port", str(port), "--scenario", "offline", "--qos", "1", "--window", "1000",
                "--publishers", "10", "--subscribers", "10", "--count", "100000000"]  # fmt: skip
        with subprocess.Popen(load, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as generator:
            time.sleep(seconds)
            if generator.poll() is not None:
                raise SystemExit("restart: the load ended early")
            process.kill()
            process.wait()
            generator.kill()
    finally:
        process.kill()
        process.wait()
    logs = [*directory.glob("*-wal"), *directory.glob("log/*.log")]
    return round(sum(path.stat().st_size for path in logs) / 2**20, 1)


def measure(command: list[str], directory: Path, returning: tuple[str, int] | None = None) -> dict[str, float]:
    """Start a broker on a data directory and measure it; ``returning`` is a client id and the length of its queue."""
    port = free_port()
    began = time.monotonic()
    process = start(command, directory, port)
    try:
        connect(port, "first", began + 120).close()
        found = {"connack_s": round(time.monotonic() - began, 3), "cpu_s": round(cpu(process.pid), 2)}
        found["rss_mib"] = round(rss(process.pid), 1)
        if returning is not None:
            asked = time.monotonic()
            line = connect(port, returning[0], asked + 60)
            answered = time.monotonic()
            drain(line, returning[1])
            found["resume_s"] = round(answered - asked, 4)
            found["queue_s"] = round(time.monotonic() - answered, 4)
            line.close()
    finally:
        process.terminate()
        process.wait(60)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--subscriptions", type=int, default=500_000)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3, help="starts (%(default)s)")
    parser.add_argument("--data-dir", type=Path, help="kept, and used if it exists; default: a temporary one")
    parser.add_argument("--load", type=float, default=0.0, metavar="SECONDS", help="load before a kill and each start")
    parser.add_argument("command", nargs="*", default=[sys.executable, "-m", "mqttbroker"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.data_dir or Path(temporary) / "data"
        if not (directory / DATABASE).exists():
            fill(directory, options.sessions, options.subscriptions, options.messages)
        for number in range(options.repeat):
            # The second start, as the first creates the tables.
            idle = [measure(options.command, Path(temporary) / f"empty-{number}")["rss_mib"] for _ in range(2)][1]
            copy = Path(temporary) / f"copy-{number}"
            shutil.copytree(directory, copy)
            killed = load_and_kill(options.command, copy, options.load) if options.load else 0.0
            found = measure(options.command, copy, client_with_queue(directory))
            shutil.rmtree(copy)
            if options.load:
                found["killed_mib"] = killed
            found["idle_rss_mib"] = idle
            if not options.load:
                found["bytes_per_session"] = round((found["rss_mib"] - idle) * 2**20 / options.sessions)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
