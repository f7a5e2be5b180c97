"""The parts of a support bundle. Every text passes `Redactor`; ``missing.txt`` says what could not be had, and why."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import sqlite3
import ssl
import sys
import time
import tomllib
from base64 import b64decode
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from mqttbroker import __version__, build_kind
from mqttbroker.cli import broker_api
from mqttbroker.cli.broker_api import AWAY, BrokerApi, CommandError
from mqttbroker.cli.broker_processes import lock_holder, process_tree, title
from mqttbroker.cli.log_excerpt import ExcerptError, events, journal_lines, last_lines
from mqttbroker.cli.redaction import Redactor, secrets_in_environment, secrets_in_tree, secrets_of
from mqttbroker.cli.tables import cell
from mqttbroker.config.load import ConfigError, load_settings, secret_in
from mqttbroker.config.settings import Settings

MAX_ENTRY_BYTES = 4 << 20  # of one file in the bundle, longer ones are cut
MAX_BUNDLE_BYTES = 32 << 20  # of all, before compression; what comes then is left out
API_SECONDS = 60.0  # for all answers of the broker: one that takes this long is asked no more
MAX_LISTED_FILES = 10_000  # of the data directory
_SYS_TOPICS = "$SYS/broker/#"
# Pages of the API, by the name of their file.
_PAGES = {
    "status": "/status", "alarms": "/alarms", "listeners": "/listeners", "bridges": "/bridges",
    "streams": "/streams", "configuration": "/configuration", "log-level": "/log/level", "cluster": "/cluster",
}  # fmt: skip
_LIMITS = {name[7:].lower(): getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"}
_CGROUP_FILES = ("memory.max", "memory.high", "memory.current", "memory.swap.max", "cpu.max", "pids.max", "pids.current")


class Missing(Exception):
    """A part of the bundle cannot be had; one line."""


class Bundle:
    """Collects the parts of a bundle. ``missing`` has those that could not be had, with the reason."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.missing: dict[str, str] = {}
        self.redactor = Redactor(options.anonymize)
        self._options = options
        self._problems: list[str] = []  # of the configuration
        self._loaded = True  # false = of the settings only the data directory is known, or nothing
        self._settings = self._load()
        self._pid: int | None = None
        self._pid_unknown = "no broker has locked the data directory"
        if self._settings is not None:
            try:
                self._pid = lock_holder(self._settings.data_dir / "lock")
            except FileNotFoundError:
                pass
            except OSError as error:
                self._pid_unknown = f"{self._settings.data_dir}: {error.strerror}"
        self._collect_secrets()

    def entries(self) -> dict[str, bytes]:
        """The files of the bundle."""
        parts: dict[str, Callable[[], str]] = {
            "version.json": self._version, "machine.json": self._machine, "limits.json": self._limits,
            "processes.json": self._processes, "configuration.toml": self._configuration, "doctor.json": self._doctor,
            "data-directory.json": self._data_directory, **self._api_parts(), "log.txt": self._log, "audit.txt": self._audit,
        }  # fmt: skip
        texts: dict[str, str] = {}
        for name, part in parts.items():
            try:
                texts[name] = part()
            except Missing as reason:
                self.missing[name] = str(reason)
            except Exception as error:  # a defect here must not cost the rest; its text may hold anything
                self.missing[name] = f"unexpected {type(error).__name__}"
        for text in texts.values():
            self.redactor.learn(text)
        found: dict[str, bytes] = {}
        left = MAX_BUNDLE_BYTES
        for name, text in texts.items():
            data = self._cut(self.redactor.clean(text).encode(errors="replace"), name == "log.txt" or name == "audit.txt")
            if len(data) > left:
                self.missing[name] = f"the bundle has {MAX_BUNDLE_BYTES >> 20} MiB"
                continue
            left -= len(data)
            found[name] = data
        lines = [f"{name}: {reason}\n" for name, reason in self.missing.items()] or ["nothing\n"]
        found["missing.txt"] = self.redactor.clean("".join(lines)).encode(errors="replace")
        found["README.txt"] = self._about().encode()
        return found

    def _cut(self, data: bytes, keep_end: bool) -> bytes:
        if len(data) <= MAX_ENTRY_BYTES:
            return data
        note = f"\n(cut: {MAX_ENTRY_BYTES} of {len(data)} bytes)\n".encode()
        return note + data[-MAX_ENTRY_BYTES:] if keep_end else data[:MAX_ENTRY_BYTES] + note

    def _about(self) -> str:
        short = f" {self.redactor.too_short} secrets are too short to be searched for." if self.redactor.too_short else ""
        names = (
            "Names of clients and users, and addresses, are tags: one name has one tag in this bundle."
            if self.redactor.anonymize
            else "Client ids, user names, topics and addresses are as they are; --anonymize puts tags in their place."
        )
        return (
            f"Made by mqttbroker {__version__} support-bundle at {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}.\n"
            "It holds no payloads. *** stands for a secret: those of the configuration, of the files that it names and of the "
            f"environment, and what looks like one.{short}\n{names}\n"
            "missing.txt says what could not be had. log.txt and audit.txt have the broker's own events only.\n"
        )

    # --- secrets ------------------------------------------------------------------------------------------------------

    def _load(self) -> Settings | None:
        flags = {} if (given := getattr(self._options, "--data-dir")) is None else {"--data-dir": given}
        try:
            return load_settings(self._options.config, os.environ, flags, self._problems.append)
        except ConfigError as error:
            self._problems += error.problems
        self._loaded = False
        if given is None:
            return None
        try:
            return load_settings(None, None, flags, lambda _: None)  # the other keys are not known
        except ConfigError:
            return None

    def _collect_secrets(self) -> None:
        options, add = self._options, self.redactor.add_secret
        environments = [dict(os.environ)]
        if self._pid is not None:
            try:
                words = Path(f"/proc/{self._pid}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
                environments.append(dict(word.partition("=")[::2] for word in words if "=" in word))
            except OSError:
                pass  # another user's
        for variables in environments:
            for value in secrets_in_environment(variables):
                add(value)
        self._variables = sorted({name for each in environments for name in each if name.startswith("MQTTBROKER_")})
        if self._settings is not None:
            for value in secrets_of(self._settings):
                add(value)
        if options.config is not None:
            try:
                for value in secrets_in_tree(tomllib.loads(options.config.read_text(encoding="utf-8"))):
                    add(value)
            except (OSError, ValueError):
                pass  # `_load` has the reason
        for file in filter(None, (options.token_file, os.environ.get("MQTTBROKER_API_TOKEN_FILE"))):
            try:
                add(secret_in(Path(file)))
            except ValueError:
                pass
        if options.token is not None:
            add(options.token)
        self.redactor.add_name(platform.node())

    # --- the machine --------------------------------------------------------------------------------------------------

    def _version(self) -> str:
        from mqttbroker.admin.data.version import FORMATS

        packages = sorted({f"{each.name} {each.version}" for each in metadata.distributions()}, key=str.lower)
        return _json({
            "mqttbroker": __version__, "build": build_kind(), "data_formats": FORMATS, "python": sys.version,
            "implementation": platform.python_implementation(), "sqlite": sqlite3.sqlite_version, "openssl": ssl.OPENSSL_VERSION,
            "packages": packages,
        })  # fmt: skip

    def _machine(self) -> str:
        from mqttbroker.cli.doctor import clock_is_synchronised

        release = platform.freedesktop_os_release() if sys.platform == "linux" else {}
        return _json({
            "system": platform.platform(), "release": release.get("PRETTY_NAME"), "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()), "host": None if self.redactor.anonymize else platform.node(), "cpus": os.cpu_count(),
            "cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "load": os.getloadavg(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "clock_is_synchronised": clock_is_synchronised(),
            "container": any(Path(each).exists() for each in ("/.dockerenv", "/run/.containerenv")),
        })  # fmt: skip

    def _limits(self) -> str:
        pid = self._pid or os.getpid()
        limits = {}
        for name, number in _LIMITS.items():
            try:
                limits[name] = [None if value == resource.RLIM_INFINITY else value for value in resource.prlimit(pid, number)]
            except OSError:
                continue
        kernel = ("net/core/somaxconn", "fs/file-max", "fs/nr_open", "vm/overcommit_memory", "vm/swappiness")
        return _json({
            "of": "the broker" if self._pid else "this command",
            "soft_and_hard": limits, "cgroup": {name: text for name, text in _cgroup(pid)},
            "kernel": {name: _text_of(Path("/proc/sys", name)) for name in kernel},
        })  # fmt: skip

    def _processes(self) -> str:
        if self._pid is None:
            raise Missing(self._pid_unknown)
        return _json({"environment": self._variables, "processes": [_process(pid) for pid in process_tree(self._pid)]})

    # --- configuration and data ---------------------------------------------------------------------------------------

    def _configuration(self) -> str:
        from mqttbroker.config.printed import printed
        from mqttbroker.server.config_check import check, warnings

        if not self._loaded or self._settings is None:
            raise Missing("; ".join(self._problems))
        problems = [*self._problems, *check(self._settings), *warnings(self._settings)]
        return "".join(f"# problem: {cell(problem)}\n" for problem in problems) + printed(self._settings)

    def _doctor(self) -> str:
        from mqttbroker.cli.doctor import findings

        return _json([finding._asdict() for finding in findings(self._options.config, getattr(self._options, "--data-dir"))])

    def _data_directory(self) -> str:
        from mqttbroker.admin.data.version import found_formats, last_program
        from mqttbroker.cli.doctor import file_system

        directory = self._known("the data directory").data_dir
        try:
            usage, places = shutil.disk_usage(directory), os.statvfs(directory)
            os.listdir(directory)
        except OSError as error:
            raise Missing(f"{directory}: {error.strerror}") from None
        try:
            formats: Any = [found._asdict() for found in found_formats(directory)]
        except (OSError, sqlite3.Error) as error:
            formats = f"unknown: {error}"
        files: list[dict[str, Any]] = []
        count = size = 0
        for path, status in _walk(directory):
            count, size = count + 1, size + status.st_size
            if len(files) < MAX_LISTED_FILES:
                files.append(
                    {
                        "path": path,
                        "bytes": status.st_size,
                        "mode": oct(status.st_mode),
                        "uid": status.st_uid,
                        "changed": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(status.st_mtime)),
                    }
                )
        return _json({
            "directory": str(directory), "file_system": file_system(directory), "last_program": last_program(directory),
            "formats": formats, "disk_bytes": usage.total, "disk_free_bytes": usage.free, "inodes_free": places.f_favail,
            "files": count, "bytes": size, "listed": files,
        })  # fmt: skip

    def _known(self, what: str) -> Settings:
        if self._settings is None:
            raise Missing(f"the configuration cannot be read, so {what} is not known: give --data-dir")
        return self._settings

    # --- the running broker -------------------------------------------------------------------------------------------

    def _api_parts(self) -> dict[str, Callable[[], str]]:
        """The parts that a running broker answers."""
        try:
            api = broker_api.broker_api(self._options)
            api.request("GET", "/livez", None, {})
        except (CommandError, ConfigError) as error:
            self.missing["api"] = f"all that a running broker answers: {error}"
            return {}
        clustered = self._settings is None or self._settings.cluster.configured
        parts: dict[str, Callable[[], str]] = {
            f"api/{name}.json": lambda path=path: _page(api, path)  # type: ignore[misc]
            for name, path in _PAGES.items()
            if name != "cluster" or clustered
        }
        parts |= {"api/readyz.json": lambda: _ready(api), "api/metrics.txt": lambda: _metrics(api), "api/sys.txt": lambda: _sys(api)}
        end = time.monotonic() + API_SECONDS
        return {name: lambda part=part: _in_time(part, end) for name, part in parts.items()}  # type: ignore[misc]

    # --- logs ---------------------------------------------------------------------------------------------------------

    def _log(self) -> str:
        given: Path | None = self._options.log
        log = self._settings.log if self._settings is not None else None
        if given is None and log is not None and "file" in log.to:
            given = log.file
        if given is not None:
            return self._excerpt(given)
        try:
            return "\n".join(events(journal_lines(self._options.log_lines, MAX_ENTRY_BYTES))) + "\n"
        except ExcerptError as error:
            raise Missing(f"{error}; the broker logs to {'stderr' if log is None else ', '.join(log.to)}: give --log FILE") from None

    def _audit(self) -> str:
        log = self._known("its audit log").log
        if log.audit_file is None:
            raise Missing("log.audit_file is not set")
        return self._excerpt(log.audit_file)

    def _excerpt(self, path: Path) -> str:
        try:
            return "\n".join(events(last_lines(path, self._options.log_lines, MAX_ENTRY_BYTES))) + "\n"
        except OSError as error:
            raise Missing(f"{path}: {error.strerror}") from None


