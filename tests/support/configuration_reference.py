"""Writes docs/configuration.md: kinds and defaults from the settings, descriptions from conf/mqttbroker.toml.

Usage: python -m support.configuration_reference FILE
"""

from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mqttbroker import __version__
from mqttbroker.auth.external_specs import EXTERNAL
from mqttbroker.config import setting_kinds as kinds
from mqttbroker.config.printed import toml
from mqttbroker.config.settings import Bridge, BridgeTopic, HttpAccess, Listener, Queue, Settings, Stream
from mqttbroker.server.reload import RELOADABLE
from support.paths import ROOT

CONF = ROOT / "conf" / "mqttbroker.toml"
# Keys of released versions, by section; "" has those in front of the sections. All others are new.
RELEASED = {
    "0.1.0": {
        "": "data_dir durability durability_interval on_corrupt_store allow_anonymous password_file acl_file reveal_denials "
        "sys_interval shared_subscription_strategy response_information",
        "log": "level format",
        "http": "host port token certfile keyfile tls_version",
        "listeners": "host port type path mode certfile keyfile cafile crlfile tls_version client_certificate "
        "use_identity_as_username origins max_connections max_packet_size connect_timeout max_keep_alive receive_maximum "
        "topic_alias_maximum allow_anonymous password_file acl_file",
        "limits": "max_connections max_sessions max_connect_size connect_timeout max_keep_alive max_session_expiry "
        "max_packet_size receive_maximum max_inflight max_inflight_unpersisted topic_alias_maximum max_topic_levels "
        "max_topic_length max_subscriptions_per_client retain_available max_retained_messages max_retained_bytes "
        "max_queued_messages max_queued_bytes queue_full queue_high_watermark_messages queue_high_watermark_bytes "
        "backpressure_wait max_total_queued_messages max_total_queued_bytes max_total_queue_memory_bytes "
        "max_queue_memory_messages max_transient_queue_bytes max_outbox_bytes max_pending_write_bytes route_cache_size",
        "redirect": "server_reference permanent rate",
        "consumers": "max_consumers max_name_length forget_after interval retention_warning retention_warning_percent warning_interval",
        "streams": "filters partitions key retention_age retention_bytes segment_bytes segment_age seal",
    }
}
UNRELEASED = __version__

HEAD = """\
# Configuration

This page is made from the code and from [conf/mqttbroker.toml](../conf/mqttbroker.toml) by `make configuration`.

`mqttbroker serve --config FILE` reads a TOML file. Environment variables override it, and the flags of `serve` override
both. The variable of a key is its path with two underscores between the parts: `MQTTBROKER_LISTENERS__0__PORT=1884`,
`MQTTBROKER_LIMITS__MAX_PACKET_SIZE=1MiB`, `MQTTBROKER_STREAMS__SENSORS__FILTERS=sensors/#,meters/#`. Relative paths in
values start at the working directory.

```sh
mqttbroker check-config FILE                     # problems name file, line and key
mqttbroker check-config FILE --print-config      # each setting with the file and line, the variable or the flag that set it
mqttbroker serve --config FILE --port 1884 --print-config | grep -v '# default$'      # also with flags; starts no broker
mqttbroker config --changed                      # the same of a running broker
```

What `--print-config` prints is a configuration file without secrets, which are comments.

## Several files

`include`, in front of the first table of a file, names other files: a path, a pattern with `*`, `?` or `[…]`, or a list
of them, relative to the file that includes them.

```toml
include = "conf.d/*.toml"
```

An included file overrides the file that includes it, and a later file an earlier one; those of a pattern come in the
order of their names, hidden ones not at all. Tables are merged key by key, also those of a stream. `[[listeners]]`,
`[[bridges]]` and `[[http.access]]` of all files count, those of the including file first; `--port` and `MQTTBROKER_LISTENERS__0__PORT`
set the first listener. A pattern may have no file. A file that is missing, or that is included twice or by itself, is a
problem. Commands that take a configuration, SIGHUP included, follow `include`.

## Values

Durations are written as `"500ms"`, `"10s"`, `"5m"`, `"12h"` or `"7d"`, sizes as `"512B"`, `"64KiB"`, `"10MiB"` or
`"1GiB"`. Each key below has its default, its values, when a change is applied, and the first version that has it.
**SIGHUP**: when the broker gets the signal, or by `mqttbroker reload`; the log names each changed setting. **restart**:
with the next start; SIGHUP logs `event=restart_needed`. The contents of files with passwords, rules, tokens, keys and
certificates are read again on SIGHUP in any case.
"""


