#!/usr/bin/env python3
"""Queries of `BrokerControl` on a million sessions: the time of each, and how long its slices hold the event loop.

Runs in memory, without sockets or a broker; the modules are those that Python imports, compiled or plain, as the table
says. Times are CPU time. Every session has a subscription to one filter, fifty have one to another.

    python bench/control.py [--sessions 1000000]
"""

from __future__ import annotations

import argparse
import gc
import ipaddress
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

from mqttbroker import build_kind  # noqa: E402
from mqttbroker.admin.control.control import BrokerControl, Slices  # noqa: E402
from mqttbroker.admin.control.views import SessionFilter  # noqa: E402
from mqttbroker.config.settings import Settings  # noqa: E402
from mqttbroker.core.broker import Broker  # noqa: E402
from mqttbroker.core.client.connection import CONNECTED  # noqa: E402
from mqttbroker.core.sessions.rankings import SessionRankings  # noqa: E402
from mqttbroker.core.terms.terms import ListenerTerms  # noqa: E402
from mqttbroker.server.assembly import build_broker  # noqa: E402
from sessions.session import Subscription  # noqa: E402
from sessions.store.interface import Recovered  # noqa: E402

CONNECTIONS = 2000


def row(what: str, *figures: str) -> None:
    print(f"| {what:<48} | " + " | ".join(f"{figure:>12}" for figure in figures) + " |", flush=True)


def measure(what: str, operation: Slices[Any]) -> None:
    """Run an operation of several slices and print its figures."""
    longest = total = 0.0
    slices = 0
    while True:
        start = time.thread_time()
        try:
            next(operation)
        except StopIteration:
            done = True
        else:
            done = False
        took = (time.thread_time() - start) * 1000
        longest, total, slices = max(longest, took), total + took, slices + 1
        if done:
            row(what, f"{total:.2f} ms", str(slices), f"{longest:.2f} ms")
            return


def one_pass(rankings: SessionRankings) -> Slices[None]:
    before = rankings.passes
    while rankings.passes == before:
        yield rankings.step()


def measure_call(what: str, call: Callable[[], Any]) -> Any:
    """Run an operation of one slice and print its figures; returns its result."""
    start = time.thread_time()
    result = call()
    took = (time.thread_time() - start) * 1000
    row(what, f"{took:.2f} ms", "1", f"{took:.2f} ms")
    return result


def connect(broker: Broker, client_ids: list[str]) -> None:
    """Connections without sockets, each from an address of its own."""
    terms = ListenerTerms()
    for number, client_id in enumerate(client_ids):
        peer = f"{ipaddress.ip_address('10.0.0.0') + number}:1"
        connection = broker.accept(peer, terms, float(number))
        connection.state, connection.client_id = CONNECTED, client_id
        session = broker.registry.sessions[client_id]
        connection.session, session.connection = session, connection


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--sessions", type=int, default=1_000_000)
    count = options.parse_args().sessions
    broker = build_broker(Settings(), Recovered([], [], [], [], [], 1, 1, 1))
    client_ids = [f"device-{number:07d}" for number in range(count)]
    random.Random(1).shuffle(client_ids)
    for number, client_id in enumerate(client_ids):
        session = broker.registry.create(client_id, False)
        broker.subscriptions.load(Subscription(session, "commands/all", 1, 0))
        if number < 50:
            broker.subscriptions.load(Subscription(session, "commands/+/few", 1, 0))
    gc.collect()
    gc.freeze()
    control = BrokerControl(broker, time.monotonic)
    row(f"{count} sessions, {build_kind()}", "total", "slices", "longest")
    row("---", "---:", "---:", "---:")
    middle = f"device-{count // 2:07d}"
    measure("100 sessions", control.sessions(after=middle))
    measure("1000 sessions", control.sessions(after=middle, limit=1000))
    measure("all client identifiers, none matches", control.sessions(SessionFilter(contains="none")))
    measure("all sessions, none is connected", control.sessions(SessionFilter(connected=True)))
    measure("100 sessions of one network", control.sessions(SessionFilter(network="10.0.0.0/8")))
    measure("100 sessions, by client identifier, descending", control.sessions(after=middle, descending=True))
    measure("100 sessions with the longest queues, of all", control.sorted_sessions("queued_messages", True))
    rankings = control.rankings = SessionRankings(broker.registry)
    measure("the pass that finds all rankings", one_pass(rankings))
    measure("100 sessions with the longest queues", control.sorted_sessions("queued_messages", True))
    measure("1000 sessions, first disconnected", control.sorted_sessions("disconnected_at", False, limit=1000))
    connect(broker, client_ids[:CONNECTIONS])
    few = f", {CONNECTIONS} connected"
    measure(f"100 connected sessions{few}", control.sessions(SessionFilter(connected=True)))
    measure(f"sessions of one address{few}", control.sessions(SessionFilter(network="10.0.0.7")))
    measure(f"100 last connected{few}", control.sorted_sessions("connected_at", True, SessionFilter(connected=True)))
    measure("sessions of one user", control.sessions(SessionFilter(username="none")))
    measure_call("one session", lambda: control.session(middle))
    for topic in ("commands/all", "commands/7/few"):
        cursor = measure_call(f"open the receivers of {topic}", lambda topic=topic: control.open_receivers(topic))
        measure(f"1000 receivers of {topic}", control.subscriptions(cursor, 1000))
    measure_call("status", control.status)


if __name__ == "__main__":
    main()
