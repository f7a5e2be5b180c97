#!/usr/bin/env python3
"""The router's cost in memory and time: a million subscriptions, many changes of them, and many new topics.

Runs in memory, without sockets or a broker; the modules are those that Python imports, compiled or plain, as the table
says. Times are CPU time of single calls, less that of measuring; memory is the growth of the process (RSS), in a new
process for each part.

    python bench/trie.py [--subscriptions 1000000] [--cache 100000] [--topics 2000000]
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from mqttbroker import build_kind  # noqa: E402
from mqttbroker.core.routing.groups import RoundRobin  # noqa: E402
from mqttbroker.core.routing.router import Router  # noqa: E402
from sessions.context import SessionContext, SessionLimits  # noqa: E402
from sessions.journal import Journal  # noqa: E402
from sessions.session import Session, Subscription  # noqa: E402
from topic_matcher.trie import SubscriptionTrie  # noqa: E402

SESSIONS = 10_000
SAMPLES = 20_000


def rss() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def topic(source: random.Random) -> str:
    """One of 10⁹ topics with eight levels."""
    plant, line, cell = source.randrange(10), source.randrange(100), source.randrange(1000)
    return f"plant/{plant}/line/{line}/cell/{cell}/sensor/{source.randrange(1000)}"


def as_in_plants(source: random.Random) -> str:
    """A filter in a usual form: 60 % exact, 25 % with one or two ``+``, 15 % with ``#``."""
    levels = topic(source).split("/")
    kind = source.random()
    if kind < 0.25:
        for level in source.choice([(6,), (5,), (3,), (1, 5), (3, 5)]):
            levels[level] = "+"
    elif kind < 0.4:
        levels[source.choice([6, 6, 6, 7]) :] = ["#"]
    return "/".join(levels)


def anywhere(source: random.Random) -> str:
    """The same shares, but ``+`` in any one or two of the eight levels and ``#`` after any six or more."""
    levels = topic(source).split("/")
    kind = source.random()
    if kind < 0.25:
        for level in source.sample(range(8), source.randint(1, 2)):
            levels[level] = "+"
    elif kind < 0.4:
        levels[source.randint(6, 7) :] = ["#"]
    return "/".join(levels)


def timed(calls: Iterable[Callable[[], object]]) -> list[float]:
    """CPU time of each call in microseconds, sorted."""
    took = []
    clock = time.thread_time_ns
    for call in calls:
        start = clock()
        call()
        took.append((clock() - start) / 1000 - OVERHEAD)
    return sorted(took)


OVERHEAD = 0.0
OVERHEAD = statistics.median(timed([lambda: None] * SAMPLES))


def row(what: str, *figures: str) -> None:
    print(f"| {what:<52} | " + " | ".join(f"{figure:>14}" for figure in figures) + " |", flush=True)


def summary(took: list[float]) -> tuple[str, str, str]:
    return f"{statistics.median(took):.2f} µs", f"{took[int(len(took) * 0.99)]:.2f} µs", f"{took[-1]:.0f} µs"


def index(shape: Callable[[random.Random], str], count: int) -> None:
    source = random.Random(1)
    filters = [shape(source) for _ in range(count)]
    subscribers = [object() for _ in range(SESSIONS)]
    before = rss()
    trie = SubscriptionTrie()
    start = time.thread_time()
    for number, topic_filter in enumerate(filters):
        subscriber = subscribers[number % SESSIONS]
        trie.insert(topic_filter, subscriber, subscriber)
    took = time.thread_time() - start
    size = (rss() - before) / len(trie)
    name = shape.__name__.replace("_", " ")
    row(f"{len(trie)} filters {name}: index, each", f"{size:.0f} B", f"{took / count * 1e6:.2f} µs", "")
    topics = [topic(source) for _ in range(SAMPLES)]
    found = statistics.mean(len(trie.match(name)) for name in topics)
    row(f"match, {found:.1f} found", *summary(timed(lambda name=name: trie.match(name) for name in topics)))


