"""The versions of everything that the nodes of a cluster exchange: links, records and snapshots.

A node speaks a range of versions, and the nodes of a cluster the newest one that all of them speak. So a release that changes a format
raises `SPOKEN.newest`, and still reads and writes the version of the release before until no node needs that. A node whose range has
nothing in common with those of the others is refused as a member, and a process without a common version as one end of a link. A program
reads no record of a version that it does not know, and serves no shard whose log has one. The descriptions by which nodes learn of each
other (`NodeInfo`, `Directory`, `Hello`) have no version: they may only get fields that have defaults.
"""

from __future__ import annotations

from typing import NamedTuple


class Versions(NamedTuple):
    """The versions from ``oldest`` to ``newest``."""

    oldest: int
    newest: int

    def common(self, other: Versions) -> Versions | None:
        """The versions that are in both; None if there are none."""
        found = Versions(max(self.oldest, other.oldest), min(self.newest, other.newest))
        return found if found.oldest <= found.newest else None

    def __str__(self) -> str:
        return f"version {self.newest}" if self.oldest == self.newest else f"versions {self.oldest} to {self.newest}"


SPOKEN = Versions(2, 2)  # by this program
