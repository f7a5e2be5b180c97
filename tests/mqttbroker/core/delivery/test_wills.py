"""Wills in the store: rows of sessions that end with their connection, which only a restart reads."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.core import Core, CoreClient

from mqttbroker.codec.packets import Connack, Connect, Publish, Will
from mqttbroker.codec.properties import Properties
from sessions.row_kinds import RETAINED, SESSIONS


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    with Core(tmp_path) as core:
        yield core


def rows(core: Core) -> int:
    """The stored sessions, after a kill."""
    core.kill()
    with closing(sqlite3.connect(core.directory / "core.db")) as database:
        count: int = database.execute("SELECT count(*) FROM sessions").fetchone()[0]
    return count


def retained(core: Core) -> dict[str, bytes]:
    found = core.broker.retained.scan("will/#")
    return {message.topic: message.payload for message in found.read(1000, core.broker.outbound.clock.now)}


def with_will(core: Core, client_id: str = "c", delay: int = 0, version: int = 5) -> CoreClient:
    properties = Properties()
    if version == 5:
        properties.will_delay_interval = delay
    return core.connect(client_id, version, will=Will(f"will/{client_id}", b"gone", 1, True, properties=properties))


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("delay", [0, 60])
def test_a_kill_publishes_the_wills_of_sessions_that_end_with_it(core: Core, version: int, delay: int) -> None:
    """Also before their delay has passed, as their sessions end [MQTT-3.1.2-8]."""
    for number in range(3):
        with_will(core, f"c{number}", delay, version)
    core.advance(1)
    assert rows(core) == 3
    core.advance(0)
    assert retained(core) == {f"will/c{number}": b"gone" for number in range(3)}
    assert len(core.broker.registry) == 0 and core.broker.registry.context.will_bytes == 0
    assert rows(core) == 0


def test_no_row_stays_of_a_client_that_leaves_or_whose_will_was_published(core: Core) -> None:
    leaving, lost = with_will(core, "left"), with_will(core, "lost")
    core.advance(1)
    leaving.disconnect()
    lost.close()
    with_will(core, "taken over")
    with_will(core, "taken over").disconnect()
    assert rows(core) == 0
    assert set(retained(core)) == {"will/lost", "will/taken over"}


def test_a_reconnect_after_a_kill_publishes_the_old_will_first(core: Core) -> None:
    with_will(core)
    core.advance(1)
    core.kill()
    again = with_will(core)
    assert not again.connack.session_present and retained(core) == {"will/c": b"gone"}
    again.send(Publish("will/c", b"back", 1, True, False, 1))
    again.disconnect()
    assert rows(core) == 0 and retained(core) == {"will/c": b"back"}


def test_connack_does_not_wait_for_the_will_but_no_later_message_is_stored_without_it(core: Core) -> None:
    core.eager = False
    client = core.client()
    client.send(Connect("c", 5, True, will=Will("will/c", b"gone", 1, True)))
    assert client.expect(Connack).reason_code == 0
    client.send(Publish("will/c", b"online", 1, True, False, 1))
    write_set = core.take()
    assert write_set is not None and len(write_set.saved(SESSIONS)) == len(write_set.saved(RETAINED)) == 1
    core.commit()
    core.kill()
    core.advance(0)
    assert retained(core) == {"will/c": b"gone"}


def test_a_will_whose_commit_failed_is_stored_by_the_next(core: Core) -> None:
    core.eager = False
    client = core.client()
    client.send(Connect("c", 5, True, will=Will("will/c", b"gone", 1, True)))
    assert not core.commit(), "it waits for another commit"
    core.advance(1)
    assert core.fail() and core.commit()
    assert rows(core) == 1
