"""`SessionControl` on a broker core: pages, filters, orders, disconnecting, and the sessions visited in one slice."""

from __future__ import annotations

import operator

import pytest
from support.control import count_slices, finish, many_sessions
from support.core import Core
from support.core_sessions import durable

from mqttbroker.admin.control import sessions as sessions_module
from mqttbroker.admin.control.control import Controls
from mqttbroker.admin.control.sessions import SORTS
from mqttbroker.admin.control.slices import MAX_PAGE, SLICE
from mqttbroker.admin.control.views import (
    SessionDetail,
    SessionFilter,
    SessionSummary,
)
from mqttbroker.codec.packets import Connect, Disconnect
from mqttbroker.codec.reason_codes import ADMINISTRATIVE_ACTION
from mqttbroker.core.client.connection import Connection
from mqttbroker.core.sessions.rankings import MAX_RANKED, SessionRankings


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
    rankings = core.control.sessions.rankings
    while not rankings.passes:
        assert rankings.step() > 0.0
    return core


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("sort", SORTS)
def test_rankings_of_the_last_pass_are_those_of_all_sessions(ordered: Core, sort: str, descending: bool) -> None:
    slices, page = count_slices(ordered.control.sessions.sorted_page(sort, descending, limit=100))
    assert slices == 2
    ordered.control.sessions.rankings = SessionRankings(ordered.broker.registry)
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
