"""Conversion of single values of a Mosquitto configuration. Each function raises ValueError with the reason."""

from __future__ import annotations

from typing import Final

_BOOLEANS: Final = {"true": True, "false": False, "1": True, "0": False}


def boolean(text: str) -> bool:
    if text not in _BOOLEANS:
        raise ValueError("not true or false")
    return _BOOLEANS[text]


def number(text: str) -> int:
    """A number that is not negative."""
    value = int(text)
    if value < 0:
        raise ValueError("below 0")
    return value


def seconds(text: str) -> str:
    return f"{number(text)}s"


def tls_version(text: str) -> str:
    """The oldest version of TLS; 1.1 becomes 1.2."""
    if text == "tlsv1.3":
        return "1.3"
    if text in ("tlsv1.2", "tlsv1.1"):
        return "1.2"
    raise ValueError("not tlsv1.2 or tlsv1.3")
