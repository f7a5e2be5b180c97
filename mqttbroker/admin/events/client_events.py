"""Client events: a JSON message below ``$SYS/broker/clients/`` when a client has connected or is disconnected.

Keys are those of EMQX's client events; ``reason`` has the text of the log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from mqttbroker.core.client.connection import Connection
from mqttbroker.core.sessions.clients import Clients
from topic_matcher.filters import text_bytes

MAX_ID_BYTES = 4096  # of client ids that have events
MAX_WAITING = 1000  # messages that wait to be published, beyond which events are dropped
_NOT_IN_LEVELS = re.compile(r"[/+#%]")


def topic_level(client_id: str) -> str:
    """The client id as one topic level: ``/ + # %`` are percent-encoded."""
    return _NOT_IN_LEVELS.sub(lambda found: f"%{ord(found[0]):02X}", client_id)


class ClientEvents:
    """Publishes the events of ``clients`` while `enable` says so.

    ``publish`` takes topic and payload of a message that is not retained, ``waiting`` returns how many messages wait,
    and ``now`` the Unix time in seconds. ``dropped`` counts events that were not published.
    """

    def __init__(
        self,
        clients: Clients,
        publish: Callable[[str, bytes], None],
        waiting: Callable[[], int],
        now: Callable[[], float],
    ) -> None:
        self.dropped = 0
        self._clients = clients
        self._publish = publish
        self._waiting = waiting
        self._now = now

    def enable(self, enabled: bool) -> None:
        self._clients.on_connected = self._connected if enabled else None
        self._clients.on_disconnected = self._disconnected if enabled else None

    def _connected(self, connection: Connection, clean_start: bool) -> None:
        self._event("connected", connection, {
            "keepalive": int(connection.keep_alive),
            "clean_start": clean_start,
            "expiry_interval": 0 if connection.session is None else connection.session.expiry_interval,
            "connected_at": int(self._now() * 1000),
            "connack": 0,
        })  # fmt: skip

    def _disconnected(self, connection: Connection, reason: str) -> None:
        self._event("disconnected", connection, {"reason": reason, "disconnected_at": int(self._now() * 1000)})

    def _event(self, event: str, connection: Connection, more: dict[str, object]) -> None:
        client_id = connection.client_id
        if text_bytes(client_id) > MAX_ID_BYTES or self._waiting() >= MAX_WAITING:
            self.dropped += 1
            return
        version = connection.version
        message: dict[str, object] = {
            "clientid": client_id,
            "username": connection.username,
            "ipaddress": connection.peer.rpartition(":")[0] or connection.peer,
            "address": connection.peer,
            "listener": connection.terms.listener,
            "proto_name": "MQIsdp" if version == 3 else "MQTT",
            "proto_ver": version,
            **more,
            "ts": int(self._now() * 1000),
        }
        payload = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        self._publish(f"$SYS/broker/clients/{topic_level(client_id)}/{event}", payload)
