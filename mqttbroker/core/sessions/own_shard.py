"""The shard of a cluster that a core owns, and the client ids that belong to it."""

from __future__ import annotations

from zlib import crc32


def shard_of(text: str, shards: int) -> int:
    """The shard, of ``shards``, of a client id, a topic, or the name of a group."""
    return crc32(text.encode("utf-8")) % shards


class OwnShard:
    """Shard ``number`` of ``shards``."""

    def __init__(self, number: int, shards: int) -> None:
        self.number = number
        self.shards = shards

    def owns(self, client_id: str) -> bool:
        return shard_of(client_id, self.shards) == self.number

    def fitted(self, client_id: str) -> str:
        """An assigned client id that belongs to this shard: with a number at its end if it does not already."""
        if self.owns(client_id):
            return client_id
        start = crc32((client_id + "-").encode("utf-8"))
        number: int = 0
        while crc32(b"%d" % number, start) % self.shards != self.number:
            number += 1
        return f"{client_id}-{number}"
