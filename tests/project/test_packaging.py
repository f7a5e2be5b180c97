"""The image's pinned packages, the Dockerfile and the systemd unit."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.paths import ROOT
from support.tools import needs

from mqttbroker.config.load import load_settings

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
UNIT = ROOT / "conf" / "mqttbroker.service"
SOCKET_UNIT = ROOT / "conf" / "mqttbroker.socket"
IMAGE = {**default_environment(), "python_version": "3.13", "python_full_version": "3.13.0", "sys_platform": "linux",
         "platform_system": "Linux", "os_name": "posix", "implementation_name": "cpython",
         "platform_python_implementation": "CPython", "platform_machine": "x86_64", "extra": ""}  # fmt: skip

pytestmark = pytest.mark.one_build


def pinned(name: str) -> dict[str, str]:
    """The versions in a file of requirements/; every one has hashes, and there is nothing else in the file."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    found = {}
    for entry in re.sub(r"\s*#.*", "", text).replace("\\\n", " ").split("\n"):
        if not entry.strip():
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+]+)\s*(?:;[^-]*?)?((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*", entry)
        assert match, f"requirements/{name}: {entry}"
        found[canonicalize_name(match[1])] = match[2]
    return found


@pytest.mark.parametrize("file", ["image.txt", "build.txt", "notebook.txt"])
def test_pinned_packages_are_in_the_ranges_of_pyproject(file: str) -> None:
    """`make lock` mends it."""
    project = PROJECT["project"]
    extras = {"image.txt": ("parquet",), "notebook.txt": ("spark", "jdk", "demo", "notebook", "jupyter")}
    wanted = PROJECT["build-system"]["requires"]
    if file in extras:
        wanted = [*project["dependencies"], *(each for extra in extras[file] for each in project["optional-dependencies"][extra])]
    versions = pinned(file)
    for requirement in map(Requirement, wanted):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None and version in requirement.specifier, f"{requirement}: {version}"


@pytest.mark.parametrize("file", ["image.txt", "build.txt", "notebook.txt"])
def test_pinned_packages_have_what_they_need(file: str) -> None:
    """The image is installed without an index, so a package that is missing here would be missing there."""
    versions = pinned(file)
    looked_at = 0
    for name, version in versions.items():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if distribution.version != version:
            continue
        looked_at += 1
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker is None or requirement.marker.evaluate(IMAGE):
                found = versions.get(canonicalize_name(requirement.name))
                assert found is not None and found in requirement.specifier, f"{name} needs {requirement}: {found}"
    assert looked_at > len(versions) // 3


def test_requirements_name_no_host() -> None:
    for path in (ROOT / "requirements").iterdir():
        assert not re.search(r"://|--(extra-)?index-url|--trusted-host|--find-links|@ ", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(("file", "user"), [("Dockerfile", 1883), ("conf/compose/notebook.Dockerfile", 1000)])
def test_the_image_installs_only_packages_with_known_hashes(file: str, user: int) -> None:
    text = (ROOT / file).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"\bpip (?:install|wheel|download) [^&\n]*", text)
    assert len(commands) == 4
    for command in commands:
        assert "--require-hashes" in command or "--no-index" in command, command
    last = text[text.rindex("\nFROM ") :]
    assert f"\nUSER {user}:{user}\n" in last and f"useradd --uid {user} " in last  # a number, so that Kubernetes knows it is not root
    assert "gcc" not in last


def unit_lines() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_unit_starts_a_broker_with_its_state_directory() -> None:
    lines = unit_lines()
    assert lines["ExecStart"] == ["/opt/mqttbroker/bin/mqttbroker serve --config /etc/mqttbroker/mqttbroker.toml"]
    variables = dict(each.split("=", 1) for each in lines["Environment"])
    assert load_settings(None, variables).data_dir == Path("/var/lib") / lines["StateDirectory"][0]
    assert lines["RuntimeDirectoryPreserve"] == ["restart"]  # or every restart forgets the proven passwords
    assert lines["Type"] == ["notify"] and lines["WatchdogSec"] and "NotifyAccess" not in lines  # the main process notifies
    assert lines["UMask"] == ["0077"] and lines["StateDirectoryMode"] == ["0700"]


@needs("systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/mqttbroker/bin/mqttbroker", sys.executable))
    sockets = tmp_path / SOCKET_UNIT.name
    sockets.write_text(SOCKET_UNIT.read_text(encoding="utf-8").replace("#ListenStream", "ListenStream"))
    command = ["systemd-analyze", "verify", str(unit), str(sockets)]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    # 2.0 of 10, where 0 is a service that can do nothing: the network and its own files are what is left.
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=20", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert rated.returncode == 0, rated.stdout + rated.stderr
