"""The Helm chart: rendered by helm, held against the schemas of Kubernetes, and its configuration run by a broker."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import kubernetes_validate
import pytest
import yaml
from support.broker_process import BrokerProcess
from support.paths import ROOT

CHART = ROOT / "conf" / "helm" / "mqttbroker"
HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
NEWEST = kubernetes_validate.latest_version()
OLDEST = "1.25"
OPERATOR_KINDS = {"ServiceMonitor"}  # kinds that Kubernetes itself does not have

pytestmark = pytest.mark.one_build


def helm(*arguments: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    assert HELM is not None, "helm is not installed"
    text = json.dumps({"image": {"repository": "registry/mqttbroker"}, **(values or {})})
    return subprocess.run([HELM, *arguments, "--values", "-"], input=text, capture_output=True, text=True, check=False)


def rendered(values: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """The objects of the chart, by kind and name."""
    done = helm("template", "site", str(CHART), values=values)
    assert done.returncode == 0, done.stderr
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in yaml.safe_load_all(done.stdout) if each}


EVERYTHING = {
    "listeners": [
        {"name": "mqtt", "type": "tcp", "port": 1883},
        {"name": "mqtts", "type": "tls", "port": 8883, "settings": "max_connections = 500"},
        {"name": "wss", "type": "wss", "port": 8084, "settings": 'origins = ["https://example.org"]'},
    ],
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "listener": "wss",
        "hosts": ["mqtt.example.org"],
        "tlsSecret": "site-tls",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "3600"},
    },
    "tls": {"secret": "site-tls"},
    "workers": "auto",
    "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "networkPolicy": {"enabled": True, "httpFrom": [{"namespaceSelector": {}}]},
    "persistence": {"storageClass": "fast", "annotations": {"a": "b"}},
    "service": {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "loadBalancerSourceRanges": ["192.0.2.0/24"]},
    "image": {"repository": "registry/mqttbroker", "digest": "sha256:" + "0" * 64, "pullSecrets": [{"name": "pull"}]},
    "podSecurityContext": {},
    "env": [{"name": "MQTTBROKER_LIMITS__MAX_CONNECTIONS", "value": "1000"}],
    "podAnnotations": {"c": "d"},
    "podLabels": {"team": "plant"},
    "nodeSelector": {"disk": "nvme"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "priorityClassName": "high",
}
SECRETS_OF_OTHERS = {"http": {"tokenSecret": "our-token"}, "files": {"secret": "our-files"}, "serviceAccount": {"create": False}}


@pytest.mark.parametrize("values", [{}, EVERYTHING, SECRETS_OF_OTHERS], ids=["defaults", "everything", "secrets of others"])
def test_helm_and_kubernetes_accept_the_chart(values: dict[str, Any]) -> None:
    linted = helm("lint", "--strict", str(CHART), values=values)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    for version in (OLDEST, NEWEST):
        for name, each in rendered(values).items():
            if each["kind"] not in OPERATOR_KINDS:
                kubernetes_validate.validate(each, version, strict=True)
            assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == "site", name


def test_the_schemas_refuse_what_kubernetes_would_refuse() -> None:
    stateful_set = rendered()["StatefulSet/site-mqttbroker"]
    stateful_set["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(stateful_set, NEWEST, strict=True)


def test_helm_lint_needs_no_values() -> None:
    assert HELM is not None, "helm is not installed"
    linted = subprocess.run([HELM, "lint", "--strict", CHART], capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"image": {"repository": ""}}, "repository"),
        ({"listeners": [{"name": "mqtts", "type": "tls", "port": 8883}]}, "tls.secret"),
        ({"listeners": [{"name": "mqtt", "type": "udp", "port": 1883}]}, "type"),
        ({"listeners": [{"name": "mqtt", "type": "tcp", "port": 80}]}, "port"),
        ({"workers": -1}, "workers"),
        ({"replicas": 3}, "replicas"),
        ({"ingress": {"enabled": True, "listener": "mqtt", "hosts": ["a.example"]}}, "ingress.listener"),
        ({"ingress": {"enabled": True, "listener": "absent", "hosts": ["a.example"]}}, "ingress.listener"),
        ({"ingress": {"enabled": True, "listener": "ws"}, "listeners": [{"name": "ws", "type": "ws", "port": 8083}]}, "ingress.hosts"),
        ({"ingress": {"path": "mqtt"}}, "path"),
        ({"ingress": {"annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": 3600}}}, "proxy-read-timeout"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], name: str) -> None:
    done = helm("template", "site", str(CHART), values=values)
    assert done.returncode != 0 and name in done.stderr


def test_the_services_reach_the_broker_and_nothing_else() -> None:
    objects = rendered(EVERYTHING)
    pod = objects["StatefulSet/site-mqttbroker"]["spec"]["template"]
    ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    services = [each for each in objects.values() if each["kind"] == "Service"]
    assert len(services) == 3
    for service in services:
        selector = service["spec"]["selector"]
        assert selector.items() <= pod["metadata"]["labels"].items()
        assert not selector.items() <= objects["Pod/site-mqttbroker-ready"]["metadata"]["labels"].items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert [port["name"] for port in objects["Service/site-mqttbroker"]["spec"]["ports"]] == ["mqtt", "mqtts", "wss"]
    monitored = objects["ServiceMonitor/site-mqttbroker"]["spec"]
    matched = [each for each in services if monitored["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()]
    assert [each["metadata"]["name"] for each in matched] == ["site-mqttbroker-http"]
    assert monitored["endpoints"][0]["port"] == "http"
    assert monitored["endpoints"][0]["authorization"]["credentials"] == {"name": "site-mqttbroker-http", "key": "token"}


def test_the_ingress_reaches_the_websocket_listener() -> None:
    objects = rendered(EVERYTHING)
    ingress = objects["Ingress/site-mqttbroker"]["spec"]
    (rule,) = ingress["rules"]
    (path,) = rule["http"]["paths"]
    service = objects[f"Service/{path['backend']['service']['name']}"]
    port = path["backend"]["service"]["port"]["name"]
    assert (rule["host"], path["path"], port) == ("mqtt.example.org", "/mqtt", "wss")
    assert [each["port"] for each in service["spec"]["ports"] if each["name"] == port] == [8084]
    assert ingress["tls"] == [{"hosts": ["mqtt.example.org"], "secretName": "site-tls"}]
    assert "Ingress/site-mqttbroker" not in rendered()


def test_the_ingress_of_the_page() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (block,) = [each for each in re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "ingress:" in each]
    objects = rendered(yaml.safe_load(block))
    kubernetes_validate.validate(objects["Ingress/site-mqttbroker"], NEWEST, strict=True)
    (rule,) = objects["Ingress/site-mqttbroker"]["spec"]["rules"]
    assert f"`wss://{rule['host']}{rule['http']['paths'][0]['path']}`" in page


def test_the_container_may_write_to_its_volumes_only() -> None:
    pod = rendered()["StatefulSet/site-mqttbroker"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}  # fmt: skip
    assert {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")} == {"/data", "/tmp"}


def test_a_broker_runs_with_the_configuration_of_the_chart(tmp_path: Path) -> None:
    """With the files and variables of the pod, moved from /etc/mqttbroker and /data to other directories."""
    made = tmp_path / "made"
    command = [sys.executable, "-m", "mqttbroker", "passwd", str(made), "alice"]
    subprocess.run(command, input="secret\n", text=True, check=True)
    settings = {"name": "mqtt", "type": "tcp", "port": 1883, "settings": "max_connections = 5"}
    content = {"passwords": made.read_text(), "acl": "user alice\ntopic plant/#\n"}
    objects = rendered({"listeners": [settings], "files": {"content": content}})
    (container,) = objects["StatefulSet/site-mqttbroker"]["spec"]["template"]["spec"]["containers"]
    mounted = tmp_path / "etc"
    for directory, secret in (("http", "site-mqttbroker-http"), ("files", "site-mqttbroker-files")):
        (mounted / directory).mkdir(parents=True)
        data = {name: base64.b64decode(value) for name, value in objects[f"Secret/{secret}"].get("data", {}).items()}
        data |= {name: text.encode() for name, text in objects[f"Secret/{secret}"].get("stringData", {}).items()}
        for name, value in data.items():
            (mounted / directory / name).write_bytes(value)
            (mounted / directory / name).chmod(0o640)
    configuration = objects["ConfigMap/site-mqttbroker"]["data"]["mqttbroker.toml"]
    variables = {each["name"]: each["value"].replace("/etc/mqttbroker", str(mounted)) for each in container["env"]}
    assert variables.pop("MQTTBROKER_DATA_DIR") == "/data"
    assert container["args"] == ["serve", "--config", "/etc/mqttbroker/mqttbroker.toml"]
    with BrokerProcess(config=configuration.replace("/etc/mqttbroker", str(mounted)), env=variables) as broker:
        for password, status in (("secret", 0), ("wrong", 134)):
            command = [sys.executable, "-m", "mqttbroker", "pub", "-p", str(broker.port), "-V", "5", "-q", "1"]
            command += ["-u", "alice", "-P", password, "-t", "plant/1", "-m", "1"]
            published = subprocess.run(command, capture_output=True, text=True, check=False)
            assert published.returncode == status, published.stderr
        token = (mounted / "http" / "token").read_text()
        assert b"mqttbroker_" in broker.get("/metrics", {"Authorization": f"Bearer {token}"})
        with pytest.raises(HTTPError, match="401"):
            broker.get("/metrics")
        assert broker.get("/readyz")
