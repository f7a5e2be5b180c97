"""The options of the source for a cluster, whose streams are topics of Kafka."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge_spark.source.option_values import OptionError, one_of

SERVERS = "kafka.bootstrap.servers"
PASSWORD = "kafka.sasl.password"
KAFKA_OPTION_NAMES = (
    SERVERS,
    "clusterId",
    "kafka.security.protocol",
    "kafka.sasl.mechanism",
    "kafka.sasl.username",
    PASSWORD,
    "kafka.sasl.passwordFile",
    "kafka.ssl.ca.location",
    "kafka.ssl.certificate.location",
    "kafka.ssl.key.location",
)
_PROTOCOLS = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
_MECHANISMS = ("plain", "scram-sha-256", "scram-sha-512")


@dataclass(frozen=True)
class KafkaOptions:
    """How to reach Kafka, with the values of aiokafka; ``cluster`` is the id of the cluster of brokers."""

    servers: tuple[str, ...]
    cluster: str = "mqtt"
    protocol: str = "PLAINTEXT"
    mechanism: str | None = None
    username: str | None = None
    password: str | None = None
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None

    def connection(self) -> dict[str, Any]:
        """The arguments of aiokafka's clients. Raises `OptionError` for files that are none of certificates."""
        from aiokafka.helpers import create_ssl_context

        found: dict[str, Any] = {"bootstrap_servers": list(self.servers), "security_protocol": self.protocol}
        if self.protocol.endswith("SSL"):
            try:
                found["ssl_context"] = create_ssl_context(cafile=self.ca_file, certfile=self.certificate_file, keyfile=self.key_file)
            except OSError as error:  # ssl.SSLError is one
                raise OptionError("kafka.ssl.ca.location", f"or the certificate or key: {error}") from None
        if self.mechanism is not None:
            found.update(sasl_mechanism=self.mechanism, sasl_plain_username=self.username, sasl_plain_password=self.password)
        return found


def kafka_options(given: Mapping[str, str]) -> KafkaOptions | None:
    """The options among ``given``; None without servers. Raises `OptionError`."""
    if SERVERS not in given:
        for name in KAFKA_OPTION_NAMES:
            if name in given:
                raise OptionError(name, f"is for '{SERVERS}' only")
        return None
    for name in ("path", "url"):
        if name in given:
            raise OptionError(name, f"cannot be given together with '{SERVERS}'")
    protocol = one_of(given, "kafka.security.protocol", _PROTOCOLS).upper()
    sasl = protocol.startswith("SASL")
    for name in ("kafka.sasl.mechanism", "kafka.sasl.username", PASSWORD, "kafka.sasl.passwordFile"):
        if name in given and not sasl:
            raise OptionError(name, f"is for 'kafka.security.protocol' SASL_SSL or SASL_PLAINTEXT, not {protocol}")
    for name in ("kafka.ssl.ca.location", "kafka.ssl.certificate.location", "kafka.ssl.key.location"):
        if name in given and not protocol.endswith("SSL"):
            raise OptionError(name, f"is for 'kafka.security.protocol' SSL or SASL_SSL, not {protocol}")
    password = _password(given)
    if sasl and ("kafka.sasl.username" not in given or password is None):
        raise OptionError("kafka.sasl.username", f"and the password are required for {protocol}")
    return KafkaOptions(
        servers=_servers(given[SERVERS]),
        cluster=_cluster(given),
        protocol=protocol,
        mechanism=one_of(given, "kafka.sasl.mechanism", _MECHANISMS).upper() if sasl else None,
        username=given.get("kafka.sasl.username"),
        password=password,
        ca_file=given.get("kafka.ssl.ca.location"),
        certificate_file=given.get("kafka.ssl.certificate.location"),
        key_file=given.get("kafka.ssl.key.location"),
    )


def _servers(text: str) -> tuple[str, ...]:
    servers = tuple(part.strip() for part in text.split(",") if part.strip())
    for server in servers:
        host, _, port = server.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise OptionError(SERVERS, f"{server!r} is not HOST:PORT")
    if not servers:
        raise OptionError(SERVERS, "is empty: give HOST:PORT[,HOST:PORT...]")
    return servers


def _cluster(given: Mapping[str, str]) -> str:
    cluster = given.get("clusterId", KafkaOptions.cluster)
    if not cluster or not all(char.isascii() and (char.isalnum() or char in "._-") for char in cluster):
        raise OptionError("clusterId", f"{cluster!r} is not the id of a cluster: letters, digits, '.', '_' and '-'")
    return cluster


def _password(given: Mapping[str, str]) -> str | None:
    path = given.get("kafka.sasl.passwordFile")
    if path is None:
        return given.get(PASSWORD)
    if PASSWORD in given:
        raise OptionError("kafka.sasl.passwordFile", f"cannot be given together with '{PASSWORD}'")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("kafka.sasl.passwordFile", f"{path}: {getattr(error, 'strerror', None) or 'is not UTF-8'}") from None
