"""Remembered tokens: bounded in bytes, by an estimate that is not below the memory they take."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from mqttbroker.auth.jwt_tokens import Token
from mqttbroker.auth.permissions import PermissionsReader
from mqttbroker.auth.remembered_tokens import RememberedTokens

TOKENS = 2000


def small(number: int) -> Token:
    return Token(f"user-{number}", None, None, 1.5 + number, [])


def large(number: int) -> Token:
    acl: Any = {"pub": [f"plant/{number}/{topic}/#" for topic in range(20)], "sub": [f"commands/{number}/+/ü"]}
    values = [f"role-{number}-{value}" for value in range(10)]
    return Token(f"ü-{number}", f"device-{number}", PermissionsReader().of_claim(acl), 1.5, [("roles", "%c", values)])


@pytest.mark.parametrize("make", [small, large])
def test_estimate_is_not_below_the_memory(make: Callable[[int], Token]) -> None:
    make(0)
    gc.collect()
    tracemalloc.start()
    try:
        remembered = RememberedTokens(1 << 40)
        for number in range(TOKENS):
            remembered.add(f"token-{number}", make(number))
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken <= remembered.size <= 3 * taken, (taken / TOKENS, remembered.size / TOKENS)


def test_oldest_tokens_are_forgotten_first() -> None:
    limit = 20_000
    remembered = RememberedTokens(limit)
    for number in range(100):
        remembered.add(str(number), (large if number % 10 == 0 else small)(number))
        assert remembered.size <= limit
    found = [number for number in range(100) if remembered.get(str(number)) is not None]
    assert 5 < len(found) == len(remembered) and found == list(range(100 - len(found), 100))


def test_token_larger_than_the_limit_is_not_remembered() -> None:
    remembered = RememberedTokens(1000)
    remembered.add("a", large(1))
    assert remembered.get("a") is None and len(remembered) == remembered.size == 0
