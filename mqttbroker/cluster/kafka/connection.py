"""How this node connects to Kafka, and the names that it uses there."""

from __future__ import annotations

import logging
import ssl
from hashlib import sha256
from typing import Any

from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaConnectionError

from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Cluster

CLUSTER_ID_BYTES = 8
_send = AIOKafkaConnection.send


def send(self: AIOKafkaConnection, request: Any, expect_response: bool = True) -> Any:
    """`AIOKafkaConnection.send`. Raises `KafkaConnectionError` where uvloop raises RuntimeError: the connection was closed in this
    iteration of the event loop. aiokafka, which would end its tasks, handles that (github.com/aio-libs/aiokafka/issues/1038)."""
    try:
        return _send(self, request, expect_response)
    except RuntimeError as error:
        self.close(reason=CloseReason.CONNECTION_BROKEN)
        raise KafkaConnectionError(f"Connection at {self.host}:{self.port} broken: {error}") from error


def connection(cluster: Cluster) -> dict[str, Any]:
    """The arguments of aiokafka's clients. Raises ConfigError for a certificate that cannot be read."""
    AIOKafkaConnection.send = send
    # Its debug lines have whole requests: passwords, keys of links, payloads. A process that wants fewer lines has said so before.
    log = logging.getLogger("aiokafka")
    log.setLevel(max(log.level, logging.INFO))
    arguments: dict[str, Any] = {
        "bootstrap_servers": list(cluster.bootstrap_servers),
        "security_protocol": cluster.security_protocol,
    }
    if cluster.security_protocol.startswith("SASL"):
        arguments |= {
            "sasl_mechanism": cluster.sasl_mechanism,
            "sasl_plain_username": cluster.sasl_username,
            "sasl_plain_password": cluster.sasl_password,
        }
    if cluster.security_protocol.endswith("SSL"):
        try:
            context = ssl.create_default_context(cafile=cluster.cafile)
            if cluster.certfile is not None:
                context.load_cert_chain(cluster.certfile, cluster.keyfile)
        except OSError as error:
            raise ConfigError([f"cluster: TLS to Kafka: {error}"]) from None
        arguments["ssl_context"] = context
    return arguments


def record_cluster_id(kafka_cluster_id: str, cluster: Cluster) -> bytes:
    """The name of the cluster in the header of each record, so that a copied or mixed up log is noticed."""
    return sha256(f"{kafka_cluster_id}/{cluster.id}".encode()).digest()[:CLUSTER_ID_BYTES]
