"""Requests to the administration API of a broker in tests."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlencode

from support.broker_process import BrokerProcess
from support.patience import PATIENCE

ROLES = ("viewer", "operator", "admin")
ACCESS = [{"name": role, "role": role, "token": f"t-{role}"} for role in ROLES]


class Api:
    """Requests to a broker's API with the token of a role."""

    def __init__(self, broker: BrokerProcess, role: str = "admin") -> None:
        self.broker = broker
        self.role = role

    def ask(self, method: str, path: str, body: Any = None, **query: Any) -> tuple[int, Any]:
        """The status and the JSON of the answer; None for an empty one. ``body`` is JSON, or bytes."""
        url = f"{self.broker.url}/api/v1{path}" + (f"?{urlencode(query)}" if query else "")
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Authorization": f"Bearer t-{self.role}"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                text = response.read()
                return response.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            assert error.headers["Content-Type"].startswith("application/problem+json")
            return error.code, json.loads(error.read())

    def get(self, path: str, **query: Any) -> Any:
        status, answer = self.ask("GET", path, **query)
        assert status == 200, answer
        return answer

    def refused(self, status: int, field: str | None, method: str, path: str, body: Any = None, **query: Any) -> str:
        """The detail of a refusal that names this field."""
        found, problem = self.ask(method, path, body, **query)
        assert (found, problem["status"], problem.get("field")) == (status, status, field), problem
        return str(problem["detail"])

    def pages(self, path: str, limit: int, **query: Any) -> list[Any]:
        """The items of all pages."""
        found: list[Any] = []
        cursor: dict[str, str] = {}
        while True:
            page = self.get(path, limit=limit, **query, **cursor)
            assert len(page["items"]) <= limit
            found += page["items"]
            if page["next_cursor"] is None:
                return found
            cursor = {"cursor": page["next_cursor"]}
