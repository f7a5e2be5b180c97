"""The records of a shard's log, and which of them are valid."""
