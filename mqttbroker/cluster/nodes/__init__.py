"""The nodes of a cluster: membership, assignment of shards, and the core processes of a node."""
