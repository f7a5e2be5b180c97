"""Fixtures shared by all tests: brokers as subprocesses and clients that are closed at the end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("support")

from support.memory_directory import use_memory  # noqa: E402

use_memory()

if os.environ.get("TEST_CLUSTER"):
    from support import clustered_broker

    clustered_broker.use()

from support.broker_process import BrokerProcess  # noqa: E402
from support.file_order import part_of, place_of  # noqa: E402
from support.spark_home import use_spark_home  # noqa: E402

use_spark_home()

# Subprocesses start in directories of their own and must find the same modules as this process.
if os.environ.get("PYTHONPATH"):
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep)))

# No test depends on the speed of the machine.
settings.register_profile("timeless", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("timeless")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, then tests of code that is never compiled, and these in `make test` only against the build TESTED_BUILD."""
    items.sort(key=lambda item: (place_of(item.path), item.get_closest_marker("one_build") is None))
    tested = os.environ.get("TESTED_BUILD")
    for item in items:
        if tested and item.get_closest_marker("one_build"):
            item.add_marker(pytest.mark.skip(reason=f"runs against the {tested} build"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, files that share something are given to one process of pytest."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return part_of(config.rootpath / file) or file

    return Scheduling(config, log)


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    """A broker with default settings, shared by the tests of a module: use topics and client ids of your own."""
    with BrokerProcess() as process:
        yield process


@pytest.fixture
def start_broker() -> Iterator[Callable[..., BrokerProcess]]:
    """Start further brokers; the arguments are those of BrokerProcess."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(BrokerProcess(**options))


@pytest.fixture
def path_on_disk() -> Iterator[Path]:
    """An empty directory that is not in memory, as that of `tmp_path` may be."""
    with tempfile.TemporaryDirectory(prefix="mqttbroker-test-", dir="/var/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def connect(broker: BrokerProcess) -> Iterator[Callable[..., Any]]:
    """Connect to ``broker``: ``connect(client_id, version=5, **fields of CONNECT)`` gives a RawClient."""
    from support.raw_client import RawClient

    with ExitStack() as stack:

        def connected(client_id: str = "", version: int = 5, **fields: Any) -> RawClient:
            client = stack.enter_context(RawClient(broker.port, version))
            connack = client.connect(client_id, **fields)
            assert connack.reason_code == 0, f"refused with {connack.reason_code:#x}"
            return client

        yield connected
