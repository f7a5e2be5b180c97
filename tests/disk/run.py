"""``make power-loss``: records one broker under load, and checks the power loss at many moments of the record.

The load is a real run and differs each time; given its record, the moments and the states left at each depend on the
seed only. The exit status is 1 if anything acknowledged is missing.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from support.broker_process import BrokerProcess
from support.memory_directory import directory_in_memory

from disk.image import Disk
from disk.layer import SYNC, Call, Layer, calls
from disk.resume import Resumption
from disk.verdict import Judge, Offsets, agree
from disk.workload import CONFIG, NEVER, History, Load

PUBLISHERS = ["pub-4-1", "pub-4-2", "pub-5-1", "pub-5-2"]


class PowerLoss:
    """One recorded run below ``directory``. ``faults`` sets failures for the time of the load."""

    def __init__(
        self,
        directory: Path,
        seed: str,
        messages: int,
        publishers: list[str] | None = None,
        faults: Callable[[Layer], None] | None = None,
    ) -> None:
        self.directory = directory
        self.seed = seed
        self.root = directory / "disk"
        self.root.mkdir()
        layer = Layer(self.root, directory, record=True)
        broker = BrokerProcess(self.root / "data", CONFIG, env=layer.env)
        with broker:
            load = Load(broker, seed, publishers or PUBLISHERS, messages)
            self.history: History = load.run(lambda: None if faults is None else faults(layer))
            layer.end_failures()
            broker.terminate()
        self.calls = list(calls(layer.log))
        disk = Disk(self.root)
        for call in self.calls:
            disk.apply(call)
        disk.expect(self.root)
        shutil.rmtree(self.root)
        self.shown: Offsets = {}
        self.judged = 0

    def moments(self, count: int) -> list[int]:
        """Numbers of calls before which the power is lost: half random, half spread over kinds of calls."""
        rng = Random(f"{self.seed}:moments")
        kinds: dict[tuple[object, ...], list[int]] = {}
        for number, call in enumerate(self.calls):
            kinds.setdefault((call.kind, call.error, _file_kind(call)), []).append(number + 1)
        chosen = {rng.randrange(len(self.calls) + 1) for _ in range(count // 2)} | {len(self.calls)}
        while len(chosen) < min(count, len(self.calls)):
            chosen.add(rng.choice(kinds[rng.choice(list(kinds))]))
        return sorted(chosen)

    def lose(self, moments: list[int], whole: int) -> None:
        """Judge the state after a loss at each moment; at ``whole`` of them a broker and all clients continue."""
        served = set(Random(f"{self.seed}:whole").sample(moments, whole))
        disk, done = Disk(self.root), 0
        for number in moments:
            for call in self.calls[done:number]:
                disk.apply(call)
            done = number
            self._judge(disk, number)
            if number in served:
                self._serve(disk, number)

    def _moment(self, number: int) -> int:
        """The time of the power loss, at the start of this call."""
        return self.calls[number].began if number < len(self.calls) else NEVER

    def _left(self, disk: Disk, number: int, purpose: str) -> Path:
        target = self.directory / f"left-{number}-{purpose}"
        disk.leave(target, Random(f"{self.seed}:{number}:{purpose}"))
        return target

    def _judge(self, disk: Disk, number: int) -> None:
        left = self._left(disk, number, "judged")
        try:
            offsets = Judge(left / "data", self.history, self._moment(number)).judge()
            agree(self.shown, offsets, self.history, self._moment(number))
        except Exception as error:
            last = self.calls[max(0, number - 3) : number]
            before = [f"{call.path} {_KINDS[call.kind]} {call.error or ''}" for call in last]
            where = f"power lost before call {number} of {len(self.calls)}, after {before}"
            raise AssertionError(f"{where}: {error}") from error
        self.judged += 1
        shutil.rmtree(left)

    def _serve(self, disk: Disk, number: int) -> None:
        left = self._left(disk, number, "served")
        with BrokerProcess(left / "data", CONFIG) as broker:
            Resumption(broker, self.history, self._moment(number)).run()
        shutil.rmtree(left)


_KINDS = ("", "create", "truncate", "write", "sync", "rename", "unlink", "mkdir")


def _file_kind(call: Call) -> str:
    """The kind of file, so that rare ones are chosen too."""
    path = Path(call.path)
    return path.suffix or path.name.rstrip("0123456789")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make power-loss", description="Cut the power of a broker under load.")
    parser.add_argument("--points", type=int, default=1000, help="moments")
    parser.add_argument("--whole", type=int, default=20, help="moments after which a broker process goes on")
    parser.add_argument("--messages", type=int, default=3000, help="of each publisher")
    parser.add_argument("--seed", default="1")
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mqttbroker-power-", dir=directory_in_memory()) as directory:
        run = PowerLoss(Path(directory), options.seed, options.messages)
        moments = run.moments(options.points)
        syncs = sum(call.kind == SYNC for call in run.calls)
        print(f"power-loss: seed {options.seed}, {len(run.calls)} calls with {syncs} syncs, {len(moments)} moments")
        try:
            run.lose(moments, options.whole)
        except AssertionError as error:
            print(f"power-loss: {error}")
            return 1
    acknowledged = sum(publication.acked < NEVER for publication in run.history.all_publications())
    print(
        f"power-loss: {acknowledged} messages acknowledged; missing 0, twice 0, out of order 0, older retained 0"
        f" after {run.judged} losses and {options.whole} restarts, {time.monotonic() - start:.0f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
