"""Conversion of the bridges of a Mosquitto configuration: the lines behind ``connection NAME``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NoReturn

from mqttbroker.migration.mosquitto_values import boolean, number, seconds, tls_version
from topic_matcher.remapping import echoed, prefix_rule

# Options without a counterpart, because bridges here always do what the comment says, or have no need to.
_NEEDLESS: Final = {
    "bridge_attempt_unsubscribe",  # filters that are no longer configured are unsubscribed
    "bridge_max_topic_alias",  # a remote's messages come with their names
    "bridge_tls_use_os_certs",  # without a cafile
    "bridge_tcp_keepalive",  # MQTT's keep alive
    "bridge_tcp_user_timeout",
}

# Options that are not carried over, and what to do.
_NOT_CARRIED: Final = {
    "bridge_alpn": "the protocol is mqtt",
    "bridge_bind_address": "the system chooses the address",
    "bridge_capath": "put the authorities into one file, and set cafile",
    "bridge_ciphers": "the defaults of OpenSSL are used",
    "bridge_ciphers_tls1.3": "the defaults of OpenSSL are used",
    "bridge_identity": "use certificates",
    "bridge_max_packet_size": "the remote's maximum is heeded, and limits.max_packet_size holds for what it sends",
    "bridge_psk": "use certificates",
    "bridge_reload_type": "a changed bridge connects again",
    "bridge_require_ocsp": "OCSP is not supported",
    "idle_timeout": "bridges stay connected",
    "local_cleansession": "messages always wait for the bridge",
    "local_clientid": "the client id here is $bridge/NAME",
    "local_password": "the access rules do not apply to bridges",
    "local_username": "the access rules do not apply to bridges",
    "threshold": "bridges stay connected",
}

_VERSIONS: Final = {"mqttv31": "3.1.1", "mqttv311": "3.1.1", "mqttv50": "5.0"}
_USES_TLS: Final = {"bridge_cafile", "bridge_capath", "bridge_certfile", "bridge_identity", "bridge_tls_use_os_certs"}


def _expiry(text: str) -> str:
    value = number(text)
    return "never" if value == 0xFFFFFFFF else f"{value}s"


def _version(text: str) -> str:
    if text not in _VERSIONS:
        raise ValueError("not mqttv31, mqttv311 or mqttv50")
    return _VERSIONS[text]


# Option: key of the settings, and the conversion of its value.
_KEYS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "bridge_cafile": ("cafile", str),
    "bridge_certfile": ("certfile", str),
    "bridge_insecure": ("verify", lambda text: not boolean(text)),
    "bridge_keyfile": ("keyfile", str),
    "bridge_outgoing_retain": ("outgoing_retain", boolean),
    "bridge_protocol_version": ("version", _version),
    "bridge_receive_maximum": ("receive_maximum", number),
    "bridge_session_expiry_interval": ("session_expiry", _expiry),
    "bridge_tls_version": ("tls_version", tls_version),
    "cleansession": ("clean_start", boolean),
    "clientid": ("client_id", str),
    "keepalive_interval": ("keep_alive", seconds),
    "notification_topic": ("notification_topic", str),
    "password": ("password", str),
    "remote_clientid": ("client_id", str),
    "remote_password": ("password", str),
    "remote_username": ("username", str),
    "round_robin": ("round_robin", boolean),
    "try_private": ("try_private", boolean),
    "username": ("username", str),
}


class BridgeReader:
    """The lines of one bridge. ``where`` is that of ``connection``; a method that refuses something raises ValueError."""

    def __init__(self, where: str, name: str) -> None:
        self.where = where
        self._name = re.sub(r"[^A-Za-z0-9_.@-]", "-", name)[:64]
        if not re.match("[A-Za-z0-9]", self._name):
            self._name = f"b{self._name}"[:64]
        # Mosquitto's defaults, where this broker's are others.
        self._values: dict[str, Any] = {"version": "3.1.1", "reconnect_first": "5s", "reconnect_longest": "30s"}
        self._addresses: list[str] = []
        self._topics: list[dict[str, Any]] = []
        self._tls = False
        self._notifications = self._everywhere = True

    def read(self, option: str, value: str) -> str | None:
        """Convert a line; returns the reason if it is not carried over. Raises ValueError for an invalid value."""
        if option in _USES_TLS:
            self._tls = self._tls or value != "false"
        if option in _KEYS:
            key, conversion = _KEYS[option]
            self._values[key] = conversion(value)
            if value == "mqttv31":
                return "MQTT 3.1 is not supported for bridges; 3.1.1 is used"
        elif option in ("address", "addresses"):
            self._addresses += value.split()
        elif option == "topic":
            self._topics.append(_topic(value))
        elif option == "restart_timeout":
            first, *longest = (number(text) for text in value.split())
            self._values["reconnect_first"] = f"{max(1, first)}s"
            self._values["reconnect_longest"] = f"{max(1, first, *longest)}s"
        elif option == "notifications":
            self._notifications = boolean(value)
        elif option == "notifications_local_only":
            self._everywhere = not boolean(value)
        elif option == "start_type":
            if value != "automatic":
                return f"start_type {value}: bridges connect at the start, and stay connected"
        elif option in _NOT_CARRIED:
            return f"{option}: {_NOT_CARRIED[option]}"
        elif option not in _NEEDLESS:
            return f"{option}: unknown"
        return None

    def finish(self) -> dict[str, Any]:
        """The table of the bridge, with its ``topics``. Raises ValueError with the reason if it cannot be one."""
        if not self._addresses:
            self._refuse("no address")
        if not self._topics:
            self._refuse("no topic")
        values = self._values
        rules = [
            prefix_rule(each["filter"], each["direction"], each["qos"], each["local_prefix"], each["remote_prefix"])
            for each in self._topics
        ]
        if values["version"] == "3.1.1" and values.get("try_private") is False:
            loop = echoed(rules)
            if loop is not None:
                self._refuse(f"messages that go out would come back by {loop}: give a prefix to one side")
        if not self._notifications:
            notifications = "off"
        else:
            notifications = "both" if self._everywhere else "local"
        if notifications != "both":
            values.pop("notification_topic", None)
        scheme = "mqtts" if self._tls else "mqtt"
        addresses = [f"{scheme}://{address if _has_port(address) else address + ':1883'}" for address in self._addresses]
        return {"name": self._name, "addresses": addresses, **values, "notifications": notifications,
                "topics": self._topics}  # fmt: skip

    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(f"bridge {self._name}: {reason}")


def _has_port(address: str) -> bool:
    return re.search(r"[^:\]]:\d+$|\]:\d+$", address) is not None


def _topic(value: str) -> dict[str, Any]:
    """``pattern [[[out | in | both] qos] local-prefix remote-prefix]``, in which "" is an empty text."""
    words = ["" if word == '""' else word for word in value.split()]
    if not 1 <= len(words) <= 5:
        raise ValueError("not a pattern with direction, QoS and two prefixes at most")
    topic_filter, direction, qos, local, remote = words + ["out", "0", "", ""][len(words) - 1 :]
    if direction not in ("out", "in", "both") or qos not in ("0", "1", "2"):
        raise ValueError("the direction is not out, in or both, or the QoS is not 0, 1 or 2")
    prefix_rule(topic_filter, direction, int(qos), local, remote)
    return {"filter": topic_filter, "direction": direction, "qos": int(qos), "local_prefix": local,
            "remote_prefix": remote}  # fmt: skip
