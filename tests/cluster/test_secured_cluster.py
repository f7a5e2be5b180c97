"""Two nodes whose links have TLS, on a Kafka broker that asks for TLS and passwords."""

from __future__ import annotations

import asyncio
import json
import ssl
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiokafka.admin import AIOKafkaAdminClient
from support.broker_process import BrokerProcess, to_toml
from support.cluster_nodes import ClusterNodes
from support.processes import children
from support.raw_client import RawClient
from support.secured_kafka import SecuredKafka

from mqttbroker.cluster.links.keys import KEY_BYTES, key_of, new_key
from mqttbroker.cluster.links.server import CORE, WORKER, Hello, LinkRefused, client_context, connect_link
from mqttbroker.core.sessions.own_shard import shard_of
from mqttbroker.net.link_address import LinkAddress

SHARDS = 2
PASSWORDS = {"node-1": "password-of-node-1", "node-2": "password-of-node-2"}
# The nodes need not use the same one.
MECHANISMS = {"node-1": "SCRAM-SHA-512", "node-2": "PLAIN"}

pytestmark = [pytest.mark.slow("two nodes on Kafka"), pytest.mark.one_build]


class Files:
    """The PEM files of an authority, and of a certificate that it signed."""

    def __init__(self, directory: Path, name: str) -> None:
        authority = trustme.CA()
        certificate = authority.issue_cert(f"{name}.test")
        self.cafile, self.certfile, self.keyfile = (directory / f"{name}.{kind}" for kind in ("ca", "pem", "key"))
        authority.cert_pem.write_to_path(str(self.cafile))
        certificate.cert_chain_pems[0].write_to_path(str(self.certfile))
        certificate.private_key_pem.write_to_path(str(self.keyfile))

    def context(self) -> ssl.SSLContext:
        context = client_context(self.cafile, self.certfile, self.keyfile)
        assert context is not None
        return context


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    with SecuredKafka(tmp_path_factory.mktemp("kafka"), PASSWORDS) as cluster:
        assert isinstance(cluster, SecuredKafka)
        yield cluster


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("links"), "member")


def security(kafka: SecuredKafka, files: Files, node: str) -> dict[str, Any]:
    """The settings of a node that protect it."""
    return {
        "security_protocol": "SASL_SSL", "sasl_mechanism": MECHANISMS[node], "sasl_username": node,
        "sasl_password": PASSWORDS[node], "cafile": str(kafka.cafile), "link_cafile": str(files.cafile),
        "link_certfile": str(files.certfile), "link_keyfile": str(files.keyfile),
    }  # fmt: skip


@pytest.fixture(scope="module")
def cluster(kafka: SecuredKafka, files: Files) -> Iterator[ClusterNodes]:
    common = {"allow_anonymous": True, "log": {"level": "debug"}}
    nodes = ClusterNodes(kafka, 2, SHARDS, common, replication=1, min_insync_replicas=1, **security(kafka, files, "node-1"))
    second = nodes.nodes[1].config
    settings = tomllib.loads(second.read_text(encoding="utf-8"))
    settings["cluster"] |= security(kafka, files, "node-2")
    second.write_text(to_toml(settings), encoding="utf-8")
    with nodes:
        yield nodes


@pytest.fixture(scope="module")
def keys(kafka: SecuredKafka, cluster: ClusterNodes) -> dict[str, str]:
    """The key of each node's links, as the nodes tell each other."""

    async def find() -> dict[str, str]:
        admin = AIOKafkaAdminClient(**kafka.connection("SCRAM-SHA-256", "node-1", PASSWORDS["node-1"]))
        await admin.start()
        try:
            (answer,) = await admin.describe_consumer_groups([f"{cluster.id}.nodes"])
            infos = [json.loads(member[3]) for member in answer.groups[0][5]]
        finally:
            await admin.close()
        return {info["node"]: info["link_key"] for info in infos}

    found = asyncio.run(find())
    assert sorted(found) == ["node-1", "node-2"] and all(len(key) == 2 * KEY_BYTES for key in found.values())
    return found


def client_id(name: str, shard: int) -> str:
    return next(f"{name}{number}" for number in range(99) if shard_of(f"{name}{number}", SHARDS) == shard)


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_messages_cross_nodes(cluster: ClusterNodes, qos: int) -> None:
    """Of clients of both shards at both nodes."""
    places = [(port, shard) for port in cluster.ports for shard in range(SHARDS)]
    with ExitStack() as stack:
        subscribers = [stack.enter_context(RawClient(port)) for port, _ in places]
        for number, (subscriber, (_, shard)) in enumerate(zip(subscribers, places)):
            assert subscriber.connect(client_id(f"sub{qos}{number}-", shard)).reason_code == 0
            subscriber.subscribe(f"secured/{qos}", options=qos)
        for number, (port, shard) in enumerate(places):
            with RawClient(port) as publisher:
                publisher.connect(client_id(f"pub{qos}{number}-", shard))
                for count in range(10):
                    publisher.publish(f"secured/{qos}", b"%d/%d" % (number, count), qos)
                publisher.disconnect()
        expected = sorted(b"%d/%d" % (number, count) for number in range(len(places)) for count in range(10))
        for subscriber in subscribers:
            found = [subscriber.take() for _ in expected]
            assert sorted(one.payload for one in found) == expected
            assert {one.qos for one in found} == {qos}


