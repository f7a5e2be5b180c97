"""Which shard a client, a retained message or a group of a shared subscription belongs to."""

from __future__ import annotations

from mqttbroker.core.sessions.own_shard import shard_of


class Shards:
    """The shards of a cluster, whose number never changes."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"{count} shards")
        self.count = count

    def of_text(self, text: str) -> int:
        """The shard of a client id, a topic, or the name of a group or queue."""
        return shard_of(text, self.count)
