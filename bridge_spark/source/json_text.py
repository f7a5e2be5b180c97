"""Decodes JSON texts by strict rules, with numbers as written and objects as lists of members."""

from __future__ import annotations

import json
import re
from typing import Any

from bridge_spark.source.row_parser import BadPayload

MAX_DEPTH = 200
BLANKS = " \t\n\r"
_STRING = re.compile(r'"(?:[^"\\]|\\.?)*"?', re.DOTALL)  # also one without end, so that each character is read once


class JsonNumber(str):
    """A number, as written."""

    __slots__ = ()


class JsonObject(list[tuple[str, Any]]):
    """The members of an object, in order, with duplicates."""

    __slots__ = ()


def _refuse(word: str) -> Any:
    raise BadPayload("not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=JsonObject, parse_int=JsonNumber, parse_float=JsonNumber, parse_constant=_refuse)


def decode(payload: bytes) -> Any:
    """Decode one JSON value, with `JsonObject` for objects and `JsonNumber` for numbers; raises `BadPayload`."""
    if not payload:
        raise BadPayload("empty payload")
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError:
        raise BadPayload("not UTF-8") from None
    text = text.removeprefix("\ufeff").strip(BLANKS)
    if not text:
        raise BadPayload("empty payload")
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise BadPayload("nested too deeply")
    try:
        value, end = _DECODER.raw_decode(text)
    except json.JSONDecodeError:
        raise BadPayload("not JSON") from None
    if end != len(text):
        raise BadPayload("text after the JSON value")
    if "\\u" in text and _has_surrogate(text_of(value)):
        raise BadPayload("not JSON")
    return value


def text_of(value: Any) -> str:
    """The JSON text of a decoded value, without white space; numbers as written."""
    if isinstance(value, JsonNumber):
        return str(value)
    if isinstance(value, JsonObject):
        return "{" + ",".join(f"{_quoted(name)}:{text_of(item)}" for name, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text_of, value)) + "]"
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _depth(text: str) -> int:
    deepest = depth = 0
    for character in _STRING.sub("", text):
        if character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest
