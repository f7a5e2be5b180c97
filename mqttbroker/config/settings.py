"""All settings of the broker, each with its kind and default; conf/mqttbroker.toml describes them.

A default is written as in the file. Durations are float seconds, sizes are int bytes.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar, cast

from bridge_spark.log.stream_config import can_seal
from mqttbroker.config.setting_kinds import (
    Anonymous,
    Archive,
    Automatic,
    BearerToken,
    Boolean,
    Choice,
    ClientIdPattern,
    Directory,
    Duration,
    FileMode,
    Filters,
    FirstOf,
    Headers,
    HeaderText,
    Host,
    Integer,
    Kind,
    Levels,
    ListenerPath,
    MemorySize,
    Name,
    Networks,
    OptionalPath,
    OptionalText,
    Options,
    OrNone,
    PartitionKey,
    Patterns,
    PluginReference,
    Prefix,
    RemoteAddresses,
    Size,
    Templates,
    Text,
    Texts,
    TopicPattern,
    Url,
    Words,
)
from topic_matcher.remapping import TopicRule, echoed, pattern_rule, prefix_rule

T = TypeVar("T")

MAX_WORKERS = 256
MAX_HISTORY_SAMPLES = 4000


def _key(kind: Kind[T], default: object, formerly: str = "") -> T:
    """A field with its kind; the default is written as in the file.  ``formerly`` is an older name of the key."""
    return dataclasses.field(default=kind.read(default), metadata={"kind": kind, "formerly": formerly})


def _required(kind: Kind[T]) -> T:
    return cast(T, dataclasses.field(metadata={"kind": kind}))


def _secret(kind: Kind[T], default: object) -> T:
    """A `_key` whose value is never shown."""
    return dataclasses.field(default=kind.read(default), repr=False, metadata={"kind": kind})


def _file_of(secret: str) -> Path | None:
    """The path of a file with the value of the `_secret` of that name in the same section; `load_settings` reads it."""
    return dataclasses.field(default=None, metadata={"kind": OptionalPath(), "file_of": secret})


def _tables(section: type[T]) -> tuple[T, ...]:
    """A list of tables, each of which is a section."""
    return cast(tuple[T, ...], dataclasses.field(default=(), metadata={"tables": section}))


def _section(section: type[T]) -> T:
    return dataclasses.field(default_factory=section, metadata={"section": section})


# The kinds of authenticators in the order in which "auto" asks those that are configured.
AUTHENTICATORS = ("certificate", "jwt", "password_file", "http_callback", "plugin")
JWT_ALGORITHMS = ("HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")


@dataclass(frozen=True)
class Limits:
    """Limits of one client, and of all together.

    A limit needs a line here, one in conf/mqttbroker.toml, and a field of the same name in `BrokerTerms`,
    `ListenerTerms` or `SessionLimits`. A limit that listeners may override needs a line in `Listener`, too.
    """

    max_memory: int | str | None = _key(OrNone(MemorySize("64MiB", "1024TiB"), "unlimited"), "auto")
    max_connections: int = _key(Integer(1, 10_000_000), 100_000)
    max_half_open: int = _key(Integer(1, 10_000_000), 5000)
    max_connections_per_address: int = _key(Integer(0, 10_000_000), 0)
    max_connections_per_user: int = _key(Integer(0, 10_000_000), 0)
    max_connect_rate: int = _key(Integer(0, 1_000_000), 0)
    max_connect_rate_per_address: int = _key(Integer(0, 1_000_000), 0)
    max_connect_rate_per_user: int = _key(Integer(0, 1_000_000), 0)
    max_half_open_per_address: int = _key(Integer(0, 10_000_000), 0)
    ipv4_prefix: int = _key(Integer(8, 32), 32)
    ipv6_prefix: int = _key(Integer(16, 128), 64)
    max_publish_rate: int = _key(Integer(0, 100_000_000), 0)
    max_receive_rate: int = _key(Size("0B", "1TiB"), "0B")
    max_delivery_rate: int = _key(Integer(0, 100_000_000), 0)
    max_send_rate: int = _key(Size("0B", "1TiB"), "0B")
    max_publish_rate_per_user: int = _key(Integer(0, 100_000_000), 0)
    max_receive_rate_per_user: int = _key(Size("0B", "1TiB"), "0B")
    max_delivery_rate_per_user: int = _key(Integer(0, 100_000_000), 0)
    max_send_rate_per_user: int = _key(Size("0B", "1TiB"), "0B")
    max_publish_rate_per_listener: int = _key(Integer(0, 100_000_000), 0)
    max_receive_rate_per_listener: int = _key(Size("0B", "1TiB"), "0B")
    max_delivery_rate_per_listener: int = _key(Integer(0, 100_000_000), 0)
    max_send_rate_per_listener: int = _key(Size("0B", "1TiB"), "0B")
    max_sessions: int = _key(Integer(1, 100_000_000), 1_000_000)
    max_sessions_per_user: int = _key(Integer(0, 100_000_000), 0)
    max_connect_size: int = _key(Size("128B", "256MiB"), "256KiB")
    connect_timeout: float = _key(Duration("100ms", "1h"), "10s")
    left_client_timeout: float = _key(Duration("100ms", "1h"), "1m")
    max_keep_alive: float = _key(Duration("1s", "65535s"), "65535s")
    max_session_expiry: float | None = _key(OrNone(Duration("0s", "36500d"), "never"), "never")
    max_packet_size: int = _key(Size("128B", "256MiB"), "10MiB")
    receive_maximum: int = _key(Integer(1, 65535), 65535)
    max_pending_acks: int = _key(Integer(1, 1_000_000), 2000)
    max_inflight: int = _key(Integer(1, 65535), 1000)
    max_inflight_unpersisted: int = _key(Integer(1, 65535), 65535, formerly="max_inflight_unkept")
    topic_alias_maximum: int = _key(Integer(0, 65535), 10)
    max_topic_levels: int = _key(Integer(1, 65535), 128)
    max_topic_length: int = _key(Size("1B", "65535B"), "65535B")
    max_subscriptions_per_client: int = _key(Integer(1, 100_000_000), 100_000)
    max_filters_per_packet: int = _key(Integer(1, 10_000_000), 5000)
    max_subscription_bytes_per_client: int = _key(Size("1KiB", "1TiB"), "16MiB")
    max_total_subscription_bytes: int = _key(Size("1KiB", "1TiB"), "1GiB")
    retain_available: bool = _key(Boolean(), True)
    max_retained_messages: int = _key(Integer(1, 1_000_000_000), 1_000_000)
    max_retained_bytes: int = _key(Size("1KiB", "1TiB"), "1GiB")
    max_queued_messages: int = _key(Integer(1, 1_000_000_000), 1_000_000)
    max_queued_bytes: int = _key(Size("1KiB", "1024TiB"), "1GiB")
    queue_full: str = _key(Choice("drop_newest", "drop_oldest", "refuse"), "drop_newest")
    queue_high_watermark_messages: int = _key(Integer(0, 1_000_000_000), 1000, formerly="crowded_queue_messages")
    queue_high_watermark_bytes: int = _key(Size("1KiB", "1TiB"), "16MiB", formerly="crowded_queue_bytes")
    backpressure_wait: float = _key(Duration("10ms", "10s"), "100ms", formerly="crowded_queue_wait")
    max_total_queued_messages: int = _key(Integer(1, 1_000_000_000_000), 10_000_000)
    max_total_queued_bytes: int = _key(Size("1KiB", "1024TiB"), "10GiB")
    max_total_queue_memory_bytes: int = _key(Size("1KiB", "1TiB"), "512MiB")
    max_total_in_flight_bytes: int = _key(Size("1KiB", "1TiB"), "256MiB")
    max_total_session_bytes: int = _key(Size("1KiB", "1TiB"), "2GiB")
    max_queue_memory_messages: int = _key(Integer(1, 1_000_000), 1000)
    max_transient_queue_bytes: int = _key(Size("1KiB", "1TiB"), "64MiB")
    max_outbox_bytes: int = _key(Size("1KiB", "1TiB"), "4MiB")
    max_total_outbox_bytes: int = _key(Size("1KiB", "1TiB"), "256MiB")
    max_total_incomplete_bytes: int = _key(Size("1KiB", "1TiB"), "256MiB")
    max_total_connect_bytes: int = _key(Size("1KiB", "1TiB"), "64MiB")
    max_total_alias_bytes: int = _key(Size("1KiB", "1TiB"), "64MiB")
    max_total_will_bytes: int = _key(Size("1KiB", "1TiB"), "64MiB")
    max_stream_groups: int = _key(Integer(1, 1_000_000), 1000)
    stream_chunk_bytes: int = _key(Size("4KiB", "16MiB"), "256KiB")
    max_total_stream_chunk_bytes: int = _key(Size("64KiB", "1TiB"), "64MiB")
    sealed_reader_cache_bytes: int = _key(Size("1MiB", "1TiB"), "128MiB")
    sealed_reader_nice: int = _key(Integer(0, 19), 10)
    max_pending_write_bytes: int = _key(Size("1KiB", "1TiB"), "64MiB")
    max_unapplied_bytes: int = _key(Size("1KiB", "1TiB"), "64MiB")
    route_cache_size: int = _key(Integer(1, 100_000_000), 100_000)
    route_cache_bytes: int = _key(Size("1KiB", "1TiB"), "128MiB")


def is_loopback(host: str) -> bool:
    """Whether a host to listen on is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


