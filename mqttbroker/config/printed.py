"""The settings in force as a TOML text that can be read back: each with the place that set it, and without secrets."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from mqttbroker import __version__
from mqttbroker.config.files import one_line
from mqttbroker.config.in_force import MASK, shown_value
from mqttbroker.config.settings import Settings

_COMMENT_COLUMN = 60


def printed(settings: Settings) -> str:
    """All settings. A secret is a comment, so that a broker that reads the text lacks it and says so."""
    lines = [
        f"# The configuration in force of mqttbroker {__version__}: each setting with the file and line, the variable or the flag",
        f"# that set it. Secrets are left out: they are the comments with {MASK}.",
        "",
        *_keys(settings, "", settings),
    ]
    for field in dataclasses.fields(settings):
        if "section" in field.metadata:
            section = getattr(settings, field.name)
            lines += ["", f"[{field.name}]", *_keys(section, f"{field.name}.", settings)]
            for inner in dataclasses.fields(section):
                if "tables" in inner.metadata:
                    name = f"{field.name}.{inner.name}"
                    for index, item in enumerate(getattr(section, inner.name)):
                        lines += ["", f"[[{name}]]", *_keys(item, f"{name}.{index}.", settings)]
    for index, listener in enumerate(settings.listeners):
        lines += ["", "[[listeners]]", *_keys(listener, f"listeners.{index}.", settings)]
    for index, stream in enumerate(settings.streams):
        lines += ["", f"[streams.{stream.name}]", *_keys(stream, f"streams.{index}.", settings)]
    for index, queue in enumerate(settings.queues):
        lines += ["", f"[queues.{queue.name}]", *_keys(queue, f"queues.{index}.", settings)]
    for index, bridge in enumerate(settings.bridges):
        lines += ["", "[[bridges]]", *_keys(bridge, f"bridges.{index}.", settings)]
        for number, topic in enumerate(bridge.topics):
            lines += ["", "[[bridges.topics]]", *_keys(topic, f"bridges.{index}.topics.{number}.", settings)]
    return "\n".join(lines) + "\n"


def _keys(section: Any, prefix: str, settings: Settings) -> Iterator[str]:
    fields = [field for field in dataclasses.fields(section) if "kind" in field.metadata]
    in_files = {field.metadata["file_of"] for field in fields
                if "file_of" in field.metadata and getattr(section, field.name) is not None}  # fmt: skip
    for field in fields:
        if field.name in in_files:
            continue  # read back from its file
        value = getattr(section, field.name)
        shown = shown_value(field.name, value)
        hidden = value != field.default and shown != shown_value("", value)
        line = f"#{field.name} = {toml(shown)}" if hidden else f"{field.name} = {toml(field.metadata['kind'].written(value))}"
        source = one_line(settings.sources.get(prefix + field.name, "default"))
        yield f"{line:<{_COMMENT_COLUMN}}  # {source}"


def toml(value: object) -> str:
    """A value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    # A string of JSON is one of TOML, but for U+007F, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml(name)
