"""Runs every conformance case against a broker process.

``make conformance`` runs them too, and writes docs/conformance.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from support.broker_process import BrokerProcess

from conformance.cases import BROKERS, CASES
from conformance.script import Case, Run


def rows() -> Iterator[object]:
    for case in CASES:
        for version, ids in case.ids.items():
            name = "5" if version >= 5 else "3.1.1"
            marks = [pytest.mark.normative(name, *ids)]
            yield pytest.param(case, version, id=f"{case.name}-{name}", marks=marks)


ROWS = list(rows())


def started(broker: BrokerProcess) -> int:
    """The broker's port: that of its WebSocket listener if it has one."""
    if '"ws"' in broker.config.read_text(encoding="utf-8"):
        return int(broker.wait_for_log(r"event=listening .*\btype=ws\b.*\bport=(\d+)")[1])
    return broker.port


@pytest.fixture(scope="module")
def port_of() -> Iterator[Callable[[str], int]]:
    """Starts a broker with some settings once, and returns its port.

    The environment variable CONFORMANCE_PORT names the port of a running broker to test instead.
    """
    ports: dict[str, int] = {}
    with ExitStack() as stack:

        def port(settings: str) -> int:
            if settings not in ports:
                ready = os.environ.get("CONFORMANCE_PORT")
                ports[settings] = int(ready) if ready else started(stack.enter_context(BrokerProcess(config=BROKERS[settings])))
            return ports[settings]

        yield port


@pytest.fixture(scope="module")
def timed_runs(request: pytest.FixtureRequest, port_of: Callable[[str], int]) -> Iterator[dict[tuple[str, int], Future[None]]]:
    """The selected timed cases, started with the first test in threads of their own."""
    selected = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    timed = [(p["case"], p["version"]) for p in selected if isinstance(p.get("case"), Case) and p["case"].timed]
    with ThreadPoolExecutor(max_workers=64) as pool:
        yield {(case.name, v): pool.submit(Run(case, v, port_of(case.broker)).play) for case, v in timed}


@pytest.mark.parametrize("case, version", ROWS)
def test_case(case: Case, version: int, port_of: Callable[[str], int], timed_runs: dict[tuple[str, int], Future[None]]) -> None:
    failure = ""
    try:
        if case.timed:
            timed_runs[case.name, version].result()
        else:
            Run(case, version, port_of(case.broker)).play()
    except AssertionError as error:
        failure = str(error)
    if failure:
        pytest.fail(failure, pytrace=False)
