"""docs/configuration.md is what `make configuration` writes, and has each setting once."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import pytest
from support.configuration_reference import RELEASED, SECTIONS, reference
from support.paths import ROOT

pytestmark = pytest.mark.one_build


def test_the_reference_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == reference(), "run `make configuration`"


def test_the_reference_has_each_setting_once() -> None:
    """The sections of listeners, senders of HTTP, streams and queues have names of keys alone."""
    listed = Counter(re.findall(r"^\*\*`([a-z0-9_.]+)`\*\*", reference(), re.MULTILINE))
    expected: Counter[str] = Counter()
    for section, settings in SECTIONS.items():
        prefix = "" if section in ("", "listeners", "http.access", "streams", "queues") else f"{section}."
        expected.update(prefix + field.name for field in dataclasses.fields(settings) if "kind" in field.metadata)
    assert listed == expected


def test_each_setting_has_a_description() -> None:
    for paragraph in re.split(r"\n(?=\*\*`)(?<!  \n)", reference())[1:]:
        keys, _, text = paragraph.partition("\n\n")
        assert text.strip(), keys


def test_keys_of_released_versions_exist() -> None:
    for version, keys_by_section in RELEASED.items():
        for section, keys in keys_by_section.items():
            known = {field.name for field in dataclasses.fields(SECTIONS[section])}
            assert set(keys.split()) <= known, f"{version}: [{section}]"
