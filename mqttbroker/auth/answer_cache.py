"""Answers of an external authenticator, remembered for a while.

An answer is found by a digest of the whole login under a random key of this process; no password is kept. Bounded in
bytes: the oldest answers are forgotten first.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from typing import Any

_OVERHEAD = 200  # bytes of an entry beside its answer


class AnswerCache:
    """Remembers answers for ``seconds``, in at most ``max_bytes``; 0 seconds = not at all."""

    def __init__(self, seconds: float, max_bytes: int) -> None:
        self.seconds = seconds
        self.max_bytes = max_bytes
        self.size = 0
        self._key = os.urandom(32)
        self._answers: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()  # until when, oldest first

    def digest(self, login: bytes) -> bytes:
        return hashlib.blake2b(login, digest_size=32, key=self._key).digest()

    def get(self, digest: bytes, now: float) -> dict[str, Any] | None:
        found = self._answers.get(digest)
        if found is None or found[0] <= now:
            return None
        answer: dict[str, Any] = json.loads(found[1])
        return answer

    def put(self, digest: bytes, answer: dict[str, Any], now: float) -> None:
        if self.seconds <= 0.0:
            return
        data = json.dumps(answer).encode()
        self._forget(digest)
        self._answers[digest] = (now + self.seconds, data)
        self.size += len(data) + _OVERHEAD
        while self._answers and (self.size > self.max_bytes or next(iter(self._answers.values()))[0] <= now):
            self._forget(next(iter(self._answers)))

    def clear(self) -> None:
        self._answers.clear()
        self.size = 0

    def _forget(self, digest: bytes) -> None:
        found = self._answers.pop(digest, None)
        if found is not None:
            self.size -= len(found[1]) + _OVERHEAD
