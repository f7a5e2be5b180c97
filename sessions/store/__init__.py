"""The SQLite store: the writer thread, the tables, and their check, repair and copy."""
