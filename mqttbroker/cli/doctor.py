"""``mqttbroker doctor``: checks a machine and a configuration for problems that a broker would have.

Each finding is one line; a problem has a second line with the cure. The command writes and removes a file in the data
directory, and changes nothing else. Exit status: 0 = no problem (there may be warnings), 1 = a problem, 2 = wrong call.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import importlib.util
import os
import resource
import shutil
import socket
import stat
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from mqttbroker import build_kind
from mqttbroker.cli.tables import cell, print_json
from mqttbroker.config.in_force import SECRETS, flatten
from mqttbroker.config.load import ConfigError, load_settings
from mqttbroker.config.settings import Listener, Settings

OK, WARNING, PROBLEM = "ok", "warning", "problem"
FSYNCS = 50
SLOW_FSYNC = 0.01  # seconds
FREE_BYTES = 1 << 30
CERTIFICATE_DAYS = 30
CLOCK_SLACK = 60.0  # seconds
_STA_UNSYNC = 0x40  # of adjtimex(2)
# SQLite's write-ahead log needs memory that processes share, which these do not have; a tmpfs is lost with the power.
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs")
_SECRETS = ("password_file", "keyfile", "token_file", "secret_file", "key_file", "authorization_file", "headers_file", "options_file")


class Finding(NamedTuple):
    """The result of one check. ``cure`` is a line, "" if nothing is to be done."""

    check: str
    state: str
    text: str
    cure: str = ""


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``mqttbroker``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="look for what keeps a broker from working well, with a cure for each",
        allow_abbrev=False,
        epilog="exit status: 0 no problem, perhaps warnings; 1 a problem; 2 wrong call",
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="the broker's TOML file")
    parser.add_argument("--data-dir", dest="--data-dir", metavar="DIR", help="the data directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    found = list(findings(options.config, getattr(options, "--data-dir")))
    if options.json:
        print_json([finding._asdict() for finding in found])
    else:
        width = max(len(finding.check) for finding in found)
        for finding in found:
            print(f"{finding.state.ljust(7)}  {finding.check.ljust(width)}  {cell(finding.text)}")
            if finding.cure:
                print(f"{'':7}  {'':{width}}  cure: {cell(finding.cure)}")
    return 1 if any(finding.state == PROBLEM for finding in found) else 0


def findings(config: Path | None, data_dir: str | None) -> Iterator[Finding]:
    """Run all checks."""
    yield from _build()
    flags = {} if data_dir is None else {"--data-dir": data_dir}
    warned: list[str] = []
    try:
        settings = load_settings(config, os.environ, flags, warned.append)
    except ConfigError as error:
        for line in error.problems:
            yield Finding("configuration", PROBLEM, line, "correct this key; conf/mqttbroker.toml describes each")
        return
    for text in warned:
        yield Finding("configuration", WARNING, text, "use the new name")
    checks: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
        _configuration,
        _open_files,
        _ports,
        _backlog,
        _data_directory,
        _disk,
        _secrets,
        _certificates,
        _clock,
        _java,
    )
    for check in checks:
        yield from check(settings)


def _build() -> Iterator[Finding]:
    if build_kind() == "compiled":
        yield Finding("build", OK, "compiled")
    else:
        yield Finding(
            "build",
            WARNING,
            "plain Python, which takes several times the CPU",
            "install a C compiler and Python's headers (apt install gcc python3-dev), then install again",
        )


def _configuration(settings: Settings) -> Iterator[Finding]:
    from mqttbroker.server.config_check import check, warnings

    found = False
    for text in check(settings):
        found = True
        yield Finding("configuration", PROBLEM, text, "correct this key, or the file that it names")
    for text in warnings(settings):
        found = True
        yield Finding("configuration", WARNING, text, "correct this key, or leave it if that is meant")
    if not found:
        changed = sum(source != "default" for source in settings.sources.values())
        yield Finding("configuration", OK, f"{changed} keys are set")


def _open_files(settings: Settings) -> Iterator[Finding]:
    from mqttbroker.system.file_limit import files_needed

    needed = files_needed(settings)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= needed:
        limit = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        yield Finding("open files", OK, f"{limit}, {needed} are needed")
    else:
        yield Finding(
            "open files",
            WARNING,
            f"the hard limit is {hard}, the limits of connections need {needed}",
            f"LimitNOFILE={needed} in the systemd unit, docker run --ulimit nofile={needed}, or a lower limits.max_connections",
        )


# --- network ----------------------------------------------------------------------------------------------------------


def _ports(settings: Settings) -> Iterator[Finding]:
    running = broker_runs(settings.data_dir)
    places = [(f"listeners.{index}", one.host, one.port) for index, one in enumerate(settings.listeners) if one.type != "unix"]
    if settings.http.port is not None:
        places.append(("http", settings.http.host, settings.http.port))
    for name, host, port in places:
        yield _port(name, host, port, running)


def _port(name: str, host: str, port: int, running: bool) -> Finding:
    where = f"{name}: {Listener(host=host, port=port).address}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror as error:
        return Finding("port", PROBLEM, f"{where}: {error.strerror}", "give an address of this machine, or a name that resolves")
    except OSError as error:
        if error.errno == errno.EADDRINUSE and running:
            return Finding("port", OK, f"{where}: in use, and a broker runs on this data directory")
        cures = {
            errno.EADDRINUSE: f"find its owner with: ss -ltnp 'sport = :{port}', or choose another port",
            errno.EACCES: "ports below 1024 need CAP_NET_BIND_SERVICE (AmbientCapabilities= in the systemd unit)",
            errno.EADDRNOTAVAIL: "give an address of this machine: ip address",
        }
        cure = cures.get(error.errno or 0, "give an address and a port of this machine")
        return Finding("port", PROBLEM, f"{where}: {error.strerror}", cure)
    return Finding("port", OK, f"{where}: free")


def broker_runs(data_dir: Path) -> bool:
    """Whether a broker holds the lock of the data directory; false if it cannot be looked at."""
    from mqttbroker.admin.data.repair import in_use

    try:
        return in_use(data_dir)
    except OSError:
        return False


def _backlog(settings: Settings) -> Iterator[Finding]:
    try:
        allowed = int(Path("/proc/sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):
        return  # not Linux
    if allowed < 1024:
        yield Finding(
            "backlog",
            WARNING,
            f"net.core.somaxconn is {allowed}: of many clients that connect at once some wait for seconds",
            "sysctl -w net.core.somaxconn=4096",
        )
    else:
        yield Finding("backlog", OK, f"net.core.somaxconn is {allowed}")


# --- files and disk ---------------------------------------------------------------------------------------------------


def _data_directory(settings: Settings) -> Iterator[Finding]:
    directory = settings.data_dir
    if not directory.is_dir():
        yield Finding("data directory", OK, f"{directory} does not exist yet; the broker makes it")
        return
    status = directory.stat()
    if status.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        yield Finding(
            "data directory",
            WARNING,
            f"{directory} belongs to another user than this one",
            "run this command as the broker's user: sudo -u mqttbroker mqttbroker doctor",
        )
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        yield Finding("data directory", PROBLEM, f"every user may write to {directory}", f"chmod o-w {directory}")
    kind = file_system(directory)
    if kind in _REMOTE:
        yield Finding(
            "data directory",
            PROBLEM,
            f"{directory} is on {kind}, on which SQLite may lose data",
            "set data_dir to a local disk, or a block device over the network",
        )
    elif kind in ("tmpfs", "ramfs") and settings.durability != "off":
        yield Finding(
            "data directory", WARNING, f"{directory} is on {kind}, which is lost when the machine restarts", "set data_dir to a disk"
        )
    else:
        yield Finding("data directory", OK, f"{directory} is on {kind or 'a file system of unknown type'}")


def file_system(directory: Path) -> str:
    """The type of the file system that a directory is on; "" where the system does not tell."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    path = directory.resolve()
    found = [(len(place), index, kind) for index, (place, kind) in enumerate(mounts) if Path(place) == path or Path(place) in path.parents]
    return max(found)[2] if found else ""


