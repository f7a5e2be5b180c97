"""The dashboard in a headless Chromium, on a real broker: what is there is what it shows, as text, and buttons do what they say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from support.api_client import ACCESS
from support.broker_process import BrokerProcess
from support.browser import WAIT, Errors, browser
from support.raw_client import RawClient

pytestmark = pytest.mark.one_build
Connect = Callable[..., RawClient]
Open = Callable[..., Page]

HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>\"'`&amp;"

expect.set_options(timeout=WAIT)


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    config = {
        "http": {"access": ACCESS},
        "listeners": [{}, {"type": "ws", "port": 0}],
        "streams": {"plant": {"filters": ["plant/#"], "partitions": 2}},
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

    def opening(fragment: str = "", role: str = "operator", of: BrokerProcess = broker, **options: Any) -> Page:
        context = chromium.new_context(**options)
        page = context.new_page()
        opened.append((context, Errors(page)))
        page.goto(f"{of.url}/{fragment}")
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
    for number in range(50):
        publisher.publish("overview/1", str(number).encode(), 0)
    rate = page.get_by_label("Messages").locator(".legend li", has_text="received").locator("b")
    expect(rate).to_have_text(re.compile(r"^[1-9]"))
    assert page.get_by_label("Messages").locator("polyline").first.get_attribute("points")


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
    page.get_by_role("button", name="Disconnect").click()
    expect(page.get_by_text("The client was disconnected.")).to_be_visible()
    assert [getattr(packet, "reason_code", None) for packet in doomed.expect_closed()] == [0x98]


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
    expect(page.get_by_role("button", name="Delete session")).to_have_count(0)


def test_hostile_client_id_and_filter_are_text(open_page: Open, connect: Connect) -> None:
    connect(HOSTILE).subscribe(HOSTILE)
    page = open_page("#/clients")
    page.get_by_role("link", name=HOSTILE).click()
    expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()
    expect(page.get_by_role("cell", name=HOSTILE)).to_be_visible()
    assert "run" != page.title() and page.locator("main img, main script").count() == 0


def test_page_says_when_the_broker_is_away_and_comes_back(open_page: Open, start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker()
    page = open_page(of=broker, role="")  # on the machine of the broker, without tokens
    expect(page.get_by_text("anonymous (viewer)")).to_be_visible()
    expect(figure(page, "Clients")).to_have_text("0")
    broker.terminate()
    expect(page.get_by_role("alert")).to_contain_text("no connection to the broker")
    broker.start()
    with RawClient(broker.port) as client:
        client.connect("back")
        expect(page.get_by_role("alert")).to_have_text("")
        expect(figure(page, "Clients")).to_have_text("1")


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
