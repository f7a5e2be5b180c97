"""Makes the random tokens and passwords of compose.yaml. Each is a file that its service and the broker's group may read.

    tokens.py DIRECTORY

A file that is there already is kept.
"""

import os
import secrets
import sys
from pathlib import Path

BROKER = 1883  # user and group of the broker's image
OWNERS = {"admin": BROKER, "prometheus": 65534, "notebook": 1000, "grafana-admin": 472}  # user ids in compose.yaml


def make(path: Path, owner: int) -> None:
    unfinished = path.with_name(f".{path.name}")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o440)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
        file.flush()
        os.fsync(descriptor)
        os.fchown(descriptor, owner, BROKER)
    unfinished.rename(path)


def main() -> None:
    os.umask(0)
    directory = Path(sys.argv[1])
    for name, owner in OWNERS.items():
        if not (directory / name).exists():
            make(directory / name, owner)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"tokens: {error}")
