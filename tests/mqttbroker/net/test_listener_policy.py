"""The policy of a listener."""

from __future__ import annotations

import inspect

from mqttbroker.core.access.policy import AuthenticationPolicy
from mqttbroker.net.listener_policy import PolicyByListener


def test_policy_by_listener_implements_every_method_of_a_policy() -> None:
    # A new method of a policy must apply by listener, too.
    questions = {name for name, _ in inspect.getmembers(AuthenticationPolicy, callable) if not name.startswith("_")}
    assert questions and questions <= set(vars(PolicyByListener))
