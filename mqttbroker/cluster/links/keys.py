"""The keys of links: who connects to a core proves that it knows the key of the core's node, and the core proves it, too.

A node makes its key at its start, and tells it the other nodes with its address. A key is never sent over a link, for whoever listens at
the port of a core that is away would learn it. Each kind of process has a key of its own, derived from the node's: what a worker knows
makes it no core.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 16


def new_key() -> str:
    """The key of a node."""
    return secrets.token_hex(KEY_BYTES)


def new_nonce() -> str:
    """A value that makes the proofs of one connection unlike those of all others."""
    return secrets.token_hex(NONCE_BYTES)


def key_of(node_key: str, kind: str) -> str:
    """The key of processes of one kind for the links to a node; "" if the node's is not known."""
    return node_key and _digest(node_key, kind.encode())


def proof(key: str, side: str, hello: bytes, challenge: bytes) -> str:
    """The proof that one side of a connection, which began with these two lines, knows the key."""
    return _digest(key, b"\n".join((side.encode(), hello, challenge)))


def proves(given: str, key: str, side: str, hello: bytes, challenge: bytes) -> bool:
    """Whether ``given`` is the `proof`. Takes the same time for each wrong one."""
    expected = proof(key, side, hello, challenge)
    return key != "" and hmac.compare_digest(expected.encode(), given.encode("utf-8", "surrogatepass"))


def _digest(key: str, data: bytes) -> str:
    return hmac.new(key.encode(), data, "sha256").hexdigest()