_LISTENER_TYPES = ("tcp", "tls", "ws", "wss", "unix")
# The types of listeners that have a key; all have the others.
_TYPES_OF: dict[str, tuple[str, ...]] = {
    "host": _LISTENER_TYPES[:-1],
    "port": _LISTENER_TYPES[:-1],
    **dict.fromkeys(("path", "mode"), ("unix",)),
    **dict.fromkeys(("certfile", "keyfile", "cafile", "crlfile", "tls_version"), ("tls", "wss")),
    "client_certificate": ("tls", "wss"),
    **dict.fromkeys(("use_identity_as_username", "certificate_identity"), _LISTENER_TYPES[:-1]),
    "origins": ("ws", "wss"),
    "proxy_sources": _LISTENER_TYPES[:-1],
}


def _limit(name: str) -> Any:
    """A key of `Limits` for one listener; None = the value there."""
    kind = next(field.metadata["kind"] for field in dataclasses.fields(Limits) if field.name == name)
    return dataclasses.field(default=None, metadata={"kind": OrNone(kind, "global"), "limit": True})


@dataclass(frozen=True)
class Listener:
    """Port 0 = any free port, which the log names.

    A limit, ``allow_anonymous`` or ``authentication`` that is None, and a file that is "global", has the value for all
    listeners.
    """

    host: str = _key(Host(), "127.0.0.1")
    port: int = _key(Integer(0, 65535), 1883)
    type: str = _key(Choice(*_LISTENER_TYPES), "tcp")
    path: Path | None = _key(OptionalPath(), "")
    mode: int = _key(FileMode(), "0660")
    certfile: Path | None = _key(OptionalPath(), "")
    keyfile: Path | None = _key(OptionalPath(), "")
    cafile: Path | None = _key(OptionalPath(), "")
    crlfile: Path | None = _key(OptionalPath(), "")
    tls_version: str = _key(Choice("1.2", "1.3"), "1.2")
    client_certificate: str = _key(Choice("none", "optional", "required"), "none")
    use_identity_as_username: bool = _key(Boolean(), False)
    certificate_identity: tuple[str, ...] = _key(FirstOf("cn", "san_dns", "san_uri", "san_email", "subject"), "cn")
    username_query: str = _key(Choice("keep", "ignore"), "keep")
    client_id_from: str | None = _key(ClientIdPattern(), "", formerly="client_id_pattern")
    origins: tuple[str, ...] = _key(Texts(), [])
    proxy_protocol: bool = _key(Boolean(), False)
    proxy_sources: tuple[str, ...] = _key(Networks(), [])
    max_connections: int | None = _limit("max_connections")
    max_connections_per_address: int | None = _limit("max_connections_per_address")
    max_connect_rate: int | None = _limit("max_connect_rate")
    max_connect_rate_per_address: int | None = _limit("max_connect_rate_per_address")
    max_half_open: int | None = _limit("max_half_open")
    max_half_open_per_address: int | None = _limit("max_half_open_per_address")
    max_publish_rate: int | None = _limit("max_publish_rate")
    max_receive_rate: int | None = _limit("max_receive_rate")
    max_delivery_rate: int | None = _limit("max_delivery_rate")
    max_send_rate: int | None = _limit("max_send_rate")
    max_publish_rate_per_listener: int | None = _limit("max_publish_rate_per_listener")
    max_receive_rate_per_listener: int | None = _limit("max_receive_rate_per_listener")
    max_delivery_rate_per_listener: int | None = _limit("max_delivery_rate_per_listener")
    max_send_rate_per_listener: int | None = _limit("max_send_rate_per_listener")
    max_packet_size: int | None = _limit("max_packet_size")
    connect_timeout: float | None = _limit("connect_timeout")
    max_keep_alive: float | None = _limit("max_keep_alive")
    receive_maximum: int | None = _limit("receive_maximum")
    topic_alias_maximum: int | None = _limit("topic_alias_maximum")
    allow_anonymous: bool | str | None = _key(OrNone(Anonymous(), "global"), "global")
    authentication: tuple[str, ...] | None = _key(OrNone(Words(*AUTHENTICATORS), "global"), "global")
    password_file: Path | str | None = _key(ListenerPath(), "global")
    acl_file: Path | str | None = _key(ListenerPath(), "global")

    @property
    def address(self) -> str:
        """The address as in the log."""
        if self.type == "unix":
            return str(self.path)
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host or '*'}:{self.port}"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that are invalid together, each with the reason."""
        for name, types in _TYPES_OF.items():
            if self.type not in types and getattr(self, name) != getattr(_DEFAULT_LISTENER, name):
                yield name, f'a listener of type "{self.type}" has none'
        if self.type == "unix" and self.path is None:
            yield "path", "is required for a Unix socket"
        if self.proxy_sources and not self.proxy_protocol:
            yield "proxy_sources", "needs proxy_protocol"
        if self.type in ("tcp", "ws") and self._uses_certificates:
            # Otherwise every client could claim any name.
            if not self.proxy_sources:
                yield self._uses_certificates, 'needs type "tls" or "wss", or proxies named in proxy_sources'
            if "cn" not in self.certificate_identity:
                yield "certificate_identity", 'must have "cn": a proxy sends no other name'
        if self.type == "unix" and "%i" in (self.client_id_from or ""):
            yield "client_id_from", "clients of a Unix socket have no certificates"
        if self.type in ("tls", "wss"):
            for name in ("certfile", "keyfile"):
                if getattr(self, name) is None:
                    yield name, f'is required for type "{self.type}"'
            if self.client_certificate != "none" and self.cafile is None:
                yield "cafile", "is required to check client certificates"
            if self._uses_certificates and self.client_certificate == "none":
                yield "client_certificate", f'must be "optional" or "required" for {self._uses_certificates}'
            if self.crlfile is not None and self.client_certificate == "none":
                yield "crlfile", "needs client_certificate"

    @property
    def _uses_certificates(self) -> str:
        """A key that needs client certificates; "" if there is none."""
        if self.use_identity_as_username:
            return "use_identity_as_username"
        return "client_id_from" if "%i" in (self.client_id_from or "") else ""


