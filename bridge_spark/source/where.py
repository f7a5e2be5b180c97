"""Parses the option `where`: conditions on `topic`, `partition`, `offset` and `timestamp`, joined by AND.

| condition | values |
|---|---|
| `topic`, `=` `<` `<=` `>` `>=`, `IN (...)`, `BETWEEN ... AND ...`, `LIKE 'prefix%'` | strings in single quotes |
| `partition` and `offset`, all but LIKE | whole numbers |
| `timestamp`, all but LIKE | `'2026-01-31T12:00:00Z'`, with a time zone; optionally TIMESTAMP before it |

Files and row groups that hold no matching row are not read.  Strings are compared as in Spark, by their UTF-8 bytes.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from bridge_spark.log.predicates import COLUMNS, Predicate
from bridge_spark.source.option_values import OptionError, parse_instant

_TOKEN = re.compile(r"\s*(?:('(?:[^']|'')*')|(<=|>=|=|<|>|\(|\)|,)|(-?[0-9]+)|`?([A-Za-z_][A-Za-z0-9_]*)`?)")
_COMPARISONS = ("=", "<", "<=", ">", ">=")
_EXAMPLE = "topic LIKE 'sensors/%' AND timestamp >= '2026-01-31T12:00:00Z'"


def parse_where(name: str, text: str) -> Predicate:
    """Parse the value of the option ``name``; raises `OptionError`."""
    return _Parser(name, text).parse()


class _Parser:
    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._tokens = self._split(text)
        self._next = 0

    def parse(self) -> Predicate:
        predicate = self._condition(Predicate())
        while self._keyword("AND"):
            predicate = self._condition(predicate)
        if self._next < len(self._tokens):
            raise self._error(f"expected AND or the end before {self._tokens[self._next]}")
        return predicate

    def _condition(self, predicate: Predicate) -> Predicate:
        column = self._next_token().strip("`").lower()
        if column not in COLUMNS:
            raise self._error(f"{column or 'nothing'} is not one of the columns {', '.join(COLUMNS)}")
        if self._keyword("BETWEEN"):
            first = self._value(column)
            if not self._keyword("AND"):
                raise self._error("BETWEEN needs AND")
            return self._narrowed(self._narrowed(predicate, column, ">=", first), column, "<=", self._value(column))
        if self._keyword("IN"):
            return self._narrowed(predicate, column, "in", self._list(column))
        if self._keyword("LIKE"):
            pattern = self._value(column)
            prefix = pattern[:-1] if isinstance(pattern, str) else ""
            if not isinstance(pattern, str) or not pattern.endswith("%") or re.search(r"[%_\\]", prefix):
                raise self._error("LIKE takes a prefix of a topic like 'sensors/%', without other % or _")
            return self._narrowed(predicate, column, "prefix", prefix)
        operator = self._next_token()
        if operator not in _COMPARISONS:
            raise self._error(f"expected =, <, <=, >, >=, IN, BETWEEN or LIKE after {column}")
        return self._narrowed(predicate, column, operator, self._value(column))

    def _narrowed(self, predicate: Predicate, column: str, operator: str, value: Any) -> Predicate:
        narrowed = predicate.narrowed(column, operator, value)
        assert narrowed is not None
        return narrowed

    def _list(self, column: str) -> list[Any]:
        if self._next_token() != "(":
            raise self._error("IN needs a list in parentheses")
        values = [self._value(column)]
        while (token := self._next_token()) == ",":
            values.append(self._value(column))
        if token != ")":
            raise self._error("the list of IN is not closed")
        return values

    def _value(self, column: str) -> Any:
        if column == "timestamp":
            self._keyword("TIMESTAMP")
        token = self._next_token()
        text = token[1:-1].replace("''", "'") if token.startswith("'") else None
        if column == "topic" and text is not None:
            return text
        if column == "timestamp" and text is not None:
            return self._moment(text)
        if column in ("partition", "offset") and re.fullmatch("-?[0-9]+", token):
            return int(token)
        expected = "a whole number" if column in ("partition", "offset") else "a string in single quotes"
        raise self._error(f"{column} is compared with {expected}, not {token or 'nothing'}")

    def _moment(self, text: str) -> datetime:
        moment = parse_instant(text)
        if moment is None:
            raise self._error(f"'{text}' is not a time with a time zone like 2026-01-31T12:00:00Z")
        return moment

    def _keyword(self, word: str) -> bool:
        if self._next < len(self._tokens) and self._tokens[self._next].upper() == word:
            self._next += 1
            return True
        return False

    def _next_token(self) -> str:
        self._next += 1
        return self._tokens[self._next - 1] if self._next <= len(self._tokens) else ""

    def _split(self, text: str) -> list[str]:
        tokens: list[str] = []
        position, end = 0, len(text.rstrip())
        while position < end:
            match: re.Match[str] | None = _TOKEN.match(text, position)
            if match is None:
                raise self._error(f"cannot read {text[position : position + 20].strip()!r}")
            tokens.append(next(group for group in match.groups() if group is not None))
            position = match.end()
        return tokens

    def _error(self, reason: str) -> OptionError:
        return OptionError(self._name, f"{self._text!r}: {reason} (example: {_EXAMPLE})")
