"""Settings: TOML file, environment and command line become one immutable, checked ``Settings``.

Rule: every problem is found before the broker starts and is one line that names where it was said (file, variable
or flag), the key and the reason. Flags override the environment, which overrides the file, which overrides the
defaults that stand beside the keys below. conf/mqttbroker.toml documents every key; a test keeps it complete.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Optional, TypeVar, Union, cast

from topic_matcher.filters import is_valid_filter

T = TypeVar("T")

ENVIRONMENT_PREFIX = "MQTTBROKER_"
FLAGS: dict[str, tuple[str, ...]] = {
    "--host": ("listeners", "0", "host"),
    "--port": ("listeners", "0", "port"),
    "--http-port": ("http", "port"),
    "--data-dir": ("data_dir",),
    "--durability": ("durability",),
    "--allow-anonymous": ("allow_anonymous",),
    "--log-level": ("log", "level"),
}

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_STREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
# A Kubernetes service named "mqttbroker" puts these into every pod, and MQTTBROKER_COMPILE belongs to the build.
_NOT_SETTINGS = re.compile(r"SERVICE_(HOST|PORT(_.+)?)|PORT_\d+_(TCP|UDP)(_.+)?|COMPILE")


class ConfigError(Exception):
    """``problems`` holds one line for each thing that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class _FromText(str):
    """A value said outside the file, so that it comes as text whatever its type."""


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "a table" if isinstance(value, dict) else "a list"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (str, bool, int, float)) else str(value)


# --- what a single value may be -----------------------------------------------------------------------------------


class Kind(Generic[T]):
    """One type of value: ``read`` checks it and raises ValueError with the reason."""

    def read(self, value: object) -> T:
        raise ValueError("cannot be set")

    def from_text(self, text: str) -> object:
        """The TOML value that a variable or flag means; the text itself unless the type is not textual."""
        return text


class Integer(Kind[int]):
    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high

    def read(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"must be a whole number, got {_shown(value)}")
        if not self.low <= value <= self.high:
            raise ValueError(f"must be {self.low}–{self.high}, got {value}")
        return value

    def from_text(self, text: str) -> object:
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else text


class Boolean(Kind[bool]):
    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, got {_shown(value)}")
        return value

    def from_text(self, text: str) -> object:
        return {"true": True, "false": False}.get(text.lower(), text)


class Text(Kind[str]):
    def __init__(self, what: str = "a string") -> None:
        self.what = what

    def read(self, value: object) -> str:
        if not isinstance(value, str) or not value or "\0" in value:
            raise ValueError(f"must be {self.what}, got {_shown(value)}")
        return str(value)


class OptionalText(Kind[Optional[str]]):
    """The empty string means that there is none."""

    def read(self, value: object) -> Optional[str]:
        if not isinstance(value, str) or "\0" in value:
            raise ValueError("must be a string")
        return str(value) or None


class OptionalPath(Kind[Optional[Path]]):
    """The empty string means that there is none."""

    def read(self, value: object) -> Optional[Path]:
        text = OptionalText().read(value)
        return None if text is None else Path(text)


class Directory(Kind[Path]):
    def read(self, value: object) -> Path:
        return Path(Text("the path of a directory").read(value))


class Choice(Kind[str]):
    def __init__(self, *words: str) -> None:
        self.words = words

    def read(self, value: object) -> str:
        if value not in self.words:
            raise ValueError(f"must be {_one_of(self.words)}, got {_shown(value)}")
        return str(value)


class Anonymous(Kind[Union[bool, str]]):
    def read(self, value: object) -> Union[bool, str]:
        if not isinstance(value, bool) and value != "loopback":
            raise ValueError(f'must be true, false or "loopback", got {_shown(value)}')
        return value if isinstance(value, bool) else "loopback"

    def from_text(self, text: str) -> object:
        return Boolean().from_text(text)


class Host(Kind[str]):
    """A name or address; the empty string is every address of this machine."""

    def read(self, value: object) -> str:
        return OptionalText().read(value) or ""


