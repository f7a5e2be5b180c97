"""Loads the configuration: TOML files, environment variables and flags become one checked, immutable ``Settings``.

Flags override the environment, which overrides the files, which override the defaults in settings.py. Every problem is
one line with its source (file, variable or flag), the key and the reason. conf/mqttbroker.toml documents every key.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mqttbroker.config.files import INCLUDE, ConfigFile, ConfigFiles, dotted, one_line
from mqttbroker.config.files import ConfigError as ConfigError
from mqttbroker.config.in_force import flatten
from mqttbroker.config.setting_kinds import shown
from mqttbroker.config.settings import (
    Bans,
    Cluster,
    Consumers,
    Http,
    HttpCallback,
    Jwt,
    Limits,
    Listener,
    Log,
    Queue,
    Redirect,
    Settings,
    Stream,
)
from mqttbroker.config.stream_definition import STREAM_NAME

log = logging.getLogger("mqttbroker")

MAX_SECRET_BYTES = 65535
ENVIRONMENT_PREFIX = "MQTTBROKER_"
FLAGS: dict[str, tuple[str, ...]] = {
    "--host": ("listeners", "0", "host"),
    "--port": ("listeners", "0", "port"),
    "--http-port": ("http", "port"),
    "--data-dir": ("data_dir",),
    "--durability": ("durability",),
    "--allow-anonymous": ("allow_anonymous",),
    "--workers": ("workers",),
    "--log-level": ("log", "level"),
}

# Kubernetes sets these variables in every pod for a service named "mqttbroker"; MQTTBROKER_COMPILE belongs to the
# build.
_NOT_SETTINGS = re.compile(r"SERVICE_(HOST|PORT(_.+)?)|PORT_\d+_(TCP|UDP)(_.+)?|COMPILE|API_(URL|TOKEN|TOKEN_FILE|CA_FILE)")


class _FromText(str):
    """The value of a variable or flag, which is text for keys of every type."""


_Path = tuple[str, ...]
_SECTION_LISTS: dict[str, type[Any]] = {"listeners": Listener, "streams": Stream, "queues": Queue}


def _former_names(section: type[Any], path: _Path) -> Iterator[tuple[_Path, _Path]]:
    """Paths of keys by their former names, and the paths by their names."""
    for field in dataclasses.fields(section):
        if "section" in field.metadata:
            yield from _former_names(field.metadata["section"], path + (field.name,))
        elif field.metadata.get("formerly"):
            yield path + (field.metadata["formerly"],), path + (field.name,)


_EACH = "*"  # stands for the numbers of the listeners in `_RENAMED`
_RENAMED: dict[_Path, _Path] = {
    **dict(_former_names(Settings, ())),
    **dict(_former_names(Listener, ("listeners", _EACH))),
}


def _new_name(path: _Path) -> _Path:
    """The path of a key that is given by its former name; any other path as it is."""
    general = ("listeners", _EACH, *path[2:]) if path[:1] == ("listeners",) else path
    return path[:-1] + _RENAMED[general][-1:] if general in _RENAMED else path


def _tables(tree: Any, path: _Path) -> Iterator[tuple[_Path, dict[str, Any]]]:
    """The tables at a path of `_RENAMED`, each with its own path."""
    found: list[tuple[_Path, Any]] = [((), tree)]
    for name in path:
        parts = found
        found = []
        for before, node in parts:
            if name == _EACH and isinstance(node, list):
                found += [(before + (str(index),), item) for index, item in enumerate(node)]
            elif isinstance(node, dict) and name in node:
                found.append((before + (name,), node[name]))
    return ((before, node) for before, node in found if isinstance(node, dict))


# Keys that have no effect any more, and why: a file that has one still loads.
_GONE = dict.fromkeys(
    ("log.syslog_address", "log.syslog_facility"), "the broker writes to no syslog itself: leave it out (docs/upgrade.md)"
)


class _Builder:
    """Turns tables into settings and collects the problems.

    ``sources`` names the variable or flag that gave a path; the files gave the others. ``warn`` takes a line for each
    key with a former name, or without an effect.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.files: ConfigFiles | None = None
        self.warn = warn
        self.sources: dict[_Path, str] = {}
        self.renamed: set[_Path] = set()  # paths that variables give by a former name
        self.problems: list[str] = []
        self.invalid: set[str] = set()  # sections with problems

    def problem(self, path: _Path, reason: str) -> None:
        self.invalid.add(path[0])
        self.problems.append(self.line(path, reason))

    def line(self, path: _Path, reason: str) -> str:
        source = next((name for said, name in self.sources.items() if said[: len(path)] == path), "")
        if not source and self.files is None:
            source = self._nearest_source(path)
        elif not source and self.files is not None:
            path, source = self.files.former_name(path), self.files.place(path)
        return ": ".join(part for part in (source, dotted(path), reason) if part)

    def _nearest_source(self, path: _Path) -> str:
        """The variable or flag for the section that lacks a key; "" if there is none."""
        while path := path[:-1]:
            for said, name in self.sources.items():
                if said[: len(path)] == path:
                    return name
        return ""

    def rename_keys(self, file: ConfigFile) -> None:
        """Put the values of keys with a former name under the new one."""
        for former in _RENAMED:
            for path, table in _tables(file.tree, former[:-1]):
                old = path + former[-1:]
                new = _new_name(old)
                if old[-1] not in table:
                    continue
                line = f"{file.place(old)}: {dotted(old)}: is "
                if new[-1] in table:
                    self.invalid.add(old[0])
                    self.problems.append(f"{line}the former name of {dotted(new)}, which is set too")
                else:
                    self.warn(one_line(f"{line}called {dotted(new)} now"))
                    file.former[new] = old
                    table[new[-1]] = table[old[-1]]
                del table[old[-1]]

    def variable(self, tree: dict[str, Any], name: str, text: str) -> None:
        """Put the value of a variable into the tree."""
        path = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
        new = _new_name(path)
        if new in self.sources and (new != path or new in self.renamed):
            self.problems.append(f"{name}: sets {dotted(new)}, as {self.sources[new]} does")
            return
        self.override(tree, new, text, name)
        if new != path:
            self.renamed.add(new)
            self.warn(one_line(f"{name}: {dotted(path)} is called {dotted(new)} now"))

    def settings(self, tree: dict[str, Any]) -> Settings:
        plain = {name: value for name, value in tree.items() if name not in _SECTION_LISTS}
        values = self.values(Settings, plain, ())
        values["listeners"] = self.listeners(tree["listeners"])
        values["streams"] = self.named(Stream, "stream", tree.get("streams", {}))
        values["queues"] = self.named(Queue, "queue", tree.get("queues", {}))
        for section, default in (("log", Log()), ("http", Http()), ("bans", Bans()), ("jwt", Jwt()), ("http_callback", HttpCallback()),
                                 ("cluster", Cluster())):  # fmt: skip
            # An invalid value has its default now, about which a message would mislead.
            if section not in self.invalid:
                for name, reason in values.get(section, default).problems():
                    self.problem((section, *name.split(".")), reason)
        self.check_bridges(values.get("bridges", ()))
        settings = Settings(**values)
        for path, reason in [
            *settings.authentication_problems(),
            *settings.access_problems(),
            *settings.archive_problems(),
            *settings.cluster_problems(),
        ]:
            self.problem(path, reason)
        return settings

    def check_bridges(self, bridges: Sequence[Any]) -> None:
        names: set[str] = set()
        for index, bridge in enumerate(bridges if "bridges" not in self.invalid else ()):
            path = ("bridges", str(index))
            for name, reason in bridge.problems():
                self.problem((*path, *name.split(".")), reason)
            if bridge.name in names:
                self.problem((*path, "name"), f"{bridge.name} is taken by an earlier bridge")
            names.add(bridge.name)

    def tables(self, section: type[Any], raw: object, path: _Path) -> tuple[Any, ...]:
        """The sections of a list of tables; variables give a table whose keys are the numbers of the list."""
        if isinstance(raw, dict) and all(key.isdecimal() for key in raw):
            raw = [raw[key] for key in sorted(raw, key=int)]
        if not isinstance(raw, list):
            self.problem(path, f"must be [[{dotted(path)}]] tables")
            return ()
        read = [self.section(section, item, path + (str(index),)) for index, item in enumerate(raw)]
        return tuple(item for item in read if item is not None)

    def section(self, section: type[Any], raw: object, path: _Path, **given: object) -> Any:
        """An instance of the section; None after a problem that prevents one."""
        if not isinstance(raw, dict):
            # A string may be a secret.
            self.problem(path, f"must be a table of keys, got {'a string' if isinstance(raw, str) else shown(raw)}")
            return None
        values = self.values(section, raw, path)
        required = [name for name in _without_default(section) if name not in given]
        for name in required:
            if name not in raw:
                self.problem(path + (name,), "is required")
        return section(**given, **values) if all(name in values for name in required) else None

    def values(self, section: type[Any], raw: Mapping[str, Any], path: _Path) -> dict[str, Any]:
        known = {field.name: field for field in dataclasses.fields(section)}
        values: dict[str, Any] = {}
        for name, value in raw.items():
            metadata = known[name].metadata if name in known else {}
            if "section" in metadata:
                inner = self.section(metadata["section"], value, path + (name,))
                if inner is not None:
                    values[name] = inner
            elif "tables" in metadata:
                values[name] = self.tables(metadata["tables"], value, path + (name,))
            elif "kind" in metadata:
                try:
                    given = metadata["kind"].from_text(str(value)) if isinstance(value, _FromText) else value
                    values[name] = metadata["kind"].read(given)
                except ValueError as error:
                    self.problem(path + (name,), str(error))
            elif name == INCLUDE:
                self.problem(path + (name,), "only a file can include others, in front of its first [table]")
            elif dotted(path + (name,)) in _GONE:
                self.warn(self.line(path + (name,), _GONE[dotted(path + (name,))]))
            else:
                self.problem(path + (name,), "unknown key" + _suggestion(name, section))
        for name, field in known.items():
            if "file_of" in field.metadata and values.get(name) is not None:
                self.read_secret(known[field.metadata["file_of"]], name, values, path)
        return values

    def read_secret(self, secret: dataclasses.Field[Any], name: str, values: dict[str, Any], path: _Path) -> None:
        """Set a secret to the contents of the file that the key ``name`` gives."""
        if values.get(secret.name):
            self.problem(path + (name,), f"{secret.name} is set, too")
            return
        try:
            values[secret.name] = secret.metadata["kind"].read(secret_in(values[name]))
        except ValueError as error:
            self.problem(path + (name,), f"{values[name]}: {error}")

    def listeners(self, raw: object) -> tuple[Listener, ...]:
        if not isinstance(raw, list) or not raw:
            self.problem(("listeners",), "must be one or more [[listeners]] tables")
            return ()
        read = [self.section(Listener, item, ("listeners", str(i))) for i, item in enumerate(raw)]
        seen: set[str] = set()
        for index, listener in enumerate(read):
            if listener is None:
                continue
            path = ("listeners", str(index))
            for name, reason in listener.problems():
                self.problem(path + (name,), reason)
            key = "path" if listener.type == "unix" else "port"
            if listener.address in seen:
                self.problem(path + (key,), f"{listener.address} is taken by an earlier listener")
            elif getattr(listener, key):
                seen.add(listener.address)
        return tuple(listener for listener in read if listener is not None)

    def named(self, kind: type[Any], word: str, raw: object) -> tuple[Any, ...]:
        """The tables ``[streams.NAME]`` or ``[queues.NAME]``."""
        section = f"{word}s"
        if not isinstance(raw, dict):
            self.problem((section,), f"must be [{section}.NAME] tables")
            return ()
        read: list[Any] = []
        for name, item in raw.items():
            if not STREAM_NAME.fullmatch(name):
                self.problem((section, name), f"a {word}'s name must be 1–64 of A–Z a–z 0–9 _ -, first a letter or digit")
                continue
            found = self.section(kind, item, (section, name), name=name)
            for key, reason in found.problems() if found is not None else ():
                self.problem((section, name, key), reason)
            if found is not None:
                read.append(found)
        return tuple(read)

    def key_sources(self, tree: dict[str, Any], settings: Settings) -> dict[str, str]:
        """The sources of the keys of `flatten`, and of those of the members of lists of tables, that have one."""
        found: dict[str, str] = {}
        access = (f"http.access.{index}.{field.name}" for index, each in enumerate(settings.http.access)
                  for field in dataclasses.fields(each))  # fmt: skip
        topics = (f"bridges.{index}.topics.{number}.{field.name}" for index, each in enumerate(settings.bridges)
                  for number, topic in enumerate(each.topics) for field in dataclasses.fields(topic))  # fmt: skip
        for key in (*flatten(settings), *access, *topics):
            path = tuple(key.split("."))
            if path[0] in ("streams", "queues"):
                path = (path[0], getattr(settings, path[0])[int(path[1])].name, *path[2:])
            for given in (path, (*path[:-1], f"{path[-1]}_file")):
                source = self.source(tree, given)
                if source:
                    found.setdefault(key, source)
        return found

    def source(self, tree: Any, path: _Path) -> str:
        """The source of a path: a variable, a flag, or the file and its line; "" if it has its default."""
        for said, name in self.sources.items():
            if said[: len(path)] == path:
                return name
        for name in path:
            if isinstance(tree, list) and name.isdecimal() and int(name) < len(tree):
                tree = tree[int(name)]
            elif isinstance(tree, dict) and name in tree:
                tree = tree[name]
            else:
                return ""
        return self.files.place(path) if self.files is not None else ""

    def override(self, tree: dict[str, Any], path: _Path, text: str, source: str) -> None:
        """Put the value of a variable or flag into the tree."""
        node: Any = tree
        for depth, name in enumerate(path):
            last = depth == len(path) - 1
            if isinstance(node, list):
                if not name.isdecimal() or int(name) > len(node):
                    self.sources[path] = source
                    self.problem(path[: depth + 1], f"must be a number from 0 to {len(node)} here")
                    del self.sources[path]
                    return
                if int(name) == len(node):
                    node.append({})
                child: Any = int(name)
            elif isinstance(node, dict):
                child = next((key for key in node if key.lower() == name.lower()), name)
                if not last:
                    node.setdefault(child, {})
            else:
                return
            path = path[:depth] + (str(child),) + path[depth + 1 :]
            if last:
                node[child] = _FromText(text)
            else:
                node = node[child]
        self.sources[path] = source


