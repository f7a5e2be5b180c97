"""The kinds of values that settings have: each checks a value and converts it.

The message of a ValueError is the reason alone; the caller adds the source and the key.
"""

from __future__ import annotations

import ipaddress
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar
from urllib.parse import urlsplit, urlunsplit

from bridge_spark.log.archive.location import parse_location
from mqttbroker.config.remote_address import parse_address
from topic_matcher.filters import is_valid_filter, is_valid_topic

T = TypeVar("T")

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MICROSECONDS = {unit: round(seconds * 1e6) for unit, seconds in _SECONDS.items()}
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "a table" if isinstance(value, dict) else "a list"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (str, bool, int, float)) else str(value)


class Kind(ABC, Generic[T]):
    """One kind of value."""

    @abstractmethod
    def read(self, value: object) -> T:
        """The setting for a value in TOML; ValueError with the reason if it is invalid."""

    def from_text(self, text: str) -> object:
        """The value in TOML for the text of a variable or flag."""
        return text

    def written(self, setting: T) -> object:
        """The value in TOML that `read` makes the setting of."""
        return "" if setting is None else str(setting) if isinstance(setting, Path) else setting


class Integer(Kind[int]):
    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high

    def read(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"must be a whole number, got {shown(value)}")
        if not self.low <= value <= self.high:
            raise ValueError(f"must be {self.low}–{self.high}, got {value}")
        return value

    def from_text(self, text: str) -> object:
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else text


class Boolean(Kind[bool]):
    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, got {shown(value)}")
        return value

    def from_text(self, text: str) -> object:
        return {"true": True, "false": False}.get(text.lower(), text)


class Text(Kind[str]):
    def __init__(self, description: str = "a string") -> None:
        self.description = description

    def read(self, value: object) -> str:
        if not isinstance(value, str) or not value or "\0" in value:
            raise ValueError(f"must be {self.description}, got {shown(value)}")
        return str(value)


