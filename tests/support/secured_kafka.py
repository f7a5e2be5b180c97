"""Kafka with TLS and passwords: clients need a user of SASL, over TLS with a certificate of a test's own authority."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trustme
from cryptography.hazmat.primitives import serialization
from support.kafka import KafkaCluster

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
BROKER = "kafka-broker"  # the user that the brokers are to each other
_BROKER_PASSWORD = "password-of-the-broker"
_LOGIN = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


class SecuredKafka(KafkaCluster):
    """One broker with these users, by name, and their passwords; each can use all of `MECHANISMS`. Starts with ``with``."""

    def __init__(self, directory: Path, users: Mapping[str, str]) -> None:
        self.cafile = directory / "kafka-ca.pem"
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.cafile))
        keystore = directory / "kafka-keystore.pem"
        keystore.write_bytes(_keystore(authority.issue_cert("127.0.0.1", "localhost")))
        passwords = {**users, BROKER: _BROKER_PASSWORD}
        settings = [
            "ssl.keystore.type=PEM", f"ssl.keystore.location={keystore}",
            "ssl.truststore.type=PEM", f"ssl.truststore.location={self.cafile}",
            f"sasl.enabled.mechanisms={','.join(MECHANISMS)}",
            "sasl.mechanism.inter.broker.protocol=PLAIN",
        ]  # fmt: skip
        for mechanism in MECHANISMS:
            kind = mechanism.partition("-")[0]
            known = "".join(f' user_{name}="{password}"' for name, password in passwords.items()) if kind == "PLAIN" else ""
            login = f'{_LOGIN[kind]} required username="{BROKER}" password="{_BROKER_PASSWORD}"{known};'
            settings.append(f"listener.name.sasl_ssl.{mechanism.lower()}.sasl.jaas.config={login}")
        formatting = [
            argument
            for name, password in passwords.items()
            for mechanism in MECHANISMS[1:]
            for argument in ("--add-scram", f"{mechanism}=[name={name},password={password}]")
        ]
        super().__init__(directory, 1, protocol="SASL_SSL", settings=settings, formatting=formatting)

    def connection(self, mechanism: str, user: str, password: str) -> dict[str, Any]:
        """Arguments of aiokafka's clients."""
        return {
            "bootstrap_servers": self.bootstrap, "security_protocol": "SASL_SSL", "sasl_mechanism": mechanism,
            "sasl_plain_username": user, "sasl_plain_password": password,
            "ssl_context": ssl.create_default_context(cafile=str(self.cafile)),
        }  # fmt: skip


def _keystore(certificate: trustme.LeafCert) -> bytes:
    """Key and certificates, as Kafka reads them."""
    key: Any = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), None)
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem + b"".join(one.bytes() for one in certificate.cert_chain_pems)
