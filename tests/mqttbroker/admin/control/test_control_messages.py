"""`MessageControl` on a broker core."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.control import finish
from support.core import Core
from support.core_sessions import durable

from mqttbroker.admin.control.slices import ControlError
from mqttbroker.codec.packets import Publish


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
