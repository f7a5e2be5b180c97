"""`StatusReport` on a broker core."""

from __future__ import annotations

from support.core import Core, CoreClient
from support.core_sessions import durable

from mqttbroker.admin.control.slices import SLICE
from sessions.counters import COUNTERS, Counters


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
