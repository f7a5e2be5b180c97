"""What the broker and its commands load to start: a count of modules, which depends on no machine's speed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
from support.broker_process import BrokerProcess

# Packages that take long to load, and that an idle broker with default settings does not need.
HEAVY = {
    "aiohttp", "aiokafka", "cryptography", "jwt", "numpy", "paho", "pandas", "prometheus_client", "pyarrow",
    "sqlite_utils", "websockets",
}  # fmt: skip


def loaded(lines: Sequence[str]) -> set[str]:
    """The modules that ``python -X importtime`` has named."""
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")} - {"imported package"}


def heavy(modules: set[str]) -> set[str]:
    return {name for name in HEAVY if any(module == name or module.startswith(f"{name}.") for module in modules)}


def test_a_broker_with_default_settings_loads_what_it_needs_to_listen(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(program=["-X", "importtime", "-m", "mqttbroker"])
    modules = loaded(broker.lines)
    assert "mqttbroker.server.server" in modules
    assert not heavy(modules)
    assert len(modules) <= 510, len(modules)
    broker.get("/metrics")  # what answers HTTP requests is loaded now
    broker.wait_for_log("import time:.* aiohttp.web$")
    assert {"aiohttp", "prometheus_client"} <= heavy(loaded(broker.lines))


@pytest.mark.parametrize(
    ("words", "most", "needed"),
    [
        (["--version"], 250, set()),
        (["status", "--url", "http://127.0.0.1:9"], 320, set()),
        (["pub", "-p", "9", "-t", "a", "-m", "b"], 260, {"paho"}),
        (["bench", "-p", "9"], 280, set()),
        (["check-config", "/dev/null"], 500, set()),
    ],
)
def test_commands_load_what_they_need(words: list[str], most: int, needed: set[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "mqttbroker", *words]
    modules = loaded(subprocess.run(command, stderr=subprocess.PIPE, text=True).stderr.splitlines())
    assert "mqttbroker.cli.main" in modules
    assert heavy(modules) == needed
    assert len(modules) <= most, len(modules)
