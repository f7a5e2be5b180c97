"""Sessions, retained messages and the SQLite store that keeps them."""