class FileMode(Kind[int]):
    """Permissions as chmod takes them."""

    def read(self, value: object) -> int:
        if not isinstance(value, str) or not re.fullmatch(r"0?[0-7]{3}", value):
            raise ValueError(f'must be permissions like "0660", got {_shown(value)}')
        return int(value, 8)


class Texts(Kind[tuple[str, ...]]):
    """A list of strings, which may be empty."""

    def read(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise ValueError(f"must be a list of strings, got {_shown(value)}")
        return tuple(Text().read(item) for item in value)

    def from_text(self, text: str) -> object:
        return [part.strip() for part in text.split(",") if part.strip()]


class Duration(Kind[float]):
    """Seconds, written like "500ms", "10s", "5m", "12h" or "7d"."""

    def __init__(self, low: str, high: str) -> None:
        self.low = low
        self.high = high

    def read(self, value: object) -> float:
        seconds = _quantity(value, _SECONDS)
        if seconds is None:
            raise ValueError(f'must be a duration like "500ms", "10s", "5m", "12h" or "7d", got {_shown(value)}')
        if not (_quantity(self.low, _SECONDS) or 0) <= seconds <= (_quantity(self.high, _SECONDS) or 0):
            raise ValueError(f"must be {self.low}–{self.high}, got {value}")
        return seconds


class Size(Kind[int]):
    """Bytes, written like "64KiB", "10MiB" or "1GiB"."""

    def __init__(self, low: str, high: str) -> None:
        self.low = low
        self.high = high

    def read(self, value: object) -> int:
        size = _quantity(value, _BYTES)
        if size is None or size != int(size):
            raise ValueError(f'must be a size like "512B", "64KiB", "10MiB" or "1GiB", got {_shown(value)}')
        if not (_quantity(self.low, _BYTES) or 0) <= size <= (_quantity(self.high, _BYTES) or 0):
            raise ValueError(f"must be {self.low}–{self.high}, got {value}")
        return int(size)


class OrNone(Kind[Optional[T]]):
    """A value of another kind, or the word that stands for none."""

    def __init__(self, kind: Kind[T], word: str) -> None:
        self.kind = kind
        self.word = word

    def read(self, value: object) -> Optional[T]:
        if value == self.word:
            return None
        try:
            return self.kind.read(value)
        except ValueError as error:
            raise ValueError(str(error).replace(", got", f', or "{self.word}", got', 1)) from None

    def from_text(self, text: str) -> object:
        return text if text == self.word else self.kind.from_text(text)


class Filters(Kind[tuple[str, ...]]):
    """One or more topic filters, none of them shared."""

    def read(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not value:
            raise ValueError(f"must be a list of one or more topic filters, got {_shown(value)}")
        for item in value:
            if not isinstance(item, str) or not is_valid_filter(item) or item.startswith("$share/"):
                raise ValueError(f"{_shown(item)} is not a topic filter that a stream can keep")
        return tuple(dict.fromkeys(value))

    def from_text(self, text: str) -> object:
        return [part.strip() for part in text.split(",")]


class PartitionKey(Kind[str]):
    def read(self, value: object) -> str:
        name = value.removeprefix("user-property:") if isinstance(value, str) else ""
        if value in ("topic", "client") or (isinstance(value, str) and name and name != value):
            return str(value)
        raise ValueError(f'must be "topic", "client" or "user-property:NAME", got {_shown(value)}')


def _quantity(value: object, units: Mapping[str, float]) -> Optional[float]:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z]+)", value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        return None
    return round(float(match[1]) * units[match[2]], 6)


def _one_of(words: Sequence[str]) -> str:
    quoted = [f'"{word}"' for word in words]
    return ", ".join(quoted[:-1]) + " or " + quoted[-1]


def _key(kind: Kind[T], default: object) -> T:
    """A field with its kind; the default is written as in the file."""
    return dataclasses.field(default=kind.read(default), metadata={"kind": kind})


