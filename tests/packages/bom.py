"""Software bills of materials (CycloneDX 1.6, JSON): what an installation of a package brings, with versions and licences."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from support.interpreters import ROOT, run

PROGRAM = Path(sys.executable).parent / "cyclonedx-py"


def beside(package: Path) -> Path:
    """Where the bill of a package lies."""
    return package.with_name(f"{package.name}.cdx.json")


def of_wheel(wheel: Path, packages: Path, log: Path, package: Path | None = None) -> Path:
    """Write the bill of ``wheel``, or of ``package`` that it was built from.  ``packages`` has what its installation brought."""
    package = package or wheel
    with tempfile.TemporaryDirectory() as scratch:
        python = Path(scratch) / "python"  # tells cyclonedx-py where the packages are, also those of another machine
        python.write_text(f"#!/bin/sh\necho '{json.dumps([str(packages)])}'\n")
        python.chmod(0o755)
        bill = _made("environment", python, _metadata(wheel), Path(scratch), log)
    bill["components"] = [each for each in bill["components"] if each["name"] not in ("pip", "setuptools")]  # of the environment
    here = {each["bom-ref"] for each in [*bill["components"], bill["metadata"]["component"]]}
    bill["dependencies"] = [each for each in bill["dependencies"] if each["ref"] in here]
    bill["metadata"]["component"]["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(package.read_bytes()).hexdigest()}]
    return _written(bill, beside(package))


def of_image(target: Path, version: str, log: Path) -> Path:
    """Write the bill of the image: its packages of Python, with their hashes, and the image that it stands on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = {"name": project["name"], "version": version, "description": project["description"], "license": project["license"],
                "dependencies": [*project["dependencies"], *project["optional-dependencies"]["parquet"]]}  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        bill = _made("requirements", ROOT / "requirements" / "image.txt", metadata, Path(scratch), log)
    for component in bill["components"]:
        component.pop("description", None)  # the line of the file
    found = re.search(r"^ARG PYTHON=([\w.-]+)@sha256:([0-9a-f]{64})$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, "the Dockerfile pins no image of Python"
    bill["components"].append({
        "type": "container", "bom-ref": "base-image", "name": "python", "version": found[1],
        "purl": f"pkg:oci/python@sha256%3A{found[2]}?tag={found[1]}", "hashes": [{"alg": "SHA-256", "content": found[2]}],
    })  # fmt: skip
    return _written(bill, target)


def _made(command: str, subject: Path, metadata: dict[str, Any], scratch: Path, log: Path) -> dict[str, Any]:
    """What cyclonedx-py finds; it validates it, too."""
    described, target = scratch / "pyproject.toml", scratch / "bill.json"
    described.write_text("[project]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in metadata.items()), encoding="utf-8")
    run([PROGRAM, command, "--pyproject", described, "--spec-version", "1.6", "--output-reproducible", "--validate",
         "--output-file", target, subject], log)  # fmt: skip
    return dict(json.loads(target.read_text(encoding="utf-8")))


def _metadata(wheel: Path) -> dict[str, Any]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        told = HeaderParser().parsestr(archive.read(name).decode())
    required = [line for line in told.get_all("Requires-Dist", []) if "extra" not in str(Requirement(line).marker)]
    return {"name": told["Name"], "version": told["Version"], "description": told["Summary"], "license": told["License-Expression"],
            "dependencies": required}  # fmt: skip


def _written(bill: dict[str, Any], target: Path) -> Path:
    root = bill["metadata"]["component"]
    root["purl"] = f"pkg:pypi/{root['name']}@{root['version']}"
    target.write_text(json.dumps(bill, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return target
