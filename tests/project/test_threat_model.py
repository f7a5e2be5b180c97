"""docs/threat-model.md against the configuration and the code."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from support.paths import ROOT

from mqttbroker.config.settings import Settings
from mqttbroker.server.reload import flatten

TEXT = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([a-z_.0-9]+)` \| `(.*?)` \|", TEXT, re.MULTILINE)

pytestmark = pytest.mark.one_build


def documented() -> Any:
    """conf/mqttbroker.toml, whose values are the defaults (tests/mqttbroker/config/test_config.py)."""
    return tomllib.loads((ROOT / "conf" / "mqttbroker.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("key", "default"), ROWS, ids=[key for key, _ in ROWS])
def test_the_table_has_the_default(key: str, default: str) -> None:
    found = documented()
    for name in key.split("."):
        found = found[int(name)] if isinstance(found, list) else found.get(name, [] if key == "http.access" else None)
    assert found == tomllib.loads(f"x = {default}")["x"]


def test_the_table_has_every_key_about_logins_and_access() -> None:
    keys = {
        key for key in flatten(Settings()) if re.match(r"bans\.|logins\.|crl\.|http\.(access|token|client_c)|.*(anonymous|acl_file)", key)
    }
    keys = {key for key in keys if not key.startswith("listeners.")}
    assert keys <= {key for key, _ in ROWS}


def test_every_setting_and_metric_that_the_text_names_exists() -> None:
    keys = {name for key in flatten(Settings()) for name in key.split(".")} | {
        "http",
        "access",
        "streams",
        "token_file",
    }
    words = set(re.findall(r"`([a-z]+_[a-z_]+|bans|origins)(?: = [^`]*)?`", TEXT))
    metrics = {word for word in words if word.startswith("mqttbroker_")}
    assert words - metrics - {"path", "filter"} <= keys
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "mqttbroker" / "admin").rglob("*.py"))
    for name in metrics:
        assert name.removeprefix("mqttbroker_").removesuffix("_total") in source, name


def test_links_lead_to_files_and_headings() -> None:
    for file in ("docs/threat-model.md", "SECURITY.md"):
        page = ROOT / file
        for target, heading in re.findall(r"\]\(([^)#]+)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            text = (page.parent / target).read_text(encoding="utf-8")
            headings = {re.sub(r"[^a-z0-9 -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
            assert not heading or heading in headings, f"{file}: {target}#{heading}"