def _required(kind: Kind[T]) -> T:
    return cast(T, dataclasses.field(metadata={"kind": kind}))


def _section(section: type[T]) -> T:
    return dataclasses.field(default_factory=section, metadata={"section": section})


# --- the settings -------------------------------------------------------------------------------------------------
# Durations are float seconds, sizes int bytes. What each key means for an operator stands in conf/mqttbroker.toml.


_LISTENER_TYPES = ("tcp", "tls", "ws", "wss", "unix")
# Keys of a listener that only some types know.
_TYPES_OF: dict[str, tuple[str, ...]] = {
    "host": _LISTENER_TYPES[:-1],
    "port": _LISTENER_TYPES[:-1],
    **dict.fromkeys(("path", "mode"), ("unix",)),
    **dict.fromkeys(("certfile", "keyfile", "cafile", "crlfile", "tls_version"), ("tls", "wss")),
    **dict.fromkeys(("client_certificate", "use_identity_as_username"), ("tls", "wss")),
    "origins": ("ws", "wss"),
}


@dataclass(frozen=True)
class Listener:
    """Port 0 is any free port; the log says which. ``max_*`` and ``allow_anonymous`` None: what holds for all."""

    host: str = _key(Host(), "127.0.0.1")
    port: int = _key(Integer(0, 65535), 1883)
    type: str = _key(Choice(*_LISTENER_TYPES), "tcp")
    path: Optional[Path] = _key(OptionalPath(), "")
    mode: int = _key(FileMode(), "0660")
    certfile: Optional[Path] = _key(OptionalPath(), "")
    keyfile: Optional[Path] = _key(OptionalPath(), "")
    cafile: Optional[Path] = _key(OptionalPath(), "")
    crlfile: Optional[Path] = _key(OptionalPath(), "")
    tls_version: str = _key(Choice("1.2", "1.3"), "1.2")
    client_certificate: str = _key(Choice("none", "optional", "required"), "none")
    use_identity_as_username: bool = _key(Boolean(), False)
    origins: tuple[str, ...] = _key(Texts(), [])
    max_connections: Optional[int] = _key(OrNone(Integer(1, 10_000_000), "global"), "global")
    max_packet_size: Optional[int] = _key(OrNone(Size("128B", "256MiB"), "global"), "global")
    allow_anonymous: Optional[Union[bool, str]] = _key(OrNone(Anonymous(), "global"), "global")

    @property
    def address(self) -> str:
        """Where it listens, for people."""
        if self.type == "unix":
            return str(self.path)
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host or '*'}:{self.port}"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that do not go together, each with the reason."""
        for name, types in _TYPES_OF.items():
            if self.type not in types and getattr(self, name) != getattr(_DEFAULT_LISTENER, name):
                yield name, f'a listener of type "{self.type}" has none'
        if self.type == "unix" and self.path is None:
            yield "path", "is required for a Unix socket"
        if self.type in ("tls", "wss"):
            for name in ("certfile", "keyfile"):
                if getattr(self, name) is None:
                    yield name, f'is required for type "{self.type}"'
            if self.client_certificate != "none" and self.cafile is None:
                yield "cafile", "is required to check client certificates"
            if self.use_identity_as_username and self.client_certificate == "none":
                yield "client_certificate", 'must be "optional" or "required" for use_identity_as_username'
            if self.crlfile is not None and self.client_certificate == "none":
                yield "crlfile", "needs client_certificate"


_DEFAULT_LISTENER = Listener()


@dataclass(frozen=True)
class Http:
    """``port`` is None when there is no HTTP server, 0 for any free port; without ``token`` anyone may read."""

    host: str = _key(Text("a host name or address"), "127.0.0.1")
    port: Optional[int] = _key(OrNone(Integer(0, 65535), "off"), 18083)
    token: Optional[str] = _key(OptionalText(), "")


@dataclass(frozen=True)
class Log:
    level: str = _key(Choice("debug", "info", "warning", "error"), "info")
    format: str = _key(Choice("text", "json"), "text")