_DEFAULT_LISTENER = Listener()


@dataclass(frozen=True)
class HttpAccess:
    """A sender of HTTP requests: its credentials, its role, and the streams that it may read."""

    name: str = _required(Name("the name of a program or person"))
    role: str = _required(Choice("viewer", "operator", "admin", "reader"))
    token: str | None = _secret(BearerToken(), "")
    token_file: Path | None = _file_of("token")
    certificate: str | None = _key(OptionalText(), "")
    streams: tuple[str, ...] = _key(Texts(), [])
    user: str | None = _key(OptionalText(), "")

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that are invalid together, each with the reason."""
        if self.token is None and self.token_file is None and self.certificate is None:
            yield "token_file", "is required, or certificate"
        if self.role == "reader" and not self.streams and self.user is None:
            yield "streams", 'is required for role "reader", or user'
        if self.role == "admin" and self.streams:
            yield "streams", 'role "admin" reads all streams'


@dataclass(frozen=True)
class Http:
    """``port`` None = no HTTP server, 0 = any free port. ``token`` is that of an administrator.

    With ``certfile`` and ``keyfile`` it uses TLS, with ``cafile`` also certificates of clients.
    """

    host: str = _key(Host(), "127.0.0.1")
    port: int | None = _key(OrNone(Integer(0, 65535), "off"), 18083)
    token: str | None = _secret(BearerToken(), "")
    token_file: Path | None = _file_of("token")
    max_connections: int = _key(Integer(1, 1_000_000), 1000)
    certfile: Path | None = _key(OptionalPath(), "")
    keyfile: Path | None = _key(OptionalPath(), "")
    cafile: Path | None = _key(OptionalPath(), "")
    crlfile: Path | None = _key(OptionalPath(), "")
    client_certificate: str = _key(Choice("none", "optional", "required"), "none")
    tls_version: str = _key(Choice("1.2", "1.3"), "1.2")
    backup_dir: Path | None = _key(OptionalPath(), "")
    dashboard: bool = _key(Boolean(), True)
    history_interval: float = _key(Duration("1s", "1h"), "10s")
    history_length: float = _key(Duration("0s", "30d"), "1h")
    access: tuple[HttpAccess, ...] = _tables(HttpAccess)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that are invalid together, each with the reason."""
        for name, other in (("certfile", "keyfile"), ("keyfile", "certfile")):
            if getattr(self, name) is None and getattr(self, other) is not None:
                yield name, f"is required with {other}"
        if self.client_certificate != "none":
            for name in ("certfile", "cafile"):
                if getattr(self, name) is None:
                    yield name, "is required to check client certificates"
        for name in ("cafile", "crlfile"):
            if getattr(self, name) is not None and self.client_certificate == "none":
                yield name, 'needs client_certificate "optional" or "required"'
        if self.port is not None and not self.has_access and not is_loopback(self.host):
            where = self.host or "every address"
            yield "token", f"is required, or token_file, or [[http.access]], when the server can be reached at {where}"
        if self.history_samples > MAX_HISTORY_SAMPLES:
            yield "history_length", f"must be at most {MAX_HISTORY_SAMPLES:,} times history_interval"
        names: set[str] = set()
        owners = {self.token: "http.token"}
        for index, access in enumerate(self.access):
            for name, reason in access.problems():
                yield f"access.{index}.{name}", reason
            if access.name in names:
                yield f"access.{index}.name", f"{access.name} is taken by an earlier entry"
            if access.token is not None and access.token in owners:
                yield f"access.{index}.token", f"is also the token of {owners[access.token]}"
            if access.certificate is not None and self.client_certificate == "none":
                yield f"access.{index}.certificate", 'needs http.client_certificate "optional" or "required"'
            names.add(access.name)
            owners[access.token] = access.name

    @property
    def history_samples(self) -> int:
        """The number of samples that the history has."""
        return math.ceil(self.history_length / self.history_interval)

    @property
    def command_token(self) -> str | None:
        """The token for commands on this machine: that of the most powerful sender; None if nobody has one."""
        ranks = ("viewer", "operator", "admin")
        tokens = {each.role: each.token for each in reversed(self.access) if each.token is not None}
        return self.token or next((tokens[role] for role in reversed(ranks) if role in tokens), None)

    @property
    def has_access(self) -> bool:
        """Whether requests need credentials."""
        return self.token is not None or self.token_file is not None or bool(self.access)


