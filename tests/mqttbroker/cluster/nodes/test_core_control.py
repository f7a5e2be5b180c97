"""The lines between a node and its cores."""

from __future__ import annotations

import pytest

from mqttbroker.cluster.nodes import core_control as control
from mqttbroker.config.load import load_settings
from mqttbroker.net.link_address import LinkAddress

pytestmark = pytest.mark.one_build


def test_commands_and_status_are_the_same_on_the_other_side() -> None:
    messages = [control.Standby(), control.Own(1.5), control.Owners(3, {2: LinkAddress("host", 5, "k")}), control.Release(), control.Stop()]
    data = b"".join(map(control.encode_line, messages))
    lines = control.Lines()
    received = [*lines.feed(data[:40]), *lines.feed(data[40:])]
    assert [control.decode_command(line) for line in received] == messages
    status = control.Status(control.OWNER, lag=3, http_port=8)
    assert control.decode_status(control.encode_line(status)) == status


def test_settings_are_the_same_on_the_other_side() -> None:
    setup = control.CoreSetup(load_settings(None, {}, {}), b"12345678", "node", "host", "digest", "key")
    assert control.CoreSetup.decode(setup.encode()) == setup


def test_a_line_that_no_node_sends_is_an_error() -> None:
    for line in (b"", b"{}", b'{"do":"jump"}', b"[1]"):
        with pytest.raises(ValueError):
            control.decode_command(line)


def test_ports_follow_those_of_the_node() -> None:
    assert (control.link_port(100, 0), control.http_port(200, 3)) == (101, 204)
    assert (control.http_port(0, 3), control.http_port(None, 3)) == (0, None)
