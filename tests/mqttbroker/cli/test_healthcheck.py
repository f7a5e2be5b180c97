"""``mqttbroker healthcheck``: it finds the HTTP server where the configuration of the broker has it, and fails without an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess, to_toml
from support.certificates import CertificateFiles
from support.local_kafka import free_ports
from support.paths import ROOT

from mqttbroker.cli.main import main

pytestmark = pytest.mark.one_build


@pytest.mark.parametrize("certificates", ["", "none", "required"])
def test_the_configuration_says_where_to_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str], certificates: str) -> None:
    files = CertificateFiles(tmp_path)
    tls: dict[str, Any] = {"certfile": str(files.certfile), "keyfile": str(files.keyfile)}
    if certificates == "required":
        tls |= {"cafile": str(files.cafile), "client_certificate": certificates}
    (port,) = free_ports(1)
    http = {"port": port, **(tls if certificates else {})}
    file = tmp_path / "asked.toml"
    file.write_text(to_toml({"http": http}))
    broker = BrokerProcess(tmp_path / "data", {"http": http}, program=["-X", "utf8", "-m", "mqttbroker"])  # a command line of its own
    broker.http_port = port
    with broker:
        assert main(["healthcheck", "--config", str(file)]) == 0, capsys.readouterr().err
        assert main(["healthcheck", "--pid", str(broker.pid)]) == 0, capsys.readouterr().err
        assert capsys.readouterr().out.count("it lives") == 2
    assert main(["healthcheck", "--config", str(file)]) == 1
    assert f"127.0.0.1:{port}: " in capsys.readouterr().err


def test_a_broker_that_cannot_be_asked_is_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MQTTBROKER_HTTP__PORT", "off")
    assert main(["healthcheck"]) == 0 and '"off"' in capsys.readouterr().out
    monkeypatch.setenv("MQTTBROKER_HTTP__PORT", "0")
    assert main(["healthcheck"]) == 2 and "port is not known" in capsys.readouterr().err
    monkeypatch.setenv("MQTTBROKER_HTTP__PORT", "x")
    assert main(["healthcheck"]) == 2 and "MQTTBROKER_HTTP__PORT: " in capsys.readouterr().err
    assert main(["healthcheck", "--pid", "1999999999"]) == 1


def test_the_image_asks_with_the_configuration_of_its_broker() -> None:
    assert 'CMD ["mqttbroker", "healthcheck", "--pid", "1"]' in (ROOT / "Dockerfile").read_text(encoding="utf-8")
