"""The examples of docs/bridges.md are configurations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.paths import ROOT

from mqttbroker.config.load import load_settings
from topic_matcher.remapping import incoming_map, outgoing_map

pytestmark = pytest.mark.one_build


def test_the_examples_of_bridges_do_what_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "bridges.md").read_text(encoding="utf-8")
    (tmp_path / "password").write_text("secret")
    bridges = []
    for number, block in enumerate(re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)):
        path = tmp_path / f"{number}.toml"
        path.write_text(block.replace("/etc/mqttbroker/cloud-password", str(tmp_path / "password")))
        bridges += load_settings(path).bridges
    cloud, warehouse = bridges
    assert cloud.password == "secret"
    assert outgoing_map(cloud.rules()).find(b"plant/7/temp") == b"site1/plant/7/temp"
    assert incoming_map(cloud.rules()).find(b"site1/cmd/7") == b"cmd/7"
    assert outgoing_map(warehouse.rules()).find(b"plant/1/press/temp") == b"machines/press/1/temp"
