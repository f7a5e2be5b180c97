"""`SubscriptionControl` on a broker core: pages, and the subscriptions visited in one slice."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from support.control import count_slices, finish, many_sessions
from support.core import Core

from mqttbroker.admin.control import subscriptions as subscriptions_module
from mqttbroker.admin.control.slices import MAX_PAGE, SLICE
from mqttbroker.admin.control.views import (
    SubscriptionView,
)
from mqttbroker.codec.properties import Properties
from sessions.session import Subscription


def subscriptions(core: Core, cursor: int, limit: int = MAX_PAGE) -> list[tuple[str, str]]:
    """Client identifiers and filters of all pages, sorted."""
    found: list[SubscriptionView] = []
    while cursor:
        page = finish(core.control.subscriptions.page(cursor, limit))
        found += page.subscriptions
        assert len(page.subscriptions) == limit or not page.cursor
        cursor = page.cursor
    return sorted((view.client_id, view.topic_filter) for view in found)


@pytest.mark.parametrize("matches", [0, subscriptions_module.MATCHES], ids=["by session", "by filter"])
def test_subscriptions_of_a_client_a_filter_and_a_topic(core: Core, matches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions_module, "MATCHES", matches)
    for client_id, filters in {
        "a": ["s/+", "s/1", "#", "$share/g/s/+"],
        "b": ["s/1", "+/1", "$share/g/s/+", "$share/h/s/+"],
        "c": ["s/2", "$SYS/#", "s"],
    }.items():
        core.connect(client_id).subscribe(*filters, options=1)
    control = core.control
    for limit in (1, 2, MAX_PAGE):
        assert subscriptions(core, control.subscriptions.open_client("a"), limit) == [
            ("a", "#"),
            ("a", "$share/g/s/+"),
            ("a", "s/+"),
            ("a", "s/1"),
        ]
        assert subscriptions(core, control.subscriptions.open_subscribers("s/1"), limit) == [("a", "s/1"), ("b", "s/1")]
        assert subscriptions(core, control.subscriptions.open_subscribers("s/+"), limit) == [("a", "s/+")]
        assert subscriptions(core, control.subscriptions.open_subscribers("$SYS/#"), limit) == [("c", "$SYS/#")]
        assert subscriptions(core, control.subscriptions.open_subscribers("$share/g/s/+"), limit) == [
            ("a", "$share/g/s/+"),
            ("b", "$share/g/s/+"),
        ]
        assert subscriptions(core, control.subscriptions.open_receivers("s/1"), limit) == [
            ("a", "#"),
            ("a", "$share/g/s/+"),
            ("a", "s/+"),
            ("a", "s/1"),
            ("b", "$share/g/s/+"),
            ("b", "$share/h/s/+"),
            ("b", "+/1"),
            ("b", "s/1"),
        ]
    assert subscriptions(core, control.subscriptions.open_subscribers("none/#")) == []
    assert subscriptions(core, control.subscriptions.open_subscribers("$share/none/s")) == []
    assert subscriptions(core, control.subscriptions.open_receivers("$SYS/broker/uptime")) == [("c", "$SYS/#")]


def test_the_options_of_a_subscription(core: Core) -> None:
    properties = Properties()
    properties.subscription_identifiers = [7]
    core.connect("a").subscribe("t", options=2 | 4 | 8, properties=properties)
    page = finish(core.control.subscriptions.page(core.control.subscriptions.open_receivers("t")))
    assert page.subscriptions == (SubscriptionView("a", "t", 2, True, True, 7, True),)


def test_a_session_that_may_not_read_a_topic_does_not_receive_it(tmp_path: Path) -> None:
    acl = tmp_path / "acl"
    acl.write_text("pattern read own/%c/#\n")
    with Core(tmp_path, others={"acl_file": acl}) as core:
        for client_id in ("a", "b"):
            core.connect(client_id).subscribe("own/#", options=1)
        assert subscriptions(core, core.control.subscriptions.open_receivers("own/a/1")) == [("a", "own/#")]
        assert subscriptions(core, core.control.subscriptions.open_subscribers("own/#")) == [("a", "own/#"), ("b", "own/#")]


@pytest.mark.parametrize("matches", [0, 10_000], ids=["by session", "by filter"])
def test_many_subscriptions_are_visited_in_slices(core: Core, matches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions_module, "MATCHES", matches)
    registry = core.broker.registry
    for client_id in many_sessions(core, 5 * SLICE):
        core.broker.subscriptions.load(Subscription(registry.sessions[client_id], "all/#", 1, 0))
        core.broker.subscriptions.load(Subscription(registry.sessions[client_id], "$share/g/all/x", 1, 0))
    slices, page = count_slices(core.control.subscriptions.page(core.control.subscriptions.open_receivers("all/x"), MAX_PAGE))
    assert len(page.subscriptions) == MAX_PAGE and slices in (4, 5)
    assert len(subscriptions(core, core.control.subscriptions.open_receivers("all/x"))) == 10 * SLICE
    slices, page = count_slices(core.control.subscriptions.page(core.control.subscriptions.open_subscribers("all/+")))
    assert page == ((), 0) and slices == (7 if matches else 1)  # those of all/# are visited, too
    slices, page = count_slices(core.control.subscriptions.page(core.control.subscriptions.open_subscribers("all/#"), MAX_PAGE))
    assert len(page.subscriptions) == MAX_PAGE and slices in (4, 5)


@pytest.mark.parametrize("topic, found", [("a/" * 12 + "x", 4096), ("a/" * 12 + "y", 0)])
def test_one_topic_with_many_filters_is_searched_in_slices(core: Core, topic: str, found: int) -> None:
    core.connect("many")
    session = core.broker.registry.sessions["many"]
    for levels in itertools.product("+a", repeat=12):
        core.broker.subscriptions.load(Subscription(session, "/".join(levels) + "/x", 1, 0))
    slices, page = count_slices(core.control.subscriptions.page(core.control.subscriptions.open_receivers(topic), MAX_PAGE))
    assert len(page.subscriptions) == min(found, MAX_PAGE) and slices > 4096 // SLICE
    assert len(subscriptions(core, core.control.subscriptions.open_receivers(topic))) == found


def test_subscriptions_that_end_between_pages_are_left_out(core: Core) -> None:
    a, b, c = (core.connect(client_id) for client_id in "abc")
    for client in (a, b, c):
        client.subscribe("t", options=1)
    cursor = core.control.subscriptions.open_receivers("t")
    page = finish(core.control.subscriptions.page(cursor, 1))
    left = {"a": a, "b": b, "c": c}
    del left[page.subscriptions[0].client_id]
    left.popitem()[1].close()
    core.connect("d").subscribe("t")
    assert [client_id for client_id, _ in subscriptions(core, page.cursor)] == list(left)