class Name(Kind[str]):
    """A name of 1-64 of A-Z a-z 0-9 _ . @ -, first a letter or digit."""

    def __init__(self, description: str) -> None:
        self.description = description

    def read(self, value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", value):
            raise ValueError(f"must be {self.description}: 1–64 of A–Z a–z 0–9 _ . @ -, first a letter or digit, got {shown(value)}")
        return str(value)


class OptionalText(Kind[str | None]):
    """A string of at most 65535 bytes, the limit of MQTT; the empty one is None."""

    def read(self, value: object) -> str | None:
        if not isinstance(value, str) or "\0" in value or len(value.encode("utf-8")) > 65535:
            raise ValueError("must be a string")
        return str(value) or None


class RemoteAddresses(Kind[tuple[str, ...]]):
    """A list of URLs of brokers, at least one."""

    def read(self, value: object) -> tuple[str, ...]:
        texts = Texts().read(value)
        if not texts:
            raise ValueError("must not be empty")
        return tuple(str(parse_address(text)) for text in texts)

    def from_text(self, text: str) -> object:
        return Texts().from_text(text)


class Prefix(Kind[str]):
    """The beginning of topics, possibly empty."""

    def read(self, value: object) -> str:
        text = OptionalText().read(value) or ""
        if "+" in text or "#" in text:
            raise ValueError(f"must have no wildcard, got {shown(text)}")
        return text


class BearerToken(Kind[str | None]):
    """A token for an ``Authorization`` header, never shown; the empty string is None."""

    def read(self, value: object) -> str | None:
        if not isinstance(value, str) or not re.fullmatch(r"[!-~]*", value):
            raise ValueError("must be a string of printable ASCII characters without spaces")
        return str(value) or None


class TopicPattern(Kind[str | None]):
    """A topic name in which the levels %c and %u stand for the client's names; the empty string is None."""

    def read(self, value: object) -> str | None:
        text = OptionalText().read(value)
        if text is not None:
            if not is_valid_topic(text):
                raise ValueError(f"must be a topic name, got {shown(text)}")
            for level in text.split("/"):
                if level not in ("%c", "%u") and ("%c" in level or "%u" in level):
                    raise ValueError(f"%c and %u must be a whole level, not part of {shown(level)}")
        return text


class ClientIdPattern(Kind[str | None]):
    """A client id in which %u stands for the user name and %i for the name in the certificate, with a * at its end for
    any further characters. "username" and "certificate" are %u and %i; "" is None."""

    def read(self, value: object) -> str | None:
        text = OptionalText().read(value)
        if text is not None and (text == "*" or "*" in text[:-1]):
            raise ValueError(f'must be "username", "certificate" or a client id like "%u-*", with a * only at its end, got {shown(text)}')
        if text is not None and "%" in text.replace("%u", "").replace("%i", ""):
            raise ValueError(f"must have no % other than %u and %i, got {shown(text)}")
        return {"username": "%u", "certificate": "%i"}.get(text or "", text)


class OptionalPath(Kind[Path | None]):
    """A path; the empty string is None."""

    def read(self, value: object) -> Path | None:
        text = OptionalText().read(value)
        return None if text is None else Path(text)


class Archive(Kind[str | None]):
    """The location of an archive; the empty string is None."""

    def read(self, value: object) -> str | None:
        text = OptionalText().read(value)
        return None if text is None else str(parse_location(text))


class ListenerPath(Kind[Path | str | None]):
    """An `OptionalPath`, or "global" for the value for all listeners."""

    def read(self, value: object) -> Path | str | None:
        return "global" if value == "global" else OptionalPath().read(value)


class Directory(Kind[Path]):
    def read(self, value: object) -> Path:
        return Path(Text("the path of a directory").read(value))


class Choice(Kind[str]):
    def __init__(self, *words: str) -> None:
        self.words = words

    def read(self, value: object) -> str:
        if value not in self.words:
            raise ValueError(f"must be {one_of(self.words)}, got {shown(value)}")
        return str(value)


class Anonymous(Kind[bool | str]):
    def read(self, value: object) -> bool | str:
        if not isinstance(value, bool) and value != "loopback":
            raise ValueError(f'must be true, false or "loopback", got {shown(value)}')
        return value if isinstance(value, bool) else "loopback"

    def from_text(self, text: str) -> object:
        return Boolean().from_text(text)


class Automatic(Kind[bool | str]):
    def read(self, value: object) -> bool | str:
        if not isinstance(value, bool) and value != "auto":
            raise ValueError(f'must be true, false or "auto", got {shown(value)}')
        return value if isinstance(value, bool) else "auto"

    def from_text(self, text: str) -> object:
        return Boolean().from_text(text)


class Host(Kind[str]):
    """A name or address; the empty string is all addresses of this machine."""

    def read(self, value: object) -> str:
        return OptionalText().read(value) or ""


class FileMode(Kind[int]):
    """Permissions in octal digits, as for chmod."""

    def read(self, value: object) -> int:
        if not isinstance(value, str) or not re.fullmatch(r"0?[0-7]{3}", value):
            raise ValueError(f'must be permissions like "0660", got {shown(value)}')
        return int(value, 8)

    def written(self, setting: int) -> object:
        return f"{setting:04o}"


class Texts(Kind[tuple[str, ...]]):
    """A list of strings, possibly empty."""

    def read(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise ValueError(f"must be a list of strings, got {shown(value)}")
        return tuple(Text().read(item) for item in value)

    def from_text(self, text: str) -> object:
        return [part.strip() for part in text.split(",") if part.strip()]


class Words(Kind[tuple[str, ...]]):
    """A list of different words, possibly empty; each is one of ``words``."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def read(self, value: object) -> tuple[str, ...]:
        texts = Texts().read(value)
        for index, text in enumerate(texts):
            Choice(*self.words).read(text)
            if text in texts[:index]:
                raise ValueError(f"{shown(text)} stands there twice")
        return texts

    def from_text(self, text: str) -> object:
        return Texts().from_text(text)


class FirstOf(Kind[tuple[str, ...]]):
    """One of some words, or a list of them in their order. ``gone`` says what to write instead of a word that is no more."""

    def __init__(self, *words: str, gone: Mapping[str, str] = MappingProxyType({})) -> None:
        self.words = words
        self._gone = gone

    def read(self, value: object) -> tuple[str, ...]:
        for word, instead in self._gone.items():
            if value == word or isinstance(value, list) and word in value:
                raise ValueError(f"{shown(word)} is no more: write {instead}")
        if not isinstance(value, list):
            return (Choice(*self.words).read(value),)
        if not value:
            raise ValueError("must not be empty")
        return Words(*self.words).read(value)

    def from_text(self, text: str) -> object:
        return Texts().from_text(text)

    def written(self, setting: tuple[str, ...]) -> object:
        return setting[0] if len(setting) == 1 else setting


class Patterns(Kind[tuple[tuple[str, str], ...]]):
    """A table of texts by name, possibly empty; in a variable "name=text, name=text"."""

    def read(self, value: object) -> tuple[tuple[str, str], ...]:
        if not isinstance(value, dict):
            raise ValueError(f"must be a table of strings, got {shown(value)}")
        return tuple((name, Text().read(text)) for name, text in sorted(value.items()))

    def from_text(self, text: str) -> object:
        pairs = [part.partition("=") for part in text.split(",") if part.strip()]
        return {name.strip(): value.strip() for name, _, value in pairs}

    def written(self, setting: tuple[tuple[str, str], ...]) -> object:
        return dict(setting)


class Levels(Kind[tuple[tuple[str, str], ...]]):
    """A table of log levels by area, possibly empty."""

    def __init__(self, areas: Sequence[str], levels: Sequence[str]) -> None:
        self.areas = areas
        self.levels = levels

    def read(self, value: object) -> tuple[tuple[str, str], ...]:
        pairs = Patterns().read(value)
        for area, level in pairs:
            if area not in self.areas:
                raise ValueError(f"{shown(area)} is no area: {', '.join(self.areas)}")
            if level not in self.levels:
                raise ValueError(f"{area} must be {one_of(self.levels)}, got {shown(level)}")
        return pairs

    def from_text(self, text: str) -> object:
        return Patterns().from_text(text)

    def written(self, setting: tuple[tuple[str, str], ...]) -> object:
        return dict(setting)


class Url(Kind[str | None]):
    """A URL of HTTPS, or of HTTP on this machine, with ``plain`` on any; the empty string is None."""

    def __init__(self, plain: bool = False) -> None:
        self.plain = plain

    def read(self, value: object) -> str | None:
        text = OptionalText().read(value)
        if text is None:
            return None
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"must be a URL that begins with https://{' or http://' if self.plain else ''}")
        if parts.username is not None or parts.password is not None:
            raise ValueError("must not have a user name or password")
        if parts.scheme == "http" and not self.plain and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise ValueError("must begin with https://, because the host is not localhost")
        return text


def shown_url(url: str) -> str:
    """A URL for logs and listings: without user, password and fragment, and with ``***`` for the query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "***" if parts.query else "", ""))


