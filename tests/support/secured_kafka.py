"""Kafka with TLS, passwords and access rules: clients need a user of SASL, over TLS with a certificate of a test's own authority."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import trustme
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import CreateAclsRequest
from cryptography.hazmat.primitives import serialization

from support.kafka import KafkaCluster

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
BROKER = "kafka-broker"  # the user that the brokers are to each other
_BROKER_PASSWORD = "password-of-the-broker"
_LOGIN = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM": "org.apache.kafka.common.security.scram.ScramLoginModule",
}

# As in Kafka's protocol.
RESOURCES = {"Topic": 2, "Group": 3, "Cluster": 4, "TransactionalId": 5}
OPERATIONS = {
    "Read": 3, "Write": 4, "Create": 5, "Delete": 6, "Alter": 7, "Describe": 8, "DescribeConfigs": 10, "AlterConfigs": 11,
}  # fmt: skip
LITERAL, PREFIXED = 3, 4
ALLOW = 3


class Rule(NamedTuple):
    """An operation on the resource with this name, or, if it is not the ``whole`` name, on those that begin with it."""

    resource: str
    name: str
    whole: bool
    operation: str


class SecuredKafka(KafkaCluster):
    """One broker with these users, by name, and their passwords; each can use all of `MECHANISMS`. Starts with ``with``.

    With ``rules`` a user may only do what `allow` has allowed.
    """

    def __init__(self, directory: Path, users: Mapping[str, str], rules: bool = False) -> None:
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
        if rules:
            settings += [
                "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                f"super.users=User:{BROKER};User:ANONYMOUS",  # the controller's listener has no passwords
            ]
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

    async def allow(self, user: str, rules: Iterable[Rule]) -> None:
        """Allow a user what these rules say."""
        admin = AIOKafkaAdminClient(**self.connection("PLAIN", BROKER, _BROKER_PASSWORD))
        await admin.start()
        try:
            for rule in rules:
                answer = await admin._send_request(CreateAclsRequest(
                    RESOURCES[rule.resource], rule.name, LITERAL if rule.whole else PREFIXED, f"User:{user}", "*",
                    OPERATIONS[rule.operation], ALLOW,
                ))  # fmt: skip
                assert all(code == 0 for code, _ in answer.creation_responses), answer
        finally:
            await admin.close()

    async def end(self, topic: str) -> int:
        """How many records were ever in a topic."""
        consumer = AIOKafkaConsumer(topic, group_id=None, **self.connection("PLAIN", BROKER, _BROKER_PASSWORD))
        await consumer.start()
        try:
            return sum((await consumer.end_offsets(consumer.assignment())).values())
        finally:
            await consumer.stop()


def _keystore(certificate: trustme.LeafCert) -> bytes:
    """Key and certificates, as Kafka reads them."""
    key: Any = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), None)
    pem: bytes = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return pem + b"".join(one.bytes() for one in certificate.cert_chain_pems)
