"""Verified tokens by their digest, so that a client that reconnects with its token costs no verification."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from mqttbroker.auth.jwt_tokens import Token

ENTRY_BYTES = 250  # of a digest and its place, at most


class RememberedTokens:
    """Remembers tokens in at most ``max_bytes`` of memory; the oldest are forgotten first. 0 = none."""

    def __init__(self, max_bytes: int) -> None:
        self.size = 0  # bytes, at most
        self._max_bytes = max_bytes
        self._tokens: OrderedDict[bytes, Token] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens)

    def get(self, text: str) -> Token | None:
        return self._tokens.get(_digest(text))

    def add(self, text: str, token: Token) -> None:
        """Remember a token that is not remembered."""
        self._tokens[_digest(text)] = token
        self.size += token.size + ENTRY_BYTES
        while self.size > self._max_bytes:
            _, oldest = self._tokens.popitem(last=False)
            self.size -= oldest.size + ENTRY_BYTES


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
