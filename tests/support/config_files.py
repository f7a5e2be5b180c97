"""Configuration files, and the problems found in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mqttbroker.config.load import ConfigError, load_settings


def write(directory: Path, text: str) -> Path:
    path = directory / "broker.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path | None = None, environ: dict[str, str] | None = None, flags: dict[str, str] | None = None) -> list[str]:
    """The problems, without the lines of their keys."""
    with pytest.raises(ConfigError) as caught:
        load_settings(path, environ, flags)
    return [without_line(text) for text in caught.value.problems]


def without_line(text: str) -> str:
    return re.sub(r"^((?:warning: )?[^:]*\.toml):\d+: ", r"\1: ", text)
