"""`Controls` of a broker core: requests that cannot be served."""

from __future__ import annotations

from typing import Any

import pytest
from support.control import finish
from support.core import Core

from mqttbroker.admin.control.slices import ControlError


def test_bad_requests_are_one_line(core: Core) -> None:
    control = core.control
    core.connect("a").subscribe("t")
    cursor = control.subscriptions.open_client("a")
    requests: list[tuple[Any, str]] = [
        (lambda: finish(control.sessions.page(limit=0)), "a page has 1 to 1000 entries, not 0"),
        (lambda: finish(control.subscriptions.page(cursor, 1001)), "a page has 1 to 1000 entries, not 1001"),
        (lambda: finish(control.retained.page(1)), "no cursor 1: "),
        (lambda: control.subscriptions.open_client("none"), "no session 'none'"),
        (lambda: control.subscriptions.open_subscribers("a/#/b"), "not a topic filter: 'a/#/b'"),
        (lambda: control.subscriptions.open_receivers("a/#"), "not a topic name: 'a/#'"),
        (lambda: control.retained.open(""), "not a topic filter: ''"),
        (lambda: control.retained.open("$share/g/t"), "a shared subscription has no retained messages"),
        (lambda: finish(control.retained.clear("$SYS/#")), r"the messages of \$SYS are the broker's"),
    ]
    for request, reason in requests:
        with pytest.raises(ControlError, match=f"^{reason}"):
            request()
