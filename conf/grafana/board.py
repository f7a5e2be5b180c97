"""Makes `mqttbroker.json`, a board of Grafana, of its panels: ``python conf/grafana/board.py > conf/grafana/mqttbroker.json``."""

import json

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
INSTANCES = "label_values(mqttbroker_build_info, instance)"
HEIGHT, WIDTH = 8, 24
OPTIONS = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
STYLE = {"fillOpacity": 10, "showPoints": "never"}
EACH = '{instance=~"$instance"}'


def total(name, by=""):
    return f"sum{f' by ({by}) ' if by else ''}({name}{EACH})"


def rate(name, by=""):
    return f"sum{f' by ({by}) ' if by else ''}(rate({name}{EACH}[$__rate_interval]))"


def quantiles(name):
    """Three lines of a histogram."""
    buckets = rate(f"mqttbroker_{name}_seconds_bucket", "le")
    return {f"{100 * share:.0f} %": f"histogram_quantile({share}, {buckets})" for share in (0.5, 0.9, 0.99)}


# Rows of panels: title, unit, and the expression of each line by its legend.
ROWS = {
    "Traffic": [
        ("Messages", "cps", {"received": rate("mqttbroker_publish_received_total"), "sent": rate("mqttbroker_publish_sent_total")}),
        ("Bytes", "Bps", {"received": rate("mqttbroker_bytes_received_total"), "sent": rate("mqttbroker_bytes_sent_total")}),
        ("Dropped messages by cause", "cps", {"{{cause}}": rate("mqttbroker_messages_dropped_total", "cause")}),
    ],
    "Clients": [
        ("Clients and sessions", "short", {"connected": total("mqttbroker_clients_connected"), "sessions": total("mqttbroker_sessions")}),
        ("Connects", "cps", {"CONNECT": rate("mqttbroker_connects_total"), "sockets": rate("mqttbroker_connections_total")}),
        ("Refused clients by reason", "cps", {
            "{{reason}}": rate("mqttbroker_connects_refused_total", "reason"),
            "handshake: {{layer}}": rate("mqttbroker_handshakes_failed_total", "layer"),
        }),
        ("Logins and denials", "cps", {
            "{{authenticator}}: {{outcome}}": rate("mqttbroker_logins_total", "authenticator, outcome"),
            "denied: {{action}}": rate("mqttbroker_denials_total", "action"),
        }),
    ],
    "Latency": [
        ("Delivery (sampled)", "s", quantiles("delivery")),
        ("Acknowledgement after commit (sampled)", "s", quantiles("acknowledgement")),
        ("Commit", "s", quantiles("commit")),
        ("Event loop lag", "s", quantiles("event_loop_lag")),
    ],
    "Store and queues": [
        ("Queued messages", "short", {
            "queued": total("mqttbroker_queued_messages"), "retained": total("mqttbroker_retained_messages"),
        }),
        ("Bytes", "bytes", {
            "queued": total("mqttbroker_queued_bytes"), "retained": total("mqttbroker_retained_bytes"),
            "waiting for the disk": total("mqttbroker_store_pending_bytes"),
        }),
        ("Commits", "cps", {"commits": rate("mqttbroker_commit_seconds_count"), "failed": rate("mqttbroker_store_failures_total")}),
        ("Limits reached", "cps", {"{{limit}}": rate("mqttbroker_limits_reached_total", "limit")}),
    ],
    "Streams": [
        ("Records", "cps", {"{{stream}}": rate("mqttbroker_stream_high_watermark", "stream")}),
        ("Bytes on disk", "bytes", {"{{stream}}": total("mqttbroker_stream_bytes", "stream")}),
        ("Lag of readers", "short", {"{{stream}} {{consumer}}": total("mqttbroker_stream_consumer_lag", "stream, consumer")}),
        ("Age of unread records", "s", {
            "{{stream}} {{consumer}}": f"max by (stream, consumer) (mqttbroker_stream_consumer_lag_seconds{EACH})",
        }),
    ],
    "Process": [
        ("CPU", "percentunit", {"broker": rate("process_cpu_seconds_total")}),
        ("Memory", "bytes", {
            "used": total("mqttbroker_memory_used_bytes"), "max_memory": total("mqttbroker_memory_max_bytes"),
            "resident": total("process_resident_memory_bytes"),
        }),
        ("Garbage collections", "s", quantiles("gc_pause")),
        ("Alarms", "short", {"{{alarm}}": total("mqttbroker_alarm", "alarm")}),
    ],
}  # fmt: skip


def panels():
    """A line of panels below the title of each row."""
    found = []
    for number, (title, row) in enumerate(ROWS.items()):
        top, width = number * (HEIGHT + 1), WIDTH // len(row)
        grid = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        found.append({"id": len(found) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": grid, "panels": []})
        for place, (name, unit, lines) in enumerate(row):
            queries = enumerate(lines.items())
            found.append({
                "id": len(found) + 1, "type": "timeseries", "title": name, "datasource": SOURCE,
                "gridPos": {"h": HEIGHT, "w": width, "x": place * width, "y": top + 1},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": STYLE}, "overrides": []}, "options": OPTIONS,
                "targets": [{"refId": "ABC"[index], "datasource": SOURCE, "expr": query, "legendFormat": legend}
                            for index, (legend, query) in queries],
            })  # fmt: skip
    return found


BOARD = {
    "title": "mqttbroker", "uid": "mqttbroker", "schemaVersion": 39, "version": 1, "editable": True, "refresh": "10s",
    "time": {"from": "now-1h", "to": "now"}, "tags": ["mqtt"], "annotations": {"list": []},
    "templating": {"list": [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        {"name": "instance", "type": "query", "label": "Broker", "datasource": SOURCE, "definition": INSTANCES,
         "query": {"query": INSTANCES, "refId": "instance"}, "refresh": 2, "multi": True, "includeAll": True, "allValue": ".*"},
    ]},
}  # fmt: skip

if __name__ == "__main__":
    head = json.dumps(BOARD, indent=1)[:-2]
    print(head + ',\n "panels": [\n  ' + ",\n  ".join(json.dumps(panel) for panel in panels()) + "\n ]\n}")