def addresses(cluster: ClusterNodes, key: str = "") -> Iterator[tuple[LinkAddress, str, int]]:
    """The addresses of all cores that own a shard, with the name of the node; with a key of links, or none."""
    for shard in cluster.nodes[0].cluster()["shards"]:
        host, _, port = shard["address"].rpartition(":")
        yield LinkAddress(host, int(port), key), shard["owner"], shard["shard"]


@pytest.mark.parametrize("kind", [CORE, WORKER])
def test_an_impostor_has_no_link(cluster: ClusterNodes, files: Files, keys: dict[str, str], tmp_path: Path, kind: str) -> None:
    """Neither with the key and without a certificate, nor with a certificate of the nodes and without the key."""
    stranger = Files(tmp_path, "stranger")
    trusting = ssl.create_default_context(cafile=str(files.cafile))
    trusting.check_hostname = False

    async def run() -> None:
        for place, owner, shard in addresses(cluster):
            hello = Hello(cluster="", kind=kind, node="impostor", from_shard=SHARDS, shard=shard, version="")
            known = place._replace(key=key_of(keys[owner], kind))
            for context in (None, trusting, stranger.context()):
                with pytest.raises(OSError):
                    await connect_link(known, context, hello, asyncio.Protocol(), timeout=2.0)
            for wrong in (new_key(), keys[owner], key_of(keys[owner], CORE if kind == WORKER else WORKER)):
                with pytest.raises(LinkRefused, match="does not know the key"):
                    await connect_link(place._replace(key=wrong), files.context(), hello, asyncio.Protocol())
            reason = "a link from shard 2" if kind == CORE else "node impostor is of the cluster"
            with pytest.raises(LinkRefused, match=reason):
                await connect_link(known, files.context(), hello, asyncio.Protocol())

    asyncio.run(run())


def test_secrets_are_in_no_output_of_a_node(cluster: ClusterNodes, keys: dict[str, str]) -> None:
    """Nor in arguments and environments of its processes. The level of its log is debug."""
    secrets = [*PASSWORDS.values(), *keys.values()]
    secrets += [key_of(key, kind) for key in keys.values() for kind in (CORE, WORKER)]
    for node in cluster.nodes:
        outputs = {"log": node.log.encode()}
        for path in ("/metrics", "/api/v1/cluster", "/readyz"):
            outputs[path] = node.get(path)
        for pid in (node.pid, *children(node.pid)):
            for name in ("cmdline", "environ"):
                outputs[f"{name} of {pid}"] = Path(f"/proc/{pid}/{name}").read_bytes()
        assert len(outputs) > 8
        for place, output in outputs.items():
            for secret in secrets:
                assert secret.encode() not in output, place


def test_a_key_is_new_at_each_start_and_links_come_back(
    cluster: ClusterNodes, keys: dict[str, str], kafka: SecuredKafka, files: Files
) -> None:
    cluster.nodes[1].restart(kill=True)
    cluster.wait_until_ready()
    test_messages_cross_nodes(cluster, 1)

    async def run() -> None:
        for place, owner, shard in addresses(cluster):
            if owner == "node-2":
                hello = Hello(cluster="", kind=WORKER, node="impostor", shard=shard, version="")
                old = place._replace(key=key_of(keys[owner], WORKER))
                with pytest.raises(LinkRefused, match="does not know the key"):
                    await connect_link(old, files.context(), hello, asyncio.Protocol())

    asyncio.run(run())


def test_a_node_with_a_wrong_password_does_not_serve(kafka: SecuredKafka, files: Files, cluster: ClusterNodes) -> None:
    """It says why, without the password."""
    section = {
        "engine": "kafka", "id": cluster.id, "bootstrap_servers": kafka.bootstrap, "node": "node-3", "shards": SHARDS,
        **security(kafka, files, "node-1"), "sasl_password": "a-wrong-password",
    }  # fmt: skip
    with closing(BrokerProcess(config={"cluster": section})) as node:
        node.launch()
        node.wait_for_log("SaslAuthenticationFailed")
        node.wait_for_log("event=kafka_not_ready")
        assert "a-wrong-password" not in node.log
    assert {node["node"] for node in cluster.nodes[0].cluster()["nodes"]} == set(PASSWORDS)