def _disk(settings: Settings) -> Iterator[Finding]:
    directory = next(path for path in (settings.data_dir, *settings.data_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(directory).free
    if free < FREE_BYTES:
        yield Finding(
            "disk space",
            WARNING,
            f"{free >> 20} MiB are free on the disk of {directory}",
            "free some, or limit retention_bytes and limits.max_total_queued_bytes",
        )
    else:
        yield Finding("disk space", OK, f"{free / (1 << 30):.1f} GiB are free")
    if settings.durability == "off" or not settings.data_dir.is_dir():
        return
    try:
        seconds = fsync_seconds(settings.data_dir)
    except OSError as error:
        yield Finding(
            "fsync",
            PROBLEM,
            f"{settings.data_dir} cannot be written: {error.strerror}",
            f"chown the directory to the broker's user, and check the disk: dmesg, df {settings.data_dir}",
        )
        return
    text = f"{seconds * 1000:.2f} ms for 4 KiB (median of {FSYNCS})"
    if seconds > SLOW_FSYNC:
        yield Finding(
            "fsync",
            WARNING,
            f"{text}: each acknowledgement at QoS 1 and 2 waits at least that long",
            'use an SSD with power-loss protection, or durability = "interval" if the last second may be lost',
        )
    else:
        yield Finding("fsync", OK, text)


def fsync_seconds(directory: Path) -> float:
    """The median time in which a disk stores 4 KiB. Raises OSError."""
    times = []
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(FSYNCS):
            file.write(bytes(4096))
            start = time.perf_counter()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _secrets(settings: Settings) -> Iterator[Finding]:
    values = list(_all_values(settings))
    paths = {value for key, value in values if key in _SECRETS and isinstance(value, Path)}
    if any(value is not None and value != () for key, value in values if key in SECRETS):
        # A secret is in the configuration, or in a file that the same key with _file names.
        places = {source.rpartition(":")[0] for key, source in settings.sources.items() if key.rpartition(".")[2] in (*SECRETS, "access")}
        paths |= {Path(place) for place in places if place}
    found = [path for path in sorted(paths) if os.path.exists(path)]  # false if this user cannot see it
    open_to_all = [path for path in found if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH)]
    for path in open_to_all:
        yield Finding("secrets", WARNING, f"every user of the machine may read or write {path}", f"chmod o-rwx {path}")
    if found and not open_to_all:
        yield Finding("secrets", OK, f"other users may not read {', '.join(map(str, found))}")


def _all_values(settings: Settings) -> Iterator[tuple[str, Any]]:
    for key, value in flatten(settings).items():
        if key == "http.access":
            for access in value:
                yield "token_file", access.token_file
                if access.token_file is None:
                    yield "token", access.token
        else:
            yield key.rpartition(".")[2], value


def _certificates(settings: Settings) -> Iterator[Finding]:
    from cryptography import x509

    named = [(f"listeners.{index}", one.certfile) for index, one in enumerate(settings.listeners)]
    for name, path in [*named, ("http", settings.http.certfile)]:
        if path is None:
            continue
        try:
            expires = x509.load_pem_x509_certificates(path.read_bytes())[0].not_valid_after_utc
        except (OSError, ValueError):
            continue  # a problem of the configuration
        left = expires - datetime.now(UTC)
        text = f"{name}: {path} is valid until {expires:%Y-%m-%d %H:%M} UTC"
        if left < timedelta(0):
            yield Finding("certificate", PROBLEM, text, "renew it, then: mqttbroker reload")
        elif left < timedelta(days=CERTIFICATE_DAYS):
            yield Finding("certificate", WARNING, text, "renew it, then: mqttbroker reload")
        else:
            yield Finding("certificate", OK, text)


# --- machine ----------------------------------------------------------------------------------------------------------


def _clock(settings: Settings) -> Iterator[Finding]:
    newest = max((path.stat().st_mtime for path in settings.data_dir.glob("*") if path.is_file()), default=0.0)
    behind = newest - time.time()
    if behind > CLOCK_SLACK:
        yield Finding(
            "clock",
            PROBLEM,
            f"the clock is {behind:.0f} s behind the newest file of {settings.data_dir}: messages and sessions would expire late",
            "set the clock: timedatectl set-ntp true",
        )
        return
    synchronised = clock_is_synchronised()
    if synchronised is None:
        yield Finding("clock", OK, "the system does not say whether it is synchronised")
    elif synchronised:
        yield Finding("clock", OK, "synchronised")
    else:
        yield Finding(
            "clock",
            WARNING,
            "not synchronised with a time server: timestamps of messages, expiries and tokens depend on it",
            "timedatectl set-ntp true, or install chrony",
        )


def clock_is_synchronised() -> bool | None:
    """Whether the kernel's clock is synchronised; None where it does not tell."""
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    timex = (ctypes.c_long * 64)()  # larger than struct timex; modes = 0 only reads
    if adjtimex(timex) < 0:
        return None
    # struct timex: int modes; long offset, freq, maxerror, esterror; int status
    return not ctypes.c_int.from_buffer(timex, 5 * ctypes.sizeof(ctypes.c_long)).value & _STA_UNSYNC


def _java(settings: Settings) -> Iterator[Finding]:
    if importlib.util.find_spec("pyspark") is None:
        return  # Spark runs elsewhere
    from bridge_spark.java import JavaError, java_home

    try:
        yield Finding("Java", OK, str(java_home()))
    except JavaError as error:
        reason, _, cure = str(error).partition(". ")
        yield Finding("Java", WARNING, reason, cure)
