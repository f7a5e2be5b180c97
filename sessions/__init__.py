"""Sessions, retained messages and the SQLite store."""