class Templates(Kind[tuple[tuple[str, str], ...]]):
    """A table of texts by name, with placeholders like ${username}; at least one name."""

    def __init__(self, *placeholders: str) -> None:
        self.placeholders = placeholders

    def read(self, value: object) -> tuple[tuple[str, str], ...]:
        pairs = Patterns().read(value)
        if not pairs:
            raise ValueError("must not be empty")
        for _, template in pairs:
            for name in re.findall(r"\$\{(.*?)\}", template):
                if name not in self.placeholders:
                    raise ValueError(f"${{{name}}} is none of {', '.join(self.placeholders)}")
        return pairs

    def from_text(self, text: str) -> object:
        return Patterns().from_text(text)

    def written(self, setting: tuple[tuple[str, str], ...]) -> object:
        return dict(setting)


class HeaderText(Kind[str | None]):
    """The text of an HTTP header, never shown; the empty string is None."""

    def read(self, value: object) -> str | None:
        if not isinstance(value, str) or not re.fullmatch(r"[\t -~]*", value):
            raise ValueError("must be a string of printable ASCII characters")
        return str(value) or None


class Headers(Kind[tuple[tuple[str, str], ...]]):
    """A table of HTTP headers, or a JSON object as text; possibly empty. Errors show no values: they may be secrets."""

    def read(self, value: object) -> tuple[tuple[str, str], ...]:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = None
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise ValueError("must be a table of strings, or a JSON object")
        pairs: tuple[tuple[str, str], ...] = tuple(sorted(value.items()))
        for name, text in pairs:
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or not re.fullmatch(r"[\t -~]+", text):
                raise ValueError(f"{shown(name)} is not a header, or has no printable ASCII text")
        return pairs

    def from_text(self, text: str) -> object:
        return text if text.startswith("{") else Patterns().from_text(text)

    def written(self, setting: tuple[tuple[str, str], ...]) -> object:
        return dict(setting)


class PluginReference(Kind[str | None]):
    """ "module:object"; the empty string is None."""

    def read(self, value: object) -> str | None:
        text = OptionalText().read(value)
        if text is not None and not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", text):
            raise ValueError(f'must be like "package.module:Class", got {shown(text)}')
        return text


class Options(Kind[str | None]):
    """A table of any values, or a JSON object as text; as JSON. The empty one is None."""

    def read(self, value: object) -> str | None:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise ValueError("must be a table, or a JSON object") from None
        if not isinstance(value, dict):
            raise ValueError("must be a table, or a JSON object")
        try:
            return json.dumps(value) if value else None
        except TypeError as error:
            raise ValueError(f"must have strings, numbers, booleans, lists and tables: {error}") from None

    def written(self, setting: str | None) -> object:
        return setting or {}


class Networks(Kind[tuple[str, ...]]):
    """A list of addresses and networks like "10.0.0.0/8", possibly empty."""

    def read(self, value: object) -> tuple[str, ...]:
        texts = Texts().read(value)
        for text in texts:
            try:
                ipaddress.ip_network(text)
            except ValueError as error:
                raise ValueError(f"{shown(text)} is not an address or network: {error}") from None
        return texts

    def from_text(self, text: str) -> object:
        return Texts().from_text(text)


