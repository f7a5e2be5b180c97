"""Queries and commands on a running broker, for the HTTP server, ``$SYS`` and the command line: an object for each family."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mqttbroker.admin.control.bans import BanControl
from mqttbroker.admin.control.messages import MessageControl
from mqttbroker.admin.control.retained import RetainedControl
from mqttbroker.admin.control.sessions import SessionControl
from mqttbroker.admin.control.status import StatusReport
from mqttbroker.admin.control.subscriptions import SubscriptionControl
from mqttbroker.core.broker import Broker


class Controls(NamedTuple):
    """The families of one broker; each user takes its own."""

    status: StatusReport
    sessions: SessionControl
    subscriptions: SubscriptionControl
    retained: RetainedControl
    messages: MessageControl
    bans: BanControl


def controls_of(broker: Broker, monotonic: Callable[[], float]) -> Controls:
    """``monotonic`` is the clock of `Connection.accepted` and of `Bans`."""
    outbound = broker.outbound
    return Controls(
        StatusReport(broker, monotonic),
        SessionControl(broker.registry, broker.clients, broker.subscriptions, broker.lifecycle, outbound, monotonic),
        SubscriptionControl(broker.router, broker.registry, broker.rules),
        RetainedControl(broker.retained, broker.context.clock, outbound),
        MessageControl(broker.messages, broker.publisher, broker.router, broker.terms, broker.commits, outbound),
        BanControl(broker.bans, broker.clients, monotonic),
    )
