"""The dashboard in a headless Chromium: it shows what the broker has, as text, and its buttons do what they say."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Dialog, Page, Request, expect
from support.api_client import ACCESS, Api
from support.broker_process import BrokerProcess
from support.browser import WAIT, Errors, browser
from support.certificates import CertificateFiles
from support.core import wait_until
from support.raw_client import RawClient

from mqttbroker.auth.passwords import hash_password, set_password
from mqttbroker.codec.packets import Puback, Publish
from mqttbroker.codec.properties import Properties

pytestmark = pytest.mark.one_build
Connect = Callable[..., RawClient]
Open = Callable[..., Page]
Start = Callable[..., BrokerProcess]

HOSTILE = "<img src=x onerror=\"document.title='run'\">\"'`&amp;"

expect.set_options(timeout=WAIT)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    users = tmp_path_factory.mktemp("users") / "passwords"
    set_password(users, HOSTILE, hash_password(b"secret"))
    rules = users.with_name("rules")
    rules.write_text(f"topic readwrite #\nuser {HOSTILE}\ntopic readwrite #\n")
    config = {
        "password_file": str(users),
        "acl_file": str(rules),
        "allow_anonymous": True,
        "http": {"access": ACCESS, "history_interval": "1s"},
        "listeners": [{}, {"type": "ws", "port": 0}],
        "streams": {
            "plant": {"filters": ["plant/#"], "partitions": 2},
            "jobs": {"filters": ["job/#"], "partitions": 1},
        },
        "queues": {"jobs": {"stream": "jobs"}},
    }
    with BrokerProcess(config=config) as process:
        yield process


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as launched:
        yield launched


@pytest.fixture
def open_page(broker: BrokerProcess, chromium: Browser) -> Iterator[Open]:
    """Open the dashboard and log in; each page is in a context of its own, and must cause no error."""
    opened = []

    def opening(fragment: str = "", role: str = "operator", at: str = broker.url, **options: Any) -> Page:
        context = chromium.new_context(**options)
        page = context.new_page()
        opened.append((context, Errors(page)))
        page.goto(f"{at}/{fragment}")
        if role:
            page.get_by_label("Token").fill(f"t-{role}")
            page.get_by_role("button", name="Log in").click()
        return page

    yield opening
    for context, errors in opened:
        context.close()
        assert errors.found == []


def figure(page: Page, name: str) -> Any:
    return page.locator(".figures div", has_text=re.compile(f"^{name}")).locator("dd")


def subscribe(page: Page, topic_filter: str) -> None:
    """Show the live messages of a filter."""
    page.get_by_label("Topic filter").fill(topic_filter)
    expect(page.get_by_label("WebSocket listener")).not_to_have_value("")
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_text(f"Subscribed to {topic_filter}")).to_be_visible()


def press(page: Page, button: str, sure: bool = True) -> str:
    """Press a button that asks a question, and answer it; returns the question."""
    asked: list[str] = []

    def answer(dialog: Dialog) -> None:
        asked.append(dialog.message)
        dialog.accept() if sure else dialog.dismiss()

    page.once("dialog", answer)
    page.get_by_role("button", name=button, exact=True).click()
    assert len(asked) == 1
    return asked[0]


def no_script_ran(page: Page) -> None:
    assert page.title() != "run" and page.locator("main img, main script").count() == 0


def test_login_needs_a_token_that_the_broker_knows(open_page: Open) -> None:
    page = open_page(role="nobody")
    expect(page.get_by_text("The token is not known to the broker.")).to_be_visible()
    page.get_by_label("Token").fill("t-viewer")
    page.keyboard.press("Enter")
    expect(page.get_by_text("viewer (viewer)")).to_be_visible()
    page.reload()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    assert page.url.endswith("/") and page.evaluate("Object.keys(localStorage).length") == 0
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Token")).to_be_focused()
    assert page.evaluate("sessionStorage.length") == 0


def test_overview_follows_the_broker(open_page: Open, connect: Connect) -> None:
    page = open_page(role="viewer")
    expect(figure(page, "Clients")).to_have_text("0")
    publisher = connect("overview-a")
    connect("overview-b")
    expect(figure(page, "Clients")).to_have_text("2")
    rate = page.get_by_label("Messages").locator(".legend li", has_text="received").locator("b")

    def shows_a_rate() -> bool:
        """It is that of the last seconds, and the browser may be slow."""
        for number in range(50):
            publisher.publish("overview/1", str(number).encode(), 0)
        return re.match("[1-9]", rate.inner_text()) is not None

    wait_until(shows_a_rate)
    assert page.get_by_label("Messages").locator("path").first.get_attribute("d")
    latency = page.get_by_label("Latency").locator(".legend li", has_text="commit").locator("b")
    while latency.inner_text() == "–":
        publisher.publish("overview/1", b"kept", 1, True)  # is acknowledged after a commit
    expect(latency).to_have_text(re.compile(r"^(\d.* ms|–)$"))


def test_charts_begin_before_the_page_was_opened(start_broker: Start, open_page: Open) -> None:
    broker = start_broker(config={"http": {"access": ACCESS, "history_interval": "1s", "history_length": "15m"}})
    api = Api(broker, "viewer")
    wait_until(lambda: len(api.get("/history")["times"]) >= 4)
    page = open_page(at=broker.url, role="viewer")
    choice = page.get_by_role("group", name="Time that the charts show")
    expect(choice.get_by_role("button")).to_have_text(["5 min", "15 min"])
    expect(choice.get_by_role("button", pressed=True)).to_have_text("5 min")  # there is not more
    expect(page.get_by_text("the samples end with the broker's process")).to_be_visible()
    drawn = page.get_by_label("Connections", exact=True).locator("path").first.get_attribute("d") or ""
    assert drawn.count("L") >= 3  # points of samples, in the first drawing
    choice.get_by_role("button", name="15 min").click()
    expect(page.get_by_label("Connections", exact=True)).to_contain_text("15 min ago")
    broker.terminate()
    broker.start()
    expect(page.get_by_role("alert")).to_have_text("")
    page.reload()
    expect(page.get_by_text("the samples end with the broker's process")).to_be_visible()
    assert len(api.get("/history")["times"]) < 60


def test_clients_are_found_and_disconnected(open_page: Open, connect: Connect) -> None:
    doomed = connect("find/me ü")
    doomed.subscribe("find/#", options=1)
    connect("another")
    page = open_page("#/clients")
    expect(page.get_by_role("link", name="another")).to_be_visible()
    page.get_by_label("Part of the client id").fill("d/me")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="another")).to_have_count(0)
    page.get_by_role("link", name="find/me ü").click()
    expect(page.get_by_role("heading", name="find/me ü")).to_be_visible()
    expect(page.get_by_role("cell", name="find/#")).to_be_visible()
    press(page, "Disconnect")
    expect(page.get_by_text("The client was disconnected.")).to_be_visible()
    assert [getattr(packet, "reason_code", None) for packet in doomed.expect_closed()] == [0x98]
    expect(page.get_by_text("There is no session with this client id.")).to_be_visible()
    expect(page.locator(".details")).to_be_hidden()
    persistent = Properties()
    persistent.session_expiry_interval = 600
    connect("find/me ü", properties=persistent)
    expect(page.locator(".details dd").first).to_have_text("connected")
    press(page, "Disconnect")
    expect(page.locator(".details dd").first).to_have_text("disconnected")
    press(page, "Delete session")
    expect(page.get_by_text("The session was deleted.")).to_be_visible()
    expect(page.locator(".details")).to_be_hidden()


def test_message_of_the_form_is_the_one_that_is_delivered_and_shown(open_page: Open, connect: Connect) -> None:
    client = connect("subscriber")
    client.subscribe("form/#", options=2)
    page = open_page("#/publish")
    form = page.get_by_role("form", name="Message", exact=True)
    form.get_by_label("Topic", exact=True).fill("form/1")
    form.get_by_label("Payload", exact=True).fill("21.5 °C")
    form.get_by_label("QoS").select_option("2")
    form.get_by_label("Retain").check()
    form.get_by_label("User properties").fill("unit=C\nsite=a=b")
    form.get_by_role("button", name="Publish").click()
    expect(page.get_by_text("Published to 1 subscriptions and streams.")).to_be_visible()
    message = client.take()
    assert (message.topic, message.payload, message.qos) == ("form/1", "21.5 °C".encode(), 2)
    assert message.properties.user_properties == [("unit", "C"), ("site", "a=b")]
    lines = form.get_by_label("User properties")
    lines.fill("unit=C\nsite")
    form.get_by_role("button", name="Publish").click()
    expect(lines).to_have_accessible_description(re.compile("the line “site” has no =$"))
    expect(lines).to_be_focused()
    client.expect_nothing()
    lines.fill("unit=C\n\nempty=\n")
    form.get_by_role("button", name="Publish").click()
    assert client.take().properties.user_properties == [("unit", "C"), ("empty", "")]
    form.get_by_label("The payload is").select_option("base64")
    form.get_by_label("Payload", exact=True).fill("not base64")
    form.get_by_role("button", name="Publish").click()
    field = form.get_by_label("Payload", exact=True)
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_accessible_description("must be base64 (RFC 4648, section 4)")
    expect(field).to_be_focused()
    field.fill("AP8Q")
    form.get_by_role("button", name="Publish").click()
    assert client.take().payload == b"\x00\xff\x10"
    page.get_by_role("link", name="Topics").click()
    page.get_by_role("region", name="Retained topics").get_by_text("form", exact=True).click()
    page.get_by_role("button", name="00 ff 10").click()
    expect(page.get_by_role("region", name="Message").locator("pre")).to_have_text("00 ff 10")
    page.get_by_role("link", name="Publish").click()
    form.get_by_label("Topic", exact=True).fill("form/+")
    form.get_by_role("button", name="Publish").click()
    expect(form.get_by_label("Topic", exact=True)).to_have_accessible_description(re.compile("must be a topic name"))
    form.get_by_label("Topic", exact=True).fill("form/1")
    form.get_by_label("Retain").check()
    assert "deletes the retained message" in press(page, "Publish", sure=False)
    client.expect_nothing()


def test_retained_messages_are_set_and_deleted(open_page: Open, broker: BrokerProcess) -> None:
    page = open_page("#/topics")
    setting = page.get_by_role("form", name="Set a retained message")
    setting.get_by_label("Topic", exact=True).fill("kept/1")
    setting.get_by_label("Payload", exact=True).fill("first")
    setting.get_by_role("button", name="Set").click()
    expect(page.get_by_role("region", name="Message").locator("pre")).to_have_text("first")
    setting.get_by_label("Payload", exact=True).fill("second")
    setting.get_by_role("button", name="Set").click()
    expect(page.get_by_role("region", name="Message").locator("pre")).to_have_text("second")
    clearing = page.get_by_role("form", name="Delete retained messages")
    clearing.get_by_label("Topic filter").fill("kept/#")
    press(page, "Delete all that match", sure=False)
    assert Api(broker).get("/retained", filter="kept/#")["items"]
    press(page, "Delete all that match")
    expect(page.get_by_text("Deleted: 1 retained messages.")).to_be_visible()
    assert Api(broker).get("/retained", filter="kept/#")["items"] == []


def test_clients_are_banned_and_bans_lifted(open_page: Open, connect: Connect) -> None:
    banned = connect("banned")
    page = open_page("#/clients/banned")
    page.get_by_role("link", name="Ban", exact=True).click()
    form = page.get_by_role("form", name="Ban clients")
    expect(form.get_by_label("Client id")).to_have_value("banned")
    form.get_by_label("Seconds").fill("-1")
    press(page, "Ban")
    expect(form.get_by_label("Seconds")).to_have_accessible_description(re.compile("must be a number above 0"))
    form.get_by_label("Seconds").fill("3600")
    form.get_by_label("Reason").fill("a test")
    press(page, "Ban")
    banned.expect_closed()
    row = page.get_by_role("row", name="banned")
    expect(row).to_contain_text("a test")
    expect(row).to_contain_text("in 59 min")
    row.get_by_role("button", name="Lift the ban of “banned”").click()
    expect(page.get_by_text("No bans.")).to_be_visible()
    connect("banned")
    form.get_by_role("button", name="Ban").click()
    expect(form.get_by_label("Address or network")).to_have_accessible_description(re.compile("a ban needs"))


def test_users_and_rules_are_changed(open_page: Open, connect: Connect, broker: BrokerProcess) -> None:
    page = open_page("#/accounts", role="admin")
    users = page.get_by_role("region", name="Users and forms")
    rules = page.get_by_role("region", name="Rules and forms")
    adding = page.get_by_role("form", name="Add a user")
    adding.get_by_label("User name").fill("alice")
    adding.get_by_label("Password").fill("first")
    adding.get_by_role("button", name="Add").click()
    expect(page.get_by_role("row", name="alice")).to_contain_text("argon2id")
    expect(adding.get_by_label("Password")).to_have_value("")
    adding.get_by_label("User name").fill("alice")
    adding.get_by_label("Password").fill("again")
    adding.get_by_role("button", name="Add").click()
    expect(adding.get_by_label("User name")).to_have_accessible_description(re.compile("already"))
    client = connect("alice-1", username="alice", password=b"first")
    page.get_by_role("button", name="Set the password of “alice”").click()
    changing = page.get_by_role("form", name="Password of “alice”")
    changing.get_by_label("Password", exact=True).fill("second")
    press(page, "Set password")
    client.expect_closed()
    connect("alice-2", username="alice", password=b"second")
    rule = page.get_by_role("form", name="Add a rule")
    rule.get_by_label("User name").fill("alice")
    rule.get_by_label("Access").select_option("write")
    rule.get_by_label("Topic filter").fill("plant/1/#")
    rule.get_by_role("button", name="Add").click()
    expect(page.get_by_role("row", name="alice write plant/1/#")).to_be_visible()
    page.get_by_role("button", name="Delete the rule write “plant/1/#” for “alice”").click()
    assert any(each["username"] == "alice" for each in Api(broker).get("/acl/rules")["items"])  # no answer is a no
    press(page, "Delete the rule write “plant/1/#” for “alice”")
    expect(page.get_by_role("row", name="alice write plant/1/#")).to_have_count(0)
    press(page, "Delete “alice”")
    expect(page.get_by_role("row", name="alice")).to_have_count(0)
    users.get_by_role("searchbox").fill("nobody")
    page.keyboard.press("Enter")
    expect(users.get_by_text("No users.")).to_be_visible()
    expect(rules.get_by_role("row", name=HOSTILE)).to_be_visible()


def test_packets_of_a_client_are_traced(open_page: Open, connect: Connect) -> None:
    client = connect("traced")
    page = open_page("#/clients/traced")
    page.get_by_role("button", name="Trace", exact=True).click()
    packets = page.get_by_role("region", name="Packets")
    expect(packets).to_be_visible()
    while not packets.inner_text():
        client.publish("traced/1", b"secret payload", 1)
    expect(packets).to_contain_text("received client='traced'")
    expect(packets).to_contain_text("topic='traced/1'")
    expect(packets).not_to_contain_text("secret")
    page.get_by_role("button", name="Stop the trace").click()
    expect(page.get_by_text("The trace has ended")).to_be_visible()


def test_list_of_clients_shows_one_page_at_a_time(open_page: Open, connect: Connect) -> None:
    for number in range(51):
        connect(f"page-{number:02}")
    page = open_page("#/clients")
    page.get_by_label("Part of the client id").fill("page-")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(50)
    page.get_by_role("button", name="Next").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.get_by_role("link", name="page-50")).to_be_visible()
    expect(page.get_by_role("button", name="Next")).to_be_disabled()
    page.get_by_role("button", name="Previous").click()
    expect(page.get_by_role("link", name="page-00")).to_be_visible()


def test_viewer_has_no_buttons_that_change_something(open_page: Open, connect: Connect) -> None:
    connect("seen")
    page = open_page("#/clients/seen", role="viewer")
    expect(page.get_by_text("127.0.0.1:").first).to_be_visible()
    expect(page.get_by_role("button", name="Disconnect")).to_have_count(0)
    for view in ("clients/seen", "topics", "publish", "bans", "accounts"):
        page.goto(f"{page.url.partition('#')[0]}#/{view}")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.locator("main form:not([role=search]), main button.danger, main button.primary")).to_have_count(0)
    page.goto(f"{page.url.partition('#')[0]}#/accounts")
    expect(page.get_by_role("row", name=HOSTILE).first).to_be_visible()


def test_operator_changes_no_users(open_page: Open) -> None:
    page = open_page("#/accounts", role="operator")
    expect(page.get_by_role("row", name=HOSTILE).first).to_be_visible()
    expect(page.locator("main form:not([role=search]), main button.danger")).to_have_count(0)


def test_hostile_client_id_and_filter_are_text(open_page: Open, connect: Connect) -> None:
    connect(HOSTILE, username=HOSTILE, password=b"secret").subscribe(HOSTILE)
    page = open_page("#/clients")
    row = page.locator("tbody tr", has=page.get_by_role("link", name=HOSTILE))
    expect(row.get_by_role("cell").nth(2)).to_have_text(HOSTILE)
    row.get_by_role("link").click()
    expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()
    expect(page.locator(".details dd").nth(1)).to_have_text(HOSTILE)
    expect(page.get_by_role("cell", name=HOSTILE)).to_be_visible()
    no_script_ran(page)


def test_hostile_topic_and_payload_are_text(open_page: Open, connect: Connect) -> None:
    client = connect("hostile")
    page = open_page("#/live")
    subscribe(page, "#")
    properties = Properties()
    properties.content_type, properties.user_properties = HOSTILE, [(HOSTILE, HOSTILE)]
    client.publish(f"hostile/{HOSTILE}", HOSTILE.encode(), 1, True, properties)
    row = page.locator("tbody tr", has_text=f"hostile/{HOSTILE}")
    expect(row.get_by_role("cell").nth(2)).to_have_text(HOSTILE)
    expect(row).to_contain_text(f"{HOSTILE}={HOSTILE}")
    page.get_by_role("link", name="Topics").click()
    page.get_by_role("region", name="Retained topics").get_by_text("hostile", exact=True).click()
    page.get_by_role("button", name=HOSTILE).click()
    detail = page.get_by_role("region", name="Message")
    expect(detail.locator("pre")).to_have_text(HOSTILE)
    expect(detail).to_contain_text(f"hostile/{HOSTILE}")
    expect(detail).to_contain_text(f"{HOSTILE}={HOSTILE}")
    no_script_ran(page)


@pytest.mark.parametrize("name", ["\u202eevil\u2066", "x" * 65_000, "👩\u200d🔬 é", "שלום", " a  b "],
                         ids=["direction", "long", "emoji", "right-to-left", "blanks"])  # fmt: skip
def test_odd_names_are_shown_as_they_are(open_page: Open, connect: Connect, name: str) -> None:
    with connect(name) as client:
        client.publish(f"odd/{name}", name.encode(), 1, True)
        seen = name.replace("\u202e", "\\u202e").replace("\u2066", "\\u2066")
        whole = len(name) < 100
        page = open_page("#/clients", viewport={"width": 360, "height": 740})
        page.get_by_label("Part of the client id").fill(name[:50])
        page.keyboard.press("Enter")
        link = page.locator("tbody a")
        expect(link).to_have_count(1)
        assert link.text_content() == seen if whole else "… (65,000 characters)" in (link.text_content() or "")
        link.click()
        expect(page.get_by_role("heading", level=1)).to_contain_text(seen[:100])
        if not whole:
            expect(page.get_by_text("A client id of more than 2,000 characters has no page.")).to_be_visible()
        page.get_by_role("link", name="Topics").click()
        page.get_by_role("region", name="Retained topics").get_by_text("odd", exact=True).click()
        page.locator("details[open] li button.value").last.click()
        pane = page.get_by_role("region", name="Message")
        expect(pane).to_contain_text(seen if whole else "A topic of more than 2,000 characters")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        client.publish(f"odd/{name}", b"", 1, True)


def test_page_asks_no_other_server_and_names_its_controls(open_page: Open, broker: BrokerProcess) -> None:
    page = open_page(role="admin")
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request))
    names = page.get_by_role("navigation").get_by_role("link").all_inner_texts()
    assert len(names) == 9
    nameless = """[...document.querySelectorAll("a, button, input, select, textarea")].filter((each) =>
        !each.closest("[hidden]") && !(each.textContent || each.ariaLabel || each.labels?.length)).length"""
    for name in names:
        page.get_by_role("navigation").get_by_role("link", name=name).click()
        expect(page.get_by_role("heading", name=name, level=1)).to_be_visible()
        assert page.evaluate(nameless) == 0
    assert asked and all(request.url.startswith(broker.url + "/") for request in asked)


def test_keyboard_is_enough(open_page: Open, connect: Connect) -> None:
    client = connect("keys")
    client.subscribe("keys/#")
    page = open_page(role="")
    expect(page.get_by_label("Token")).to_be_focused()
    page.keyboard.type("t-operator")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.keyboard.press("5")
    expect(page.get_by_label("Topic", exact=True)).to_be_focused()
    page.keyboard.type("keys/1")
    page.keyboard.press("Tab")
    page.keyboard.type("by key")
    while not page.get_by_role("button", name="Publish").evaluate("each => each === document.activeElement"):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert client.take().payload == b"by key"


@pytest.mark.slow("connects 10,000 clients and publishes 100,000 retained messages")
def test_page_stays_small_with_many_clients_and_topics(open_page: Open, start_broker: Start) -> None:
    broker = start_broker(config={"http": {"access": ACCESS}, "listeners": [{}, {"type": "ws", "port": 0}]})
    with ExitStack() as stack:
        for number in range(10_000):
            client = stack.enter_context(RawClient(broker.port))
            client.connect(f"many-{number:05}")
        for number in range(100_000):
            client.publish(f"many/{number:06}", b"1", 0, True)
            if number % 1000 == 0:
                client.ping()
        client.ping()
        page = open_page("#/clients", at=broker.url)
        elements = "document.querySelectorAll('*').length"
        expect(page.locator("tbody tr")).to_have_count(50)
        page.get_by_label("Part of the client id").fill("09999")
        page.keyboard.press("Enter")
        expect(page.locator("tbody tr")).to_have_count(1)
        assert page.evaluate(elements) < 1000
        page.get_by_role("link", name="Topics").click()
        page.get_by_role("region", name="Retained topics").get_by_text("many", exact=True).click()
        expect(page.locator("details[open] li")).to_have_count(100)
        page.get_by_role("button", name="More", exact=True).click()
        expect(page.locator("details[open] li")).to_have_count(200)
        assert page.evaluate(elements) < 2000
        page.get_by_role("link", name="Live messages").click()
        subscribe(page, "many/#")
        expect(page.get_by_text("100,000 messages")).to_be_visible()
        assert page.locator("tbody tr").count() == 200
        page.get_by_role("link", name="Overview").click()
        expect(figure(page, "Retained")).to_have_text(re.compile("100,0"))


def test_live_messages_are_those_that_are_published(open_page: Open, connect: Connect) -> None:
    client = connect("live")
    client.publish("live/kept", b"before", 1, True)
    page = open_page("#/live", role="viewer")
    expect(page.get_by_label("WebSocket listener")).to_have_value(re.compile(r"^ws://127\.0\.0\.1:\d+/mqtt$"))
    subscribe(page, "live/#")
    rows = page.locator("tbody tr")
    expect(rows.first).to_contain_text("live/kept")
    payloads = ["21.5 °C", '{"a": 1}', "x" * 70_000]
    for number, text in enumerate(payloads):
        client.publish(f"live/{number}", text.encode(), 2 if number else 0)
    client.publish("live/bytes", b"\x00\xff\x10", 0)
    client.publish("other/1", b"not of the filter", 0)
    expect(rows).to_have_count(5)
    expect(rows.first.get_by_role("cell").nth(2)).to_have_text("00 ff 10")
    shown = rows.locator("td:nth-child(3)").all_inner_texts()
    assert shown[1:] == ["x" * 1000 + "…", '{"a": 1}', "21.5 °C", "before"]
    page.get_by_role("button", name="Pause").click()
    client.publish("live/unseen", b"unseen", 0)
    expect(page.get_by_text("6 messages")).to_be_visible()
    expect(rows).to_have_count(5)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped.")).to_be_visible()


def test_the_advised_listener_does_not_take_the_default_one_away(start_broker: Start, open_page: Open) -> None:
    default = start_broker()
    page = open_page("#/live", role="", at=default.url)
    advice = page.locator("pre").inner_text()
    assert advice.startswith('[[listeners]]\nhost = "127.0.0.1"\nport = ') and advice.count("[[listeners]]") == 2
    advised = start_broker(config=advice.replace("8083", "0"))
    for kind in ("tcp", "ws"):
        advised.wait_for_log(f"event=listening type={kind} ")
    own = start_broker(config='[[listeners]]\nhost = "127.0.0.1"\n')
    page = open_page("#/live", role="", at=own.url)
    assert page.locator("pre").inner_text().startswith('[[listeners]]\ntype = "ws"\n')


def test_live_messages_come_back_after_a_disconnect(open_page: Open, connect: Connect, broker: BrokerProcess) -> None:
    page = open_page("#/live")
    subscribe(page, "again/#")
    api = Api(broker, "operator")
    viewer = api.get("/clients", prefix="dashboard-")["items"][0]["client_id"]
    assert api.ask("POST", f"/clients/{viewer}/disconnect")[0] == 204
    expect(page.get_by_text("disconnected by an operator")).to_be_visible()
    expect(page.get_by_text("Subscribed to again/#.")).to_be_visible()
    connect("again").publish("again/1", b"still here", 0)
    expect(page.get_by_role("cell", name="still here")).to_be_visible()


@pytest.mark.parametrize("topic_filter", ["a/#/b", "a+/b", "$share/g", "x" * 65536])
def test_a_live_filter_that_is_no_filter_stops(open_page: Open, broker: BrokerProcess, topic_filter: str) -> None:
    page = open_page("#/live")
    sockets: list[str] = []
    page.on("websocket", lambda socket: sockets.append(socket.url))
    page.clock.install()
    page.get_by_label("Topic filter").fill(topic_filter)
    expect(page.get_by_label("WebSocket listener")).not_to_have_value("")
    page.get_by_role("button", name="Start").click()
    expect(
        page.get_by_role("status").filter(has_text=re.compile("^Stopped: the broker refuses the topic filter|has at most 65535 bytes"))
    ).to_be_visible()
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_disabled()
    tried = len(sockets)
    page.clock.run_for(60_000)
    assert len(sockets) == tried <= 1
    subscribe(page, "valid/#")


def test_page_over_https_uses_a_listener_with_tls(open_page: Open, start_broker: Start, tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    tls = {"certfile": str(files.certfile), "keyfile": str(files.keyfile)}
    listeners = [{}, {"type": "ws", "port": 0}, {"type": "wss", "port": 0, **tls}]
    broker = start_broker(config={"http": tls, "listeners": listeners})
    page = open_page("#/live", role="", at=f"https://localhost:{broker.http_port}", ignore_https_errors=True)
    expect(page.get_by_label("WebSocket listener")).to_have_value(re.compile(r"^wss://localhost:\d+/mqtt$"))
    subscribe(page, "secure/#")
    with RawClient(broker.port) as client:
        client.connect("secure")
        client.publish("secure/1", b"over TLS", 1)
        expect(page.get_by_role("cell", name="over TLS")).to_be_visible()


def test_topics_show_the_last_retained_value(open_page: Open, connect: Connect) -> None:
    client = connect("topics")
    for topic, text in (("site/1/temperature", "20"), ("site/1/unit/name", "C"), ("site", "whole")):
        client.publish(topic, text.encode(), 1, True)
    page = open_page("#/topics")
    tree = page.get_by_role("region", name="Retained topics")
    tree.get_by_text("site", exact=True).click()
    tree.get_by_text("1", exact=True).click()
    tree.get_by_role("button", name="20").click()
    detail = page.get_by_role("region", name="Message")
    expect(detail.locator("pre")).to_have_text("20")
    expect(detail).to_contain_text("site/1/temperature")
    client.publish("site/1/temperature", b"30", 1, True)
    expect(tree.get_by_role("button", name="30")).to_be_visible()
    expect(detail.locator("pre")).to_have_text("30")
    press(page, "Delete message")
    expect(tree.get_by_text("temperature", exact=True)).to_have_count(0)
    expect(tree.get_by_text("unit", exact=True)).to_be_visible()


def test_a_tapped_topic_shows_its_message_on_a_phone(open_page: Open, connect: Connect) -> None:
    client = connect("phone")
    for number in range(60):
        client.publish(f"phone-{number:02}", f"value {number}".encode(), 1, True)
    page = open_page("#/topics", viewport={"width": 360, "height": 740}, has_touch=True)
    page.get_by_role("button", name="value 7", exact=True).tap()
    detail = page.get_by_role("region", name="Message")
    expect(detail.locator("pre")).to_have_text("value 7")
    expect(detail.locator("pre")).to_be_in_viewport()
    expect(detail.get_by_text("phone-07", exact=True)).to_be_in_viewport()
    for number in range(60):
        client.publish(f"phone-{number:02}", b"", 1, True)


def test_streams_show_records_and_lag(open_page: Open, connect: Connect, broker: BrokerProcess) -> None:
    client = connect("streams")
    for number in range(7):
        client.publish(f"plant/{number}", b"1", 1)
    request = urllib.request.Request(
        f"{broker.url}/streams/plant/consumers/hourly", b'{"offsets": {"0": 0, "1": 0}}',
        {"Authorization": "Bearer t-admin"}, method="PUT",
    )  # fmt: skip
    urllib.request.urlopen(request).close()
    page = open_page("#/streams", role="viewer")
    expect(page.get_by_text("7 records")).to_be_visible()
    expect(page.get_by_text("Stores plant/#; key: topic; keeps everything.")).to_be_visible()
    row = page.get_by_label("Consumers of plant").get_by_role("row", name="hourly")
    expect(row.get_by_role("cell").nth(1)).to_have_text("7")
    client.publish("plant/more", b"1", 1)
    expect(page.get_by_text("8 records")).to_be_visible()
    expect(row.get_by_role("cell").nth(1)).to_have_text("8")


def test_streams_show_groups_and_queues(open_page: Open, connect: Connect) -> None:
    start = Properties()
    start.user_properties = [("stream-offset", "earliest")]
    member, publisher = connect("member"), connect("producer")
    member.subscribe("$share/g/$stream/plant/plant/fleet/#", "$queue/jobs", options=1, properties=start)
    for number in range(6):
        publisher.publish(f"plant/fleet/{number}", b"1", 1)
        publisher.publish("job/1", b"1", 1)
    page = open_page("#/streams", role="viewer")
    group = page.get_by_label("Groups of plant").get_by_role("row", name="g plant/fleet/#").get_by_role("cell")
    expect(group.nth(2)).to_have_text("6")
    expect(group.nth(6)).to_have_text("member: 0, 1")
    queue = page.get_by_label("Queues of jobs").get_by_role("row", name="jobs").get_by_role("cell")
    expect(queue.nth(1)).to_have_text("6")
    expect(queue.nth(4)).to_have_text("1")
    for _ in range(12):
        member.send(Puback(member.expect(Publish).packet_id))
    member.ping()
    expect(group.nth(2)).to_have_text("0")
    expect(queue.nth(1)).to_have_text("0")
    publisher.publish("job/2", b"1", 1)
    expect(queue.nth(1)).to_have_text("1")


def test_page_says_when_the_broker_is_away_and_comes_back(open_page: Open, start_broker: Start) -> None:
    broker = start_broker()
    page = open_page(at=broker.url, role="")  # on the machine of the broker, without tokens
    expect(page.get_by_text("anonymous (viewer)")).to_be_visible()
    expect(figure(page, "Clients")).to_have_text("0")
    page.get_by_role("link", name="Live messages").click()
    expect(page.locator("pre", has_text='type = "ws"')).to_be_visible()  # the page tells how to add a listener
    settings = broker.config.read_text()
    broker.config.write_text("nothing = 1\n")
    os.kill(broker.pid, signal.SIGHUP)
    page.get_by_role("link", name="Alarms (1)").click()
    expect(page.get_by_role("region", name="Alarms").get_by_role("row", name="reload")).to_contain_text("nothing")
    broker.config.write_text(settings)
    os.kill(broker.pid, signal.SIGHUP)
    expect(page.get_by_text("No alarms.")).to_be_visible()
    expect(page.get_by_role("region", name="Ended alarms").get_by_role("row", name="reload")).to_be_visible()
    page.get_by_role("link", name="Overview").click()
    broker.terminate()
    expect(page.get_by_role("alert")).to_contain_text("no connection to the broker")
    broker.start()
    with RawClient(broker.port) as client:
        client.connect("back")
        expect(page.get_by_role("alert")).to_have_text("")
        expect(figure(page, "Clients")).to_have_text("1")


def test_alarms_are_acknowledged(open_page: Open, start_broker: Start) -> None:
    broker = start_broker(config={"http": {"access": ACCESS}, "alarms": {"disk_free": "1024TiB"}})
    page = open_page("#/alarms", at=broker.url)
    row = page.get_by_role("region", name="Alarms").get_by_role("row", name="disk")
    link = page.get_by_role("link", name="Alarms (1)")
    expect(link).to_have_class("alert")
    row.get_by_role("button", name="Acknowledge").click()
    expect(row).to_contain_text("by operator at")
    expect(link).not_to_have_class("alert")
    expect(open_page("#/alarms", role="viewer", at=broker.url).get_by_text("by operator at")).to_be_visible()
    broker.wait_for_log('event=admin action=acknowledge_alarm target="name=disk" user=operator')


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone_and_follows_the_scheme(open_page: Open, connect: Connect, scheme: str) -> None:
    connect("x" * 200)
    page = open_page("#/overview", viewport={"width": 360, "height": 740}, color_scheme=scheme)
    background = "getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).map(Number)"
    for name in page.get_by_role("navigation").get_by_role("link").all_inner_texts():
        page.get_by_role("navigation").get_by_role("link", name=name).click()
        expect(page.get_by_role("heading", name=name, level=1)).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        assert (max(page.evaluate(background)) < 100) is (scheme == "dark")
    page.get_by_role("button", name="Theme").click()
    assert max(page.evaluate(background)) > 200


def test_keys_change_the_view(open_page: Open) -> None:
    page = open_page()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.keyboard.press("2")
    expect(page.get_by_role("heading", name="Clients")).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_label("Part of the client id")).to_be_focused()
    page.keyboard.type("1")
    expect(page.get_by_role("heading", name="Clients")).to_be_visible()
