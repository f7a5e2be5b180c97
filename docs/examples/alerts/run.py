"""Sensors → broker → Spark → broker → actuator, in one command.

    python docs/examples/alerts/run.py [--alerts N] [--keep DIRECTORY]

Starts a broker and the job `alerts.py`, publishes the temperatures of three machines, of which one becomes too hot, and
subscribes to the alerts as an actuator does. Ends after N alerts. Needs `pip install 'mqttbroker[spark,demo]'`, and
`mqttbroker[jdk]` without a Java.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import aiomqtt

HERE = Path(__file__).resolve().parent
MACHINES = ("press", "lathe", "oven")
HOT = "oven"
RATE = 5  # readings per second of each machine
START_SECONDS = 240.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def run_broker(directory: Path, port: int, http_port: int) -> asyncio.subprocess.Process:
    """Start the broker and wait until it accepts clients."""
    command = ["-m", "mqttbroker", "serve", "--config", str(HERE / "broker.toml"), "--data-dir", str(directory / "data")]
    command += ["--port", str(port), "--http-port", str(http_port), "--log-level", "warning"]
    broker = await asyncio.create_subprocess_exec(sys.executable, *command)
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return broker
        except OSError:
            if broker.returncode is not None or time.monotonic() > deadline:
                raise SystemExit("the broker does not start") from None
            await asyncio.sleep(0.05)


async def run_job(directory: Path, port: int, http_port: int) -> asyncio.subprocess.Process:
    """Start the Spark job and wait until its query has read the first readings."""
    urls = f"http://127.0.0.1:{http_port}", f"mqtt://127.0.0.1:{port}"
    log = open(directory / "spark.log", "wb")  # noqa: SIM115 - the process has it until its end
    job = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "alerts.py"), *urls, str(directory / "checkpoint"),
        env=os.environ | {"PYSPARK_PYTHON": sys.executable}, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
    )
    assert job.stdout is not None
    line = await asyncio.wait_for(job.stdout.readline(), START_SECONDS)
    if not line:
        raise SystemExit(f"the Spark job ended:\n{(directory / 'spark.log').read_text()[-2000:]}")
    return job


async def publish_readings(port: int, heating: asyncio.Event) -> None:
    """The sensors: one client for all machines. One of them becomes hotter once ``heating`` is set."""
    noise = random.Random(1)
    heat = 0.0
    async with aiomqtt.Client("127.0.0.1", port, identifier="sensors") as client:
        while True:
            for machine in MACHINES:
                if machine == HOT and heating.is_set():
                    heat = min(40.0, heat + 4 / RATE)
                reading = {"temperature": round(60 + (heat if machine == HOT else 0) + noise.uniform(-2, 2), 2)}
                await client.publish(f"sensors/{machine}/temperature", json.dumps(reading), qos=1)
            await asyncio.sleep(1 / RATE)


async def act_on_alerts(port: int, wanted: int) -> None:
    """The actuator: prints each alert, and the time since the broker received the last reading in it."""
    async with aiomqtt.Client("127.0.0.1", port, identifier="actuator") as client:
        await client.subscribe("alerts/#", qos=1)
        waits: list[float] = []
        async for message in client.messages:
            assert isinstance(message.payload, (bytes, bytearray))
            alert = json.loads(message.payload)
            seconds = time.time() - alert["last_us"] / 1e6
            print(f"{message.topic}: mean {alert['mean']:.2f} °C is above {alert['limit']:.0f} °C, "
                  f"{seconds:.1f} s after the last reading", flush=True)
            waits.append(seconds)
            if len(waits) == wanted:
                print(f"{wanted} alerts, half of them within {statistics.median(waits):.1f} s", flush=True)
                return


async def run(directory: Path, wanted: int) -> None:
    port, http_port = free_port(), free_port()
    processes = [await run_broker(directory, port, http_port)]
    heating = asyncio.Event()
    sensors = asyncio.create_task(publish_readings(port, heating))
    try:
        processes.append(await run_job(directory, port, http_port))
        actuator = asyncio.create_task(act_on_alerts(port, wanted))
        heating.set()
        ended = asyncio.create_task(processes[1].wait())
        await asyncio.wait({actuator, sensors, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not actuator.done():
            raise SystemExit(f"the Spark job ended:\n{(directory / 'spark.log').read_text()[-2000:]}")
        await actuator
    finally:
        sensors.cancel()
        with suppress(asyncio.CancelledError):
            await sensors
        for process in reversed(processes):
            if process.returncode is None:
                process.terminate()
            await process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Sensors → broker → Spark → broker → actuator, in one command.")
    parser.add_argument("--alerts", type=int, default=20, metavar="N", help="end after N alerts (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="directory for data, checkpoint and Spark's log")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
        asyncio.run(run(options.keep or Path(directory), options.alerts))


if __name__ == "__main__":
    main()
