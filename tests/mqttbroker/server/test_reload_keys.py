"""Every setting: a reload puts a changed one in force, or names it as one that needs a restart."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.manual_loop import Loop

from mqttbroker.auth.security import Security
from mqttbroker.config.in_force import flatten
from mqttbroker.config.setting_kinds import Choice, Kind, OrNone
from mqttbroker.config.settings import HttpAccess, Limits, Listener, Redirect, Settings, Stream
from mqttbroker.logs.levels import LogLevels
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.listeners import OpenListener
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.shared_admission import broker_admission
from mqttbroker.server.assembly import build_broker, listener_terms
from mqttbroker.server.reload import Reloader, named_key, with_key
from mqttbroker.server.reloaded_parts import ReloadedAdmission, ReloadedLimits, ReloadedListeners, ReloadedLog, ReloadedSecurity
from mqttbroker.system.service_manager import ServiceManager
from sessions.store.interface import nothing_recovered

BASE = Settings(
    listeners=(Listener(),),
    streams=(Stream("s", ("a/#",)),),
    limits=Limits(max_memory=1 << 30),
    redirect=Redirect("other.example"),
    password_file=Path("/dev/null"),
)

# Other values of keys for which `other` has none.
OTHER: dict[str, Any] = {
    "limits.ipv4_prefix": 24,
    "limits.ipv6_prefix": 48,
    "limits.max_memory": 1 << 31,
    "limits.max_session_expiry": 60.0,
    "bans.exempt": ("10.0.0.0/8",),
    "http.access": (HttpAccess("a", "viewer", "token"),),
    "http.port": 1,
    "log.levels": (("store", "debug"),),
    "listeners.0.certificate_identity": ("san_dns",),
    "listeners.0.client_id_from": "%u",
    "listeners.0.username_query": "ignore",
    "listeners.0.allow_anonymous": True,
    "streams.0.filters": ("b/#",),
    "streams.0.seal": True,
    "streams.0.name": "other",
}

# Keys whose value in `Reloader.settings` the server, its HTTP server, the reload of certificates and `StreamControl` read when
# they need it.
READ_WHEN_NEEDED = {
    "max_created_streams", "streams.0.filters", "streams.0.retention_age", "streams.0.retention_bytes",
    "streams.0.segment_bytes", "streams.0.segment_age", "streams.0.seal", "streams.0.compact", "streams.0.compact_tombstones",
    "streams.0.compact_dirty_percent", "streams.0.compact_keys", "streams.0.dedup", "streams.0.dedup_producers",
    "log.levels", "sys_interval", "sys_client_events", "worker_timeout", "alarms.disk_free", "alarms.certificate_expiry", "alarms.bridge_down",
    "crl.refresh_interval", "crl.expiry_warning", "http.token", "http.token_file", "http.access",
    "listeners.0.cafile", "listeners.0.certfile", "listeners.0.client_certificate", "listeners.0.crlfile",
    "listeners.0.keyfile", "listeners.0.tls_version",
}  # fmt: skip


def kinds() -> dict[str, Kind[Any]]:
    """The kind of each key of `flatten`."""
    found: dict[str, Kind[Any]] = {}
    sections = {"": Settings, "listeners.0.": Listener, "streams.0.": Stream}
    for field in dataclasses.fields(Settings):
        if "section" in field.metadata:
            sections[f"{field.name}."] = field.metadata["section"]
    for prefix, section in sections.items():
        for field in dataclasses.fields(section):
            if "kind" in field.metadata:
                found[prefix + field.name] = field.metadata["kind"]
    return found


def other(key: str, value: Any, kind: Any) -> Any:
    """A value that differs from that in `BASE`."""
    if key in OTHER:
        return OTHER[key]
    if isinstance(kind, Choice):
        return next(word for word in kind.words if word != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str) and isinstance(kind, OrNone):
        return value + "x"
    name = key.rpartition(".")[2]
    if key.startswith("listeners.") and hasattr(BASE.limits, name):
        return getattr(BASE.limits, name) + 1
    if isinstance(value, tuple):
        return (*value, "x")
    return Path("other") if isinstance(value, Path) or "file" in key or key.endswith("path") else "other"


ROOTS = ("mqttbroker", "sessions")
VOLATILE = {"now", "monotonic", "_decoys"}  # the last are random


def state(*roots: Any) -> dict[tuple[Any, ...], Any]:
    """The plain values in the attributes of the broker's objects, by path."""
    found: dict[tuple[Any, ...], Any] = {}
    seen: set[int] = set()
    left: list[tuple[tuple[Any, ...], Any]] = [((index,), root) for index, root in enumerate(roots)]
    while left:
        path, item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        for name in dir(item):
            if name.startswith("__") or name in VOLATILE:
                continue
            value = getattr(item, name, None)
            if isinstance(value, (bool, int, float, str, tuple, type(None))):
                found[*path, name] = value
            elif isinstance(value, list):
                found[*path, name] = [part if isinstance(part, (int, str)) else str(type(part)) for part in value]
                left += [((*path, name, index), part) for index, part in enumerate(value) if of_broker(part)]
            elif of_broker(value):
                left.append(((*path, name), value))
    return found


