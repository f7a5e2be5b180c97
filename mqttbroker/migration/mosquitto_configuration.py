"""Conversion of a Mosquitto configuration (``mosquitto.conf``, mosquitto.conf(5) of version 2.1) to this broker's settings.

A line is converted, has nothing to convert, or is named with the reason why it is not carried over.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from mqttbroker.migration.mosquitto_bridges import BridgeReader
from mqttbroker.migration.mosquitto_values import boolean, number, seconds, tls_version

_DAYS: Final = {"w": 7, "m": 30, "y": 365}

# Options without a counterpart, because this broker always does what the comment says, or has no need to.
_NEEDLESS: Final = {
    "allow_duplicate_messages",  # one delivery for overlapping subscriptions
    "autosave_interval",  # acknowledged messages are on disk
    "autosave_on_changes",
    "check_retain_source",  # access rules are asked for retained messages, too
    "connection_messages",
    "dhparamfile",  # TLS 1.2 and later with elliptic curves
    "log_timestamp",
    "log_timestamp_format",
    "retry_interval",
    "set_tcp_nodelay",
    "socket_domain",  # follows from the address
    "store_clean_interval",
    "retained_persistence",
}

# Options that are not carried over, and what to do.
_NOT_CARRIED: Final = {
    "accept_protocol_versions": "all versions are accepted",
    "allow_zero_length_clientid": "a client without an id is assigned one",
    "auth_plugin": "see [plugin] and [http_callback] in docs/authentication.md",
    "auto_id_prefix": "ids that are assigned have no prefix",
    "bind_interface": "use the address of the interface as the listener's host",
    "capath": "put the authorities into one file, and set cafile",
    "ciphers": "the defaults of OpenSSL are used",
    "ciphers_tls1.3": "the defaults of OpenSSL are used",
    "clientid_prefixes": "see client_id_from",
    "disable_client_cert_date_checks": "certificates are always checked",
    "enable_control_api": "see the HTTP API in docs/http.md",
    "global_plugin": "see [plugin] and [http_callback] in docs/authentication.md",
    "http_api": "see [http]",
    "http_dir": "no files are served",
    "log_facility": "see log_dest syslog",
    "max_inflight_bytes": "limits.max_outbox_bytes and limits.max_total_in_flight_bytes are nearest",
    "max_qos": "all QoS are accepted",
    "message_size_limit": "limits.max_packet_size includes the header",
    "mount_point": "topics are the same at all listeners",
    "packet_buffer_size": "buffers have fixed sizes",
    "pid_file": "see conf/ for service managers",
    "plugin": "see [plugin] and [http_callback] in docs/authentication.md",
    "plugin_load": "see [plugin] and [http_callback] in docs/authentication.md",
    "plugin_use": "see [plugin] and [http_callback] in docs/authentication.md",
    "psk_file": "use certificates",
    "psk_hint": "use certificates",
    "queue_qos0_messages": "QoS 0 messages are not queued for disconnected clients",
    "retain_expiry_interval": "retained messages expire by their own message expiry",
    "tls_engine": "keys are in files",
    "tls_engine_kpass_sha1": "keys are in files",
    "tls_keyform": "keys are in PEM files",
    "upgrade_outgoing_qos": "a message is delivered at the lower of both QoS",
    "user": "set the user of the service or of the container",
    "websockets_headers_size": "headers are bounded",
    "websockets_log_level": "see log.level",
}


# The same for values of log_dest.
_LOG_DEST: Final = {
    "dlt": "set log.to; the default is stderr",
    "file": "set log.to and log.file; the default is stderr",
    "none": "set log.level; errors are always logged",
    "syslog": "the log goes to stderr, which systemd, the engine of a container or logger(1) passes on",
    "topic": "lines are not published; see sys_client_events",
}
_LOG_TO: Final = ("stderr", "stdout")  # the default


class Line(NamedTuple):
    """A line of a file; ``number`` counts from 1."""

    path: Path
    number: int

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


class NotCarried(NamedTuple):
    """A line or a part of a file that has no counterpart."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class Configuration:
    """The settings of this broker as TOML's values, and the files that the configuration names."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.limits: dict[str, Any] = {}
        self.log: dict[str, Any] = {}
        self.listeners: list[dict[str, Any]] = []
        self.bridges: list[dict[str, Any]] = []
        self.persistence: bool | None = None
        self.location = Path()
        self.database = "mosquitto.db"
        self.not_carried: list[NotCarried] = []


class ConfigurationError(Exception):
    """A file cannot be read or converted; the text is one line that names file and place."""


def convert(path: Path) -> Configuration:
    """Raises `ConfigurationError`, also for a line that Mosquitto refuses."""
    reader = _Reader()
    reader.read(path, 0)
    return reader.finish()


def _size(text: str) -> str:
    return f"{number(text)}B"


def _expiration(text: str) -> str:
    """``persistent_client_expiration``: a number of hours, days, weeks, months or years."""
    count, unit = number(text[:-1]), text[-1:]
    if unit not in "hdwmy" or not unit:
        raise ValueError("not a number with h, d, w, m or y")
    return f"{count}h" if unit == "h" else f"{count * _DAYS.get(unit, 1)}d"


def _protocol(text: str) -> str:
    if text not in ("mqtt", "websockets"):
        raise ValueError("not mqtt or websockets")
    return "tcp" if text == "mqtt" else "ws"


Convert = Callable[[str], Any]

# Option: key of the settings, and the conversion of its value. Mosquitto's 0 for "no limit" is left out.
_GLOBAL: Final[dict[str, tuple[str, Convert]]] = {
    "global_max_connections": ("limits.max_connections", number),
    "max_inflight_messages": ("limits.max_inflight", number),
    "max_keepalive": ("limits.max_keep_alive", seconds),
    "max_packet_size": ("limits.max_packet_size", _size),
    "max_queued_bytes": ("limits.max_queued_bytes", _size),
    "max_queued_messages": ("limits.max_queued_messages", number),
    "memory_limit": ("limits.max_memory", _size),
    "persistent_client_expiration": ("limits.max_session_expiry", _expiration),
    "retain_available": ("limits.retain_available", boolean),
    "sys_interval": ("sys_interval", seconds),
}
_KEEP_ZERO: Final = {"sys_interval", "retain_available"}

# The same for options of a listener.
_LISTENER: Final[dict[str, tuple[str, Convert]]] = {
    "cafile": ("cafile", str),
    "certfile": ("certfile", str),
    "crlfile": ("crlfile", str),
    "enable_proxy_protocol": ("proxy_protocol", boolean),
    "keyfile": ("keyfile", str),
    "max_connections": ("max_connections", number),
    "max_topic_alias": ("topic_alias_maximum", number),
    "protocol": ("type", _protocol),
    "tls_version": ("tls_version", tls_version),
    "use_identity_as_username": ("use_identity_as_username", boolean),
}

# Options that belong to the listener with per_listener_settings, and to the broker without.
_SECURITY: Final[dict[str, Convert]] = {"acl_file": str, "allow_anonymous": boolean, "password_file": str}

_LEVELS: Final = {"debug": "debug", "all": "debug", "information": "info", "notice": "info", "warning": "warning"}
_LEVEL_ORDER: Final = ("error", "warning", "info", "debug")


class _Reader:
    """Reads the lines of a configuration and of the files that it includes."""

    def __init__(self) -> None:
        self._found = Configuration()
        self._listener: dict[str, Any] | None = None  # that the lines speak of
        self._default: dict[str, Any] = {}  # the listener of Mosquitto's options without `listener`
        self._per_listener = False
        self._anonymous: bool | None = None
        self._bridge: BridgeReader | None = None  # the bridge that the lines speak of
        self._levels: list[str] = []

    def read(self, path: Path, depth: int) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{path}: not UTF-8: {error}") from error
        for row, line in enumerate(text.splitlines(), 1):
            words = line.strip().split(None, 1)
            if words and not words[0].startswith("#"):
                self._read_line(Line(path, row), words[0], words[1].strip() if len(words) > 1 else "", depth)

    def _read_line(self, line: Line, option: str, value: str, depth: int) -> None:
        if option == "include_dir":
            if depth:
                raise ConfigurationError(f"{line}: include_dir in a file that is included")
            folder = Path(value)
            if not folder.is_dir():
                raise ConfigurationError(f"{line}: {value}: not a directory")
            # In the order of strcasecmp, as Mosquitto reads them.
            for path in sorted(folder.glob("*.conf"), key=lambda path: (path.name.lower(), path.name)):
                self.read(path, depth + 1)
            return
        try:
            self._convert(line, option, value)
        except ValueError as error:
            raise ConfigurationError(f"{line}: {option} {value}: {error}") from error

    def _convert(self, line: Line, option: str, value: str) -> None:
        if option == "connection":
            self._end_bridge()
            self._bridge = BridgeReader(str(line), value)
        elif self._bridge is not None and option != "listener":
            reason = self._bridge.read(option, value)
            if reason is not None:
                self._refuse(line, reason)
        elif option in _NEEDLESS:
            pass
        elif option == "listener":
            self._begin_listener(line, value)
        elif option in ("port", "bind_address"):
            self._default["port" if option == "port" else "host"] = number(value) if option == "port" else value
        elif option == "per_listener_settings":
            self._per_listener = boolean(value)
        elif option in _SECURITY:
            self._convert_security(option, _SECURITY[option](value))
        elif option in _GLOBAL:
            self._convert_global(option, value)
        elif option in _LISTENER:
            self._convert_listener(line, option, value)
        else:
            self._convert_other(line, option, value)

    def _convert_security(self, option: str, value: Any) -> None:
        if self._per_listener:
            self._of_listener()[option] = value
        elif option == "allow_anonymous":
            self._anonymous = value
        else:
            self._found.settings[option] = value

    def _convert_global(self, option: str, value: str) -> None:
        key, conversion = _GLOBAL[option]
        converted = conversion(value)
        if option not in _KEEP_ZERO and value.startswith("0"):
            return
        section, _, name = key.rpartition(".")
        (self._found.limits if section else self._found.settings)[name] = converted

    def _convert_listener(self, line: Line, option: str, value: str) -> None:
        if option == "max_connections" and value == "-1":
            return
        key, conversion = _LISTENER[option]
        if option == "tls_version" and value == "tlsv1.1":
            self._refuse(line, "TLS 1.1 is not supported; TLS 1.2 is the oldest version")
        self._of_listener()[key] = conversion(value)

    def _convert_other(self, line: Line, option: str, value: str) -> None:
        found = self._found
        if option == "require_certificate":
            self._of_listener()["client_certificate"] = "required" if boolean(value) else "optional"
        elif option == "use_subject_as_username":
            if boolean(value):
                self._of_listener().update(use_identity_as_username=True, certificate_identity="subject")
        elif option == "use_username_as_clientid":
            if boolean(value):
                self._of_listener()["client_id_from"] = "username"
        elif option == "websockets_origin":
            self._of_listener().setdefault("origins", []).append(value)
        elif option == "persistence":
            found.persistence = boolean(value)
        elif option == "persistence_location":
            found.location = Path(value)
        elif option == "persistence_file":
            found.database = value
        elif option == "log_type":
            self._levels.append(_LEVELS.get(value, "error"))
        elif option == "log_dest":
            self._convert_log_dest(line, value)
        elif option in _NOT_CARRIED:
            self._refuse(line, f"{option}: {_NOT_CARRIED[option]}")
        elif option.startswith(("auth_opt_", "plugin_opt_")):
            pass  # the plugin was named
        else:
            self._refuse(line, f"{option}: unknown")

    def _convert_log_dest(self, line: Line, value: str) -> None:
        kind = value.partition(" ")[0]
        if kind in _LOG_DEST:
            self._refuse(line, f"log_dest {kind}: {_LOG_DEST[kind]}")
        elif kind not in _LOG_TO:
            raise ValueError(f"not {', '.join(sorted([*_LOG_TO, *_LOG_DEST]))}")

    def _refuse(self, line: Line, reason: str) -> None:
        self._found.not_carried.append(NotCarried(str(line), reason))

    def _begin_listener(self, line: Line, value: str) -> None:
        self._end_bridge()
        words = value.split(None, 1)
        if not words:
            raise ConfigurationError(f"{line}: listener without a port")
        port, host = number(words[0]), words[1] if len(words) > 1 else ""
        self._listener = {"type": "unix", "path": host} if port == 0 and host else {"host": host, "port": port}
        self._found.listeners.append(self._listener)

    def _of_listener(self) -> dict[str, Any]:
        return self._default if self._listener is None else self._listener

    def _end_bridge(self) -> None:
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            try:
                self._found.bridges.append(bridge.finish())
            except ValueError as error:
                self._found.not_carried.append(NotCarried(bridge.where, str(error)))

    def finish(self) -> Configuration:
        found = self._found
        self._end_bridge()
        listening = bool(found.listeners) or "port" in self._default
        if self._default or not listening:
            # Without a listener, Mosquitto serves its own machine only.
            found.listeners.insert(0, {"host": "" if listening else "127.0.0.1", "port": 1883, **self._default})
        for listener in found.listeners:
            if "certfile" in listener:
                listener["type"] = "wss" if listener.get("type") == "ws" else "tls"
                if "cafile" in listener:
                    listener.setdefault("client_certificate", "none")
            if self._per_listener:
                listener.setdefault("allow_anonymous", not listening)
                listener.setdefault("password_file", "")
                listener.setdefault("acl_file", "")
        if not self._per_listener:
            found.settings["allow_anonymous"] = not listening if self._anonymous is None else self._anonymous
        found.settings["durability"] = "off" if found.persistence is False else "commit"
        if self._levels:
            found.log["level"] = max(self._levels, key=_LEVEL_ORDER.index)
        return found


def files_of(found: Configuration) -> list[tuple[dict[str, Any], str]]:
    """Tables of the settings and their keys that name a file of users or of access rules."""
    return [(table, key) for table in (found.settings, *found.listeners) for key in ("password_file", "acl_file") if table.get(key)]