def whole(count: int, cache: int, topics: int) -> None:
    source = random.Random(2)
    context = SessionContext(Journal(True), SessionLimits())
    sessions = [Session(context, 0, f"client-{number}") for number in range(SESSIONS)]
    router = Router(cache, 1 << 40, 128, 65535, [], RoundRobin())

    def subscribe(topic_filter: str) -> Subscription:
        session = sessions[source.randrange(SESSIONS)]
        subscription = Subscription(session, topic_filter, 0, 0)
        session.subscriptions[topic_filter] = subscription
        router.subscribe(subscription)
        return subscription

    gc.collect()
    before = rss()
    for _ in range(count):
        subscribe(as_in_plants(source))
    row("a subscription with its session's and the router's part", f"{(rss() - before) / count:.0f} B", "", "")

    hot = [topic(source).encode() for _ in range(cache)]
    before = rss()
    took = timed(lambda name=name: router.route(name) for name in hot)
    row("route of a new topic", *summary(took))
    row(f"{len(router.cache)} cached routes, each", f"{(rss() - before) / len(router.cache):.0f} B", "", "")
    storms(router, hot, sessions[0], source)

    before = rss()
    worst = 0.0
    for _ in range(0, topics, SAMPLES):
        took = timed(lambda name=topic(source).encode(): router.route(name) for _ in range(SAMPLES))
        worst = max(worst, took[-1])
    row(f"{topics} new topics, cache full", *summary(took)[:2], f"{worst:.0f} µs")
    row(f"growth by them; {len(router.cache)} cached", f"{(rss() - before) / 1e6:.1f} MB", "", "")


def storms(router: Router, hot: list[bytes], session: Session, source: random.Random) -> None:
    """Subscribe and unsubscribe while the topics ``hot`` are in the route cache."""
    cases: list[tuple[str, Callable[[int], str]]] = [
        ("exact, in use", lambda number: hot[number].decode()),
        ("one line and cell", lambda number: f"plant/{number % 10}/line/{number % 100}/cell/{number % 1000}/#"),
        ("a line", lambda number: f"plant/{number % 10}/line/{number % 100}/#"),
        ("a plant, 10 % of the cached", lambda number: f"plant/{number % 10}/#"),
        ("all", lambda number: "#"),
        ("none, 7 wildcards", lambda number: "+/+/+/+/+/+/+/none"),
        ("exact, 64 levels", lambda number: "/".join(["level"] * 64)),
    ]
    for name, choose in cases:
        kept = {raw: router.route(raw) for raw in hot}
        took = []
        for number in range(200):
            subscription = Subscription(session, choose(number), 0, 0)
            took += timed([lambda: router.subscribe(subscription), lambda: router.unsubscribe(subscription)])
        lost = sum(router.route(raw) is not route for raw, route in kept.items())
        row(f"(un)subscribe {name}", *summary(sorted(took)))
        again = timed(lambda raw=raw: router.route(raw) for raw in source.sample(hot, 1000))
        row("  routes built again after 400 changes", f"{lost / len(kept):.1%}", f"{statistics.median(again):.2f} µs", "")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--subscriptions", type=int, default=1_000_000)
    options.add_argument("--cache", type=int, default=100_000)
    options.add_argument("--topics", type=int, default=2_000_000)
    given = options.parse_args()
    gc.disable()
    row(f"router, {build_kind()}", "median", "p99", "longest")
    row("---", "---:", "---:", "---:")
    parts: list[tuple[Callable[..., None], tuple[object, ...]]] = [
        (index, (as_in_plants, given.subscriptions)),
        (index, (anywhere, given.subscriptions)),
        (whole, (given.subscriptions, given.cache, given.topics)),
    ]
    for part, arguments in parts:
        process = multiprocessing.get_context("fork").Process(target=part, args=arguments)
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()
