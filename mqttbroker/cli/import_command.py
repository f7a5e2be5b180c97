"""The command import-mosquitto."""

from __future__ import annotations

import argparse
import sqlite3
import sys
from pathlib import Path
from typing import Any

COMMAND = "import-mosquitto"

# Exit status if everything was imported that can be, but not all of it.
INCOMPLETE = 3


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``mqttbroker``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        COMMAND,
        help="convert a Mosquitto's configuration, users, access rules and database",
        description=f"Exit status: 0 if everything was converted, {INCOMPLETE} if lines on stderr name what was not,"
        " 1 if nothing was, 2 if the call was wrong. Stop Mosquitto first, so that its database is complete.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="MOSQUITTO_CONF", type=Path, help="mosquitto.conf")
    parser.add_argument("--db", metavar="FILE", type=Path, help="mosquitto.db; default: the one that the file names")
    parser.add_argument(
        "--to", metavar="DIR", type=Path, default=Path("mqttbroker"), help="new or empty directory for the result; default: ./mqttbroker"
    )


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError if the converted configuration is not valid."""
    from mqttbroker.migration.import_mosquitto import SETTINGS_FILE, ImportFailed, import_mosquitto
    from sessions.store.interface import StoreError

    try:
        found = import_mosquitto(options.file, options.db, options.to)
    except (ImportFailed, StoreError, sqlite3.Error) as error:
        reason = str(error)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    else:
        for line in found.not_carried:
            print(line, file=sys.stderr)
        counts = found.counts
        print(f"{options.file} -> {options.to / SETTINGS_FILE}")
        if found.database is None:
            print("no database: sessions and retained messages begin empty")
        else:
            print(
                f"{found.database}: {counts.sessions} sessions, {counts.subscriptions} subscriptions,"
                f" {counts.queued} queued messages, {counts.retained} retained messages"
            )
        print(f"start it: mqttbroker serve --config {options.to / SETTINGS_FILE}")
        return INCOMPLETE if found.not_carried else 0
    print(f"mqttbroker {COMMAND}: {reason}", file=sys.stderr)
    return 1
