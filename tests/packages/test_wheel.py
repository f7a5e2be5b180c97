"""The first commands of docs/install.md: they install the wheel into an empty environment, where a broker runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from support.interpreters import ROOT, copy_tracked_files, run

from packages import bom
from packages.trial import try_commands

pytestmark = pytest.mark.one_build

PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("\n## A wheel\n")[2].partition("\n## ")[0]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_OF_THE_PAGE = {"test", "interop", "fuzz", "lock", "docs", "dist", "bench", "jupyter"}  # the last one is of compose.yaml


def problems(bill: Path) -> list[str]:
    """Where a bill of materials contradicts the schema."""
    found = JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill.read_text(encoding="utf-8"), all_errors=True)
    return [str(each) for each in found or ()]


@pytest.mark.timeout(600)
def test_the_first_commands_of_the_page_install_a_broker(tmp_path: Path) -> None:
    log, source, wheels, place = tmp_path / "log", tmp_path / "source", tmp_path / "wheels", tmp_path / "opt"
    copy_tracked_files(source)
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source], log,
        MQTTBROKER_COMPILE="0")  # fmt: skip
    (wheel,) = wheels.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    block = re.search(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    *installation, start = block[1].replace("python3 ", f"{sys.executable} ").replace("/opt/mqttbroker", str(place)).splitlines()
    assert start == f"{place}/bin/mqttbroker serve"
    for command in installation:
        run(["sh", "-c", command], log, directory=wheels, PIP_NO_COMPILE="1")  # of 3,000 modules few are imported
    try_commands(place / "bin", "plain", tmp_path / "data")

    (packages,) = place.glob("lib/python3.*/site-packages")
    bill = bom.of_wheel(wheel, packages, log)
    assert problems(bill) == [] and bill.parent == wheels
    told = json.loads(bill.read_text())
    listed = {(each["name"].lower(), each["version"]) for each in told["components"]}
    command = [place / "bin" / "python", "-m", "pip", "list", "--format", "json"]
    installed = {(each["name"].lower(), each["version"]) for each in json.loads(subprocess.check_output(command))}
    assert {(name, version) for name, version in installed if name not in ("pip", "setuptools", "mqttbroker")} == listed
    root = told["metadata"]["component"]
    assert (root["name"], ("mqttbroker", root["version"]) in installed) == ("mqttbroker", True)
    edges = {each["ref"]: each.get("dependsOn", []) for each in told["dependencies"]}
    assert len(edges[root["bom-ref"]]) == len(PROJECT["dependencies"])


def test_the_bill_of_the_image_has_its_pinned_packages(tmp_path: Path) -> None:
    bill = bom.of_image(tmp_path / "image.cdx.json", "1.2.3", tmp_path / "log")
    assert problems(bill) == []
    told = json.loads(bill.read_text())
    components = {each["name"]: each for each in told["components"]}
    pinned = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", (ROOT / "requirements" / "image.txt").read_text(), re.MULTILINE)
    assert len(pinned) > 20 and all(components[name]["version"] == version for name, version in pinned)
    assert all(components[name]["externalReferences"][0]["hashes"] for name, _ in pinned)
    (digest,) = components["python"]["hashes"]
    assert f"-slim-bookworm@sha256:{digest['content']}" in (ROOT / "Dockerfile").read_text()
    assert told["metadata"]["component"]["version"] == "1.2.3"

    told["components"][0].pop("name")  # the validator sees what is wrong
    bill.write_text(json.dumps(told))
    assert problems(bill)


def test_the_page_names_each_part_for_users() -> None:
    named = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`([a-z-]+)`", row)}
    assert named == PROJECT["optional-dependencies"].keys() - NOT_OF_THE_PAGE
