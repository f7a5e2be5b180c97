"""Atomic replacement of a file that only its owner may read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def replace_file(path: Path, parts: Iterable[bytes], durable: bool) -> str:
    """Replace a file by one of mode 0600 with these bytes; the reason why that failed, or "".

    ``durable``: the bytes are on the disk before the file has its name.
    """
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
        try:
            with open(handle, "wb") as file:
                file.writelines(parts)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        return error.strerror or str(error)
    return ""
