"""``make dist``: builds the packages of the broker, and tries each in an empty environment.

The sdist is built from the files that git tracks, and every wheel from the sdist: a wheel without compiled modules for
any platform, and a compiled one for each Python that is installed, for this machine and, on x86_64, for aarch64.  `trial` is
what each must pass, those for aarch64 in an emulator.  Beside each package lies a list of what it brings (`bom`).  Exit
status 1 if one fails, or if a Python that was asked for is not installed.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.interpreters import ROOT, Failed, copy_tracked_files, interpreter, run

from packages import bom
from packages.aarch64 import MACHINE, Cross, Emulated, build_requirements, install
from packages.trial import TrialFailed, try_commands

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
CROSS_BUILT = {"x86_64": ["x86_64", MACHINE]}  # by the machine that builds
EMULATED_SECONDS = 300.0


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
        (self.sdist_path,) = self._dist.glob("mqttbroker-*.tar.gz")
        return self.sdist_path

    def wheel(self, sdist: Path, python: str, name: str, compiled: bool, cross: Cross | None = None) -> Path:
        """Build a wheel from the sdist; a compiled one is renamed for the systems that have the libraries it needs."""
        source = self._scratch / name
        with tarfile.open(sdist) as archive:
            archive.extractall(source / "sdist", filter="data")
        (unpacked,) = (source / "sdist").iterdir()
        built, log = source / "wheel", self._scratch / f"{name}.log"
        run([python, "-m", "venv", source / "builder"], log)  # Debian's Python has pip in virtual environments only
        pip = [source / "builder" / "bin" / "python", "-m", "pip"]
        command = [*pip, "wheel", "--no-deps", "--wheel-dir", built, unpacked]
        if cross is None:
            run(command, log, MQTTBROKER_COMPILE="1" if compiled else "0")
        else:  # what builds is for this machine
            run([*pip, "install", "--quiet", *build_requirements(unpacked)], log)
            run([*command, "--no-build-isolation"], log, MQTTBROKER_COMPILE="1", **cross.variables())
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


def native(builder: Builder, python: str, name: str, kind: str, wheel: Path, scratch: Path) -> str:
    """Try a wheel for this machine; return a line about it.  Raises `Failed` or `TrialFailed`."""
    directory, log = scratch / f"environment-{name}", scratch / f"{name}.log"
    programs = environment(python, wheel, directory, log)
    try_commands(programs, kind, scratch / f"data-{name}")
    (packages,) = directory.glob("lib/python3.*/site-packages")
    bom.of_wheel(wheel, packages, log)
    if kind == "plain":  # the package that every wheel is built from brings the same
        bom.of_wheel(wheel, packages, log, package=builder.sdist_path)
    return "passed"


def emulated(emulator: Emulated | str, wheel: Path, version: str, name: str, scratch: Path) -> str:
    """Try a wheel for aarch64 where there is an emulator with its version of Python; return a line about it."""
    packages, log = scratch / f"environment-{name}", scratch / f"{name}.log"
    install(wheel, version, packages, log)
    bom.of_wheel(wheel, packages, log)
    if isinstance(emulator, str):
        return f"installed, not run: {emulator}"
    if emulator.version != version:
        return f"installed, not run: Debian's Python for arm64 is {emulator.version}"
    try_commands(emulator.program(packages, scratch / f"programs-{name}"), "compiled", scratch / f"data-{name}", EMULATED_SECONDS)
    return "passed in the emulator"


def results(pythons: dict[str, str], machines: Sequence[str], dist: Path, scratch: Path) -> Iterator[tuple[bool, str]]:
    """Build and try everything with these interpreters, by version; yield whether each package passed, and a line about it."""
    builder = Builder(dist, scratch)
    try:
        sdist = builder.sdist()
    except Failed as error:
        yield False, f"sdist: FAILED: {error}"
        return
    yield True, f"{sdist.name}: {sdist.stat().st_size / 1024:.0f} KiB"
    emulator: Emulated | str = ""
    if MACHINE in machines and platform.machine() != MACHINE:
        try:
            emulator = Emulated(scratch / "debian", scratch / "debian.log")
        except Failed as error:
            emulator = str(error)
    plain = None
    for version, python in pythons.items():
        for kind in ("plain", *machines):
            name, began = f"{kind}-{version}", time.monotonic()
            try:
                if kind == "plain":  # one wheel for all
                    plain = wheel = plain or builder.wheel(sdist, python, name, compiled=False)
                elif kind == platform.machine():
                    wheel = builder.wheel(sdist, python, name, compiled=True)
                else:
                    cross = Cross(python, scratch / f"cross-{version}", scratch / f"{name}.log")
                    wheel = builder.wheel(sdist, python, name, compiled=True, cross=cross)
                if kind in ("plain", platform.machine()):
                    said = native(builder, python, name, "plain" if kind == "plain" else "compiled", wheel, scratch)
                else:
                    said = emulated(emulator, wheel, version, name, scratch)
            except (Failed, TrialFailed, subprocess.SubprocessError) as error:
                yield False, f"Python {version}, {kind}: FAILED: {error}"
                continue
            size = wheel.stat().st_size / 1024
            yield True, f"Python {version}, {wheel.name}: {size:.0f} KiB, {said}, {time.monotonic() - began:.0f} s"
    made = bom.of_image(dist / f"{sdist.name.removesuffix('.tar.gz')}-image.cdx.json", version_of(sdist), scratch / "image.log")
    yield True, f"{made.name}, and {sum(1 for _ in dist.glob('*.cdx.json')) - 1} more, beside each package"


def version_of(sdist: Path) -> str:
    return sdist.name.removesuffix(".tar.gz").partition("-")[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make dist", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scratch", type=Path, required=True, help="for sources, environments and logs; emptied")
    parser.add_argument("--pythons", nargs="*", metavar="VERSION", help="these only, and each of them")
    parser.add_argument(
        "--machines",
        nargs="*",
        metavar="MACHINE",
        default=CROSS_BUILT.get(platform.machine(), [platform.machine()]),
        help="for compiled wheels (default: %(default)s)",
    )
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
    for passed, line in results(pythons, options.machines, dist, scratch):
        failed = failed or not passed
        print(line, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
