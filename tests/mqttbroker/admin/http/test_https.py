"""The HTTP server with TLS: stream files, new certificates after SIGHUP, and failed handshakes."""

from __future__ import annotations

import http.client
import os
import signal
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.config_files import problems, write
from support.metric_samples import samples
from support.patience import PATIENCE
from support.raw_client import RawClient
from support.stream_client import tcp_socket

pytestmark = pytest.mark.one_build
Start = Callable[..., BrokerProcess]
STREAM = {"readings": {"filters": ["r/#"], "partitions": 1}}
FILE = "/streams/readings/0/00000000000000000000.seg"


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return CertificateFiles(tmp_path)


def secure(files: CertificateFiles, **more: Any) -> dict[str, Any]:
    return {"http": {"certfile": str(files.certfile), "keyfile": str(files.keyfile), **more}, "streams": STREAM}


def get(broker: BrokerProcess, context: ssl.SSLContext, path: str, byte_range: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPSConnection("localhost", broker.http_port, timeout=PATIENCE, context=context)
    connection.request("GET", path, headers={"Range": f"bytes={byte_range}"} if byte_range else {})
    response = connection.getresponse()
    try:
        return response.status, response.read()
    finally:
        connection.close()


def test_stream_files_over_tls(start_broker: Start, files: CertificateFiles) -> None:
    broker = start_broker(config=secure(files, tls_version="1.3"))
    with RawClient(broker.port) as client:
        client.connect("c")
        for _ in range(6):
            client.publish("r/1", os.urandom(300_000), 1)
    data = next(broker.data_dir.glob("streams/readings/0/*.seg")).read_bytes()
    context = files.client()
    assert get(broker, context, FILE) == (200, data)
    for start, end in ((0, 0), (1, 262_144), (5, len(data) - 2)):
        assert get(broker, context, FILE, f"{start}-{end}") == (206, data[start : end + 1])
    assert get(broker, context, "/livez")[0] == 200


def test_new_certificates_after_sighup(start_broker: Start, files: CertificateFiles) -> None:
    broker = start_broker(config=secure(files))
    before = files.client()
    kept = http.client.HTTPSConnection("localhost", broker.http_port, timeout=PATIENCE, context=before)
    kept.connect()

    def reload(event: str) -> None:
        heard = len(broker.lines)
        os.kill(broker.pid, signal.SIGHUP)
        broker.wait_for_log(rf"event={event} listener=http\b", after=heard)

    renewed = CertificateFiles(files.directory)
    reload("certificates_reloaded")
    assert get(broker, renewed.client(), "/livez")[0] == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        get(broker, before, "/livez")
    files.certfile.write_text("nonsense")
    reload("reload_failed")
    assert get(broker, renewed.client(), "/livez")[0] == 200
    kept.request("GET", "/livez")
    assert kept.getresponse().status == 200
    kept.close()


def test_a_failed_handshake_is_logged_and_counted(start_broker: Start, files: CertificateFiles) -> None:
    broker = start_broker(config=secure(files))
    with tcp_socket(broker.http_port) as plain:
        plain.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
        while plain.recv(65536):
            pass
    broker.wait_for_log(r"event=refused .*address=127\.0\.0\.1:\d+ reason=.TLS handshake: http request")
    found = samples(get(broker, files.client(), "/metrics")[1])
    assert found["mqttbroker_handshakes_failed_total/https"] == 1
    assert found["mqttbroker_handshakes_failed_total/tls"] == 0


def test_missing_certificate_files(tmp_path: Path, files: CertificateFiles) -> None:
    for key, other in (("certfile", "keyfile"), ("keyfile", "certfile")):
        path = write(tmp_path, f'[http]\n{key} = "x.pem"')
        assert problems(path) == [f"{path}: http.{other}: is required with {key}"]
    config = secure(files)
    config["http"]["keyfile"] = str(files.directory / "none.key")
    broker = BrokerProcess(config=config)
    broker.launch()
    broker.wait_for_log(r"broker\.toml:\d+: http: keyfile .*none\.key: No such file")
    broker.terminate()
    broker.close()
