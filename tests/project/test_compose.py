"""compose.yaml: its files are there, and its services' commands work with each other outside of containers."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml
from support.broker_process import BrokerProcess
from support.class_archive import QUICK_JVM
from support.core import wait_until
from support.metric_samples import samples
from support.paths import ROOT
from support.spark_session import python_path
from support.tools import needs

pytestmark = pytest.mark.one_build

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
TOKENS = "/run/mqttbroker"


def mounts(service: str) -> dict[str, str]:
    """What is mounted, by its path in the container."""
    found = {}
    for volume in SERVICES[service].get("volumes", []):
        source, target, *_ = volume.split(":")
        found[target] = source
    return found


def test_each_file_and_volume_is_there() -> None:
    for service in SERVICES:
        for target, source in mounts(service).items():
            if source.startswith("./"):
                assert (ROOT / source).exists(), source
            else:
                assert source in COMPOSE["volumes"], source
            assert target.startswith("/")
    for service in SERVICES.values():
        for other in service.get("depends_on", {}):
            assert other in SERVICES
        build = service.get("build")
        if isinstance(build, dict):
            assert (ROOT / build["dockerfile"]).exists()


def test_ports_are_open_on_the_loopback_address_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 6 and all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for port in ports)


def test_images_are_those_that_are_built_or_have_a_version() -> None:
    for service in SERVICES.values():
        assert "build" in service or re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", service["image"]), service


def test_grafana_is_given_the_dashboard_and_the_data_source() -> None:
    given = mounts("grafana")
    (source,) = yaml.safe_load((ROOT / given["/etc/grafana/provisioning/datasources/mqttbroker.yml"]).read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "127.0.0.1:9090:9090" in SERVICES["prometheus"]["ports"]
    (provider,) = yaml.safe_load((ROOT / given["/etc/grafana/provisioning/dashboards/mqttbroker.yml"]).read_text())["providers"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"]) and given[home] == "./conf/grafana/mqttbroker.json"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the service `tokens` fills, by its own command, twice: the second time changes nothing."""
    directory = tmp_path_factory.mktemp("tokens")
    script = SERVICES["tokens"]["command"][0].replace("$$", "$").replace(TOKENS, str(directory))
    contents = []
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for _ in range(2):
        subprocess.run(["sh", "-euc", script], check=True, env={**os.environ, "PATH": path})
        contents.append({file.name: file.read_text() for file in directory.iterdir()})
    assert contents[0] == contents[1] and len(set(contents[0].values())) == 3
    return directory


@pytest.fixture(scope="module")
def broker(tokens: Path) -> Iterator[BrokerProcess]:
    configuration = (ROOT / mounts("broker")["/etc/mqttbroker/mqttbroker.toml"]).read_text()
    for port in ("1883", "8083"):
        assert f"127.0.0.1:{port}:{port}" in SERVICES["broker"]["ports"]
    moved = configuration.replace(TOKENS, str(tokens)).replace("port = 8083", "port = 0").replace("0.0.0.0", "127.0.0.1")
    with BrokerProcess(config=moved) as process:
        yield process


@pytest.fixture(scope="module")
def readings(broker: BrokerProcess) -> Iterator[BrokerProcess]:
    """The broker, with the service `sensors` beside it."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["sh", str(ROOT / mounts("sensors")["/sensors.sh"]), "127.0.0.1", str(broker.port)]
    with subprocess.Popen(command, env={**os.environ, "PATH": path}, start_new_session=True) as process:
        try:
            yield broker
        finally:
            os.killpg(process.pid, 15)


def token(tokens: Path, name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {(tokens / name).read_text().strip()}"}


def test_the_sensors_fill_the_stream_and_each_token_has_its_rights(readings: BrokerProcess, tokens: Path) -> None:
    metrics = token(tokens, "prometheus")
    wait_until(lambda: samples(readings.get("/metrics", metrics))["mqttbroker_publish_received_total"] >= 8)
    assert b"sensors" in readings.get("/api/v1/streams", token(tokens, "notebook"))
    for name in ("admin", "prometheus"):
        assert b"sensors" in readings.get("/api/v1/clients", token(tokens, name))
    with pytest.raises(HTTPError, match="403"):
        readings.get("/api/v1/clients", token(tokens, "notebook"))


@needs("prometheus")
def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    given = mounts("prometheus")
    text = (ROOT / given["/etc/prometheus/prometheus.yml"]).read_text()
    (tmp_path / "token").write_text(secrets.token_hex())
    for path, source in given.items():
        if source.startswith("./"):
            text = text.replace(path, str(ROOT / source))
    moved = tmp_path / "prometheus.yml"
    moved.write_text(text.replace(f"{TOKENS}/prometheus", str(tmp_path / "token")))
    done = subprocess.run(["promtool", "check", "config", str(moved)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow(reason="starts Spark")
def test_the_notebook_reads_the_stream(
    readings: BrokerProcess, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient", reason="pip install 'mqttbroker[notebook]'")
    nbformat = pytest.importorskip("nbformat")
    wait_until(lambda: samples(readings.get("/metrics", token(tokens, "prometheus")))["mqttbroker_publish_received_total"] >= 8)
    variables = SERVICES["notebook"]["environment"]
    monkeypatch.setenv("BROKER_URL", variables["BROKER_URL"].replace("broker:18083", f"127.0.0.1:{readings.http_port}"))
    monkeypatch.setenv("BROKER_TOKEN_FILE", variables["BROKER_TOKEN_FILE"].replace(TOKENS, str(tokens)))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JDK_JAVA_OPTIONS", QUICK_JVM)
    if python_path():
        monkeypatch.setenv("PYTHONPATH", python_path())
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "sensors.ipynb", 4)
    nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    shown = [output.data["text/plain"] for cell in notebook.cells if cell.cell_type == "code"
             for output in cell.outputs if output.output_type == "execute_result"]
    assert [line.split()[1] for line in shown[0].splitlines()[1:]] == ["1", "2", "3", "4"]
    assert int(shown[1]) >= 8
