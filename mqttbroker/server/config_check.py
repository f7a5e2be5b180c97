"""Checks of a configuration beyond its values: the files and directories it names, and whether a client can log in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from bridge_spark.log.archive.files import ArchiveError, open_files
from bridge_spark.log.archive.location import parse_location
from bridge_spark.log.stream_config import StreamLogDamage, StreamLogError, can_seal
from bridge_spark.log.stream_files import DESCRIPTION_FILE, STREAMS, partitions_refused, read_description
from mqttbroker.admin.data.repair import DATABASE
from mqttbroker.auth.security import Security
from mqttbroker.config.files import this_user
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Listener, Settings, Stream, is_loopback
from mqttbroker.config.stream_definition import DefinitionError, stream_of
from mqttbroker.net.tls import http_context, server_context
from mqttbroker.system.memory_limit import memory_warning
from sessions.store.check import is_emptied
from sessions.store.recovery import LOG_DIRECTORY
from sessions.store.schema import refused_header

# Authenticators of clients that send a password or token.
_WITH_SECRETS = frozenset(("password_file", "jwt", "http_callback", "plugin"))


def check(settings: Settings) -> list[str]:
    """One line for each problem that prevents a broker from starting or from accepting any client."""
    return [
        *_files(settings), *_data_dir(settings.data_dir), *stored(settings), *_logins(settings), *_archive_directories(settings),
    ]  # fmt: skip


def stored(settings: Settings) -> list[str]:
    """One line for each thing in the data directory that a start with these settings refuses. A broker may be using the directory."""
    if settings.cluster.configured or not settings.data_dir.is_dir():  # a cluster's streams and sessions are in Kafka
        return []
    if not os.access(settings.data_dir, os.R_OK | os.X_OK):
        return []  # `_data_dir` says so
    problems = []
    streams = settings.data_dir / STREAMS
    for stream in settings.streams:
        try:
            known = read_description(streams / stream.name)
        except StreamLogDamage as error:
            if settings.on_corrupt_store == "refuse":
                problems.append(f"streams.{stream.name}: {error}; run mqttbroker repair-store {settings.data_dir}")
            continue
        except (StreamLogError, OSError) as error:
            problems.append(f"streams.{stream.name}: {error}")
            continue
        if known is not None and (refused := partitions_refused(known, stream.partitions)):
            problems.append(f"streams.{stream.name}.partitions: {refused}")
    return problems + _created_streams(settings) + _stored_database(settings)


def _created_streams(settings: Settings) -> list[str]:
    """Streams that were created at run time."""
    streams = settings.data_dir / STREAMS
    configured = {stream.name for stream in settings.streams}
    problems = []
    for name in sorted({path.parent.name for path in streams.glob(f"*/{DESCRIPTION_FILE}")} - configured):
        try:
            definition = (read_description(streams / name) or {}).get("definition")
            if isinstance(definition, dict):
                stream_of(name, definition)
        except DefinitionError as error:
            problems.append(f"data_dir: {streams / name / DESCRIPTION_FILE}: {error}")
        except (StreamLogError, OSError) as error:
            problems.append(f"data_dir: {error}")
    return problems


def _stored_database(settings: Settings) -> list[str]:
    path = settings.data_dir / DATABASE
    try:
        if refused := refused_header(path):
            return [f"data_dir: {path}: {refused}"]
        if not path.exists() and not is_emptied(path) and next((settings.data_dir / LOG_DIRECTORY).glob("*.log"), None) is not None:
            return [f"data_dir: {path}: is missing, but its commit log is there; restore the database"]
    except OSError as error:
        return [f"data_dir: {path}: {error.strerror}"]
    return []


def warnings(settings: Settings) -> list[str]:
    """One line for each setting that works, but not as one might expect."""
    warning = memory_warning(settings)
    return [
        *([warning] if warning else []),
        *_only_websockets(settings),
        *_unencrypted(settings),
        *_unknown_streams(settings),
        *([] if settings.cluster.configured else unsealed(settings.streams)),
        *_unreachable_archives(settings),
    ]


def _only_websockets(settings: Settings) -> Iterator[str]:
    """A table for browsers that has taken the place of the default listener."""
    if all(listener.type in ("ws", "wss") for listener in settings.listeners):
        default = Listener()
        yield (f"listeners.0.type: all listeners are WebSockets, so no client can connect to {default.host}:{default.port} or to another port for MQTT over TCP: "
               "[[listeners]] tables replace the default listener")  # fmt: skip


def _unencrypted(settings: Settings) -> Iterator[str]:
    """Connections to other machines that send secrets without TLS."""
    http = settings.http
    if http.port is not None and http.certfile is None and not is_loopback(http.host):
        yield "http.certfile: is not set, so tokens can be read on the network"
    url = urlsplit(settings.http_callback.url or "")
    if url.scheme == "http" and not is_loopback(url.hostname or ""):
        yield "http_callback.url: begins with http://, so passwords can be read on the network"
    for index, listener in enumerate(settings.listeners):
        reads_secrets = not _WITH_SECRETS.isdisjoint(settings.authenticators_of(listener))
        plain = listener.type in ("tcp", "ws") and not listener.proxy_protocol and not is_loopback(listener.host)
        if reads_secrets and plain:
            yield f'listeners.{index}: type "{listener.type}" does not encrypt, so passwords can be read on the network'


def _unknown_streams(settings: Settings) -> Iterator[str]:
    """Streams of senders of HTTP requests that are neither in the file nor were created at run time."""
    known = {"*", *(stream.name for stream in settings.streams)}
    for index, access in enumerate(settings.http.access):
        for name in access.streams:
            if name not in known and not (settings.data_dir / STREAMS / name / DESCRIPTION_FILE).is_file():
                yield f"http.access.{index}.streams: there is no stream {name!r} yet"


def unsealed(streams: Iterable[Stream]) -> Iterator[str]:
    """Streams whose segments stay as they are because pyarrow is missing, in one line."""
    names = [] if can_seal() else [stream.name for stream in streams if stream.seal == "auto"]
    if names:
        yield (
            f"streams.{names[0]}.seal: pyarrow is not installed, so no segment of {', '.join(names)} becomes Parquet, which takes a "
            'fraction of the disk: pip install "mqttbroker[parquet]", or set seal = false'
        )


def source_of(line: str, settings: Settings, file: Path | None) -> str:
    """The place of a line of `check`, `stored` or `warnings`; else the configuration file, "" = unknown."""
    return place_of(line, settings) or ("" if file is None else str(file))


def with_place(line: str, settings: Settings) -> str:
    """A line of these, or of a `ConfigError` of the start, behind its place if that is known."""
    place = place_of(line, settings)
    return f"{place}: {line}" if place else line


def place_of(line: str, settings: Settings) -> str:
    """The file and line, the variable or the flag that set a key named by this line, or another key of its table; "" if none did."""
    key, _, text = line.partition(": ")
    names = {"streams": [stream.name for stream in settings.streams], "queues": [queue.name for queue in settings.queues]}
    for section in names:
        for index, name in enumerate(names[section]):
            key = re.sub(rf"^{section}\.{re.escape(name)}(?=\.|$)", f"{section}.{index}", key)  # as in `sources`
    words = re.findall(r"[\w.]+", text)
    keys = [key, *(f"{key}.{word}" for word in words), *words]
    found = next((settings.sources[name] for name in keys if name in settings.sources), "")
    if found or "." not in key:
        return found
    table = f"{key}." if any(name.startswith(f"{key}.") for name in settings.sources) else f"{key.rpartition('.')[0]}."
    return next((place for name, place in settings.sources.items() if name.startswith(table)), "")


def _archive_directories(settings: Settings) -> Iterator[str]:
    for stream in settings.streams:
        location = None if stream.archive is None else parse_location(stream.archive)
        if location is None or location.s3:
            continue
        if not os.path.isdir(location.root):
            yield f"streams.{stream.name}.archive: {location.root} is not a directory"
        elif not os.access(location.root, os.W_OK | os.X_OK):
            yield f"streams.{stream.name}.archive: {location.root} cannot be written"


def _unreachable_archives(settings: Settings) -> Iterator[str]:
    """Archives in S3 that cannot be read now.  The broker starts without them."""
    for stream in settings.streams:
        location = None if stream.archive is None else parse_location(stream.archive)
        if location is not None and location.s3:
            try:
                open_files(location).check()
            except ArchiveError as error:
                yield f"streams.{stream.name}.archive: {location}: {error}"


def _files(settings: Settings) -> Iterator[str]:
    try:
        Security(settings).stop()
    except ConfigError as error:
        yield from error.problems
    for index, listener in enumerate(settings.listeners):
        try:
            context = server_context(listener)
        except OSError as error:
            yield f"listeners.{index}: {error}"
            continue
        if context is not None and context.revocations is not None:
            problem = context.revocations.problem(datetime.now(UTC))
            if problem is not None:
                yield f"listeners.{index}: {problem}, so no client certificate is accepted"
    for key, file in (("file", settings.log.file), ("audit_file", settings.log.audit_file)):
        if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
            yield f"log.{key}: {file} cannot be written"
    try:
        http_context(settings.http)
    except OSError as error:
        yield f"http: {error}"


def _data_dir(directory: Path) -> Iterator[str]:
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir():
        yield f"data_dir: {existing} is not a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"data_dir: {existing} cannot be written ({this_user()})"


def _logins(settings: Settings) -> Iterator[str]:
    for index, listener in enumerate(settings.listeners):
        if not settings.authenticators_of(listener) and settings.anonymous_of(listener) is False:
            yield (f"listeners.{index}: no client can connect: allow_anonymous is false, and there is no authenticator")
