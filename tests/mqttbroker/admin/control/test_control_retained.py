"""`RetainedControl` on a broker core: pages, cursors, deleting, and the topics visited in one slice."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.control import count_slices, finish, retain
from support.core import Core

from mqttbroker.admin.control import retained as retained_module
from mqttbroker.admin.control.retained import PAGE_BYTES
from mqttbroker.admin.control.slices import MAX_CURSORS, MAX_PAGE, SLICE, ControlError
from mqttbroker.admin.control.views import (
    RetainedMessage,
)
from mqttbroker.codec.properties import Properties


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


def test_only_permitted_retained_messages_are_cleared(core: Core) -> None:
    for topic in ("a/1", "a/2", "b/1"):
        core.control.messages.set_retained(topic, b"x")
    assert finish(core.control.retained.clear("#", lambda topic: topic.startswith("a/"))) == 2
    assert core.control.retained.message("b/1") is not None


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