LOG_LEVELS = ("debug", "info", "warning", "error")
MOST_STREAM_PACKET = 48 * 1024 * 1024  # twice as much is less than the 100 MiB that Kafka takes in a request
LOG_AREAS = ("clients", "packets", "auth", "store", "streams", "network", "http", "bridges")
_TARGETS_GONE = {
    "journald": '"stderr", which is the journal in a service of systemd',
    "syslog": '"stderr", which systemd, the engine of a container or logger(1) passes on',
}


@dataclass(frozen=True)
class Log:
    """``levels`` are those of areas, ``to`` the destinations."""

    level: str = _key(Choice(*LOG_LEVELS), "info")
    levels: tuple[tuple[str, str], ...] = _key(Levels(LOG_AREAS, LOG_LEVELS), {})
    format: str = _key(Choice("text", "json"), "text")
    to: tuple[str, ...] = _key(FirstOf("stderr", "file", gone=_TARGETS_GONE), "stderr")
    file: Path | None = _key(OptionalPath(), "")
    audit_file: Path | None = _key(OptionalPath(), "")

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that are invalid together, each with the reason."""
        if "file" in self.to and self.file is None:
            yield "file", 'is required with to = "file"'
        if self.file is not None and "file" not in self.to:
            yield "file", 'needs "file" in to'
        if self.file is not None and self.file == self.audit_file:
            yield "file", "is audit_file, too"


@dataclass(frozen=True)
class Redirect:
    """The server that clients are sent to; ``server_reference`` None = none.  ``rate`` is in clients per second."""

    server_reference: str | None = _key(OptionalText(), "")
    permanent: bool = _key(Boolean(), False)
    rate: int = _key(Integer(1, 1_000_000), 500)


@dataclass(frozen=True)
class Stream:
    """A log of the messages of some topic filters; ``*retention_*`` None = unlimited, ``archive`` None = none."""

    name: str
    filters: tuple[str, ...] = _required(Filters())
    partitions: int = _key(Integer(1, 1024), 4)
    key: str = _key(PartitionKey(), "topic")
    retention_age: float | None = _key(OrNone(Duration("1s", "36500d"), "unlimited"), "unlimited")
    retention_bytes: int | None = _key(OrNone(Size("1KiB", "1024TiB"), "unlimited"), "unlimited")
    segment_bytes: int = _key(Size("1KiB", "2GiB"), "64MiB")
    segment_age: float = _key(Duration("1s", "3650d"), "1h")
    seal: bool | str = _key(Automatic(), "auto")
    archive: str | None = _key(Archive(), "")
    archive_retention_age: float | None = _key(OrNone(Duration("1s", "36500d"), "unlimited"), "unlimited")
    archive_retention_bytes: int | None = _key(OrNone(Size("1KiB", "1024TiB"), "unlimited"), "unlimited")
    compact: bool = _key(Boolean(), False)
    compact_tombstones: float = _key(Duration("0s", "36500d"), "24h")
    compact_dirty_percent: int = _key(Integer(1, 100), 50)
    compact_keys: int = _key(Integer(1000, 100_000_000), 1_000_000)
    dedup: bool = _key(Boolean(), False)
    dedup_producers: int = _key(Integer(1, 1_000_000), 10_000)

    @property
    def seals(self) -> bool:
        return can_seal() if self.seal == "auto" else self.seal is True

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that are invalid on this machine, each with the reason."""
        if self.seal is True and not can_seal():
            yield "seal", 'needs pyarrow: pip install "mqttbroker[parquet]"'
        if self.compact and not self.seals:
            why = "" if can_seal() else ': pip install "mqttbroker[parquet]"'
            yield "compact", f"needs sealed segments{why or ', and seal is false'}"
        if self.compact and self.archive is not None:
            yield "compact", "cannot be combined with archive, whose segments never change"
        if self.archive is None:
            for name in ("archive_retention_age", "archive_retention_bytes"):
                if getattr(self, name) is not None:
                    yield name, "needs archive"
            return
        if not self.seals:
            why = "" if can_seal() else ': pip install "mqttbroker[parquet]"'
            yield "archive", f"needs sealed segments{why or ', and seal is false'}"
        for name in ("retention_age", "retention_bytes"):
            local, archived = getattr(self, name), getattr(self, f"archive_{name}")
            if archived is not None and local is not None and archived < local:
                yield f"archive_{name}", f"must not be less than {name}, the retention of the data directory"


