"""Logins with argon2id passwords: a fleet that comes back after a restart, and guessed passwords beside it.

    python bench/logins.py [--clients 1500] [--guessers 200] [--seconds 20]

Prints logins per second at the first start, when each takes a hash, and after restarts by SIGTERM and SIGKILL; then the
latency of a connected client and of first right logins while other addresses guess. The addresses are 127.x.y.z, which
need Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]

from support.broker_process import BrokerProcess  # noqa: E402

from mqttbroker.auth.passwords import hash_password  # noqa: E402
from mqttbroker.codec.packets import Connect  # noqa: E402

PASSWORD = b"correct horse battery staple"


def connect_packet(user: str, password: bytes, clean_start: bool = True) -> bytes:
    return Connect(f"client-{user}", 5, clean_start, 60, username=user, password=password).encode(5)


async def login(port: int, user: str, password: bytes, host: str, timeout: float) -> tuple[int, float, asyncio.StreamWriter]:
    """Reason code (-1 = no CONNACK), seconds, and the connection."""
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
    writer.write(connect_packet(user, password))
    code = -1
    try:
        code = (await asyncio.wait_for(reader.readexactly(4), timeout))[3]
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
        pass
    return code, time.perf_counter() - begin, writer


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def fleet(broker: BrokerProcess, clients: int, title: str, timeout: float = 300.0) -> None:
    """All clients log in at once, from one address, as behind a NAT."""
    begin, cpu = time.perf_counter(), cpu_seconds(broker.pid)
    done = await asyncio.gather(*(login(broker.port, f"device-{n}", PASSWORD, "127.0.0.1", timeout) for n in range(clients)))
    seconds, cpu = time.perf_counter() - begin, cpu_seconds(broker.pid) - cpu
    refused = sum(code != 0 for code, _, _ in done)
    print(
        f"{title:24} {clients - refused:5} in, {refused:4} refused, {seconds:6.2f} s, "
        f"{clients / seconds:7.0f} logins/s, {clients / max(cpu, 0.01):7.0f} per CPU second of the broker"
    )
    for _, _, writer in done:
        writer.close()
    await asyncio.sleep(0.2)


async def guess(port: int, number: int, until: float, counts: dict[int, int]) -> None:
    host = f"127.{1 + number // 250}.0.{1 + number % 250}"
    turn = 0
    while time.perf_counter() < until:
        turn += 1
        code, _, writer = await login(port, f"device-{turn % 1000}", b"guess %d" % turn, host, 60.0)
        counts[code] = counts.get(code, 0) + 1
        writer.close()
        await asyncio.sleep(0.05)


async def bystander(port: int, until: float, latencies: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(connect_packet("bystander", PASSWORD))
    await reader.readexactly(4)
    await asyncio.sleep(0.5)
    await reader.read(1 << 16)
    while time.perf_counter() < until:
        begin = time.perf_counter()
        writer.write(b"\xc0\x00")
        await reader.readexactly(2)
        latencies.append(time.perf_counter() - begin)
        await asyncio.sleep(0.005)
    writer.close()


async def honest(port: int, until: float, latencies: list[float], number: int) -> None:
    """First logins of users that have no proven password, each from an address of its own."""
    await asyncio.sleep(1.0)
    while time.perf_counter() < until:
        number += 1
        code, seconds, writer = await login(port, f"new-{number}", PASSWORD, f"127.200.0.{1 + number % 250}", 60.0)
        latencies.append(seconds if code == 0 else float("inf"))
        writer.close()
        await asyncio.sleep(0.5)


async def guessing(broker: BrokerProcess, guessers: int, seconds: float) -> None:
    for title, number in (("quiet", 0), (f"{guessers} guessing addresses", guessers)):
        until = time.perf_counter() + seconds
        counts: dict[int, int] = {}
        pings: list[float] = []
        logins: list[float] = []
        cpu = cpu_seconds(broker.pid)
        await asyncio.gather(
            bystander(broker.port, until, pings),
            honest(broker.port, until, logins, number),
            *(guess(broker.port, n, until, counts) for n in range(number)),
        )
        quantiles = statistics.quantiles(pings, n=100)
        print(
            f"{title:24} ping p50 {quantiles[49] * 1e3:.2f} ms, p99 {quantiles[98] * 1e3:.2f} ms; first right login: first "
            f"{logins[0] * 1e3:.0f} ms, median {statistics.median(logins) * 1e3:.0f} ms, longest {max(logins) * 1e3:.0f} ms; "
            f"CPU {100 * (cpu_seconds(broker.pid) - cpu) / seconds:.0f} %; guesses by reason code "
            f"{ {hex(code): count for code, count in counts.items()} }"
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1500)
    parser.add_argument("--guessers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        names = [f"device-{n}" for n in range(given.clients)] + [f"new-{n}" for n in range(1000)] + ["bystander"]
        line = hash_password(PASSWORD)
        users = Path(directory) / "users"
        users.write_text("".join(f"{name}:{line}\n" for name in names))
        config = f'allow_anonymous = false\npassword_file = "{users}"\n'
        with BrokerProcess(config=config) as broker:
            print(broker.lines[-1])
            await fleet(broker, given.clients, "first start")
            await fleet(broker, given.clients, "reconnect")
            await asyncio.sleep(2.0)
            broker.restart()
            await fleet(broker, given.clients, "after SIGTERM")
            broker.restart(kill=True)
            await fleet(broker, given.clients, "after SIGKILL")
            await guessing(broker, given.guessers, given.seconds)


if __name__ == "__main__":
    asyncio.run(main())
