"""The sources of the suites, at fixed versions, from the registries that this machine's package clients use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from support.interpreters import Failed, run


def sdist(name: str, version: str, directory: Path) -> Path:
    """Download and unpack a package of PyPI; returns its directory."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name, "--dest", directory]
    run([*pip, f"{name}=={version}"], directory / "fetch.log")
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(directory, filter="data")
    return directory / f"{name}-{version}"


def environment(directory: Path, *packages: str) -> Path:
    """Make a virtual environment; returns its Python."""
    run([sys.executable, "-m", "venv", directory], directory.with_suffix(".log"))
    python = directory / "bin" / "python"
    run([python, "-m", "pip", "install", "--quiet", *packages], directory.with_suffix(".log"))
    return python


def go_module(path: str, version: str, directory: Path) -> Path:
    """Download a Go module and what its tests need; returns a copy of it that may be written."""
    found = subprocess.run(["go", "mod", "download", "-json", f"{path}@{version}"], cwd=directory, stdout=subprocess.PIPE, text=True)
    if found.returncode:
        raise Failed(f"go mod download: {found.stdout.strip()}")
    source = directory / "source"
    shutil.copytree(json.loads(found.stdout)["Dir"], source)
    subprocess.run(["chmod", "-R", "u+w", source], check=True)
    run(["go", "test", "-c", "-o", directory / "suite", "."], directory / "fetch.log", source)
    return source


def crate(name: str, version: str, directory: Path) -> Path:
    """Download a package of crates.io; returns its directory, in ``directory``."""
    project = directory / "project"
    (project / "src").mkdir(parents=True)
    (project / "src" / "lib.rs").touch()
    (project / "Cargo.toml").write_text(
        f'[package]\nname = "suite"\nversion = "0.0.0"\nedition = "2021"\n[dependencies]\n{name} = "={version}"\n',
        encoding="utf-8",
    )
    run(["cargo", "vendor", "--quiet", "--versioned-dirs", directory / "crates"], directory / "fetch.log", project)
    return directory / "crates" / f"{name}-{version}"


def npm_package(name: str, version: str, directory: Path) -> None:
    """Install a package of npm in ``directory``."""
    options = ["--no-save", "--no-audit", "--no-fund", "--loglevel=error"]
    run(["npm", "install", "--prefix", directory, *options, f"{name}@{version}"], directory / "fetch.log")


def executables(*names: str) -> list[str]:
    """The names of programs that this machine does not have."""
    return [name for name in names if shutil.which(name) is None]


def in_environment(**more: str) -> dict[str, str]:
    """The environment of a suite's process: without the checkout on Python's path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
