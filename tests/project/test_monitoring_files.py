"""The Grafana dashboard and the Prometheus rules use metrics that the broker has, and Prometheus accepts them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.paths import ROOT
from support.prometheus import PROMTOOL, Prometheus
from support.raw_client import RawClient
from support.tools import needs

pytestmark = pytest.mark.one_build

RULES = ROOT / "conf" / "prometheus" / "mqttbroker.rules.yml"
DASHBOARD = ROOT / "conf" / "grafana" / "mqttbroker.json"
STREAM = {"sys_interval": "0s", "streams": {"log": {"filters": ["a/#"], "partitions": 1}}}
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def test_the_dashboard_is_the_one_of_its_description() -> None:
    assert subprocess.check_output([sys.executable, str(DASHBOARD.with_name("board.py"))], text=True) == DASHBOARD.read_text()


def dashboard_expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def rule_expressions() -> list[str]:
    return re.findall(r"^ +expr: (.+)$", RULES.read_text(), re.M)


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:mqttbroker|process|python)_\w+", expression))


def metric_names(text: str) -> set[str]:
    """The names that samples of each family have or would have."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.M):
        found |= {name.removesuffix("_total") + suffix for suffix in _SUFFIXES.get(kind, ("",))}
    return found


def test_all_metrics_of_the_dashboard_and_the_alerts_exist(start_broker: Callable[..., BrokerProcess]) -> None:
    found = metric_names(start_broker(config=STREAM).get("/metrics").decode())
    used = [*dashboard_expressions(), *rule_expressions()]
    assert len(rule_expressions()) == RULES.read_text().count("- alert:") and len(dashboard_expressions()) > 30
    assert {name for expression in used for name in names_in(expression)} - found == set()


def test_each_alert_has_a_runbook() -> None:
    rules, text = RULES.read_text(), (ROOT / "docs" / "monitoring.md").read_text()
    headings = re.findall(r"^### (\w+)$", text, re.M)
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert alerts and alerts == headings
    assert re.findall(r'runbook: "docs/monitoring.md#(\w+)"', rules) == [alert.lower() for alert in alerts]


@needs("prometheus")
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run([str(PROMTOOL), "check", "rules", str(RULES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs("prometheus")
def test_prometheus_evaluates_the_rules_and_the_dashboard_on_a_broker(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    broker = start_broker(config={**STREAM, "alarms": {"disk_free": "1024TiB"}})
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "mqttbroker", "static_configs": [{"targets": [f"127.0.0.1:{broker.http_port}"]}]}],
    }
    path = tmp_path / "prometheus.yml"
    path.write_text(json.dumps(config))  # JSON is YAML, too
    with Prometheus(tmp_path, path) as prometheus:
        with RawClient(broker.port) as client:
            client.connect("c")
            client.publish("a/1", b"x", 1)

            def rules() -> list[Any]:
                return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

            prometheus.wait_until(lambda: bool(rules()) and all(rule["health"] == "ok" for rule in rules()))
            # The alarm is told to Prometheus; an alert waits for a minute before it fires.
            prometheus.wait_until(lambda: {rule["name"] for rule in rules() if rule["state"] != "inactive"} == {"MqttBrokerAlarm"})
            connected = 'sum(mqttbroker_clients_connected{instance=~".*"})'
            prometheus.wait_until(lambda: prometheus.get("query", query=connected)["result"][0]["value"][1] == "1")
            for expression in dashboard_expressions():
                query = expression.replace("$__rate_interval", "1m").replace("$instance", ".*")
                assert prometheus.get("query", query=query)["resultType"] == "vector", expression
