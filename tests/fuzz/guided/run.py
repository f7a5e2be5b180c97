"""``make fuzz-coverage``: fuzzes each target under atheris for some CPU time, and prints executions and coverage.

Inputs that reach new code are kept in ``build/fuzz/TARGET`` and are where the next run begins; ``--keep`` copies a
minimal set of them to ``tests/fuzz/corpus``, which `make test` replays. The exit status is 1 if there are findings: the
input is ``build/fuzz/TARGET-crash-…``, and belongs into the corpus once the defect is mended.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.paths import ROOT

from fuzz.guided.target import CORPUS, TARGETS, make

WORK = ROOT / "build" / "fuzz"
SECONDS_OF_ONE_INPUT = 30
MAX_MEMORY_MIB = 3000


def python(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", *arguments]


def fuzz(name: str, seconds: float) -> bool:
    """Fuzz one target; whether nothing was found."""
    work = WORK / name
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mqttbroker-fuzz-") as directory:
        (Path(directory) / "seeds").mkdir()
        target = make(name, Path(directory) / "seeds")
        target.close()
        for number, seed in enumerate(target.seeds()):
            (work / f"seed-{number}").write_bytes(seed)
        words = Path(directory) / "words"
        words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in target.words))
        (Path(directory) / "target").mkdir()
        command = python(
            "fuzz.guided.worker", name, f"{directory}/target", str(seconds), str(work), str(CORPUS / name),
            f"-max_len={target.max_bytes}", *([f"-dict={words}"] if target.words else []),
            f"-artifact_prefix={WORK}/{name}-", f"-timeout={SECONDS_OF_ONE_INPUT}", f"-rss_limit_mb={MAX_MEMORY_MIB}",
        )  # fmt: skip
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        taken = time.monotonic() - begun
    executions = re.search(r"executions=(\d+)", done.stdout)
    edges = re.findall(r"cov: (\d+) ft: (\d+)", done.stderr)
    if executions is None:
        print(f"{name}: FOUND\n{done.stdout[-6000:]}\n{done.stderr[-1500:]}", flush=True)
        return False
    print(
        f"{name}: {executions[1]} executions in {seconds:.0f} s of CPU, {taken:.0f} s in all, "
        f"{edges[-1][0] if edges else 0} edges, {edges[-1][1] if edges else 0} features",
        flush=True,
    )
    return True


def report(name: str, keep: bool) -> None:
    """Print which lines the inputs reach, without a fuzzer."""
    into = ["--into", str(CORPUS / name)] if keep else []
    directories = [str(WORK / name), str(CORPUS / name)]
    done = subprocess.run(python("fuzz.guided.coverage", name, *directories, *into), capture_output=True, text=True, check=False)
    print(f"{name}: {done.stdout.strip() or done.stderr[-3000:]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz-coverage", description="Fuzz the parsers, guided by coverage.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU for each target")
    parser.add_argument("--keep", action="store_true", help="copy a minimal set of inputs to tests/fuzz/corpus")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    clean = True
    for name in options.targets or TARGETS:
        if options.seconds:
            clean = fuzz(name, options.seconds) and clean
        report(name, options.keep)
    print("fuzz: nothing found" if clean else "fuzz: see above")
    return 0 if clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
