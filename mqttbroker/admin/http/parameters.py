"""Parameters of the HTTP API: each has a kind, which checks a value and describes it as JSON Schema."""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.schemas import Schema
from mqttbroker.config.setting_kinds import Boolean, Choice, Integer, Kind, shown
from topic_matcher.filters import is_valid_filter, is_valid_topic

MAX_TEXT = 16383  # characters of a string in MQTT, which has up to 65,535 bytes in UTF-8
MAX_NAME = 65_535  # characters of a client id or user name
MAX_URL_TEXT = 2000  # characters of a string in a path or query, which has up to 12 bytes for each
MAX_LINE = 32 << 10  # bytes of a request line
MAX_BODY = 16 << 20  # bytes of a request
MAX_LONG_CURSORS = 32
MAX_INSTANT = 253_402_300_799  # Unix time of the last second of the year 9999

# No string of MQTT has U+0000 [MQTT-1.5.4-2]. The patterns for topics and filters are for readers of the schema;
# `is_valid_topic` and `is_valid_filter` decide.
_TEXT = r"^[^\u0000]*$"
_TOPIC = r"^[^+#\u0000]+$"
_LEVEL = r"([+]|[^+#/\u0000]*)"
_FILTER = rf"(([+]|[^$+#/\u0000]+|[$]SYS)(/{_LEVEL})*(/#)?|#)$"
_SHARED = r"([$]share/[^+#/\u0000]+/)?"
_NEVER: Any = object()


