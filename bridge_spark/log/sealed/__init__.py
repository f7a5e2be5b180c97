"""Sealed segments: closed segments rewritten as Parquet; their footer, writing, reading and salvage, and the sealing process."""
