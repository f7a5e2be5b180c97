"""Permissions of the data directory: only the broker's user reads payloads, unless `data_mode` allows others."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

log = logging.getLogger("mqttbroker.store")

PRIVATE = 0o600


def set_umask(file_mode: int) -> None:
    """Create files with ``file_mode`` and directories that the same users may enter."""
    os.umask(0o777 & ~_directory_mode(file_mode))


def restrict(data_dir: Path, file_mode: int) -> None:
    """Remove from the files of the data directory the permissions that ``file_mode`` does not have.

    An older broker created them readable by every user. The mode of the directory itself is unchanged, because it may
    contain other files.
    """
    for path in (*data_dir.glob("mqttbroker.db*"), data_dir / "streams"):
        try:
            found = path.stat()
            mode = stat.S_IMODE(found.st_mode)
            restricted = mode & (_directory_mode(file_mode) if stat.S_ISDIR(found.st_mode) else file_mode)
            if mode != restricted:
                path.chmod(restricted)
                log.info("event=permissions_restricted file=%s mode=%s", path, f"{restricted:04o}")
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("event=permissions_too_wide file=%s reason=%s", path, error.strerror)


def _directory_mode(file_mode: int) -> int:
    return file_mode | (file_mode & 0o444) >> 2
