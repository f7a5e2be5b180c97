"""Entrances: whose word counts for whom."""

from __future__ import annotations

import inspect

from mqttbroker.core.policy import AuthenticationPolicy
from mqttbroker.net.listener_policy import PolicyByListener, common_name


def test_the_doorkeeper_leaves_no_question_to_the_default() -> None:
    # A policy that learns a new question must not have it answered by `Policy`, which allows everything.
    questions = {name for name, _ in inspect.getmembers(AuthenticationPolicy, callable) if not name.startswith("_")}
    assert questions and questions <= set(vars(PolicyByListener))


def test_common_names() -> None:
    subject = ((("organizationName", "Acme"),), (("commonName", "plant"), ("commonName", "pump-7")))
    assert common_name({"subject": subject}) == "pump-7"
    assert common_name({"subject": ((("commonName", ""),),)}) is None
    assert common_name({}) is None