@dataclass(frozen=True)
class Queue:
    """A work queue on a stream; ``lease`` is in seconds. ``stream`` None = that of the queue's name, ``dead_letter``
    None = none."""

    name: str
    stream: str | None = _key(OptionalText(), "")
    lease: float = _key(Duration("1s", "30d"), "5m")
    max_deliveries: int = _key(Integer(1, 1_000_000), 5)
    dead_letter: str | None = _key(OptionalText(), "")
    allow_publish: bool = _key(Boolean(), False)

    @property
    def source(self) -> str:
        """The name of the stream."""
        return self.stream or self.name

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that are invalid together, each with the reason."""
        if self.dead_letter == self.source:
            yield "dead_letter", "must be another stream than the queue's own"


@dataclass(frozen=True)
class Alarms:
    """When alarms are raised; 0 = never."""

    disk_free: int = _key(Size("0B", "1024TiB"), "256MiB")
    certificate_expiry: float = _key(Duration("0s", "3650d"), "14d")
    bridge_down: float = _key(Duration("0s", "3650d"), "1m")


@dataclass(frozen=True)
class Crl:
    """The revocation lists of listeners; ``refresh_interval`` 0 = they are read again on SIGHUP only."""

    refresh_interval: float = _key(Duration("0s", "30d"), "1m")
    expiry_warning: float = _key(Duration("0s", "365d"), "6h")


@dataclass(frozen=True)
class Consumers:
    """Readers of streams that report their progress, and when the broker warns of their lag."""

    max_consumers: int = _key(Integer(1, 10_000), 100)
    max_name_length: int = _key(Integer(1, 200), 128)
    forget_after: float = _key(Duration("1s", "3650d"), "7d")
    interval: float = _key(Duration("100ms", "1h"), "10s")
    retention_warning: float = _key(Duration("0s", "3650d"), "1h")
    retention_warning_percent: int = _key(Integer(0, 100), 10)
    warning_interval: float = _key(Duration("1s", "30d"), "10m")


@dataclass(frozen=True)
class Logins:
    """Logins with passwords; ``key_file`` None = one in a tmpfs."""

    max_waiting: int = _key(Integer(1, 1_000_000), 10_000)
    remember: str = _key(Choice("restart", "memory", "off"), "restart")
    max_remembered: int = _key(Integer(1, 10_000_000), 100_000)
    key_file: Path | None = _key(OptionalPath(), "")


_KEY_SOURCES = ("secret", "secret_file", "public_key_file", "jwks_file", "jwks_url")


@dataclass(frozen=True)
class Jwt:
    """Logins with JSON Web Tokens. ``claims`` are the names and values of required claims."""

    algorithms: tuple[str, ...] = _key(Words(*JWT_ALGORITHMS), [])
    token_in: str = _key(Choice("password", "username"), "password")
    secret: str | None = _secret(OptionalText(), "")
    secret_file: Path | None = _file_of("secret")
    secret_base64: bool = _key(Boolean(), False)
    public_key_file: Path | None = _key(OptionalPath(), "")
    jwks_file: Path | None = _key(OptionalPath(), "")
    jwks_url: str | None = _key(Url(), "")
    jwks_cafile: Path | None = _key(OptionalPath(), "")
    jwks_refresh: float = _key(Duration("1s", "30d"), "5m")
    jwks_min_interval: float = _key(Duration("100ms", "1d"), "10s")
    jwks_timeout: float = _key(Duration("100ms", "1m"), "5s")
    jwks_max_size: int = _key(Size("1KiB", "16MiB"), "256KiB")
    issuer: str | None = _key(OptionalText(), "")
    audience: tuple[str, ...] = _key(Texts(), [])
    leeway: float = _key(Duration("0s", "1h"), "10s")
    require_expiry: bool = _key(Boolean(), True)
    username_claim: str = _key(Text("the name of a claim"), "sub")
    client_id_claim: str | None = _key(OptionalText(), "")
    acl_claim: str | None = _key(OptionalText(), "acl")
    claims: tuple[tuple[str, str], ...] = _key(Patterns(), {})
    max_token_size: int = _key(Size("256B", "64KiB"), "8KiB")
    max_remembered_bytes: int = _key(Size("0B", "1TiB"), "16MiB")

    @property
    def configured(self) -> bool:
        return any(getattr(self, name) is not None for name in _KEY_SOURCES)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that are invalid together, each with the reason."""
        # The loader sets the secret from its file.
        given = [name for name in _KEY_SOURCES if getattr(self, name) is not None]
        if "secret_file" in given and "secret" in given:
            given.remove("secret")
        if not given:
            if self != Jwt():
                yield _KEY_SOURCES[0], "is required, or secret_file, public_key_file, jwks_file or jwks_url"
            return
        for name in given[1:]:
            yield name, f"{given[0]} is set, too"
        if not self.algorithms:
            yield "algorithms", "is required"
        hashed = [name for name in self.algorithms if name.startswith("HS")]
        if given[0] in ("secret", "secret_file") and len(hashed) < len(self.algorithms):
            other = next(name for name in self.algorithms if name not in hashed)
            yield "algorithms", f"{other} needs a public key, not a secret"
        elif given[0] in ("public_key_file", "jwks_url") and hashed:
            yield "algorithms", f"{hashed[0]} needs a secret, which must not be public"
        for name in ("jwks_cafile",):
            if getattr(self, name) is not None and self.jwks_url is None:
                yield name, "needs jwks_url"


@dataclass(frozen=True)
class ExternalAuthenticator:
    """An authenticator in another process."""

    timeout: float = _key(Duration("100ms", "1h"), "5s")
    max_concurrent: int = _key(Integer(1, 1000), 64)
    max_wait: float = _key(Duration("100ms", "1h"), "30s")
    cache_ttl: float = _key(Duration("0s", "1d"), "0s")
    cache_bytes: int = _key(Size("1KiB", "1TiB"), "16MiB")
    start_timeout: float = _key(Duration("100ms", "10m"), "30s")
    max_memory: int = _key(Size("64MiB", "1TiB"), "512MiB")


