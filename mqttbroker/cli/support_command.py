"""``mqttbroker support-bundle``: one file with what a maintainer asks for, without secrets and payloads.

Exit status: 0 = written, 1 = it cannot be written, 2 = wrong call.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from mqttbroker.cli import broker_api
from mqttbroker.cli.tables import cell, print_table

COMMAND = "support-bundle"
MAX_LOG_LINES = 100_000
_MODE = 0o600


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``mqttbroker``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        COMMAND,
        help="write a file for a maintainer: state, limits and log, without secrets and payloads",
        allow_abbrev=False,
        description="Writes versions, the machine and its limits, the configuration without secrets, the broker's status, alarms, "
        "metrics and $SYS, the last lines of its log, and the names and sizes of its files to one tar.gz that only you "
        "may read. The broker may be down. Run it as the broker's user.",
        epilog="exit status: 0 written; 1 it cannot be written; 2 wrong call",
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="default: mqttbroker-support-TIME.tar.gz; it must not exist")
    parser.add_argument(
        "--anonymize",
        action="store_true",
        help="put tags in the place of client ids, user names, topics of log lines, IP addresses and the host's name",
    )
    parser.add_argument(
        "--log", metavar="FILE", type=Path, help="the broker's log, as of docker logs; else log.file of the configuration, else the journal"
    )
    parser.add_argument("--log-lines", metavar="N", type=int, default=5000, help=f"up to {MAX_LOG_LINES}; default: 5000")
    parser.add_argument("--data-dir", dest="--data-dir", metavar="DIR", help="the data directory")
    broker_api.add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    if not 0 <= options.log_lines <= MAX_LOG_LINES:
        print(f"mqttbroker {COMMAND}: --log-lines must be 0 to {MAX_LOG_LINES}", file=sys.stderr)
        return 2
    name = time.strftime("mqttbroker-support-%Y%m%dT%H%M%SZ", time.gmtime())
    output = options.output or Path(f"{name}.tar.gz")
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    except OSError as error:
        print(f"mqttbroker {COMMAND}: {output}: {error.strerror}", file=sys.stderr)
        return 1
    done = False
    try:
        os.fchmod(descriptor, _MODE)
        with os.fdopen(descriptor, "wb") as file:
            from mqttbroker.cli.support_bundle import Bundle

            bundle = Bundle(options)
            entries = bundle.entries()
            _write(file, name, entries)
        done = True
    except OSError as error:
        print(f"mqttbroker {COMMAND}: {output}: {error.strerror or error}", file=sys.stderr)
        return 1
    finally:
        if not done:
            output.unlink(missing_ok=True)
    print_table(("FILE", "BYTES"), [(entry, len(data)) for entry, data in entries.items()], ("BYTES",))
    for part, reason in bundle.missing.items():
        print(f"missing: {cell(part)}: {cell(bundle.redactor.clean(reason))}")
    print(f"{output}, {output.stat().st_size} bytes. Look through it before you send it.")
    return 0


def _write(file: Any, name: str, entries: dict[str, bytes]) -> None:
    import gzip
    import io
    import tarfile

    with gzip.GzipFile(fileobj=file, mode="wb", filename="") as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for entry, data in entries.items():
            member = tarfile.TarInfo(f"{name}/{entry}")
            member.size, member.mode, member.mtime = len(data), _MODE, int(time.time())
            archive.addfile(member, io.BytesIO(data))