class Word(Kind[str]):
    """A string of ``low`` to ``high`` characters; the default is for paths and queries."""

    def __init__(self, low: int = 0, high: int = MAX_URL_TEXT, pattern: str = _TEXT, what: str = "a string") -> None:
        self.low = low
        self.high = high
        self.pattern = pattern
        self.what = what
        self._compiled = re.compile(pattern[:-1] + r"\Z", re.DOTALL)

    def read(self, value: object) -> str:
        if not isinstance(value, str) or not self._compiled.match(value):
            raise ValueError(f"must be {self.what}, got {shown(value)[:200]}")
        self.check_length(value)
        return value

    def check_length(self, value: str) -> None:
        """Raise ValueError for text that is too short or too long, or cannot be encoded in UTF-8."""
        if not self.low <= len(value) <= self.high:
            raise ValueError(f"must have {self.low} to {self.high} characters, got {len(value)}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("must be Unicode text without surrogates") from None

    @property
    def schema(self) -> Schema:
        return {"type": "string", "minLength": self.low, "maxLength": self.high, "pattern": self.pattern}


class Topic(Word):
    def __init__(self, high: int = MAX_URL_TEXT) -> None:
        super().__init__(1, high, _TOPIC, "a topic name")

    def read(self, value: object) -> str:
        if not isinstance(value, str) or not is_valid_topic(value):
            raise ValueError(f"must be a topic name, got {shown(value)[:200]}")
        self.check_length(value)
        return value


class Filter(Word):
    """A topic filter; one of a shared subscription only if ``shared``."""

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        super().__init__(1, MAX_URL_TEXT, f"^{_SHARED if shared else ''}{_FILTER}", "a topic filter")

    def read(self, value: object) -> str:
        if not isinstance(value, str) or not is_valid_filter(value):
            raise ValueError(f"must be a topic filter, got {shown(value)[:200]}")
        if not self.shared and (value + "/").startswith("$share/"):
            raise ValueError("must be a topic filter without $share")
        self.check_length(value)
        return value


class Base64(Kind[bytes]):
    """Bytes in base64, which are not empty if ``low`` is 1."""

    def __init__(self, low: int = 0) -> None:
        self.low = low

    def read(self, value: object) -> bytes:
        try:
            return base64.b64decode(value if isinstance(value, str) else "?", validate=True)
        except (binascii.Error, ValueError):
            raise ValueError("must be base64 (RFC 4648, section 4)") from None

    @property
    def schema(self) -> Schema:
        quantum, last = "[A-Za-z0-9+/]", "([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
        pattern = f"^({quantum}{{4}})*{last}$"
        return {"type": "string", "contentEncoding": "base64", "minLength": 4 * self.low, "pattern": pattern}


class Pairs(Kind[list[tuple[str, str]]]):
    """Names with values, in their order; a name may repeat."""

    def read(self, value: object) -> list[tuple[str, str]]:
        word, pairs = Word(high=MAX_TEXT), []
        if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
            raise ValueError("must be a list of [name, value]")
        for name, text in value:
            pairs.append((word.read(name), word.read(text)))
        return pairs

    @property
    def schema(self) -> Schema:
        pair = {"type": "array", "items": Word(high=MAX_TEXT).schema, "minItems": 2, "maxItems": 2}
        return {"type": "array", "items": pair}


class Network(Kind[str]):
    """An address, or a network with its prefix length."""

    def read(self, value: object) -> str:
        try:
            ipaddress.ip_network(value if isinstance(value, str) else "?")
        except ValueError:
            raise ValueError(f"must be an address or network, got {shown(value)[:200]}") from None
        return str(value)

    @property
    def schema(self) -> Schema:
        octet = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
        version6 = "([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|([0-9a-f]{1,4}:){1,6}:"
        return {"type": "string", "pattern": rf"^({octet}(\.{octet}){{3}}|{version6})$",
                "description": "Networks are accepted, too: 10.0.0.0/8"}  # fmt: skip


class Seconds(Kind[float]):
    def __init__(self, high: int) -> None:
        self.high = high

    def read(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= self.high:
            raise ValueError(f"must be a number above 0, up to {self.high}, got {shown(value)[:200]}")
        return float(value)

    @property
    def schema(self) -> Schema:
        return {"type": "number", "exclusiveMinimum": 0, "maximum": self.high}


class Instant(Kind[float]):
    """Unix time in seconds, with a fraction or not."""

    def read(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_INSTANT:
            raise ValueError(f"must be Unix time in seconds, got {shown(value)[:200]}")
        return float(value)

    def from_text(self, text: str) -> object:
        try:
            return float(text)
        except ValueError:
            return text

    @property
    def schema(self) -> Schema:
        return {"type": "number", "minimum": 0, "maximum": MAX_INSTANT}


class Field(NamedTuple):
    """A parameter of the path or query, or a key of the body. Without ``default`` it is required."""

    name: str
    kind: Kind[Any]
    description: str
    default: Any = _NEVER

    @property
    def required(self) -> bool:
        return self.default is _NEVER

    @property
    def schema(self) -> Schema:
        found = schema_of(self.kind)
        if self.default in (_NEVER, None, ""):
            return found
        try:
            self.kind.read(self.default)
        except ValueError:  # the default has no word: it is to be left out
            return found
        return {**found, "default": self.default}


def schema_of(kind: Kind[Any]) -> Schema:
    """The JSON Schema of the values of a kind."""
    if isinstance(kind, Integer):
        return {"type": "integer", "minimum": kind.low, "maximum": kind.high}
    if isinstance(kind, Boolean):
        return {"type": "boolean"}
    if isinstance(kind, Choice):
        return {"type": "string", "enum": list(kind.words)}
    schema: Schema = getattr(kind, "schema")
    return schema


def read_texts(fields: Sequence[Field], texts: Mapping[str, str], names: Sequence[str]) -> dict[str, Any]:
    """The values of fields in a path or query; ``names`` are all names there. Raises RequestError, 400."""
    repeated = next((name for name in names if list(names).count(name) > 1), None)
    if repeated is not None:
        raise RequestError(400, f"{repeated}: is there more than once", repeated)
    values = {field.name: field.kind.from_text(texts[field.name]) for field in fields if field.name in texts}
    values |= {name: texts[name] for name in names if name not in values}
    return read_values(fields, values)


def read_values(fields: Sequence[Field], values: Mapping[str, object]) -> dict[str, Any]:
    """The values of fields. Raises RequestError, 400, for one that is unknown, missing or wrong."""
    known = {field.name: field for field in fields}
    for name in values:
        if name not in known:
            expected = ", ".join(known) or "none"
            raise RequestError(400, f"{name[:200]}: unknown parameter; there are: {expected}", name[:200])
    found: dict[str, Any] = {}
    for name, field in known.items():
        if name not in values:
            if field.required:
                raise RequestError(400, f"{name}: is required", name)
            found[name] = field.default
            continue
        value = values[name]
        if isinstance(field.kind, Integer) and isinstance(value, float) and value.is_integer():
            value = int(value)  # 1.0 is an integer in JSON
        try:
            found[name] = field.kind.read(value)
        except ValueError as error:
            raise RequestError(400, f"{name}: {error}", name) from None
    return found


def read_json(data: bytes) -> Mapping[str, object]:
    """The object in a JSON text. Raises RequestError, 400."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else "not UTF-8, or nested too deep"
        raise RequestError(400, f"the body is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise RequestError(400, "the body must be a JSON object")
    return value


def encode_cursor(*parts: object) -> str:
    """Values as an opaque word."""
    return base64.urlsafe_b64encode(json.dumps(parts, ensure_ascii=False).encode()).decode().rstrip("=")


def decode_cursor(word: str | None, *kinds: Any) -> list[Any] | None:
    """The values of `encode_cursor`, of these types; None for None. Raises RequestError, 404."""
    if word is None:
        return None
    try:
        parts = json.loads(base64.urlsafe_b64decode(word + "=" * (-len(word) % 4)))
    except (ValueError, RecursionError):
        parts = None
    if not isinstance(parts, list) or len(parts) != len(kinds):
        raise RequestError(404, "cursor: there is no such page", "cursor")
    for part, kind in zip(parts, kinds):
        if isinstance(part, bool) or not isinstance(part, kind):
            raise RequestError(404, "cursor: there is no such page", "cursor")
    return parts


class LongCursors:
    """Words for cursors: one that is too long for a query is kept here, the last `MAX_LONG_CURSORS` of them."""

    def __init__(self) -> None:
        self._kept: dict[str, str] = {}

    def encode(self, *parts: object) -> str:
        """As `encode_cursor`, or a digest of that."""
        word = encode_cursor(*parts)
        if len(word) <= MAX_URL_TEXT:
            return word
        digest = hashlib.sha256(word.encode()).hexdigest()
        self._kept.pop(digest, None)
        if len(self._kept) >= MAX_LONG_CURSORS:
            del self._kept[next(iter(self._kept))]
        self._kept[digest] = word
        return digest

    def decode(self, word: str | None, *kinds: Any) -> list[Any] | None:
        """As `decode_cursor`."""
        return decode_cursor(self._kept.get(word, word) if word is not None else None, *kinds)