class Duration(Kind[float]):
    """Seconds, written like "500ms", "10s", "5m", "12h" or "7d"."""

    def __init__(self, low: str, high: str) -> None:
        self.low = low
        self.high = high

    def read(self, value: object) -> float:
        seconds = _quantity(value, _SECONDS)
        if seconds is None:
            raise ValueError(f'must be a duration like "500ms", "10s", "5m", "12h" or "7d", got {shown(value)}')
        if not (_quantity(self.low, _SECONDS) or 0) <= seconds <= (_quantity(self.high, _SECONDS) or 0):
            raise ValueError(f"must be {self.low}–{self.high}, got {value}")
        return seconds

    def written(self, setting: float) -> object:
        return _in_units(round(setting * 1e6), _MICROSECONDS) if setting else "0s"


class Size(Kind[int]):
    """Bytes, written like "64KiB", "10MiB" or "1GiB"."""

    def __init__(self, low: str, high: str) -> None:
        self.low = low
        self.high = high

    def read(self, value: object) -> int:
        size = _quantity(value, _BYTES)
        if size is None or size != int(size):
            raise ValueError(f'must be a size like "512B", "64KiB", "10MiB" or "1GiB", got {shown(value)}')
        if not (_quantity(self.low, _BYTES) or 0) <= size <= (_quantity(self.high, _BYTES) or 0):
            raise ValueError(f"must be {self.low}–{self.high}, got {value}")
        return int(size)

    def written(self, setting: int) -> object:
        return _in_units(setting, _BYTES) if setting else "0B"


class MemorySize(Kind[int | str]):
    """Bytes as for `Size`, or a text: "auto", or per cent of the memory that there is, like "50%"."""

    def __init__(self, low: str, high: str) -> None:
        self.size = Size(low, high)

    def read(self, value: object) -> int | str:
        if value == "auto":
            return "auto"
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,3} ?%", value):
            if not 1 <= int(value.rstrip("% ")) <= 100:
                raise ValueError(f"must be 1%–100%, got {shown(value)}")
            return value.replace(" ", "")
        try:
            return self.size.read(value)
        except ValueError as error:
            if "must be a size" not in str(error):
                raise
            raise ValueError(f'must be "auto", a share like "50%" or a size like "2GiB", got {shown(value)}') from None

    def written(self, setting: int | str) -> object:
        return setting if isinstance(setting, str) else self.size.written(setting)


class OrNone(Kind[T | None]):
    """A value of another kind, or a word for None."""

    def __init__(self, kind: Kind[T], word: str) -> None:
        self.kind = kind
        self.word = word

    def read(self, value: object) -> T | None:
        if value == self.word:
            return None
        try:
            return self.kind.read(value)
        except ValueError as error:
            raise ValueError(str(error).replace(", got", f', or "{self.word}", got', 1)) from None

    def from_text(self, text: str) -> object:
        return text if text == self.word else self.kind.from_text(text)

    def written(self, setting: T | None) -> object:
        return self.word if setting is None else self.kind.written(setting)


class Filters(Kind[tuple[str, ...]]):
    """One or more topic filters, without shared subscriptions."""

    def read(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not value:
            raise ValueError(f"must be a list of one or more topic filters, got {shown(value)}")
        for item in value:
            if not isinstance(item, str) or not is_valid_filter(item) or item.startswith("$share/"):
                raise ValueError(f"{shown(item)} is not a topic filter that a stream can keep")
        return tuple(dict.fromkeys(value))

    def from_text(self, text: str) -> object:
        return [part.strip() for part in text.split(",")]


class PartitionKey(Kind[str]):
    def read(self, value: object) -> str:
        name = value.removeprefix("user-property:") if isinstance(value, str) else ""
        if value in ("topic", "client") or (isinstance(value, str) and name and name != value):
            return str(value)
        raise ValueError(f'must be "topic", "client" or "user-property:NAME", got {shown(value)}')


def _quantity(value: object, units: Mapping[str, float]) -> float | None:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z]+)", value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        return None
    return round(float(match[1]) * units[match[2]], 6)


def _in_units(value: int, units: Mapping[str, int]) -> str:
    """The value in the largest unit of which it is a whole number, else in the first one."""
    for unit, size in reversed(list(units.items())):
        if value % size == 0:
            return f"{value // size}{unit}"
    unit, size = next(iter(units.items()))
    return f"{value / size:.6f}".rstrip("0") + unit


def one_of(words: Sequence[str]) -> str:
    quoted = [f'"{word}"' for word in words]
    return ", ".join(quoted[:-1]) + " or " + quoted[-1]
