"""The commands on a data directory: check-store, repair-store, data-version, backup, restore.

Results go to stdout, an error is one line on stderr. Exit status: 0 if there was no problem, 1 if problems were found
or the command failed, 2 if the call was wrong.
"""

from __future__ import annotations

import argparse
import os
import pwd
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mqttbroker.admin.data.files import set_umask
from mqttbroker.config.files import with_user
from mqttbroker.config.load import load_settings
from mqttbroker.config.settings import Settings
from mqttbroker.logs.output import append_audit

_HELP = {
    "check-store": "name the damage of a data directory; the broker may be running",
    "repair-store": "put damaged files aside and keep all rows and records that can be read",
    "data-version": "name the data formats of a data directory, and whether this program opens it",
    "backup": "copy the data directory to a new directory; the broker may be running",
    "restore": "put a backup into an empty data directory",
}
COMMANDS = tuple(_HELP)


def add_parsers(commands: Any) -> None:
    """Add the commands to the subparsers of ``mqttbroker``."""
    for command, text in _HELP.items():
        parser: argparse.ArgumentParser = commands.add_parser(command, help=text, allow_abbrev=False)
        if command == "backup":
            parser.add_argument("directory", metavar="DIR", type=Path, help="where the backup goes; new or empty")
        elif command == "restore":
            parser.add_argument("directory", metavar="BACKUP", type=Path, help="a directory made by mqttbroker backup")
        else:
            parser.add_argument("directory", metavar="DIR", type=Path, nargs="?", help="the data directory")
        parser.add_argument("--config", metavar="FILE", type=Path, help="the broker's TOML file, for its data_dir")
        parser.add_argument("--data-dir", dest="--data-dir", metavar="DIR", help="the data directory")


def run(options: argparse.Namespace) -> int:
    """Run one of `COMMANDS`; raises ConfigError if the settings cannot be read."""
    flags = {"--data-dir": given} if (given := getattr(options, "--data-dir")) is not None else {}
    settings = load_settings(options.config, os.environ, flags)
    set_umask(settings.data_mode)
    data_dir = settings.data_dir
    command: str = options.command
    if command in ("check-store", "repair-store", "data-version"):
        if options.directory is not None:
            if flags:
                print(f"mqttbroker {command}: DIR or --data-dir, not both", file=sys.stderr)
                return 2
            data_dir = options.directory
        if command == "check-store":
            return _guarded(command, data_dir, lambda: _check(data_dir))
        if command == "data-version":
            return _guarded(command, data_dir, lambda: _data_version(data_dir))
        return _guarded(command, data_dir, lambda: _audited(settings, command, data_dir, lambda: _repair(data_dir)))
    target = options.directory if command == "backup" else data_dir
    return _guarded(command, data_dir, lambda: _audited(settings, command, target, lambda: _copy(command, data_dir, options.directory)))


def _guarded(command: str, data_dir: Path, work: Callable[[], int]) -> int:
    from mqttbroker.admin.data.backup import BackupError
    from mqttbroker.admin.data.version import with_programs
    from sessions.store.interface import StoreError

    try:
        return work()
    except (BackupError, StoreError, sqlite3.Error) as error:
        reason = with_programs(error, data_dir)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    print(f"mqttbroker {command}: {with_user(reason)}", file=sys.stderr)
    return 1


def _audited(settings: Settings, command: str, target: Path, work: Callable[[], int]) -> int:
    """Do the work, and add it to the audit file of the settings before; no line, no work."""
    log = settings.log
    if log.audit_file is not None:
        user = pwd.getpwuid(os.getuid()).pw_name
        action = command.replace("-", "_")
        try:
            append_audit(log.audit_file, log.format, "event=admin action=%s target=%s user=%s", action, target, user)
        except OSError as error:
            raise OSError(f"log.audit_file: {log.audit_file}: {error.strerror or error}") from None
    return work()


def _check(data_dir: Path) -> int:
    from mqttbroker.admin.data.repair import check

    findings = check(data_dir)
    for line in findings.lines:
        print(line)
    for problem in findings.problems:
        print(f"problem: {problem}")
    print(f"{len(findings.problems)} problems" if findings.problems else "no problems")
    return 1 if findings.problems else 0


def _data_version(data_dir: Path) -> int:
    from mqttbroker import __version__
    from mqttbroker.admin.data.version import FORMATS, copies, found_formats, last_program

    os.listdir(data_dir)
    found = list(found_formats(data_dir))
    print(f"last used by mqttbroker {last_program(data_dir) or 'of a version before 0.9.0'}; this is mqttbroker {__version__}")
    for each in found:
        version = "none" if each.version is None else each.version
        print(f"{each.name}: {version}; this program reads 1 to {FORMATS[each.name]}")
    for path in copies(data_dir):
        print(f"copy from before a migration: {path.name}")
    newer = [each.name for each in found if each.newer]
    print(f"this program does not open it: {', '.join(newer)}" if newer else "this program opens it")
    return 1 if newer else 0


def _repair(data_dir: Path) -> int:
    from mqttbroker.admin.data.repair import repair

    os.listdir(data_dir)
    lines = repair(data_dir)
    for line in lines or ["nothing to repair"]:
        print(line)
    return 0


def _copy(command: str, data_dir: Path, directory: Path) -> int:
    from mqttbroker.admin.data.backup import back_up, restore

    print(back_up(data_dir, directory) if command == "backup" else restore(directory, data_dir))
    return 0
