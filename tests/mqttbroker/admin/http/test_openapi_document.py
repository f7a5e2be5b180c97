"""The OpenAPI document: a validator accepts it, and a client that is generated from it works."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from openapi_spec_validator import validate
from support.broker_process import BrokerProcess
from support.raw_client import RawClient

pytestmark = pytest.mark.one_build
TOKEN = "s3cret"
GENERATOR = "openapi_python_client"
PACKAGE = "generated_client"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    passwords = tmp_path_factory.mktemp("files") / "passwords"
    passwords.write_text("")
    config = {"http": {"token": TOKEN}, "password_file": str(passwords), "allow_anonymous": True}
    with BrokerProcess(config=config) as process:
        yield process


@pytest.fixture(scope="module")
def document(broker: BrokerProcess) -> Any:
    return json.loads(broker.get("/api/v1/openapi.json", {"Authorization": f"Bearer {TOKEN}"}))


def parts(node: Any) -> Iterator[dict[str, Any]]:
    """All objects of a document."""
    if isinstance(node, dict):
        yield node
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from parts(each)


def test_document_is_valid(document: Any) -> None:
    validate(document)  # defaults, too, against the schemas that they belong to
    assert document["servers"] == [{"url": "/", "description": "the broker that this document comes from"}]
    assert {"Client", "ClientPage", "Problem", "Stream", "Ban", "BanRequest"} <= set(document["components"]["schemas"])


def test_bodies_and_answers_have_names(document: Any) -> None:
    contents = [part["content"] for part in parts(document["paths"]) if "content" in part]
    schemas = [each["application/json"]["schema"] for each in contents if "application/json" in each]
    unnamed = [schema for schema in schemas if "$ref" not in schema and "properties" in schema]
    assert len(schemas) > 30
    assert [schema for schema in unnamed if set(schema["properties"]) != {"error"}] == []


def test_what_may_be_left_out_has_no_empty_default(document: Any) -> None:
    assert [part for part in parts(document) if part.get("default") == ""] == []


@pytest.fixture(scope="module")
def generated(document: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Imports a module of a client that is generated from the document."""
    directory = tmp_path_factory.mktemp("client")
    (directory / "openapi.json").write_text(json.dumps(document))
    (directory / "config.yml").write_text("post_hooks: []\n")
    command = [
        sys.executable, "-P", "-m", GENERATOR, "generate", "--path", "openapi.json", "--config", "config.yml", "--meta", "none",
        "--output-path", PACKAGE,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert done.returncode == 0 and "Endpoint will not be generated" not in done.stdout, done.stdout
    sys.path.insert(0, str(directory))
    yield lambda name: importlib.import_module(f"{PACKAGE}.{name}")
    sys.path.remove(str(directory))
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


@pytest.mark.skipif(find_spec(GENERATOR) is None, reason="needs openapi-python-client")
def test_a_generated_client_calls_the_broker(broker: BrokerProcess, generated: Callable[[str], Any]) -> None:
    models = generated("models")
    client = generated("client").AuthenticatedClient(base_url=broker.url, token=TOKEN, raise_on_unexpected_status=True)

    def call(operation: str, *path: str, **given: Any) -> Any:
        return generated(f"api.{operation}").sync(*path, client=client, **given)

    def change(operation: str, *path: str, **given: Any) -> int:
        return int(generated(f"api.{operation}").sync_detailed(*path, client=client, **given).status_code)

    with RawClient(broker.port) as device:
        device.connect("dev")
        device.subscribe("a/#")
        (found,) = call("clients.clients").items
        assert (found.client_id, found.username, found.subscriptions, found.disconnected_at) == ("dev", None, 1, None)
        assert call("clients.client", "dev").has_will is False
        assert [each.topic_filter for each in call("subscriptions.receivers", topic="a/1").items] == ["a/#"]
        assert call("messages.publish", body=models.PublishRequest(topic="a/1", payload="21.5", qos=1)).recipients == 1
        assert device.take().payload == b"21.5"
        assert change("clients.disconnect", "dev") == 204
    assert call("clients.client", "nobody").detail == "no session 'nobody'"  # a problem is parsed, too
    assert call("messages.publish", body=models.PublishRequest(topic="a/1", payload="", payload_base64="")).status == 400
    assert call("messages.set_retained", topic="kept", body=models.SetRetainedRequest(payload="x")).recipients == 0
    assert [each.topic for each in call("messages.retained").items] == ["kept"]
    assert call("bans.ban", body=models.BanRequest(client_id="mallory", seconds=600)).disconnected == 0
    (ban,) = call("bans.bans").items
    assert (ban.client_id, ban.address) == ("mallory", "") and ban.seconds_left > 500
    assert change("bans.lift_ban", client_id="mallory") == 204
    made = call("streams.create_stream", body=models.CreateStreamRequest(name="plant", filters=["plant/#"], seal=False))
    assert (made.name, made.source, made.settings.seal) == ("plant", "created", False)
    altered = call("streams.alter_stream", "plant", body=models.AlterStreamRequest(retention_age="7d"))
    assert altered.settings.retention_age == 7 * 86400
    assert call("accounts.add_user", body=models.AddUserRequest(username="alice", password="secret")).username == "alice"
    assert [user.username for user in call("accounts.users").items] == ["alice"]
    level = models.SetLevelRequestLevel
    assert call("broker.set_level", body=models.SetLevelRequest(level=level.DEBUG, seconds=60)).level == "debug"
    assert [listener.type_ for listener in call("broker.listeners").items] == ["tcp"]
    assert call("broker.reload").problems == []
