"""Compiled wheels for aarch64 on another machine: Zig's C compiler builds them, and QEMU runs them in Debian's Python for arm64."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from support.interpreters import Failed, run

MACHINE = "aarch64"
GLIBC = "2.17"  # the oldest that pip knows as manylinux for aarch64
DEBIAN_PACKAGES = ("python3", "libstdc++6", "ca-certificates")
ABOUT = """
import json, sysconfig
print(json.dumps({"include": sysconfig.get_path("include"), "version": sysconfig.get_python_version(),
                  "variables": sysconfig.get_config_vars()}, default=str))
"""
# Definitions of pyconfig.h that describe the processor's assembler, not the layout of data.
X86_ONLY = ("HAVE_GCC_ASM_FOR_X64", "HAVE_GCC_ASM_FOR_X87", "HAVE_GCC_ASM_FOR_MC68881")


class Cross:
    """Makes an x86_64 Python build extension modules for aarch64: with variables, and with files in ``directory``.

    The variables are those with which CPython itself is cross-compiled.  The headers are those of ``python``: all of them but
    pyconfig.h are the same on each machine, and a probe compares the sizes and alignments in pyconfig.h with the compiler's.
    """

    def __init__(self, python: str, directory: Path, log: Path) -> None:
        told = subprocess.run([python, "-c", ABOUT], capture_output=True, text=True, check=True).stdout
        about = json.loads(told)
        self._directory = directory
        self._headers = directory / "include"
        directory.mkdir(parents=True)
        self._copy_headers(Path(about["include"]), about["version"], str(about["variables"].get("MULTIARCH")))
        self._compiler = directory / "cc"
        self._compiler.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -m ziglang cc -target {MACHINE}-linux-gnu.{GLIBC} -I"{self._headers}" "$@"\n'
        )
        self._compiler.chmod(0o755)
        self._probe(log)
        self._write_variables(about["variables"])

    def variables(self) -> dict[str, str]:
        """Of the environment in which the wheel is built."""
        return {
            "_PYTHON_HOST_PLATFORM": f"linux-{MACHINE}",  # the platform in the wheel's name
            "_PYTHON_SYSCONFIGDATA_NAME": "_sysconfigdata_of_aarch64",
            "PYTHONPATH": str(self._directory),
            "ZIG_GLOBAL_CACHE_DIR": str(self._directory / "zig"),
        }

    def _copy_headers(self, include: Path, version: str, multiarch: str) -> None:
        shutil.copytree(include, self._headers)
        of_debian = Path("/usr/include") / multiarch / f"python{version}" / "pyconfig.h"  # the other one only includes it
        text = next(text for path in (include / "pyconfig.h", of_debian) if "SIZEOF_LONG" in (text := path.read_text()))
        text = re.sub(rf"^#define ({'|'.join(X86_ONLY)}) .*$", r"/* #undef \1 */", text, flags=re.MULTILINE)
        (self._headers / "pyconfig.h").write_text(text)

    def _probe(self, log: Path) -> None:
        """Raises `Failed` if pyconfig.h does not describe the machine."""
        text = (self._headers / "pyconfig.h").read_text()
        names = {"VOID_P": "void *", "WCHAR_T": "wchar_t", "SIZE_T": "size_t", "PID_T": "pid_t", "TIME_T": "time_t", "OFF_T": "off_t",
                 "UINTPTR_T": "uintptr_t", "INT": "int", "LONG": "long", "LONG_LONG": "long long", "SHORT": "short", "FLOAT": "float",
                 "DOUBLE": "double", "LONG_DOUBLE": "long double", "_BOOL": "_Bool", "FPOS_T": "fpos_t"}  # fmt: skip
        lines = ["#include <Python.h>", "#include <stdio.h>", "#include <stdint.h>", "#include <sys/types.h>"]
        for kind, name, value in re.findall(r"^#define (SIZEOF|ALIGNOF)_(\w+) (\d+)", text, flags=re.MULTILINE):
            if name in names:
                lines.append(f'_Static_assert({"sizeof" if kind == "SIZEOF" else "_Alignof"}({names[name]}) == {value}, "{kind}_{name}");')
        probe = self._directory / "probe.c"
        probe.write_text("\n".join(lines) + "\n")
        run([self._compiler, "-c", probe, "-o", probe.with_suffix(".o")], log, **self.variables())

    def _write_variables(self, known: dict[str, object]) -> None:
        """The build variables of ``python``, as `sysconfig` reads them, but for this compiler and machine."""
        suffix = str(known["EXT_SUFFIX"]).split("-")[1]  # .cpython-313-x86_64-linux-gnu.so
        made = {
            **known, "CC": str(self._compiler), "CFLAGS": "-fPIC", "OPT": "", "CCSHARED": "-fPIC", "LDSHARED": f"{self._compiler} -shared",
            "LDFLAGS": "", "MULTIARCH": f"{MACHINE}-linux-gnu", "SOABI": f"cpython-{suffix}-{MACHINE}-linux-gnu",
            "EXT_SUFFIX": f".cpython-{suffix}-{MACHINE}-linux-gnu.so",
        }  # fmt: skip
        (self._directory / "_sysconfigdata_of_aarch64.py").write_text(f"build_time_vars = {made!r}\n")


def build_requirements(source: Path) -> list[str]:
    settings = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    return list(settings["build-system"]["requires"])


class Emulated:
    """Debian's Python for arm64, unpacked below ``directory``, and QEMU.  Installs nothing into this system.

    Raises `Failed` if the packages cannot be had.
    """

    def __init__(self, directory: Path, log: Path) -> None:
        missing = [program for program in ("qemu-aarch64", "apt-get", "dpkg-deb") if shutil.which(program) is None]
        if missing:
            raise Failed(f"no {', '.join(missing)} (Debian: apt-get install qemu-user)")
        self._root = directory / "root"
        for name in ("state/lists/partial", "cache/archives/partial", "root"):
            (directory / name).mkdir(parents=True)
        (directory / "status").touch()  # nothing is installed, so apt downloads all that Python needs
        options = {"APT::Architecture": "arm64", "APT::Architectures": "arm64", "Dir::State": directory / "state",
                   "Dir::State::status": directory / "status", "Dir::Cache": directory / "cache", "Debug::NoLocking": 1}  # fmt: skip
        apt = ["apt-get", "-q", "-y", *(f"-o{name}={value}" for name, value in options.items())]
        run([*apt, "update"], log)
        run([*apt, "install", "--no-install-recommends", "--download-only", *DEBIAN_PACKAGES], log)
        for package in sorted((directory / "cache" / "archives").glob("*.deb")):
            run(["dpkg-deb", "-x", package, self._root], log)
        (python,) = [path for path in (self._root / "usr" / "bin").glob("python3.*") if re.fullmatch(r"python3\.\d+", path.name)]
        self.version = python.name.removeprefix("python")
        self._python = python

    def program(self, packages: Path, directory: Path) -> Path:
        """Write a program `mqttbroker` that runs what is installed in ``packages``; return ``directory``."""
        directory.mkdir(parents=True)
        program = directory / "mqttbroker"
        program.write_text(
            f'#!/bin/sh\nPYTHONPATH="{packages}" exec qemu-aarch64 -L "{self._root}" "{self._python}" -P -m mqttbroker "$@"\n'
        )
        program.chmod(0o755)
        return directory


def install(wheel: Path, version: str, packages: Path, log: Path) -> None:
    """Install the wheel and what it requires into ``packages``, for a Python of this version.

    Raises `Failed` if a package that it requires has no wheel for aarch64.
    """
    platforms = [f"manylinux_2_{minor}_{MACHINE}" for minor in range(28, 16, -1)] + [f"manylinux2014_{MACHINE}"]
    run([sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:", "--implementation=cp", f"--python-version={version}",
         *(f"--platform={name}" for name in platforms), "--target", packages, wheel], log)  # fmt: skip
