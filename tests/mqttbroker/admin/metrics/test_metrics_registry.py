"""The registry of counters: each is in the status, in `/metrics` and, if it has a topic, in ``$SYS``, with its own value."""

from __future__ import annotations

from pathlib import Path

from support.core import Core
from support.metric_samples import samples

from bridge_spark.log.stream_config import StreamConfig
from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.admin.http.api import status_json
from mqttbroker.admin.metrics.figures import Metrics
from mqttbroker.admin.metrics.registry import FIGURES
from mqttbroker.admin.metrics.sys_topics import SysTopics
from mqttbroker.admin.metrics.text import metrics_text
from sessions.counters import COUNTERS


def test_each_counter_is_shown_everywhere_with_its_value(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        counters = core.broker.context.counters
        for counter in COUNTERS:
            if counter.attribute:
                setattr(counters, counter.attribute, 1000 + counter.number)
            else:
                counters.counted[counter.number] = 1000 + counter.number
        metrics = Metrics(StreamLogs(tmp_path / "streams", [StreamConfig("s", ["#"])], lambda: 1.0))
        status = core.control.status()
        shown = samples(metrics_text(metrics, status))
        topics = SysTopics(core.control.status, core.control.messages, metrics, 10.0).values(status)
        totals = status_json(status)["totals"]
    assert totals == {counter.name: 1000 + counter.number for counter in COUNTERS}
    for counter in COUNTERS:
        label = f"/{counter.label[1]}" if counter.label[0] else ""
        assert shown[f"mqttbroker_{counter.metric}_total{label}"] == 1000 + counter.number
        if counter.topic:
            assert topics[f"$SYS/broker/{counter.topic}"] == str(1000 + counter.number)
        if counter.load:
            assert f"$SYS/broker/load/{counter.load}/1min" in topics


def test_connections_closed_for_another_one_of_their_client_id_are_counted(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        for version in (4, 5, 5):
            core.connect("twice", version)
        core.connect("once")
        metrics = Metrics(None)
        status = core.control.status()
        assert status.totals["takeovers"] == 2
        assert samples(metrics_text(metrics, status))["mqttbroker_takeovers_total"] == 2
        assert SysTopics(core.control.status, core.control.messages, metrics, 10.0).values(status)["$SYS/broker/clients/takeovers"] == "2"


def test_no_two_figures_have_one_name() -> None:
    names = [(figure.metric, figure.label) for figure in FIGURES if figure.metric]
    topics = [topic for figure in FIGURES for topic in figure.topics]
    assert len(set(names)) == len(names) and len(set(topics)) == len(topics)
    assert len({counter.name for counter in COUNTERS}) == len(COUNTERS)
