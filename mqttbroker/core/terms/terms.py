"""The limits and options of the broker, and those that a listener may override.

Each field is filled from the setting of the same name by `assembly.fill`; its value here only gives the type.
"""

from __future__ import annotations

from typing import Any

from mqttbroker.codec.reason_codes import NOT_AUTHORIZED, SERVER_MOVED, UNSPECIFIED_ERROR, USE_ANOTHER_SERVER
from mqttbroker.core.terms.certificate_names import certificate_name
from mqttbroker.core.terms.networks import Networks


class Redirect:
    """The server that clients are sent to; ``rate`` is in connected clients per second."""

    def __init__(self, server_reference: str, permanent: bool, rate: int) -> None:
        self.server_reference = server_reference
        self.reason_code = SERVER_MOVED if permanent else USE_ANOTHER_SERVER
        self.rate = rate


class ListenerTerms:
    """The terms for clients of one listener; times in seconds, sizes in bytes.

    ``listener`` is its address as in the log; ``rules`` names its `Rules`, None = the common ones; limits by address
    are by ``networks``. A limit by address or a rate of 0 is none. ``of_bridges``: the clients are bridges of this
    broker.
    """

    def __init__(self) -> None:
        self.listener = ""
        self.of_bridges = False
        self.rules: str | None = None
        self.networks = Networks()
        self.max_connections_per_address = 0
        self.max_connect_rate = 0
        self.max_connect_rate_per_address = 0
        self.max_half_open_per_address = 0
        self.max_publish_rate = 0
        self.max_receive_rate = 0
        self.max_delivery_rate = 0
        self.max_send_rate = 0
        self.max_publish_rate_per_listener = 0
        self.max_receive_rate_per_listener = 0
        self.max_delivery_rate_per_listener = 0
        self.max_send_rate_per_listener = 0
        self.receive_maximum = 0
        self.max_packet_size = 0
        self.topic_alias_maximum = 0
        self.max_keep_alive = 0
        self.connect_timeout = 0.0
        self.ignores_username_query = False  # what follows ? in a user name
        # A client id in which %u stands for the user name and %i for the name in the client's certificate; a * at its
        # end stands for any further characters.
        self.client_id_pattern: str | None = None
        self.certificate_identity: tuple[str, ...] = ()  # the kinds of names, as for `certificate_name`

    def binds_certificates(self) -> bool:
        """Whether client ids must have the name in the client's certificate."""
        return self.client_id_pattern is not None and "%i" in self.client_id_pattern

    def assigns_any(self) -> bool:
        """Whether an assigned client id may have more characters at its end."""
        return self.client_id_pattern is None or self.client_id_pattern.endswith("*")

    def allowed_client_id(self, client_id: str, assigned: bool, username: str | None, certificate: Any = None) -> str | None:
        """The client id of a user; None if the pattern excludes it. The broker may change an ``assigned`` one."""
        pattern = self.client_id_pattern
        if pattern is None:
            return client_id
        open_ended = pattern.endswith("*")
        if open_ended:
            pattern = pattern[:-1]
        if "%u" in pattern:
            if not username:
                return None
        identity = certificate_name(certificate, self.certificate_identity) if certificate and "%i" in pattern else None
        if "%i" in pattern and identity is None:
            return None
        # In one pass, so that neither name is taken for a placeholder.
        parts: list[str] = []
        for index, part in enumerate(pattern.split("%u")):
            if index > 0:
                parts.append(username or "")
            parts.append(part.replace("%i", identity or ""))
        pattern = "".join(parts)
        if assigned:
            made = pattern + client_id if open_ended else pattern
            return made if len(made.encode("utf-8")) <= 65535 else None
        if client_id == pattern or (open_ended and client_id.startswith(pattern)):
            return client_id
        return None


class BrokerTerms:
    """The terms that hold for the whole broker; times in seconds, sizes in bytes."""

    def __init__(self) -> None:
        self.max_connections = 0
        self.max_half_open = 0
        self.max_sessions = 0
        # Limits by user name; 0 = none.
        self.max_connections_per_user = 0
        self.max_connect_rate_per_user = 0
        self.max_sessions_per_user = 0
        self.max_publish_rate_per_user = 0
        self.max_receive_rate_per_user = 0
        self.max_delivery_rate_per_user = 0
        self.max_send_rate_per_user = 0
        self.max_connect_size = 0
        self.left_client_timeout = 0.0
        self.max_session_expiry = 0
        self.retain_available = True
        self.max_retained_messages = 0
        self.max_retained_bytes = 0
        self.max_topic_length = 0
        self.max_topic_levels = 0
        self.max_subscriptions_per_client = 0
        self.max_subscription_bytes_per_client = 0
        self.max_filters_per_packet = 0
        self.max_total_subscription_bytes = 0
        self.max_memory = 0  # 0 = unlimited
        self.max_total_session_bytes = 0
        self.max_total_in_flight_bytes = 0
        self.max_total_queue_memory_bytes = 0
        self.max_total_outbox_bytes = 0
        self.max_total_incomplete_bytes = 0
        self.max_total_connect_bytes = 0
        self.max_total_alias_bytes = 0
        self.queue_high_watermark_messages = 0
        self.route_cache_bytes = 0
        self.max_pending_write_bytes = 0
        self.max_unapplied_bytes = 0
        self.max_total_will_bytes = 0
        self.stream_chunk_bytes = 0
        self.max_stream_groups = 0
        self.max_total_stream_chunk_bytes = 0
        self.sealed_reader_cache_bytes = 0
        self.sealed_reader_nice = 0
        self.durability = ""
        self.reveal_denials = True
        # A topic name in which the levels %c and %u stand for the client id and the user name.
        self.response_information: str | None = None
        self.redirect: Redirect | None = None  # replaced on reload

    def denial_code(self) -> int:
        """The reason code for a SUBSCRIBE or PUBLISH that the rules deny (sections 3.9.3 and 3.4.2.1)."""
        return NOT_AUTHORIZED if self.reveal_denials else UNSPECIFIED_ERROR

    def server_reference(self, reason_code: int) -> str | None:
        """The Server Reference of a CONNACK or DISCONNECT with this reason code."""
        redirect = self.redirect
        if redirect is None or redirect.reason_code != reason_code:
            return None
        return redirect.server_reference

    def response_topic_root(self, client_id: str, username: str | None) -> str | None:
        """The Response Information for a client; None if its names do not fit into one topic level each."""
        if self.response_information is None:
            return None
        levels: list[str] = []
        for level in self.response_information.split("/"):
            if level == "%c" or level == "%u":
                level = client_id if level == "%c" else username or ""
                if not level or "/" in level or "+" in level or "#" in level:
                    return None
            levels.append(level)
        root = "/".join(levels)
        return root if len(root.encode("utf-8")) <= self.max_topic_length else None