@dataclass(frozen=True)
class Limits:
    """What one client, or all of them, may ask of the broker."""

    max_connections: int = _key(Integer(1, 10_000_000), 100_000)
    max_sessions: int = _key(Integer(1, 100_000_000), 1_000_000)
    max_connect_size: int = _key(Size("128B", "256MiB"), "256KiB")
    connect_timeout: float = _key(Duration("100ms", "1h"), "10s")
    max_keep_alive: float = _key(Duration("1s", "65535s"), "65535s")
    max_session_expiry: Optional[float] = _key(OrNone(Duration("0s", "36500d"), "never"), "never")
    max_packet_size: int = _key(Size("128B", "256MiB"), "10MiB")
    receive_maximum: int = _key(Integer(1, 65535), 1000)
    max_inflight: int = _key(Integer(1, 65535), 1000)
    topic_alias_maximum: int = _key(Integer(0, 65535), 10)
    max_topic_levels: int = _key(Integer(1, 65535), 128)
    max_topic_length: int = _key(Size("1B", "65535B"), "65535B")
    max_subscriptions_per_client: int = _key(Integer(1, 100_000_000), 100_000)
    retain_available: bool = _key(Boolean(), True)
    max_retained_messages: int = _key(Integer(1, 1_000_000_000), 1_000_000)
    max_retained_bytes: int = _key(Size("1KiB", "1TiB"), "1GiB")
    max_queued_messages: int = _key(Integer(1, 1_000_000_000), 1_000_000)
    max_queued_bytes: int = _key(Size("1KiB", "1024TiB"), "1GiB")
    max_queue_memory_messages: int = _key(Integer(1, 1_000_000), 1000)
    max_transient_queue_bytes: int = _key(Size("1KiB", "1TiB"), "64MiB")
    max_outbox_bytes: int = _key(Size("1KiB", "1TiB"), "4MiB")
    max_pending_write_bytes: int = _key(Size("1KiB", "1TiB"), "64MiB")
    route_cache_size: int = _key(Integer(1, 100_000_000), 100_000)


@dataclass(frozen=True)
class Stream:
    """A set of filters whose messages are kept in a log; ``retention_*`` None keeps them for ever."""

    name: str
    filters: tuple[str, ...] = _required(Filters())
    partitions: int = _key(Integer(1, 1024), 4)
    key: str = _key(PartitionKey(), "topic")
    retention_age: Optional[float] = _key(OrNone(Duration("1s", "36500d"), "unlimited"), "unlimited")
    retention_bytes: Optional[int] = _key(OrNone(Size("1KiB", "1024TiB"), "unlimited"), "unlimited")
    segment_bytes: int = _key(Size("1KiB", "2GiB"), "64MiB")
    segment_age: float = _key(Duration("1s", "3650d"), "1h")


@dataclass(frozen=True)
class Settings:
    """Everything that can be set; ``Settings()`` is the broker without file, environment and flags."""

    data_dir: Path = _key(Directory(), "./data")
    durability: str = _key(Choice("commit", "interval", "off"), "commit")
    durability_interval: float = _key(Duration("1ms", "1h"), "1s")
    allow_anonymous: Union[bool, str] = _key(Anonymous(), "loopback")
    password_file: Optional[Path] = _key(OptionalPath(), "")
    acl_file: Optional[Path] = _key(OptionalPath(), "")
    sys_interval: float = _key(Duration("0s", "1d"), "10s")
    log: Log = _section(Log)
    http: Http = _section(Http)
    limits: Limits = _section(Limits)
    listeners: tuple[Listener, ...] = (Listener(),)
    streams: tuple[Stream, ...] = ()


# --- from tables to settings --------------------------------------------------------------------------------------

_Path = tuple[str, ...]
_SECTION_LISTS: dict[str, type[Any]] = {"listeners": Listener, "streams": Stream}


