"""The page on a run of the suites: docs/clients.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date

from clients.brokers import MOSQUITTO, OURS
from clients.known import Difference, reason_of
from clients.results import FAILED, PASSED, SKIPPED, Result
from clients.suites import Suite

INTRODUCTION = """\
# Clients' own test suites

`make clients` fetches the test suites of MQTT clients, each at a fixed version, and runs them against this broker and
against the Mosquitto of the system. Each runs in a network namespace of its own, where the names of public brokers are
those of loopback. It takes up to half an hour, and fails if a test fails that `tests/clients/known.toml` does not have.
It wrote this page on {day}. Skipped tests do not count.

The suite of MQTT.js is not here: the package has no tests, and those of its repository talk to servers of their own. In its place
there are bursts of messages. `aiomqtt-tls` sends messages over TLS to an older aiomqtt. `make interop` runs MQTT.js itself, with the project's own tests. [client-settings.md](client-settings.md) names clients that
need a setting, and [conformance.md](conformance.md) has the statements of the standard.
"""

Outcomes = Mapping[tuple[str, str], Sequence[Result]]  # by suite and broker


def page(suites: Sequence[Suite], versions: Mapping[str, str], outcomes: Outcomes, known: Sequence[Difference]) -> str:
    """The page as Markdown."""
    brokers = [broker for broker in (OURS, MOSQUITTO) if broker in versions]
    parts = [INTRODUCTION.format(day=date.today().isoformat()), "\n", *_totals(suites, brokers, versions, outcomes)]
    failures = list(_failures(suites, brokers, outcomes, known))
    if failures:
        parts += ["\n## What fails\n\n", _row("suite", "test", *brokers, "why"), "|---" * (3 + len(brokers)) + "|\n"]
        parts += failures
    return "".join(parts)


def totals(results: Sequence[Result]) -> str:
    """Such as ``57 of 61``, with the number of those skipped; skipped tests do not count."""
    passed, failed, skipped = (sum(one.outcome == what for one in results) for what in (PASSED, FAILED, SKIPPED))
    return f"{passed} of {passed + failed}" + (f", {skipped} skipped" if skipped else "")


def _totals(suites: Sequence[Suite], brokers: Sequence[str], versions: Mapping[str, str], outcomes: Outcomes) -> list[str]:
    rows = [_row("suite", "version", *(f"{broker} {versions[broker]}" for broker in brokers))]
    rows.append("|---" * (2 + len(brokers)) + "|\n")
    for suite in suites:
        found = [outcomes.get((suite.name, broker)) for broker in brokers]
        rows.append(_row(suite.name, suite.version, *("did not run" if one is None else totals(one) for one in found)))
    return rows


def _failures(suites: Sequence[Suite], brokers: Sequence[str], outcomes: Outcomes, known: Sequence[Difference]) -> list[str]:
    rows = []
    for suite in suites:
        by_broker = {broker: {one.test: one for one in outcomes.get((suite.name, broker), ())} for broker in brokers}
        for test in dict.fromkeys(test for results in by_broker.values() for test in results):
            found = [by_broker[broker].get(test) for broker in brokers]
            failed = [broker for broker, one in zip(brokers, found) if one is not None and one.outcome == FAILED]
            if failed:
                reasons = dict.fromkeys(reason_of(known, suite.name, broker, test) for broker in failed)
                details = dict.fromkeys(one.detail for one in found if one is not None and one.outcome == FAILED)
                why = " ".join(filter(None, reasons)) or "; ".join(filter(None, details))
                rows.append(_row(suite.name, test, *("–" if one is None else one.outcome for one in found), why))
    return rows


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
