"""Takes the pictures of the dashboard in the README, light and dark: a broker with a simulated plant for some minutes.

python -P -m support.dashboard_picture docs/pictures
"""

from __future__ import annotations

import argparse
import math
import time
from contextlib import ExitStack
from pathlib import Path

from mqttbroker.codec.properties import Properties
from support.broker_process import BrokerProcess
from support.browser import browser
from support.raw_client import RawClient

SECONDS = 240.0  # of the five minutes that a chart shows
MACHINES = 24
SCHEMES = {"light": "dashboard.png", "dark": "dashboard-dark.png"}
CONFIG = {"streams": {"plant": {"filters": ["plant/#"], "partitions": 4}}, "http": {"history_interval": "2s"}}


def take(directory: Path, seconds: float) -> None:
    with BrokerProcess(config=CONFIG) as broker, browser() as chromium, ExitStack() as stack:
        pages = {}
        for scheme, name in SCHEMES.items():
            pages[name] = chromium.new_page(viewport={"width": 1280, "height": 640}, color_scheme=scheme)
            pages[name].goto(broker.url)

        def connected(name: str, **fields: object) -> RawClient:
            client = stack.enter_context(RawClient(broker.port))
            assert client.connect(name, **fields).reason_code == 0
            return client

        persistent = Properties()
        persistent.session_expiry_interval = 3600
        absent = connected("archive", properties=persistent)
        absent.subscribe("plant/+/temperature", options=1)
        absent.disconnect()
        connected("monitor").subscribe("plant/+/temperature", options=0)
        machines = []
        began = time.monotonic()
        for turn in range(1_000_000):
            elapsed = time.monotonic() - began
            if elapsed > seconds:
                break
            if len(machines) < MACHINES and turn % 40 == 0:
                machines.append(connected(f"machine-{len(machines) + 1}"))
            for number in range(round(len(machines) * (0.6 + 0.4 * math.sin(elapsed / 20)))):
                temperature = f"{60 + 10 * math.sin(elapsed / 30 + number):.2f}".encode()
                machines[number].publish(f"plant/{number + 1}/temperature", temperature, 1, retain=turn % 20 == 0)
            time.sleep(0.1)
        for name, page in pages.items():
            page.screenshot(path=str(directory / name))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    take(options.directory, options.seconds)