# --- parts ------------------------------------------------------------------------------------------------------------


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n"


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _cgroup(pid: int) -> Iterator[tuple[str, str]]:
    """The limits of a process's control group and of those above it, version 2; in a container the root has them."""
    line = next((line for line in (_text_of(Path(f"/proc/{pid}/cgroup")) or "").splitlines() if line.startswith("0::")), "0::/")
    group = Path("/sys/fs/cgroup", line[3:].lstrip("/"))
    for place in (group, *group.parents):
        for name in _CGROUP_FILES:
            text = _text_of(place / name)
            if text is not None:
                yield str((place / name).relative_to("/sys/fs/cgroup")), text
        if place == Path("/sys/fs/cgroup"):
            return


def _process(pid: int) -> dict[str, Any]:
    status = dict(line.partition(":")[::2] for line in (_text_of(Path(f"/proc/{pid}/status")) or "").splitlines())
    kinds: dict[str, int] = {}
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            kind = os.readlink(entry.path).partition(":")[0]
            kinds["file" if kind.startswith("/") else kind] = kinds.get("file" if kind.startswith("/") else kind, 0) + 1
        files: Any = {"all": sum(kinds.values()), **kinds}
    except OSError as error:
        files = f"unknown: {error.strerror}"
    try:
        cpu: float | None = round(time.clock_gettime(~pid << 3 | 2), 2)
    except OSError:
        cpu = None
    return {
        "pid": pid, "parent": status.get("PPid", "").strip(), "title": title(pid), "threads": status.get("Threads", "").strip(),
        "resident": status.get("VmRSS", "").strip(), "peak": status.get("VmHWM", "").strip(), "swapped": status.get("VmSwap", "").strip(),
        "user_ids": status.get("Uid", "").split(), "cpu_seconds": cpu, "open_files": files,
    }  # fmt: skip


