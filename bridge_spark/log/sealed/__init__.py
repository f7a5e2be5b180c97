"""Sealed segments, which are closed segments rewritten as Parquet: footer, writer, reader, salvage, processes."""