@dataclass(frozen=True)
class HttpCallback(ExternalAuthenticator):
    """Authentication by an HTTP server; ``url`` None = none."""

    url: str | None = _key(Url(plain=True), "")
    cafile: Path | None = _key(OptionalPath(), "")
    authorization: str | None = _secret(HeaderText(), "")
    authorization_file: Path | None = _file_of("authorization")
    headers: tuple[tuple[str, str], ...] = _secret(Headers(), {})
    headers_file: Path | None = _file_of("headers")
    body: tuple[tuple[str, str], ...] = _key(
        Templates("username", "password", "password_base64", "clientid", "peerhost", "listener", "certificate_name", "version"),
        {name: f"${{{name}}}" for name in ("username", "password", "clientid", "peerhost", "listener", "certificate_name")},
    )
    max_answer_bytes: int = _key(Size("128B", "16MiB"), "64KiB")

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that are invalid together, each with the reason."""
        if any(name.lower() == "authorization" for name, _ in self.headers):
            yield "headers", "give authorization_file, or authorization"
        if self.cafile is not None and self.url is not None and not self.url.startswith("https:"):
            yield "cafile", "needs a url that begins with https://"


@dataclass(frozen=True)
class Plugin(ExternalAuthenticator):
    """Authentication by a class of Python; ``object`` None = none."""

    object: str | None = _key(PluginReference(), "")
    path: Path | None = _key(OptionalPath(), "")
    options: str | None = _secret(Options(), {})  # JSON
    options_file: Path | None = _file_of("options")


@dataclass(frozen=True)
class Bans:
    """When clients are banned; a limit of 0 = never for that cause."""

    failures: int = _key(Integer(0, 1_000_000), 5)
    address_failures: int = _key(Integer(0, 1_000_000), 30)
    window: float = _key(Duration("1s", "30d"), "10m")
    protocol_errors: int = _key(Integer(0, 1_000_000), 0)
    reconnects: int = _key(Integer(0, 1_000_000), 0)
    reconnect_window: float = _key(Duration("1s", "30d"), "1m")
    first: float = _key(Duration("1s", "30d"), "10s")
    longest: float = _key(Duration("1s", "30d"), "15m")
    exempt: tuple[str, ...] = _key(Networks(), [])
    max_entries: int = _key(Integer(1, 10_000_000), 100_000)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that are invalid together, each with the reason."""
        if self.longest < self.first:
            yield "longest", "must not be shorter than first"


@dataclass(frozen=True)
class BridgeTopic:
    """Messages that a bridge passes: a filter with prefixes, or two patterns."""

    filter: str | None = _key(OptionalText(), "")
    direction: str = _key(Choice("out", "in", "both"), "out")
    qos: int = _key(Integer(0, 2), 0)
    local_prefix: str = _key(Prefix(), "")
    remote_prefix: str = _key(Prefix(), "")
    local: str | None = _key(OptionalText(), "")
    remote: str | None = _key(OptionalText(), "")

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that are invalid together, each with the reason."""
        if self.local is None and self.remote is None:
            if self.filter is None and not (self.local_prefix and self.remote_prefix):
                yield "filter", "is required, or local and remote"
            return
        for name, other in (("local", "remote"), ("remote", "local")):
            if getattr(self, name) is None:
                yield name, f"is required with {other}"
        for name in ("filter", "local_prefix", "remote_prefix"):
            if getattr(self, name):
                yield name, "has no meaning with local and remote"

    def rule(self) -> TopicRule:
        """The rule that these settings describe. Raises ValueError with the reason if there is none."""
        if self.local is not None and self.remote is not None:
            return pattern_rule(self.local, self.remote, self.direction, self.qos)
        return prefix_rule(self.filter or "", self.direction, self.qos, self.local_prefix, self.remote_prefix)


@dataclass(frozen=True)
class Bridge:
    """A connection of this broker to another; ``session_expiry`` None = never, ``client_id`` None = one of its own."""

    name: str = _required(Name("the name of a bridge"))
    addresses: tuple[str, ...] = _required(RemoteAddresses())
    enabled: bool = _key(Boolean(), True)
    version: str = _key(Choice("5.0", "3.1.1"), "5.0")
    try_private: bool = _key(Boolean(), True)
    client_id: str | None = _key(OptionalText(), "")
    username: str | None = _key(OptionalText(), "")
    password: str | None = _secret(OptionalText(), "")
    password_file: Path | None = _file_of("password")
    cafile: Path | None = _key(OptionalPath(), "")
    certfile: Path | None = _key(OptionalPath(), "")
    keyfile: Path | None = _key(OptionalPath(), "")
    verify: bool = _key(Boolean(), True)
    server_name: str | None = _key(OptionalText(), "")
    tls_version: str = _key(Choice("1.2", "1.3"), "1.2")
    keep_alive: float = _key(Duration("0s", "65535s"), "1m")
    clean_start: bool = _key(Boolean(), False)
    session_expiry: float | None = _key(OrNone(Duration("0s", "36500d"), "never"), "never")
    connect_timeout: float = _key(Duration("100ms", "10m"), "10s")
    reconnect_first: float = _key(Duration("10ms", "1h"), "1s")
    reconnect_longest: float = _key(Duration("10ms", "1d"), "1m")
    round_robin: bool = _key(Boolean(), False)
    shared_sessions: bool = _key(Boolean(), False)
    max_inflight: int = _key(Integer(1, 1000), 20)
    receive_maximum: int = _key(Integer(1, 65535), 100)
    outgoing_retain: bool = _key(Boolean(), True)
    notifications: str = _key(Choice("local", "both", "off"), "local")
    notification_topic: str | None = _key(OptionalText(), "")
    loop_detection: bool = _key(Boolean(), True)
    topics: tuple[BridgeTopic, ...] = _tables(BridgeTopic)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that are invalid together, each with the reason."""
        if not self.topics:
            yield "topics", "is required: [[bridges.topics]]"
        for index, topic in enumerate(self.topics):
            problems = list(topic.problems())
            if not problems:
                try:
                    topic.rule()
                except ValueError as error:
                    problems = [("filter" if topic.local is None else "local", str(error))]
            for name, reason in problems:
                yield f"topics.{index}.{name}", reason
            if problems:
                return
        if (self.certfile is None) != (self.keyfile is None):
            yield ("keyfile", "is required with certfile") if self.keyfile is None else ("certfile", "is required with keyfile")
        if self.password is not None and self.username is None and self.version == "3.1.1":
            yield "username", "is required with a password"
        if self.reconnect_longest < self.reconnect_first:
            yield "reconnect_longest", "must not be shorter than reconnect_first"
        if self.notification_topic is not None and self.notifications != "both":
            yield "notification_topic", 'needs notifications "both"'
        echo = echoed(self.rules())
        if echo is not None and self.version == "3.1.1" and not self.try_private:
            reason = f"messages that go out would come back by {echo}: give a prefix to one side, or set try_private"
            yield "topics", reason

    def rules(self) -> list[TopicRule]:
        """The rules of the topics, in their order."""
        return [topic.rule() for topic in self.topics]


