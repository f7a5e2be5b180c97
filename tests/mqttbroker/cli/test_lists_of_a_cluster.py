"""Lists of a node of a cluster, as commands show them."""

from __future__ import annotations

from typing import Any

import pytest

from mqttbroker.cli.broker_api import BrokerApi


def test_cores_whose_items_are_missing_are_named_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    api = BrokerApi("http://localhost:1", None, None)
    missing = [
        {"shard": 2, "node": "node-3", "reason": "no answer within 5 s"},
        {"shard": 4, "node": "", "reason": "no node owns the shard"},
    ]
    pages: list[dict[str, Any]] = [
        {"items": ["a"], "next_cursor": "more", "unanswered": missing},
        {"items": ["b"], "next_cursor": None, "unanswered": missing},
    ]
    monkeypatch.setattr(api, "get", lambda path, **query: pages.pop(0))
    assert api.items("/clients", 0) == (["a", "b"], False)
    assert capsys.readouterr().err.splitlines() == [
        "mqttbroker: not in the list: shard 2 of node-3: no answer within 5 s",
        "mqttbroker: not in the list: shard 4 of no node: no node owns the shard",
    ]
