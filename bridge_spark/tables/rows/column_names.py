"""Names of columns in Spark's expressions, which take an unquoted dot for a field of a struct."""

from __future__ import annotations


def quoted(*path: str) -> str:
    """The column, or the field of a column, with exactly these names."""
    return ".".join("`" + name.replace("`", "``") + "`" for name in path)