class _Builder:
    """Turns tables into settings and gathers problems; ``sources`` names who said a path that the file did not."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.sources: dict[_Path, str] = {}
        self.problems: list[str] = []

    def problem(self, path: _Path, reason: str) -> None:
        source = next((name for said, name in self.sources.items() if said[: len(path)] == path), self.file)
        key = ".".join(name if name.isprintable() else json.dumps(name) for name in path)
        self.problems.append(": ".join(part for part in (source, key, reason) if part))

    def settings(self, tree: dict[str, Any]) -> Settings:
        plain = {name: value for name, value in tree.items() if name not in _SECTION_LISTS}
        values = self.values(Settings, plain, ())
        values["listeners"] = self.listeners(tree["listeners"])
        values["streams"] = self.streams(tree.get("streams", {}))
        return Settings(**values)

    def section(self, section: type[Any], raw: object, path: _Path, **given: object) -> Any:
        """An instance, or None when that is not possible; then the problem is noted."""
        if not isinstance(raw, dict):
            self.problem(path, f"must be a table of keys, got {_shown(raw)}")
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
            elif "kind" in metadata:
                try:
                    given = metadata["kind"].from_text(str(value)) if isinstance(value, _FromText) else value
                    values[name] = metadata["kind"].read(given)
                except ValueError as error:
                    self.problem(path + (name,), str(error))
            else:
                self.problem(path + (name,), "unknown key" + _suggestion(name, section, path))
        return values

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

    def streams(self, raw: object) -> tuple[Stream, ...]:
        if not isinstance(raw, dict):
            self.problem(("streams",), "must be [streams.NAME] tables")
            return ()
        read = []
        for name, item in raw.items():
            if not _STREAM_NAME.fullmatch(name):
                self.problem(("streams", name), "a stream's name must be 1–64 of A–Z a–z 0–9 _ -, first a letter or digit")
                continue
            read.append(self.section(Stream, item, ("streams", name), name=name))
        return tuple(stream for stream in read if stream is not None)

    def override(self, tree: dict[str, Any], path: _Path, text: str, source: str) -> None:
        """Put a value from outside the file at its place in the tree."""
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


def _without_default(section: type[Any]) -> list[str]:
    missing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(section) if f.default is missing and f.default_factory is missing]


def _suggestion(name: str, section: type[Any], path: _Path) -> str:
    """", did you mean …?" with the nearest key here, or with the same key elsewhere."""
    names = [field.name for field in dataclasses.fields(section) if field.metadata or field.name in _SECTION_LISTS]
    near = difflib.get_close_matches(name, names, 1)
    if near:
        return f", did you mean {near[0]}?"
    places: dict[str, type[Any]] = {"": Settings, "listeners.0.": Listener, "limits.": Limits, "http.": Http, "log.": Log}
    for prefix, other in places.items():
        if other is not section and name in {f.name for f in dataclasses.fields(other) if "kind" in f.metadata}:
            return f", did you mean {prefix}{name}?"
    return ""


def load_settings(
    path: Optional[Path] = None,
    environ: Optional[Mapping[str, str]] = None,
    flags: Optional[Mapping[str, str]] = None,
) -> Settings:
    """Settings from a file (None: defaults), variables named MQTTBROKER_<KEY>__<KEY>, and flags (see ``FLAGS``).

    Raises ConfigError with every problem found.
    """
    builder = _Builder(str(path) if path is not None else "")
    tree = _read(path) if path is not None else {}
    tree.setdefault("listeners", [{}])
    for name, text in sorted((environ or {}).items()):
        key = name.removeprefix(ENVIRONMENT_PREFIX)
        if key != name and not _NOT_SETTINGS.fullmatch(key) and not (key == "PORT" and "://" in text):
            builder.override(tree, tuple(key.lower().split("__")), text, name)
    for flag, text in (flags or {}).items():
        builder.override(tree, FLAGS[flag], text, flag)
    settings = builder.settings(tree)
    if builder.problems:
        raise ConfigError(builder.problems)
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror or error}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8 at byte {error.start}"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path}: not TOML: {error}"]) from None
