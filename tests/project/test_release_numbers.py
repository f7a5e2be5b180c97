"""The number of the release is the same wherever the project says it; docs/releasing.md lists the places."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from support.command_line import run
from support.configuration_reference import RELEASED, UNRELEASED
from support.paths import ROOT

from mqttbroker import __version__
from mqttbroker.admin.data.version import FORMATS
from mqttbroker.admin.http.openapi import document

pytestmark = pytest.mark.one_build


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_changelog_begins_with_this_version() -> None:
    first, *older = re.findall(r"^## (.*)$", text("CHANGELOG.md"), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(__version__)} — (?:unreleased|\d{{4}}-\d\d-\d\d)", first)
    numbers = [tuple(map(int, heading.split()[0].split("."))) for heading in (first, *older)]
    assert numbers == sorted(set(numbers), reverse=True)


def test_the_chart_has_this_version() -> None:
    chart = yaml.safe_load(text("conf/helm/mqttbroker/Chart.yaml"))
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_the_program_says_this_version_and_its_data_formats(tmp_path: Path) -> None:
    first, second = run("--version", cwd=tmp_path).stdout.splitlines()
    assert first.startswith(f"mqttbroker {__version__} (")
    assert second == "data formats: " + ", ".join(f"{name} {version}" for name, version in FORMATS.items())
    assert document(())["info"]["version"] == __version__


def test_the_pages_say_this_version() -> None:
    assert f"| {__version__} |" in text("docs/upgrade.md")
    assert UNRELEASED == __version__ and __version__ not in RELEASED
    assert f"| suite | version | mqttbroker {__version__} |" in text("docs/clients.md")
    releasing = text("docs/releasing.md")
    for path in re.findall(r"^\| `([^`]+\.\w+)` \|", releasing, re.MULTILINE):
        assert (ROOT / path).is_file(), path


def test_no_other_page_names_a_version_of_its_own() -> None:
    """A wheel or an image in an example has no number that gets old."""
    for path in ("README.md", "docs/install.md", "docs/tutorial.md", "docs/commands.md", "Dockerfile"):
        assert not re.search(r"mqttbroker[-: ]v?\d+\.\d+\.\d+", text(path)), path
