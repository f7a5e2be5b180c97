"""Where a core accepts links of other processes of the cluster."""

from __future__ import annotations

from typing import NamedTuple


class LinkAddress(NamedTuple):
    """``key`` is what a link must know to be accepted there. It is in no text that is made of the address."""

    host: str
    port: int
    key: str

    def __repr__(self) -> str:
        return f"{self.host}:{self.port}"