def secret_in(file: Path) -> str:
    """The text of a file without line breaks at its end. ValueError with the reason, which never quotes the text."""
    try:
        with open(file, "rb") as opened:
            data = opened.read(MAX_SECRET_BYTES + 1)
        text = data.decode("utf-8").rstrip("\r\n")
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    if not text or len(data) > MAX_SECRET_BYTES:
        raise ValueError(f"more than {MAX_SECRET_BYTES} bytes" if text else "is empty")
    return text


def _without_default(section: type[Any]) -> list[str]:
    missing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(section) if f.default is missing and f.default_factory is missing]


def _suggestion(name: str, section: type[Any]) -> str:
    """ ", did you mean …?" with the nearest key here, or with the same key elsewhere."""
    names = [field.name for field in dataclasses.fields(section) if field.metadata or field.name in _SECTION_LISTS]
    import difflib

    near = difflib.get_close_matches(name, names, 1)
    if near:
        return f", did you mean {near[0]}?"
    places: dict[str, type[Any]] = {"": Settings, "listeners.0.": Listener}
    places |= {"limits.": Limits, "redirect.": Redirect, "consumers.": Consumers, "http.": Http, "log.": Log}
    for prefix, other in places.items():
        if other is not section and name in {f.name for f in dataclasses.fields(other) if "kind" in f.metadata}:
            return f", did you mean {prefix}{name}?"
    return ""


