"""Links between namespaces are cut without an end of a connection, and slow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from support.namespaces import DELAY, JITTER, Network, NetworkMissing
from support.patience import PATIENCE

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7))
print("ready", flush=True)
while True:
    client, _ = server.accept()
    while data := client.recv(100000):
        client.sendall(data)
"""
# Sends each line that it is given; answers how many milliseconds the echo took, or that none comes.
ASK = """
import socket, sys, time
client = socket.create_connection((sys.argv[1], 7))
client.settimeout(0.5)
for line in sys.stdin:
    begin, left = time.monotonic(), int(line)
    client.sendall(b"." * left)
    try:
        while left:
            left -= len(client.recv(left))
        print(int(1000 * (time.monotonic() - begin)), flush=True)
    except TimeoutError:
        print("nothing", flush=True)
        client.settimeout(30.0)
        while left:
            left -= len(client.recv(left))
        print("late", flush=True)
        client.settimeout(0.5)
"""


@contextmanager
def process(command: tuple[str, ...], program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    found = subprocess.Popen(
        [*command, sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield found
    finally:
        found.kill()
        found.communicate(timeout=PATIENCE)


def answer(asking: subprocess.Popen[str], size: int) -> str:
    assert asking.stdin is not None
    asking.stdin.write(f"{size}\n")
    asking.stdin.flush()
    return line(asking)


def line(asking: subprocess.Popen[str]) -> str:
    assert asking.stdout is not None
    return asking.stdout.readline().strip()


@pytest.fixture
def network() -> Iterator[Network]:
    with ExitStack() as stack:
        try:
            network = stack.enter_context(Network(["one", "two", "three"]))
        except NetworkMissing as missing:
            pytest.skip(str(missing))
        yield network


def test_a_link_is_slow_and_then_cut_without_an_end_of_its_connections(network: Network) -> None:
    address = network.address("one")
    with process(network.command("one"), ECHO, address) as echo:
        assert line(echo) == "ready"
        with process(network.command("two"), ASK, address) as two:
            answer(two, 1)
            network.slow("two")
            assert int(answer(two, 10_000)) >= 1000 * (DELAY - JITTER) - 1
            network.heal()
            network.cut("one", ["three"])
            assert answer(two, 1).isdigit()
            network.cut("one")
            assert answer(two, 1) == "nothing"
            network.heal()
            assert line(two) == "late"
        network.cut("one")
        with process((), ASK, address) as here:
            assert answer(here, 1).isdigit()


def test_nothing_is_left(network: Network) -> None:
    with process(network.command("one"), ECHO, network.address("one")) as echo:
        assert line(echo) == "ready"
        network.close()
        assert echo.wait(PATIENCE) == -signal.SIGKILL
    assert not {network.command(place)[3] for place in network.places} & set(os.listdir("/run/netns"))
    assert not [name for name in os.listdir("/sys/class/net") if name.startswith(f"ch{os.getpid()}")]
