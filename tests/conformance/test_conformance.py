"""Every statement of the standard that binds a server, packet by packet, against a real broker.

The cases are in ``conformance/``; ``make conformance`` runs them and writes docs/conformance.md.
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
    """The port that the cases are for: that of the WebSocket listener if there is one."""
    if '"ws"' in broker.config.read_text(encoding="utf-8"):
        return int(broker.wait_for_log(r"event=listening .*\btype=ws\b.*\bport=(\d+)")[1])
    return broker.port


@pytest.fixture(scope="module")
def port_of() -> Iterator[Callable[[str], int]]:
    """The port of a broker with those settings, started when first asked for.

    CONFORMANCE_PORT names a broker that runs already: to see what another one answers.
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
def packet_ids_in_use(request: pytest.FixtureRequest, port_of: Callable[[str], int]) -> Iterator[dict[tuple[str, int], Future[None]]]:
    """The selected cases that take seconds: they begin with the first test and run beside the others."""
    selected = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    timed = [(p["case"], p["version"]) for p in selected if isinstance(p.get("case"), Case) and p["case"].timed]
    with ThreadPoolExecutor(max_workers=64) as pool:
        yield {(case.name, v): pool.submit(Run(case, v, port_of(case.broker)).play) for case, v in timed}


@pytest.mark.parametrize("case, version", ROWS)
def test_case(
    case: Case, version: int, port_of: Callable[[str], int], packet_ids_in_use: dict[tuple[str, int], Future[None]]
) -> None:
    failure = ""
    try:
        if case.timed:
            packet_ids_in_use[case.name, version].result()
        else:
            Run(case, version, port_of(case.broker)).play()
    except AssertionError as error:
        failure = str(error)
    if failure:
        pytest.fail(failure, pytrace=False)
