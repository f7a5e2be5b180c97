"""The programs of docs/client-examples.md with MQTT.js, in Node and in a browser."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import WAIT, Errors, browser
from support.device_programs import NAME, PASSWORD, PROGRAMS, DeviceBroker, DeviceRun, Program, device_broker, settings
from support.raw_client import RawClient


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceBroker]:
    with device_broker(tmp_path_factory.mktemp("devices")) as broker:
        yield broker


class TestNode(DeviceRun):
    @pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])
    def test_it_keeps_its_session_and_its_readings(self, devices: DeviceBroker, tls: bool) -> None:
        self.converse(devices, tls)

    def test_what_the_broker_refuses_is_a_line(self, devices: DeviceBroker) -> None:
        self.refused(devices)

    def start(self, port: int, cafile: Path | None, password: str = PASSWORD, name: str = NAME) -> Program:
        environment = {**os.environ, **settings(port, cafile, password, name)}
        return Program(["node", PROGRAMS / "javascript" / "device.js"], environment, PROGRAMS)


def test_the_page_in_a_browser(devices: DeviceBroker, tmp_path: Path) -> None:
    shutil.copy(Path(os.environ["NODE_PATH"]) / "mqtt" / "dist" / "mqtt.min.js", tmp_path)
    shutil.copy(PROGRAMS / "javascript" / "page.html", tmp_path)
    with browser() as chromium, RawClient(devices.process.port) as operator:
        operator.connect("operator-of-the-page")
        operator.subscribe(f"sensors/{NAME}/#", options=1)
        page = chromium.new_page()
        page.set_default_timeout(WAIT)
        errors = Errors(page)
        page.goto((tmp_path / "page.html").as_uri())
        page.fill("#url", f"ws://127.0.0.1:{devices.ports['ws']}")
        page.fill("#password", PASSWORD)
        page.click("#login button")
        page.click("#send")
        page.wait_for_function("document.getElementById('state').textContent == 'stored'")
        assert json.loads(operator.take().payload).keys() == {"ts", "value"}
        operator.publish(f"commands/{NAME}/blink", b"<b>on</b>", 1)
        page.wait_for_function(f"document.getElementById('messages').textContent == 'commands/{NAME}/blink <b>on</b>'")
        operator.publish(f"commands/{NAME}", b"stop", 1)
        page.wait_for_function("document.getElementById('state').textContent == 'not connected'")
        devices.process.wait_for_log(f"event=disconnected client={NAME}-page .*reason=DISCONNECT")
        assert errors.found == []