def _walk(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The files below a directory; links are not followed."""
    for folder, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(names):
            try:
                status = os.lstat(os.path.join(folder, name))
            except OSError:
                continue  # it was removed meanwhile
            yield os.path.relpath(os.path.join(folder, name), directory), status


def _in_time(part: Callable[[], str], end: float) -> str:
    if time.monotonic() > end:
        raise Missing(f"the broker took more than {API_SECONDS:g} s for the answers before this one")
    return part()


def _page(api: BrokerApi, path: str) -> str:
    try:
        return _json(api.request("GET", broker_api.API + path, None, {}))
    except CommandError as error:
        raise Missing(str(error)) from None


def _ready(api: BrokerApi) -> str:
    """The answer of /readyz, which says what is wrong with status 503."""
    try:
        return _json(api.request("GET", "/readyz", None, {}))
    except CommandError as error:
        if error.status == AWAY:
            raise Missing(str(error)) from None
        return _json({"status": str(error)})


def _metrics(api: BrokerApi) -> str:
    try:
        return api.read("/metrics", 0, None).decode(errors="replace")
    except CommandError as error:
        raise Missing(str(error)) from None


def _sys(api: BrokerApi) -> str:
    """The topics and values below $SYS, which the broker itself publishes."""
    try:
        items, _ = api.items("/retained", 0, filter=_SYS_TOPICS)
    except CommandError as error:
        raise Missing(str(error)) from None
    return "".join(
        f"{item['topic']} {b64decode(item['payload_base64']).decode(errors='replace')}\n" for item in items if item["client_id"] is None
    )
