"""`Controls` of a broker core: pages, filters, commands, and the objects visited in one slice."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.core import Core, CoreClient
from support.core_sessions import durable

from mqttbroker.admin.control import retained as retained_module
from mqttbroker.admin.control import sessions as sessions_module
from mqttbroker.admin.control import subscriptions as subscriptions_module
from mqttbroker.admin.control.control import Controls
from mqttbroker.admin.control.retained import PAGE_BYTES
from mqttbroker.admin.control.sessions import SORTS
from mqttbroker.admin.control.slices import MAX_CURSORS, MAX_PAGE, SLICE, ControlError, Slices
from mqttbroker.admin.control.views import (
    RetainedMessage,
    SessionDetail,
    SessionFilter,
    SessionSummary,
    SubscriptionView,
)
from mqttbroker.codec.packets import Connect, Disconnect, Publish
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import ADMINISTRATIVE_ACTION
from mqttbroker.core.client.connection import Connection
from mqttbroker.core.sessions.rankings import MAX_RANKED, SessionRankings
from sessions.counters import COUNTERS, Counters
from sessions.session import Subscription


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    with Core(tmp_path) as made:
        yield made


def finish(operation: Slices[Any]) -> Any:
    return count_slices(operation)[1]


def count_slices(operation: Slices[Any]) -> tuple[int, Any]:
    """Run an operation to its end: the number of slices, and the result."""
    slices = 1
    while True:
        try:
            next(operation)
        except StopIteration as end:
            return slices, end.value
        slices += 1


def many_sessions(core: Core, count: int) -> list[str]:
    """Sessions without clients, made in no order; their client identifiers in order."""
    client_ids = [f"dev-{number * 7919 % count:06d}" for number in range(count)]
    for client_id in client_ids:
        core.broker.registry.create(client_id, False)
    return sorted(client_ids)


def listed(control: Controls, where: SessionFilter, limit: int) -> list[str]:
    """Client identifiers of all pages."""
    found: list[str] = []
    after = ""
    while True:
        page = finish(control.sessions.page(where, after, limit))
        found += [summary.client_id for summary in page.sessions]
        if not page.after:
            return found
        assert len(page.sessions) == limit and page.after == found[-1]
        after = page.after


# --- sessions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 7, 250, MAX_PAGE])
def test_pages_hold_every_session_once_in_order(core: Core, limit: int) -> None:
    client_ids = many_sessions(core, 2000 if limit > 1 else 50)
    assert listed(core.control, SessionFilter(), limit) == client_ids


def test_filters(core: Core) -> None:
    client_ids = many_sessions(core, 1500)
    core.connect("dev-0010-live", username=None)
    core.connect("z")
    control = core.control
    assert listed(control, SessionFilter(prefix="dev-0014"), 10) == [x for x in client_ids if x.startswith("dev-0014")]
    assert listed(control, SessionFilter(contains="99"), 10) == [x for x in client_ids if "99" in x]
    assert listed(control, SessionFilter(connected=True), 1) == ["dev-0010-live", "z"]
    assert listed(control, SessionFilter(prefix="dev", connected=True), 10) == ["dev-0010-live"]
    assert listed(control, SessionFilter(username="nobody"), 10) == []
    core.broker.registry.sessions["dev-000007"].set_username("alice")
    assert listed(control, SessionFilter(username="alice"), 10) == ["dev-000007"]
    assert listed(control, SessionFilter(prefix="dev-001500"), 10) == []
    assert len(finish(control.sessions.page(SessionFilter(prefix="dev-00001"), after="dev-000015")).sessions) == 4


@pytest.mark.parametrize("descending", [False, True])
def test_conditions_on_connections_find_the_same_by_way_of_connections(
    core: Core, monkeypatch: pytest.MonkeyPatch, descending: bool
) -> None:
    client_ids = many_sessions(core, 5000)
    for number in range(0, 5000, 20):
        core.connect(client_ids[number])
    core.client()  # without a CONNECT
    control, found = core.control, []
    where = SessionFilter(prefix="dev-00", contains="2", connected=True, listener=core.terms.listener)
    for sessions_per_connection in (1, 10_000):
        monkeypatch.setattr(sessions_module, "SESSIONS_PER_CONNECTION", sessions_per_connection)
        slices, page = count_slices(control.sessions.page(where, limit=20, descending=descending))
        assert (slices == 1) is (sessions_per_connection == 1)
        pages = [page]
        while pages[-1].after:
            pages.append(finish(control.sessions.page(where, pages[-1].after, 20, descending)))
        in_order = finish(control.sessions.sorted_page("connected_at", descending, where, None, 20))
        behind = finish(control.sessions.sorted_page("connected_at", descending, where, in_order.after, 20))
        found.append((pages, in_order, behind))
    assert found[0] == found[1] and [len(page.sessions) for page in found[0][0]] == 5 * [20] + [6]


def test_a_page_ends_early_after_many_sessions(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_VISITS", 2 * SLICE)
    client_ids = many_sessions(core, 5 * SLICE + 7)
    where = SessionFilter(contains=client_ids[3 * SLICE])
    pages = [finish(core.control.sessions.page(where))]
    while pages[-1].after:
        pages.append(finish(core.control.sessions.page(where, after=pages[-1].after)))
    assert [[each.client_id for each in page.sessions] for page in pages] == [[], [client_ids[3 * SLICE]], []]
    assert pages[0].after == client_ids[2 * SLICE - 1]


def test_a_page_of_retained_messages_ends_early_after_many_topics(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained_module, "MAX_VISITS", SLICE)
    retain(core, [f"s/{number:04}/{'x' if number == 700 else 'y'}" for number in range(4 * SLICE)])
    cursor, pages = core.control.retained.open("s/+/x"), 0
    found: list[str] = []
    while cursor:
        page = finish(core.control.retained.page(cursor))
        found += [message.topic for message in page.messages]
        cursor, pages = page.cursor, pages + 1
    assert found == ["s/0700/x"] and pages > 2


def test_sessions_come_and_go_between_pages(core: Core) -> None:
    many_sessions(core, 900)
    registry = core.broker.registry
    first = finish(core.control.sessions.page(limit=300))
    registry.remove(registry.sessions[first.after])
    registry.remove(registry.sessions["dev-000301"])
    registry.create("dev-000299x", False)
    registry.create("dev-000000x", False)
    second = finish(core.control.sessions.page(after=first.after, limit=2))
    assert [summary.client_id for summary in second.sessions] == ["dev-000299x", "dev-000300"]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("sort", SORTS)
def test_sorted_pages_hold_every_session_once(core: Core, sort: str, descending: bool) -> None:
    client_ids = many_sessions(core, 3 * SLICE + 7)
    for number, client_id in enumerate(client_ids[::50]):
        client = core.connect(client_id)
        core.advance(1)
        client.subscribe(*(f"t/{index}" for index in range(number + 1)))
    found: list[SessionSummary] = []
    after = None
    while True:
        page = finish(core.control.sessions.sorted_page(sort, descending, after=after, limit=100))
        found += page.sessions
        after = page.after
        if after is None:
            break
        assert len(page.sessions) == 100
    assert sorted(session.client_id for session in found) == client_ids
    values = [operator.attrgetter(sort)(session) for session in found]
    assert values == sorted(values, reverse=descending)


@pytest.mark.parametrize("prefix", ["", "dev-0001", "dev-\U0010ffff"])
def test_pages_in_descending_order_hold_every_session_once(core: Core, prefix: str) -> None:
    client_ids = [*many_sessions(core, 3 * SLICE), "dev-\U0010ffff", "dev-\U0010ffffx", "e"]
    for client_id in client_ids[-3:]:
        core.broker.registry.create(client_id, False)
    found: list[str] = []
    after = ""
    while True:
        page = finish(core.control.sessions.page(SessionFilter(prefix), after, 100, descending=True))
        found += [session.client_id for session in page.sessions]
        after = page.after
        if not after:
            break
    assert found == sorted((each for each in client_ids if each.startswith(prefix)), reverse=True)


@pytest.fixture
def ordered(core: Core, monkeypatch: pytest.MonkeyPatch) -> Core:
    """So many sessions that the rankings of the last pass are used."""
    monkeypatch.setattr(sessions_module, "MAX_VISITS", 100)
    for number, client_id in enumerate(many_sessions(core, 2 * MAX_RANKED + 7)):
        if number % 400 == 0:
            client = core.connect(client_id)
            core.advance(1)
            client.subscribe(*(f"t/{index}" for index in range(number // 400 + 1)))
    rankings = core.control.sessions.rankings = SessionRankings(core.broker.registry)
    while not rankings.passes:
        assert rankings.step() > 0.0
    return core


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("sort", SORTS)
def test_rankings_of_the_last_pass_are_those_of_all_sessions(ordered: Core, sort: str, descending: bool) -> None:
    slices, page = count_slices(ordered.control.sessions.sorted_page(sort, descending, limit=100))
    assert slices == 2
    ordered.control.sessions.rankings = None
    assert page == finish(ordered.control.sessions.sorted_page(sort, descending, limit=100))


def test_pages_behind_the_ranked_ones_visit_all_sessions(ordered: Core) -> None:
    found: list[str] = []
    after = None
    while True:
        page = finish(ordered.control.sessions.sorted_page("subscriptions", True, after=after, limit=1000))
        found += [session.client_id for session in page.sessions]
        after = page.after
        if after is None:
            break
    assert sorted(found) == sorted(ordered.broker.registry.sessions)


def test_filters_apply_to_ranked_pages(ordered: Core) -> None:
    slices, page = count_slices(ordered.control.sessions.sorted_page("subscriptions", True, SessionFilter(connected=True), limit=5))
    assert slices == 2 and [each.subscriptions for each in page.sessions] == [11, 10, 9, 8, 7]
    _, page = count_slices(ordered.control.sessions.sorted_page("subscriptions", True, SessionFilter("dev-0040"), limit=5))
    assert [each.client_id for each in page.sessions] == ["dev-004000", *(f"dev-0040{left:02d}" for left in (6, 5, 4, 3))]


def test_ranked_sessions_that_have_ended_are_left_out(ordered: Core) -> None:
    first = finish(ordered.control.sessions.sorted_page("subscriptions", True, limit=3)).sessions
    ordered.broker.registry.remove(ordered.broker.registry.sessions[first[1].client_id])
    page = finish(ordered.control.sessions.sorted_page("subscriptions", True, limit=2))
    assert page.sessions == (first[0], first[2])


def test_filters_on_connections(core: Core) -> None:
    many_sessions(core, 10)
    core.connect("live")
    assert listed(core.control, SessionFilter(listener="127.0.0.1:1883"), 10) == ["live"]
    assert listed(core.control, SessionFilter(listener="elsewhere"), 10) == []
    assert listed(core.control, SessionFilter(network="10.0.0.0/8"), 10) == []


def test_sorting_visits_a_bounded_number_of_sessions_per_slice(core: Core) -> None:
    many_sessions(core, 20 * SLICE)
    slices, page = count_slices(core.control.sessions.sorted_page("subscriptions", True, limit=5))
    assert slices == 22 and len(page.sessions) == 5
    slices, page = count_slices(core.control.sessions.sorted_page("subscriptions", True, limit=1000))
    assert slices == 25 and len(page.sessions) == 1000


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_publish_in_the_name_of_the_broker(core: Core, qos: int) -> None:
    client = durable(core, "sub")
    client.subscribe("t", options=2)
    operation = core.control.messages.publish("t", b"21.5", qos, False, b"", 60)
    if qos == 0:
        assert finish(operation) == 1
    else:
        assert next(operation) > 0.0  # waits for the commit
        core.settle()
        assert finish(operation) == 1
    messages = [packet for packet in client.arrived() if isinstance(packet, Publish)]
    assert [(message.topic, message.payload, message.qos) for message in messages] == [("t", b"21.5", qos)]
    assert messages[0].properties is not None and messages[0].properties.message_expiry_interval == 60


def test_publish_refuses_what_clients_may_not_publish(core: Core) -> None:
    for topic in ("a/#", "$SYS/x", ""):
        with pytest.raises(ControlError):
            finish(core.control.messages.publish(topic, b"x"))


def test_only_permitted_retained_messages_are_cleared(core: Core) -> None:
    for topic in ("a/1", "a/2", "b/1"):
        core.control.messages.set_retained(topic, b"x")
    assert finish(core.control.retained.clear("#", lambda topic: topic.startswith("a/"))) == 2
    assert core.control.retained.message("b/1") is not None


def test_a_scan_visits_a_bounded_number_of_sessions_per_slice(core: Core) -> None:
    many_sessions(core, 20 * SLICE)
    slices, page = count_slices(core.control.sessions.page(SessionFilter(contains="no such")))
    assert page == ((), "") and slices == 21
    slices, page = count_slices(core.control.sessions.page(limit=100))
    assert slices == 1 and len(page.sessions) == 100
    scan = core.control.sessions.page(SessionFilter(username="nobody"))
    for number in range(5):  # sessions that begin and end during the scan
        next(scan)
        core.broker.registry.create(f"dev-0{number}x", False)
        core.broker.registry.remove(core.broker.registry.sessions[f"dev-00{number:04d}"])
    assert finish(scan) == ((), "")


def test_sessions_of_an_earlier_run_are_listed(core: Core) -> None:
    for client_id in ("m", "z", "a"):
        durable(core, client_id).disconnect()
    core.settle()
    core.kill()
    core.connect("k")
    assert listed(core.control, SessionFilter(), 10) == ["a", "k", "m", "z"]


def test_one_session(core: Core) -> None:
    client = durable(core, "sub", window=2)
    client.subscribe("t", "$share/g/u", options=1)
    publisher = core.connect("pub", 4, keep_alive=30)
    for number in range(5):
        publisher.publish("t", b"12345678", 1)
    core.advance(10)
    now = core.seconds
    detail = core.control.sessions.detail("sub")
    connection = core.broker.registry.sessions["sub"].connection
    assert isinstance(connection, Connection)
    assert detail == SessionDetail(
        SessionSummary("sub", None, 5, True, True, "memory", "127.0.0.1:1883", now - 10, 0.0, 2, 5, 5 * 9, 2, 0xFFFFFFFF),
        keep_alive=0.0,
        max_in_flight=2,
        queued_memory_bytes=3 * 9,
        incoming_qos2=0,
        retained_pending=0,
        has_will=False,
        congested=False,
        worker=0,
        bytes_received=connection.bytes_received,
        bytes_sent=connection.outbox.bytes_sent,
        messages_received=0,
        messages_sent=2,
    )
    assert detail.bytes_received > 0 and detail.bytes_sent > 0
    client.disconnect()
    detail = core.control.sessions.detail("sub")
    assert detail is not None
    assert detail.summary == SessionSummary("sub", None, 5, True, False, "", "", 0.0, now, 2, 5, 5 * 9, 0, 0xFFFFFFFF)
    detail = core.control.sessions.detail("pub")
    assert detail is not None and detail.summary.protocol_version == 4 and detail.keep_alive == 30.0
    assert core.control.sessions.detail("none") is None


def test_disconnect(core: Core) -> None:
    client, old = durable(core, "c"), core.connect("old", 4)
    assert core.control.sessions.disconnect("c") and core.control.sessions.disconnect("old")
    packet = client.expect(Disconnect)
    assert packet.reason_code == ADMINISTRATIVE_ACTION and client.closed
    assert old.closed and core.broker.registry.get("old") is None
    assert core.control.sessions.detail("c") is not None
    assert not core.control.sessions.disconnect("c") and not core.control.sessions.disconnect("none")


def test_disconnect_while_the_connect_waits_for_the_store(core: Core) -> None:
    durable(core, "c").disconnect()
    core.settle()
    core.kill()
    core.eager = False
    client = core.client(4)
    client.send(Connect("c", 4, clean_start=False))
    assert "c" in core.broker.clients.pending
    assert core.control.sessions.disconnect("c")
    assert client.closed and not core.broker.clients.pending
    core.settle()
    assert core.control.sessions.detail("c") is not None and core.broker.clients.connected == 0


@pytest.mark.parametrize("connected", [True, False])
def test_delete_a_session(core: Core, connected: bool) -> None:
    client = durable(core, "c")
    filters = [f"f/{number}" for number in range(3 * SLICE)]  # and one that is shared
    for start in range(0, len(filters), 100):
        client.subscribe(*filters[start : start + 100], "$share/g/s", options=1)
    if not connected:
        client.disconnect()
    slices, deleted = count_slices(core.control.sessions.delete("c"))
    assert deleted and slices == 4
    assert client.closed and core.control.sessions.detail("c") is None
    assert core.broker.router.subscriptions == 0 and not core.broker.router.groups
    core.settle()
    core.kill()
    assert core.control.sessions.detail("c") is None and core.broker.router.subscriptions == 0
    assert finish(core.control.sessions.delete("c")) is False


def test_a_client_that_reconnects_during_the_deletion_of_its_session_is_disconnected(core: Core) -> None:
    client = durable(core, "c")
    for start in range(0, 2 * SLICE + 100, 100):
        client.subscribe(*(f"f/{start + number}" for number in range(100)), options=1)
    deletion = core.control.sessions.delete("c")
    next(deletion)
    again = durable(core, "c")
    assert finish(deletion) is True
    assert again.closed and core.control.sessions.detail("c") is None and core.broker.router.subscriptions == 0


# --- subscriptions ------------------------------------------------------------------------------------------------


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


# --- retained messages --------------------------------------------------------------------------------------------


def retain(core: Core, topics: list[str], payload: bytes = b"x") -> None:
    publisher = core.connect("publisher")
    core.eager = False
    for topic in topics:
        publisher.send(Publish(topic, payload, 0, True, False, 0))
    core.eager = True
    core.settle()
    publisher.disconnect()


def retained(core: Core, topic_filter: str, limit: int = MAX_PAGE) -> list[str]:
    found: list[RetainedMessage] = []
    cursor = core.control.retained.open(topic_filter)
    while cursor:
        page = finish(core.control.retained.page(cursor, limit))
        found += page.messages
        assert len(page.messages) == limit or not page.cursor
        cursor = page.cursor
    return sorted(message.topic for message in found)


def test_retained_messages_by_filter(core: Core) -> None:
    retain(core, [f"s/{number:03d}/v" for number in range(600)] + ["s", "other"])
    for limit in (7, 256, MAX_PAGE):
        assert retained(core, "s/+/v", limit) == [f"s/{number:03d}/v" for number in range(600)]
    assert len(retained(core, "#", 100)) == 602
    assert retained(core, "other") == ["other"] and retained(core, "none") == []
    slices, page = count_slices(core.control.retained.page(core.control.retained.open("s/+/none")))
    assert page == ((), 0) and slices >= 600 // SLICE


def test_a_page_of_retained_messages_is_bounded_in_bytes(core: Core) -> None:
    retain(core, [f"large/{number}" for number in range(7)], b"x" * (PAGE_BYTES // 3 + 1))
    sizes, cursor, topics = [], core.control.retained.open("#"), set()
    while cursor:
        page = finish(core.control.retained.page(cursor))
        sizes.append(len(page.messages))
        topics.update(message.topic for message in page.messages)
        cursor = page.cursor
    assert sizes == [3, 3, 1] and len(topics) == 7


def test_one_retained_message(core: Core) -> None:
    properties = Properties()
    properties.message_expiry_interval = 60
    properties.content_type = "text/plain"
    core.connect("p").publish("t", b"21.5", 1, retain=True, properties=properties)
    message = core.control.retained.message("t")
    assert message == RetainedMessage("t", b"21.5", 1, b"\x03\0\x0atext/plain", "p", core.seconds, core.seconds + 60)
    assert core.control.retained.message("none") is None and core.control.retained.message("#") is None
    cursor = core.control.retained.open("#")
    core.seconds += 61
    core.broker.context.clock.now += 61_000_000
    assert core.control.retained.message("t") is None
    assert finish(core.control.retained.page(cursor)) == ((), 0)


def test_changes_between_pages_of_retained_messages(core: Core) -> None:
    retain(core, ["a", "b", "c", "d"])
    cursor = core.control.retained.open("#")
    page = finish(core.control.retained.page(cursor, 1))
    first = page.messages[0].topic
    rest = [topic for topic in "abcd" if topic != first]
    retain(core, [rest[0]], b"")
    retain(core, [rest[1]], b"new")
    page = finish(core.control.retained.page(page.cursor, 10))
    assert {message.topic: message.payload for message in page.messages} == {rest[1]: b"new", rest[2]: b"x"}


def test_set_a_retained_message(core: Core) -> None:
    subscriber = core.connect("sub")
    subscriber.subscribe("t", options=1)
    core.control.messages.set_retained("t", b"on")
    core.settle()
    packet = subscriber.expect(Publish)
    assert (packet.payload, packet.qos, packet.retain) == (b"on", 1, False)
    core.kill()
    message = core.control.retained.message("t")
    assert message is not None and (message.payload, message.client_id) == (b"on", "")


@pytest.mark.parametrize(
    ("topic", "payload", "reason"),
    [
        ("t", b"", "a retained message has a payload"),
        ("a/#", b"x", "not a topic name: 'a/#'"),
        ("$SYS/x", b"x", "'$SYS/x' is reserved for the broker"),
        ("a/b/c/d/e", b"x", "more than 4 topic levels"),
        ("second", b"x", "no room for one more retained message"),
    ],
)
def test_a_retained_message_that_is_refused(tmp_path: Path, topic: str, payload: bytes, reason: str) -> None:
    with Core(tmp_path, max_topic_levels=4, max_retained_messages=1) as core:
        if topic == "second":
            core.control.messages.set_retained("first", b"x")
        with pytest.raises(ControlError) as caught:
            core.control.messages.set_retained(topic, payload)
        assert str(caught.value) == reason


def test_retained_messages_may_be_unavailable(tmp_path: Path) -> None:
    with Core(tmp_path, retain_available=False) as core:
        with pytest.raises(ControlError, match="retains no messages"):
            core.control.messages.set_retained("t", b"x")


def test_clear_retained_messages(core: Core) -> None:
    retain(core, [f"s/{number}" for number in range(3 * SLICE)] + ["other"])
    core.control.messages.publish_own("$SYS/broker/version", b"1")
    subscriber = core.connect("sub")
    subscriber.subscribe("s/1", options=1 | 2 << 4)
    slices, cleared = count_slices(core.control.retained.clear("s/#"))
    assert cleared == 3 * SLICE and slices >= 3
    assert retained(core, "#") == ["other"]
    subscriber.expect_nothing()
    core.settle()
    core.kill()
    assert retained(core, "#") == ["other"]
    assert finish(core.control.retained.clear("other")) == 1 and finish(core.control.retained.clear("other")) == 0


def test_clearing_waits_while_the_store_is_behind(tmp_path: Path) -> None:
    with Core(tmp_path, max_pending_write_bytes=1000) as core:
        retain(core, [f"s/{number}" for number in range(2 * SLICE)])
        core.control.messages.set_retained("large", b"x" * 2000)
        clearing = core.control.retained.clear("#")
        assert next(clearing) > 0.0
        core.settle()
        assert finish(clearing) == 2 * SLICE + 1


# --- requests that cannot be served -------------------------------------------------------------------------------


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


def test_cursors_are_bounded_and_end_with_their_last_page(core: Core) -> None:
    retain(core, ["a", "b", "c"])
    control = core.control
    cursors = [control.retained.open("#") for _ in range(MAX_CURSORS)]
    second = finish(control.retained.page(cursors[0], 1)).cursor
    newest = control.retained.open("#")
    with pytest.raises(ControlError, match=f"no cursor {cursors[1]}"):
        finish(control.retained.page(cursors[1]))
    with pytest.raises(ControlError, match=f"no cursor {cursors[0]}: it was used"):
        finish(control.retained.page(cursors[0]))
    assert len(finish(control.retained.page(second)).messages) == 2
    assert finish(control.retained.page(newest)).cursor == 0
    with pytest.raises(ControlError, match=f"no cursor {newest}"):
        finish(control.retained.page(newest))


# --- status -------------------------------------------------------------------------------------------------------


def test_the_status_counts(core: Core) -> None:
    subscriber: CoreClient = durable(core, "s")
    subscriber.subscribe("t", "$share/g/t", options=1)
    subscriber.disconnect()
    publisher = core.connect("p")
    publisher.publish("t", b"12345", 1, retain=True)
    status = core.control.status()
    assert (status.sessions, status.clients_connected, status.clients_connected_maximum) == (2, 1, 1)
    assert (status.subscriptions, status.shared_subscriptions) == (2, 1)
    assert (status.retained_messages, status.queued_messages) == (1, 2)
    assert status.totals["publish_received"] == 1 and status.durability == "commit"
    assert sum(status.drops.values()) == 0
    publisher.publish("t", b"12345", 1)
    assert status.totals["publish_received"] == 1, "a status does not change"


def test_every_total_is_a_counter() -> None:
    assert all(isinstance(Counters().total(counter), int) for counter in COUNTERS)
    assert SLICE <= 1000