class Group(NamedTuple):
    """Keys of conf/mqttbroker.toml with one description."""

    text: list[str]
    keys: list[str]


class Section(NamedTuple):
    """A table of conf/mqttbroker.toml; ``name`` is "" for the keys in front of all tables."""

    name: str
    header: str
    text: list[str]
    groups: list[Group]


def sections() -> list[Section]:
    """The tables of conf/mqttbroker.toml in their order."""
    found = [Section("", "", [], [])]
    comment: list[str] = []
    grouped = False  # the last line is a key
    uncommented = r"^#(?=\[streams|\[queues|\[\[http\.access|\[\[bridges|[a-z_]+ = )"
    text = re.sub(uncommented, "", CONF.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for line in text.splitlines():
        header = re.fullmatch(r"\[+([a-z_.]+)\]+", line)
        key = re.match(r"([a-z0-9_]+) = ", line)
        if line.startswith("#"):
            comment.append(line[2:] if line.startswith("# ") else line[1:])
            grouped = False
        elif header and header[1] == "http_callback.body":
            found[-1].groups.append(Group(comment, ["body"]))
            found.append(Section("-", "", [], []))
            comment = []
        elif header:
            name = header[1].removesuffix(".sensors").removesuffix(".jobs")
            found.append(Section(name, line.replace(".sensors", ".NAME").replace(".jobs", ".NAME"), comment, []))
            comment = []
        elif key and key[1] != "include":
            if not grouped:
                found[-1].groups.append(Group(comment, []))
            found[-1].groups[-1].keys.append(key[1])
            comment, grouped = [], True
        elif not line or key:
            comment, grouped = [], False
    return [each for each in found if each.name != "-"]


SECTIONS = {
    "": Settings,
    "http.access": HttpAccess,
    "listeners": Listener,
    "streams": Stream,
    "queues": Queue,
    "bridges": Bridge,
    "bridges.topics": BridgeTopic,
} | {field.name: field.metadata["section"] for field in dataclasses.fields(Settings) if "section" in field.metadata}


def reference() -> str:
    """The text of docs/configuration.md."""
    lines = [HEAD]
    for section in sections():
        fields = {field.name: field for field in dataclasses.fields(SECTIONS[section.name])}
        lines += [f"## {f'`{section.header}`' if section.header else 'In front of all tables'}", "", *_wrapped(section.text)]
        for group in section.groups:
            lines += [_key_line(section.name, fields[name]) + "  " for name in group.keys]
            lines[-1] = lines[-1].rstrip()
            lines += ["", *_wrapped(group.text)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _key_line(section: str, field: dataclasses.Field[Any]) -> str:
    name = f"{section}.{field.name}" if section not in ("", "listeners", "http.access", "streams", "queues") else field.name
    required = field.default is dataclasses.MISSING
    default = "required" if required else f"`{toml(field.metadata['kind'].written(field.default))}`"
    return " · ".join((f"**`{name}`**", default, _values(field.name, field.metadata["kind"]), _applied(section, field.name),
                       _since(section, field.name)))  # fmt: skip


def _applied(section: str, name: str) -> str:
    if section in ("http.access", "bridges", "bridges.topics"):
        return "SIGHUP"
    if section in EXTERNAL:
        return 'restart, if it was or becomes `""`; else SIGHUP' if name in ("url", "object") else "SIGHUP"
    key = {"": name, "listeners": f"listeners.0.{name}"}.get(section, f"{section}.{name}")
    return "SIGHUP" if RELOADABLE.fullmatch(key) else "restart"


def _since(section: str, name: str) -> str:
    return next((version for version, keys in RELEASED.items() if name in keys.get(section, "").split()), UNRELEASED)


def _values(name: str, kind: Any) -> str:
    """The type, the unit and the range of a setting."""
    if isinstance(kind, kinds.OrNone):
        inner = kind.kind
        word = kind.word
        return f'{_values(name, inner)}, or `"{word}"`'
    if isinstance(kind, kinds.Integer):
        unit = " per second" if "rate" in name else " %" if name.endswith("percent") else ""
        return f"{kind.low}–{kind.high}{unit}"
    if isinstance(kind, (kinds.Duration, kinds.Size)):
        unit = " per second" if "rate" in name else ""
        return f"{'duration' if isinstance(kind, kinds.Duration) else 'size'} {kind.low}–{kind.high}{unit}"
    if isinstance(kind, kinds.MemorySize):
        return f'size {kind.size.low}–{kind.size.high}, share like `"50%"`, or `"auto"`'
    if isinstance(kind, kinds.Choice):
        return _words(kind.words, "or")
    if isinstance(kind, kinds.FirstOf):
        return f"{_words(kind.words, 'or')}, or a list of them"
    if isinstance(kind, kinds.Words):
        return f"list of {_words(kind.words, 'and')}"
    return _TYPES[type(kind)]


_TYPES = {
    kinds.Boolean: "true or false",
    kinds.Anonymous: 'true, false or `"loopback"`',
    kinds.Automatic: 'true, false or `"auto"`',
    kinds.Text: "string",
    kinds.Name: "name",
    kinds.Prefix: "beginning of topics",
    kinds.RemoteAddresses: "list of URLs",
    kinds.OptionalText: "string",
    kinds.BearerToken: "secret",
    kinds.HeaderText: "secret",
    kinds.TopicPattern: "topic name with `%c` and `%u`",
    kinds.ClientIdPattern: "client id with `%u`, `%i` and `*`",
    kinds.OptionalPath: "path",
    kinds.ListenerPath: 'path, or `"global"`',
    kinds.Directory: "path of a directory",
    kinds.Archive: "S3 URL or path",
    kinds.Host: "name or address",
    kinds.FileMode: "permissions in octal digits",
    kinds.Texts: "list of strings",
    kinds.Networks: "list of addresses and networks",
    kinds.Filters: "list of topic filters",
    kinds.PartitionKey: '`"topic"`, `"client"` or `"user-property:NAME"`',
    kinds.Patterns: "table of strings",
    kinds.Templates: "table of strings",
    kinds.Headers: "table of strings, secret",
    kinds.Options: "table, secret",
    kinds.PluginReference: "`module:Class`",
    kinds.Url: "URL",
    kinds.Levels: "table of levels by area",
}


def _words(words: tuple[str, ...], last: str) -> str:
    quoted = [f'`"{word}"`' for word in words]
    return ", ".join(quoted[:-1]) + f" {last} " + quoted[-1]


def _wrapped(comment: list[str]) -> Iterator[str]:
    """A comment as paragraphs, and its indented lines as a list."""
    paragraph: list[str] = []
    for line in [*comment, ""]:
        item = re.match(r"  (\S+)   +(.*)", line)
        if item and paragraph:
            yield from _filled(paragraph)
            paragraph = []
        if item:
            paragraph = [f"- `{item[1]}`: {item[2]}"]
        elif line.startswith("   ") and paragraph:
            paragraph.append(line.strip())
        else:
            if paragraph and paragraph[0].startswith("- ") or not line:
                yield from _filled(paragraph)
                yield ""
                paragraph = []
            if line:
                paragraph.append(_marked(line.strip()))


def _filled(lines: list[str]) -> list[str]:
    text = " ".join(lines)
    return textwrap.wrap(text, 120, subsequent_indent="  " if text.startswith("- ") else "", break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def _marked(line: str) -> str:
    """The line with marks where Markdown would change characters."""
    return re.sub(r"(?<!`)(<[\w ]+>)", r"`\1`", line).replace("*", r"\*")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
