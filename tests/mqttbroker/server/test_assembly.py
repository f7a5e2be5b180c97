"""Assembly: the terms of the core are filled from the settings by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from support.core import Core

from mqttbroker.config.settings import Limits, Listener, Redirect, Settings
from mqttbroker.core.terms.terms import BrokerTerms, ListenerTerms
from mqttbroker.server.assembly import fields_of, fill, listener_terms, redirect_of
from sessions.context import DROP_OLDEST, SessionLimits

# Settings that the core has in another form.
CONVERTED = {"queue_full": DROP_OLDEST, "max_keep_alive": 61, "max_session_expiry": 62}


def unusual_limits() -> Limits:
    """Limits with distinct values, none of them the default."""
    values: dict[str, Any] = {}
    for number, field in enumerate(dataclasses.fields(Limits)):
        values[field.name] = type(field.default)(200 + number) if isinstance(field.default, (int, float)) else None
    values |= {
        "retain_available": False,
        "queue_full": "drop_oldest",
        "max_keep_alive": 61.0,
        "max_session_expiry": 62.0,
    }
    return Limits(**values)


@pytest.mark.parametrize("target", [BrokerTerms, ListenerTerms, SessionLimits])
def test_each_term_has_the_value_of_the_setting_of_its_name(tmp_path: Path, target: type[Any]) -> None:
    limits = unusual_limits()
    others = {"reveal_denials": False, "response_information": "r/%c"}
    with Core(tmp_path, "off", others=others, **dataclasses.asdict(limits)) as core:
        settings = core.settings
        found = {
            BrokerTerms: core.broker.terms,
            ListenerTerms: listener_terms(settings, settings.listeners[0], "rules"),
            SessionLimits: core.broker.context.limits,
        }[target]
    special = {"rules": "rules", "listener": "127.0.0.1:1883", "redirect": None, "max_memory": 0} | CONVERTED
    if target is ListenerTerms:
        assert (found.networks.ipv4_prefix, found.networks.ipv6_prefix) == (limits.ipv4_prefix, limits.ipv6_prefix)
        special |= {"networks": found.networks, "of_bridges": False, "certificate_identity": ("cn",), "ignores_username_query": False}
    expected = {
        name: special[name] if name in special else getattr(limits, name, getattr(settings, name, None)) for name in fields_of(target())
    }
    assert len(expected) > 4 and {name: getattr(found, name) for name in expected} == expected


def test_a_term_without_a_setting_is_an_error() -> None:
    with pytest.raises(AttributeError, match="durability"):
        fill(BrokerTerms(), Redirect())


def test_every_limit_of_a_listener_is_a_limit_of_all() -> None:
    names = {field.name for field in dataclasses.fields(Listener) if "limit" in field.metadata}
    assert names <= {field.name for field in dataclasses.fields(Limits)}
    settings = Settings(listeners=(Listener(receive_maximum=7),))
    assert listener_terms(settings, settings.listeners[0]).receive_maximum == 7
    assert listener_terms(settings, Listener()).receive_maximum == settings.limits.receive_maximum


def test_the_redirect_has_the_reason_code_for_its_permanence() -> None:
    redirect = redirect_of(Redirect("other:1883", True, 7))
    assert redirect is not None and redirect_of(Redirect()) is None
    assert (redirect.server_reference, redirect.reason_code, redirect.rate) == ("other:1883", 0x9D, 7)
