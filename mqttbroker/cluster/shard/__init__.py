"""One shard on one node: who owns it, its log, its store and tables, its snapshots."""