def log_warning(text: str) -> None:
    """Log a line that `load_settings` gave to ``warn``."""
    log.warning("event=setting_renamed reason=%s", text)


def load_settings(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    warn: Callable[[str], None] = log_warning,
) -> Settings:
    """Settings from a file (None: defaults) and those that it includes, variables named MQTTBROKER_<KEY>__<KEY>, and flags
    (see ``FLAGS``).

    ``warn`` takes a line for each key that is given by a former name, or has no effect any more. Raises ConfigError with every problem found.
    """
    builder = _Builder(warn)
    if path is not None:
        builder.files = ConfigFiles(path, builder.rename_keys)
    tree = {} if builder.files is None else builder.files.tree
    tree.setdefault("listeners", [{}])
    for name, text in sorted((environ or {}).items()):
        key = name.removeprefix(ENVIRONMENT_PREFIX)
        if key != name and not _NOT_SETTINGS.fullmatch(key) and not (key == "PORT" and "://" in text):
            builder.variable(tree, name, text)
    for flag, text in (flags or {}).items():
        builder.override(tree, FLAGS[flag], text, flag)
    settings = builder.settings(tree)
    if builder.problems:
        raise ConfigError(builder.problems)
    return dataclasses.replace(settings, sources=builder.key_sources(tree, settings))
