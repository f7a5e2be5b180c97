"""The options of the Spark sink `mqtt`.

Every option is checked when a query starts.  An error is one line that names the option, the value and the reason.
Secrets are read on the driver and sent to the executors with the writer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from bridge_spark.sink.errors import SinkError
from bridge_spark.source import option_values as values
from bridge_spark.source.errors import line_of
from bridge_spark.source.option_values import OptionError
from topic_matcher.filters import is_valid_topic

OPTION_NAMES = (
    "url",
    "host",
    "port",
    "user",
    "password",
    "passwordFile",
    "token",
    "tokenFile",
    "caFile",
    "certFile",
    "keyFile",
    "protocolVersion",
    "clientIdPrefix",
    "topic",
    "qos",
    "retain",
    "deduplicate",
    "producerId",
    "sortRows",
    "maxInFlight",
    "delivery.timeoutMs",
    "request.timeoutMs",
)
_OTHER_NAMES = {
    "username": "user",
    "clientid": "clientIdPrefix",
    "kafka.bootstrap.servers": "url",
    "kafka.delivery.timeout.ms": "delivery.timeoutMs",
    "kafka.request.timeout.ms": "request.timeoutMs",
    "kafka.acks": "qos",
    "kafka.enable.idempotence": "deduplicate",
    "kafka.max.in.flight.requests.per.connection": "maxInFlight",
    "kafka.client.id": "clientIdPrefix",
    "kafka.ssl.truststore.location": "caFile",
    "kafka.ssl.keystore.location": "certFile",
    "path": "url",
}
_CHECKPOINT = "checkpointlocation"
_NAMES = values.OptionNames(OPTION_NAMES, (_CHECKPOINT,), _OTHER_NAMES, "the closest option of this sink", "the options of the sink")

MAX_IN_FLIGHT = 10_000
"""So many acknowledgements fit into a socket's buffer, so a broker never waits for them to be read."""
IN_FLIGHT_311 = 20
"""Version 3.1.1 has no Receive Maximum, and Mosquitto closes the connection of a client with more in flight at QoS 2."""
MAX_PRODUCER_ID = 200  # characters
MAX_PREFIX = 100


@dataclass(frozen=True)
class SinkOptions:
    """Checked options; times in seconds.

    ``version`` is MQTT's protocol level, 4 or 5.  ``topic`` None: the column.  ``producer_id`` None: the query's id, or
    a new one per batch write.
    """

    host: str
    port: int
    secure: bool = False
    user: str | None = None
    password: bytes | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    version: int = 5
    client_id_prefix: str = "spark"
    topic: str | None = None
    qos: int = 1
    retain: bool = False
    deduplicate: bool = True
    producer_id: str | None = None
    sort_rows: bool = False
    max_in_flight: int = MAX_IN_FLIGHT
    delivery_timeout: float = 120.0
    request_timeout: float = 30.0

    @property
    def address(self) -> str:
        """The broker, as errors name it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"mqtt{'s' if self.secure else ''}://{host}:{self.port}"


def are_for_writing(options: Mapping[str, str]) -> bool:
    """Whether Spark's option map is one of a sink, as far as that can be seen."""
    given = {key.lower(): value for key, value in options.items()}
    return _CHECKPOINT in given or "host" in given or given.get("url", "").lower().startswith(("mqtt:", "mqtts:"))


def parse_options(options: Mapping[str, str]) -> SinkOptions:
    """Check Spark's option map; raises `SinkError`."""
    try:
        return _parse(_NAMES.given(options))
    except OptionError as error:
        raise SinkError(line_of(error)) from None


