"""``make dist``: builds the packages of the broker, and tries each in an empty environment.

The sdist is built from the files that git tracks, and every wheel from the sdist: a wheel without compiled modules for
any platform, and a compiled one for each Python that is installed.  `trial` is what each must pass.  Exit status 1 if one
fails, or if a Python that was asked for is not installed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

from support.interpreters import ROOT, Failed, copy_tracked_files, interpreter, run

from packages.trial import TrialFailed, try_commands

PYTHONS = ("3.11", "3.12", "3.13", "3.14")


class Builder:
    """Builds packages into ``dist``, with logs and unpacked sources in ``scratch``."""

    def __init__(self, dist: Path, scratch: Path) -> None:
        self._dist = dist
        self._scratch = scratch

    def sdist(self) -> Path:
        """Build the sdist from the tracked files; return its path."""
        source = self._scratch / "tracked"
        copy_tracked_files(source)
        run([sys.executable, "-m", "build", "--sdist", "--outdir", self._dist, source], self._scratch / "sdist.log")
        (sdist,) = self._dist.glob("mqttbroker-*.tar.gz")
        return sdist

    def wheel(self, sdist: Path, python: str, name: str, compiled: bool) -> Path:
        """Build a wheel from the sdist; a compiled one is renamed for the systems that have the libraries it needs."""
        source = self._scratch / name
        with tarfile.open(sdist) as archive:
            archive.extractall(source / "sdist", filter="data")
        (unpacked,) = (source / "sdist").iterdir()
        built, log = source / "wheel", self._scratch / f"{name}.log"
        run([python, "-m", "venv", source / "builder"], log)  # Debian's Python has pip in virtual environments only
        command = [source / "builder" / "bin" / "python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", built, unpacked]
        run(command, log, MQTTBROKER_COMPILE="1" if compiled else "0")
        (wheel,) = built.glob("*.whl")
        if not compiled:
            return Path(shutil.copy2(wheel, self._dist))
        tools = Path(sys.executable).parent
        before = set(self._dist.glob("*.whl"))
        run([tools / "auditwheel", "repair", "--wheel-dir", self._dist, wheel], log, PATH=f"{tools}:/usr/bin:/bin")
        (repaired,) = set(self._dist.glob("*.whl")) - before
        return repaired


def environment(python: str, wheel: Path, directory: Path, log: Path) -> Path:
    """Make a virtual environment with the wheel and what it requires; return its directory of programs."""
    run([python, "-m", "venv", directory], log)
    programs = directory / "bin"
    run([programs / "python", "-m", "pip", "install", "--quiet", wheel], log)
    run([programs / "python", "-m", "pip", "check"], log)
    return programs


def results(pythons: dict[str, str], dist: Path, scratch: Path) -> Iterator[tuple[bool, str]]:
    """Build and try everything with these interpreters, by version; yield whether each package passed, and a line about it."""
    builder = Builder(dist, scratch)
    try:
        sdist = builder.sdist()
    except Failed as error:
        yield False, f"sdist: FAILED: {error}"
        return
    yield True, f"{sdist.name}: {sdist.stat().st_size / 1024:.0f} KiB"
    plain = None
    for version, python in pythons.items():
        for kind in ("plain", "compiled"):
            name, began = f"{kind}-{version}", time.monotonic()
            try:
                if kind == "plain":  # one wheel for all
                    plain = wheel = plain or builder.wheel(sdist, python, name, compiled=False)
                else:
                    wheel = builder.wheel(sdist, python, name, compiled=True)
                programs = environment(python, wheel, scratch / f"environment-{name}", scratch / f"{name}.log")
                try_commands(programs, kind, scratch / f"data-{name}")
            except (Failed, TrialFailed, subprocess.SubprocessError) as error:
                yield False, f"Python {version}, {kind}: FAILED: {error}"
                continue
            size = wheel.stat().st_size / 1024
            yield True, f"Python {version}, {wheel.name}: {size:.0f} KiB, passed in {time.monotonic() - began:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make dist", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scratch", type=Path, required=True, help="for sources, environments and logs; emptied")
    parser.add_argument("--pythons", nargs="*", metavar="VERSION", help="these only, and each of them")
    options = parser.parse_args()
    found = {version: interpreter(version) for version in options.pythons or PYTHONS}
    pythons = {version: python for version, python in found.items() if python is not None}
    missing = [version for version in found if version not in pythons]
    if missing:
        print(f"not installed, so without a wheel and a trial: Python {', '.join(missing)}", flush=True)
    if not pythons or (missing and options.pythons):
        return 1
    scratch, dist = options.scratch.resolve(), ROOT / "dist"
    for directory in (scratch, dist):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    failed = False
    for passed, line in results(pythons, dist, scratch):
        failed = failed or not passed
        print(line, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
