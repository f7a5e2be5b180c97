"""One target under atheris: ``python -m fuzz.guided.worker TARGET DIRECTORY CPU_SECONDS [libFuzzer's options]``.

The process ends after so much CPU time and prints ``executions=N``; a finding ends it earlier, with a stack on stderr.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from random import Random

import atheris

from fuzz.guided.target import PACKAGES, make

STRUCTURED = 0.4  # share of the mutations that are the target's own


def main() -> None:
    name, directory, seconds, *options = sys.argv[1:]
    with atheris.instrument_imports(include=PACKAGES):
        target = make(name, Path(directory))
    executions = 0

    def check(data: bytes) -> None:
        nonlocal executions
        executions += 1
        target.check(data)
        if time.process_time() > float(seconds):
            print(f"executions={executions}", flush=True)
            os._exit(0)

    def mutated(data: bytes, max_bytes: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < STRUCTURED:
            changed = target.changed(data, random)[:max_bytes]
            if changed != data:
                return changed
        mutated: bytes = atheris.Mutate(data, max_bytes)
        return mutated

    atheris.Setup([sys.argv[0], *options], check, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
