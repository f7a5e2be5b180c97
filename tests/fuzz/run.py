"""``make fuzz``: rounds of invalid input against the codec, the broker core and a broker process, for some seconds.

A round depends only on the seed and its number: ``--seed S --first N --rounds 1`` repeats it. The exit status is 1 if
there are findings.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
from pathlib import Path

from fuzz.core_target import CoreTarget
from fuzz.network_target import NetworkTarget
from fuzz.packet_target import CodecTarget, ExchangeTarget


class Run:
    """Runs the targets in turn: ``rounds`` rounds, or, if None, for ``seconds``."""

    def __init__(self, seed: str, first: int, rounds: int | None, seconds: float, directory: Path) -> None:
        self.seed = seed
        self.first = first
        self.rounds = rounds
        self.seconds = seconds
        self.codec = CodecTarget()
        self.exchange = ExchangeTarget(_made(directory / "exchange"))
        self.network = NetworkTarget()
        self.cores = [CoreTarget(_made(directory / durability), durability) for durability in ("off", "commit")]
        self.done = 0

    def go(self) -> None:
        """Any exception is a finding."""
        end = time.monotonic() + self.seconds
        try:
            while time.monotonic() < end if self.rounds is None else self.done < self.rounds:
                self._round(f"{self.seed}:{self.first + self.done}")
                self.done += 1
            self.network.expect_no_sessions()
        finally:
            try:
                self.network.close()
            finally:
                for core in self.cores:
                    core.close()

    def _round(self, seed: str) -> None:
        """The cores and the process get the same conversations."""
        self.codec.round(seed)
        self.exchange.round(seed)
        for core in self.cores:
            core.round(seed)
        self.network.round(seed)

    def summary(self) -> str:
        network = self.network
        lines = [
            f"fuzz: seed {self.seed}, rounds {self.first} to {self.first + self.done - 1}",
            f"  codec: {self.codec.packets} packets, {self.codec.taken} of them packets of the standard",
            f"  core, packet by packet: {self.exchange.packets} packets, {self.exchange.messages} messages delivered",
        ]
        for core in self.cores:
            lines.append(
                f"  core, durability {core.durability}: {core.connections} connections, {core.bytes} bytes in, "
                f"{core.packets} packets out, {core.bystanders.sent} messages of bystanders"
            )
        sizes = network.sizes or [0]
        lines.append(
            f"  process: {network.connections} connections over TCP and WebSocket, "
            f"{network.bystanders.messages} messages of bystanders, "
            f"resident {sizes[0] >> 20} MiB after the first round, {sizes[-1] >> 20} MiB after the last"
        )
        return "\n".join(lines)


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description="Send bad input to the broker.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, help="number of rounds, instead of a time")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mqttbroker-fuzz-") as directory:
        run = Run(options.seed, options.first, options.rounds, options.seconds, Path(directory))
        try:
            run.go()
        except Exception:
            traceback.print_exc()
            print(run.summary())
            again = f'make fuzz FUZZ_ARGS="--seed {options.seed} --first {options.first + run.done} --rounds 1"'
            print(f"fuzz: round {options.first + run.done} found the above; once more: {again}")
            return 1
    print(run.summary())
    print("fuzz: nothing found")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