def of_broker(value: Any) -> bool:
    module = type(value).__module__ or ""
    return module.partition(".")[0] in ROOTS and not module.startswith("mqttbroker.config") and not callable(value)


class Plant:
    """A broker without sockets, and a reloader whose configuration a test replaces."""

    def __init__(self) -> None:
        security = Security(BASE)
        broker = build_broker(BASE, nothing_recovered(), security)
        scheduler = FlushScheduler(broker, Loop(), lambda _: None, True)
        sockets = OpenSockets(1000, BASE.limits.max_half_open, broker.outbound.counters)
        terms = listener_terms(BASE, BASE.listeners[0])
        policy = ListenerPolicy(security.policy, terms, None, broker.outbound.counters)
        shared = broker_admission(scheduler, sockets)
        listener = OpenListener(BASE.listeners[0], policy, shared)
        self.roots = (broker, security, sockets, policy)
        levels = LogLevels(asyncio.new_event_loop(), BASE.log.level, {})
        self.reloader = Reloader(lambda: BASE, BASE, security, ServiceManager({}))
        self.reloader.register(
            ReloadedLog(levels),
            ReloadedLimits(broker),
            ReloadedAdmission(shared),
            ReloadedSecurity(security, broker),
            ReloadedListeners([listener], security),
        )

    def reload(self, settings: Settings) -> None:
        """Reload the settings without the files that they name: these have tests of their own."""
        assert self.reloader._apply_settings(settings).problems == []

    def state(self) -> dict[tuple[Any, ...], Any]:
        found = state(*self.roots)
        found["level",] = logging.getLogger().level
        return found


@pytest.fixture(scope="module")
def plant() -> Iterator[Plant]:
    level = logging.getLogger().level
    yield Plant()
    logging.getLogger().setLevel(level)


def problem(plant: Plant, key: str, lines: list[str]) -> str:
    """What is wrong with the reload of a changed key; "" if nothing is."""
    plant.reload(BASE)
    before = plant.state()
    values = flatten(BASE)
    value = other(key, values[key], kinds().get(key))
    if value == values[key]:
        return "the test has no other value"
    lines.clear()
    plant.reload(with_key(BASE, key, value))
    name = "streams.s" if key == "streams.0.name" else named_key(key, BASE)
    applied = any(line.startswith(f"event=setting_changed key={name} ") for line in lines)
    named = f"event=restart_needed key={name}" in lines
    if applied == named or applied != plant.reloader._is_reloadable(key, value):
        return f"logged: {lines}"
    if flatten(plant.reloader.settings)[key] != (value if applied else values[key]):
        return "another value is in force"
    changed = plant.state() != before
    if named and changed:
        return "needs a restart, but something has changed"
    if applied and not changed and key not in READ_WHEN_NEEDED:
        return "no object of the broker has the value"
    return ""


def test_each_changed_key_is_applied_or_named(plant: Plant) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("mqttbroker")
    log.addHandler(handler)
    try:
        found = {key: problem(plant, key, lines) for key in flatten(BASE)}
    finally:
        log.removeHandler(handler)
    assert {key: text for key, text in found.items() if text} == {} and len(found) > 150


def test_a_reload_without_a_change_changes_nothing(plant: Plant) -> None:
    plant.reload(BASE)
    before = plant.state()
    plant.reload(BASE)
    assert plant.state() == before and len(before) > 300


def test_a_reload_that_failed_does_not_prevent_the_next(plant: Plant) -> None:
    reread = plant.reloader._reread

    def defective_once() -> Settings:
        plant.reloader._reread = reread
        raise ZeroDivisionError

    async def reload_twice() -> None:
        plant.reloader._reread = defective_once
        failed, again = plant.reloader.reload(), plant.reloader.reload()
        await asyncio.wait([failed, again])
        assert isinstance(failed.exception(), ZeroDivisionError) and again.exception() is None

    asyncio.run(reload_twice())