def _parse(given: dict[str, str]) -> SinkOptions:
    host, port, secure = _address(given)
    for name in ("caFile", "certFile", "keyFile"):
        if name in given and not secure:
            raise OptionError(name, "is for a 'url' that begins with mqtts://")
    if "keyFile" in given and "certFile" not in given:
        raise OptionError("keyFile", "needs 'certFile', the certificate of that key")
    version = {"5": 5, "5.0": 5, "3.1.1": 4}.get(given.get("protocolVersion", "5").strip())
    if version is None:
        raise OptionError("protocolVersion", f"{given['protocolVersion']!r} is neither 5 nor 3.1.1")
    user, password = _login(given, version)
    default = SinkOptions(host, port)
    return SinkOptions(
        host=host,
        port=port,
        secure=secure,
        user=user,
        password=password,
        ca_file=given.get("caFile"),
        cert_file=given.get("certFile"),
        key_file=given.get("keyFile"),
        version=version,
        client_id_prefix=_text(given, "clientIdPrefix", MAX_PREFIX) or default.client_id_prefix,
        topic=_topic(given),
        qos=_number(given, "qos", default.qos, 0, 2),
        retain=values.boolean(given, "retain", default.retain),
        deduplicate=_deduplicate(given, version),
        producer_id=_text(given, "producerId", MAX_PRODUCER_ID),
        sort_rows=values.boolean(given, "sortRows", default.sort_rows),
        max_in_flight=_number(given, "maxInFlight", MAX_IN_FLIGHT if version == 5 else IN_FLIGHT_311, 1, MAX_IN_FLIGHT),
        delivery_timeout=values.duration_ms(given, "delivery.timeoutMs", 120_000) / 1000,
        request_timeout=max(1, values.duration_ms(given, "request.timeoutMs", 30_000)) / 1000,
    )


def _address(given: dict[str, str]) -> tuple[str, int, bool]:
    """Host, port, and whether TLS is used."""
    url = given.get("url")
    if url is None:
        host = given.get("host", "").strip()
        if not host:
            raise OptionError("url", "missing: give the broker's address, mqtt://HOST:PORT or mqtts://HOST:PORT")
        return host, _number(given, "port", 1883, 1, 65535), False
    for name in ("host", "port"):
        if name in given:
            raise OptionError(name, "cannot be given together with 'url'")
    if "@" in url:  # before any message shows the text
        raise OptionError("url", "must not carry a name or password: give 'user' and 'password'")
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise OptionError("url", f"{url!r}: {error}") from None
    if parts.scheme in ("http", "https"):
        raise OptionError("url", f"{url!r} is an HTTP address, which is for reading: to write, give mqtt://HOST:PORT")
    if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise OptionError("url", f"{url!r} is not an address like mqtt://HOST:PORT or mqtts://HOST:PORT")
    secure = parts.scheme == "mqtts"
    return parts.hostname, port or (8883 if secure else 1883), secure


def _login(given: dict[str, str], version: int) -> tuple[str | None, bytes | None]:
    """User name and password; a token is sent as the password."""
    secrets = [name for name in ("password", "passwordFile", "token", "tokenFile") if name in given]
    if len(secrets) > 1:
        raise OptionError(secrets[1], f"cannot be given together with '{secrets[0]}'")
    user = _text(given, "user", 65535)
    if not secrets:
        return user, None
    name = secrets[0]
    if user is None and (name.startswith("password") or version == 4):
        raise OptionError(name, "needs 'user', the user name")
    secret = given[name].encode()
    if name.endswith("File"):
        try:
            with open(given[name], "rb") as file:
                secret = file.read().rstrip(b"\r\n")
        except OSError as error:
            raise OptionError(name, f"{given[name]}: {error.strerror}") from None
    if not secret or len(secret) > 65535:
        raise OptionError(name, "is empty" if not secret else "has more than 65535 bytes")
    return user, secret


def _deduplicate(given: dict[str, str], version: int) -> bool:
    if version == 5:
        chosen = values.boolean(given, "deduplicate", True)
        if "producerId" in given and not chosen:
            raise OptionError("producerId", "is for 'deduplicate', which is false")
        return chosen
    for name in ("deduplicate", "producerId"):
        if name in given and given[name].strip().lower() != "false":
            raise OptionError(name, "needs user properties, which MQTT 3.1.1 does not have: set 'protocolVersion' to 5")
    return False


def _topic(given: dict[str, str]) -> str | None:
    topic = given.get("topic")
    if topic is not None and not is_valid_topic(topic):
        raise OptionError("topic", f"{topic[:100]!r} is not a topic name that can be published to")
    return topic


def _number(given: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    value = values.count(given, name, default)
    if not least <= value <= most:
        raise OptionError(name, f"{value} is not a number from {least} to {most}")
    return value


def _text(given: dict[str, str], name: str, most: int) -> str | None:
    text = given.get(name)
    if text is not None and (not text or len(text.encode()) > most or not text.isprintable()):
        raise OptionError(name, f"{text[:100]!r} is not a text of 1 to {most} bytes without control characters")
    return text
