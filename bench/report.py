"""Medians, ratios, tables and the plot of the runs that ``runner`` collected.

A figure is the median of the correct runs; a broker without one shows its error instead. Ratios are this broker's
figure divided by the peer's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scenarios import CPU, Figure, Scenario

Run = dict[str, Any]
ERRORS = (
    "lost", "dup", "misordered", "unacked", "nacked", "corrupt", "disconnects", "protocol_errors", "connect_failures",
)  # fmt: skip


def value(run: Run, key: str) -> float | None:
    found: Any = run
    for part in key.split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return float(found) if isinstance(found, (int, float)) else None


def of(runs: Sequence[Run], scenario: str, broker: str) -> list[Run]:
    return [run for run in runs if run["scenario_name"] == scenario and run["broker"] == broker]


def median(runs: Sequence[Run], key: str) -> float | None:
    values = [found for run in runs if run.get("ok") and (found := value(run, key)) is not None]
    return statistics.median(values) if values else None


def error_of(runs: Sequence[Run]) -> str:
    """The first error in one word, "–" if the broker does not offer the feature, "" if there is no error."""
    for run in runs:
        if run.get("error"):
            return "–" if run["error"] == "not offered" else "failed"
        wrong = [name for name in ERRORS if run.get(name) and not (name == "dup" and run.get("qos") == 1)]
        if wrong or not run.get("ok"):
            return wrong[0] if wrong else "stalled"
    return ""


def number(found: float | None) -> str:
    if found is None:
        return ""
    return f"{found:,.0f}" if found >= 100 else f"{found:.1f}" if found >= 10 else f"{found:.2f}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows)]
    lines = [
        "| " + " | ".join(cell.ljust(w) if n < 2 else cell.rjust(w) for n, (cell, w) in enumerate(zip(row, widths))) + " |"
        for row in [head, *rows]
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 1 + (n < 2)) + (":" if n > 1 else "") for n, w in enumerate(widths)) + "|")
    return "\n".join(lines)


def table(runs: Sequence[Run], scenarios: Sequence[Scenario], brokers: Sequence[str]) -> str:
    """One line per figure: its median for each broker, then the first broker's divided by each of the others."""
    rows = []
    for scenario in scenarios:
        if not any(run["scenario_name"] == scenario.name for run in runs):
            continue
        for figure in scenario.figures:
            medians = [median(of(runs, scenario.name, broker), figure.key) for broker in brokers]
            cells = [number(found) or error_of(of(runs, scenario.name, broker))
                     for broker, found in zip(brokers, medians)]  # fmt: skip
            ratios = [f"{medians[0] / other:.2f}" if medians[0] is not None and other else "" for other in medians[1:]]
            title = figure.title + (" ↑" if figure.higher_is_better else "")
            rows.append([scenario.name, title, *cells, *ratios])
    return markdown(["scenario", "figure", *brokers, *(f"÷ {broker}" for broker in brokers[1:])], rows)


DETAILS = [
    Figure("µs/message", "cpu_us_per_delivered"),
    Figure("messages/s", "delivered_per_s"),
    Figure("p50 µs", "latency_us/p50"),
    Figure("p99 µs", "latency_us/p99"),
    Figure("ack p50 µs", "ack_us/p50"),
    Figure("ack p99 µs", "ack_us/p99"),
    Figure("RSS MB", "rss_mb"),
    Figure("broker %", "broker_cpu_pct"),
    Figure("load %", "self_cpu_pct"),
    Figure("others %", "other_cpu_pct"),
]


def details(runs: Sequence[Run], scenarios: Sequence[Scenario], brokers: Sequence[str]) -> str:
    """All figures, one line per scenario and broker."""
    rows = []
    for scenario in scenarios:
        for broker in brokers:
            mine = of(runs, scenario.name, broker)
            if mine:
                cells = [number(median(mine, figure.key)) for figure in DETAILS]
                right = sum(bool(run.get("ok")) for run in mine)
                rows.append([scenario.name, broker, *cells, f"{right}/{len(mine)}", error_of(mine)])
    return markdown(["scenario", "broker", *(figure.title for figure in DETAILS), "right", "wrong"], rows)


def medians(runs: Sequence[Run], scenarios: Sequence[Scenario], brokers: Sequence[str]) -> dict[str, Any]:
    """Medians by scenario, figure and broker, for the JSON file."""
    return {
        scenario.name: {
            figure.title: {broker: median(of(runs, scenario.name, broker), figure.key) for broker in brokers} for figure in scenario.figures
        }
        for scenario in scenarios
    }


def plot(path: Path, runs: Sequence[Run], scenarios: Sequence[Scenario], brokers: Sequence[str]) -> bool:
    """Draw CPU per delivered message as bars on a logarithmic scale; False without matplotlib."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        return False
    shown = [
        scenario for scenario in scenarios if CPU in scenario.figures and median(of(runs, scenario.name, brokers[0]), CPU.key) is not None
    ]
    if not shown:
        return True
    canvas = Canvas(figsize=(8, 1.2 + 0.16 * len(shown) * (len(brokers) + 1)), layout="constrained")
    axes = canvas.subplots()
    height = 0.85 / len(brokers)
    for index, broker in enumerate(brokers):
        points = [(row + index * height, found) for row, scenario in enumerate(shown)
                  if (found := median(of(runs, scenario.name, broker), CPU.key)) is not None]  # fmt: skip
        bars = axes.barh([at for at, _ in points], [found for _, found in points], height, label=broker)
        axes.bar_label(bars, [number(found) for _, found in points], padding=2, fontsize=6)
    axes.set_yticks([row + 0.425 - height / 2 for row in range(len(shown))], [scenario.name for scenario in shown])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.1, y=0.01)
    axes.set_xlabel("CPU µs of the broker per delivered message (less is better)")
    axes.legend(loc="best", fontsize=7)
    canvas.savefig(path, dpi=110)
    return True