@dataclass(frozen=True)
class Cluster:
    """This node of a cluster; ``engine`` None = no cluster. ``node`` None = the name of this machine, ``link_address`` None =
    ``link_host``. Kafka's own certificates are ``cafile``, ``certfile`` and ``keyfile``, those of links the others."""

    engine: str | None = _key(OrNone(Choice("kafka"), "off"), "off")
    id: str = _key(Name("the name of a cluster"), "mqtt")
    bootstrap_servers: tuple[str, ...] = _key(Texts(), [])
    security_protocol: str = _key(Choice("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"), "PLAINTEXT")
    sasl_mechanism: str = _key(Choice("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"), "PLAIN")
    sasl_username: str | None = _key(OptionalText(), "")
    sasl_password: str | None = _secret(OptionalText(), "")
    sasl_password_file: Path | None = _file_of("sasl_password")
    cafile: Path | None = _key(OptionalPath(), "")
    certfile: Path | None = _key(OptionalPath(), "")
    keyfile: Path | None = _key(OptionalPath(), "")
    node: str | None = _key(OptionalText(), "")
    link_host: str = _key(Host(), "127.0.0.1")
    link_port: int = _key(Integer(1, 65535), 18100)
    link_address: str | None = _key(OptionalText(), "")
    link_cafile: Path | None = _key(OptionalPath(), "")
    link_certfile: Path | None = _key(OptionalPath(), "")
    link_keyfile: Path | None = _key(OptionalPath(), "")
    link_buffer: int = _key(Size("64KiB", "1GiB"), "8MiB")
    shards: int = _key(Integer(1, 1024), 8)
    replication: int = _key(Integer(1, 32), 3)
    min_insync_replicas: int = _key(Integer(1, 32), 2)
    fsync: bool = _key(Boolean(), True)
    create_topics: bool = _key(Boolean(), True)
    session_timeout: float = _key(Duration("500ms", "1h"), "1.5s")
    append_timeout: float = _key(Duration("100ms", "10m"), "5s")
    standbys: int = _key(Integer(0, 16), 1)
    max_record_bytes: int = _key(Size("64KiB", "1GiB"), "900KiB")
    max_bus_bytes: int = _key(Size("1MiB", "1TiB"), "64MiB")
    snapshot_bytes: int = _key(Size("1MiB", "1TiB"), "256MiB")
    snapshot_age: float = _key(Duration("1s", "365d"), "15m")

    @property
    def configured(self) -> bool:
        return self.engine is not None

    @property
    def node_name(self) -> str:
        return self.node or socket.gethostname()

    @property
    def address(self) -> str:
        """The host of this node's links that other nodes use."""
        return self.link_address or self.link_host

    @property
    def log_topic(self) -> str:
        """The topic whose partitions are the logs of the shards."""
        return f"{self.id}.log"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that are invalid together, each with the reason."""
        if not self.configured:
            if self != Cluster():
                yield "engine", 'must be "kafka"; without it there is no cluster'
            return
        if not self.bootstrap_servers:
            yield "bootstrap_servers", "is required"
        for server in self.bootstrap_servers:
            host, _, port = server.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                yield "bootstrap_servers", f"must be a list of HOST:PORT, got {server}"
        if self.security_protocol.startswith("SASL"):
            for name in ("sasl_username", "sasl_password"):
                if getattr(self, name) is None and not (name == "sasl_password" and self.sasl_password_file is not None):
                    yield name, f'is required for security_protocol "{self.security_protocol}"'
        for name, other in (("certfile", "keyfile"), ("link_certfile", "link_keyfile")):
            for one, needed in ((name, other), (other, name)):
                if getattr(self, one) is None and getattr(self, needed) is not None:
                    yield one, f"is required with {needed}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", self.node_name):
            yield "node", "must be 1–64 of A–Z a–z 0–9 _ . -, first a letter or digit"
        if not self.address or self.address in ("0.0.0.0", "::"):
            yield "link_address", "is required when link_host is every address of this machine"
        if not is_loopback(self.link_host):
            # A link carries the packets of authenticated clients, so both ends must prove who they are.
            for name in ("link_cafile", "link_certfile"):
                if getattr(self, name) is None:
                    yield name, f"is required when links can be reached at {self.link_host or 'every address'}"
        if self.link_port + self.shards > 65535:
            yield "link_port", f"must leave room for the ports of {self.shards} shards behind it"
        if self.min_insync_replicas > self.replication:
            yield "min_insync_replicas", f"must not be greater than replication, {self.replication}"


@dataclass(frozen=True)
class Settings:
    """All settings; ``Settings()`` has the defaults."""

    data_dir: Path = _key(Directory(), "./data")
    data_mode: int = _key(FileMode(), "0600")
    durability: str = _key(Choice("commit", "interval", "off"), "commit")
    durability_interval: float = _key(Duration("1ms", "1h"), "1s")
    commit_log_bytes: int = _key(Size("1MiB", "1TiB"), "128MiB")
    apply_interval: float = _key(Duration("1ms", "10s"), "1s")
    on_corrupt_store: str = _key(Choice("salvage", "refuse"), "salvage")
    allow_anonymous: bool | str = _key(Anonymous(), "loopback")
    authentication: tuple[str, ...] | None = _key(OrNone(Words(*AUTHENTICATORS), "auto"), "auto")
    password_file: Path | None = _key(OptionalPath(), "")
    acl_file: Path | None = _key(OptionalPath(), "")
    reveal_denials: bool = _key(Boolean(), True)
    sys_interval: float = _key(Duration("0s", "1d"), "10s")
    sys_client_events: bool = _key(Boolean(), False)
    workers: int | None = _key(OrNone(Integer(0, MAX_WORKERS), "auto"), 0)
    worker_timeout: float = _key(Duration("1s", "1h"), "10s")
    shared_subscription_strategy: str = _key(Choice("round_robin", "random", "hash_topic", "least_loaded"), "round_robin")
    response_information: str | None = _key(TopicPattern(), "")
    max_created_streams: int = _key(Integer(0, 100_000), 1000)
    log: Log = _section(Log)
    http: Http = _section(Http)
    limits: Limits = _section(Limits)
    logins: Logins = _section(Logins)
    jwt: Jwt = _section(Jwt)
    http_callback: HttpCallback = _section(HttpCallback)
    plugin: Plugin = _section(Plugin)
    bans: Bans = _section(Bans)
    crl: Crl = _section(Crl)
    alarms: Alarms = _section(Alarms)
    redirect: Redirect = _section(Redirect)
    consumers: Consumers = _section(Consumers)
    cluster: Cluster = _section(Cluster)
    listeners: tuple[Listener, ...] = (Listener(),)
    streams: tuple[Stream, ...] = ()
    bridges: tuple[Bridge, ...] = _tables(Bridge)

    queues: tuple[Queue, ...] = ()

    # The file, variable or flag that gave each dotted key; keys that are not there have their defaults.
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def worker_count(self) -> int:
        """The number of connection workers; 0 = none."""
        return len(os.sched_getaffinity(0)) - 1 if self.workers is None else self.workers

    def limits_of(self, listener: Listener) -> Limits:
        """The limits with those that the listener overrides."""
        names = [field.name for field in dataclasses.fields(Listener) if "limit" in field.metadata]
        overrides = {name: value for name in names if (value := getattr(listener, name)) is not None}
        return dataclasses.replace(self.limits, **overrides)

    @property
    def producer_window(self) -> int:
        """The numbers in which those that a producer of a stream skipped are known: twice what it may have in flight."""
        listeners = (self.limits_of(listener).receive_maximum for listener in self.listeners)
        return 2 * max([*listeners, *(bridge.receive_maximum for bridge in self.bridges)])

    def anonymous_of(self, listener: Listener) -> bool | str:
        return self.allow_anonymous if listener.allow_anonymous is None else listener.allow_anonymous

    def password_file_of(self, listener: Listener) -> Path | None:
        return self.password_file if isinstance(listener.password_file, str) else listener.password_file

    def authenticators_of(self, listener: Listener) -> tuple[str, ...]:
        """The kinds of authenticators that clients of the listener are checked by, in their order."""
        chosen = self.authentication if listener.authentication is None else listener.authentication
        return tuple(kind for kind in AUTHENTICATORS if self._has(kind, listener)) if chosen is None else chosen

    def _has(self, kind: str, listener: Listener) -> bool:
        """Whether an authenticator is configured."""
        if kind == "certificate":
            return listener.use_identity_as_username
        if kind == "jwt":
            return self.jwt.configured
        if kind == "http_callback":
            return self.http_callback.url is not None
        if kind == "plugin":
            return self.plugin.object is not None
        return self.password_file_of(listener) is not None

    @property
    def longest_packet(self) -> int:
        """The largest `max_packet_size` of all listeners, in bytes."""
        return max([self.limits.max_packet_size, *(one.max_packet_size or 0 for one in self.listeners)])

    def authentication_problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Keys of listeners whose authenticators are not configured, each with the reason."""
        for index, listener in enumerate(self.listeners):
            path = ("listeners", str(index))
            kinds = self.authenticators_of(listener)
            for kind in kinds:
                # A chain for all listeners may name certificates, which only some of them ask for.
                if kind != "certificate" and not self._has(kind, listener):
                    key = ("authentication",) if listener.authentication is None else path + ("authentication",)
                    yield key, f'"{kind}" is not configured for listener {listener.address}'
            if listener.use_identity_as_username and "certificate" not in kinds:
                yield path + ("use_identity_as_username",), 'needs "certificate" in authentication'

    def access_problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Keys of senders of HTTP requests that need another setting, each with the reason."""
        for index, access in enumerate(self.http.access):
            path = ("http", "access", str(index))
            if access.user is not None and self.acl_file is None:
                yield path + ("user",), "needs acl_file, whose rules apply to this user"

    def cluster_problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Keys that have no meaning in a cluster, each with the reason."""
        if not self.cluster.configured:
            return
        if self.http.port and self.http.port + self.cluster.shards > 65535:
            yield ("http", "port"), f"must leave room for the ports of {self.cluster.shards} shards behind it"
        for name in ("bridges", "queues"):
            if getattr(self, name):
                yield (name,), "not available in a cluster"
        if self.streams and self.longest_packet > MOST_STREAM_PACKET:
            yield ("limits", "max_packet_size"), "must be at most 48MiB in a cluster with streams, whose messages are records of Kafka"
        for stream in self.streams:
            for name, given in (("seal", stream.seal is True), ("archive", stream.archive is not None), ("dedup", stream.dedup)):
                if given:
                    yield ("streams", stream.name, name), "not available in a cluster"

    def archive_problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Keys of archives in the data directory, each with the reason."""
        data_dir = self.data_dir.absolute()
        for stream in self.streams:
            root = Path(stream.archive or "")
            if root.is_absolute() and (root == data_dir or data_dir in root.parents):
                yield ("streams", stream.name, "archive"), "must not be in data_dir"

    def acl_file_of(self, listener: Listener) -> Path | None:
        return self.acl_file if isinstance(listener.acl_file, str) else listener.acl_file
