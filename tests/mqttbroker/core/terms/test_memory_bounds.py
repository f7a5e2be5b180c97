"""Memory that clients can make the broker keep: cached routes, decisions, filters; ended sessions are freed at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.core import AcceptAll, Core, CoreClient, MemoryWire
from support.core_sessions import durable

from mqttbroker.auth.acl import parse_acl
from mqttbroker.codec.packets import Connect, Publish, Suback, Subscribe, Subscription, Will
from mqttbroker.core.access.policy import Rules
from mqttbroker.core.client import connection as connection_module
from mqttbroker.core.routing.router import Router
from mqttbroker.core.sessions.authentications import ConnectAuthentication
from mqttbroker.core.sessions.pending_connect import PendingConnect
from sessions.session import Session


def route_sizes(router: Router) -> int:
    return sum(route.size for route in router.cache.values())


def restrict(core: Core) -> None:
    """Allow clients that connect from now on nothing but topics below ok/."""
    rules = Rules(parse_acl("topic readwrite ok/#\n", "rules"), {})
    broker = core.broker
    broker.rules = broker.publisher.rules = broker.subscriptions.rules = broker.router.rules = rules
    broker.connect_handler.rules = rules


# --- the route cache ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["x", "é", "😀"])
def test_the_route_cache_is_bounded_in_bytes(tmp_path: Path, text: str) -> None:
    with Core(tmp_path, route_cache_bytes=1 << 20) as core:
        router = core.broker.router
        core.connect("sub").subscribe("#")
        publisher = core.connect("pub")
        for number in range(100):
            publisher.send(Publish(text * 15_000 + str(number), b"", qos=0))
            assert router.cached_bytes == route_sizes(router) <= 1 << 20
        assert router.cache


def test_the_newest_route_is_cached_even_if_it_is_larger_than_the_cache(tmp_path: Path) -> None:
    with Core(tmp_path, route_cache_bytes=1024) as core:
        publisher = core.connect("pub")
        for number in range(3):
            publisher.send(Publish("x" * 10_000 + str(number), b"", qos=0))
            assert len(core.broker.router.cache) == 1


def test_a_change_takes_the_bytes_of_its_routes_off_the_total(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        router = core.broker.router
        publisher = core.connect("pub")
        subscriber = core.connect("sub")
        for topic_filter in ("a/1", "a/+", "#"):
            subscriber.subscribe(topic_filter)
            for number in range(3):
                publisher.send(Publish(f"a/{number}", b"", qos=0))
            assert router.cached_bytes == route_sizes(router) > 0
        publisher.send(Publish("b", b"", qos=0))
        assert router.cached_bytes == route_sizes(router)


def test_refused_topics_are_not_cached(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        restrict(core)
        publisher = core.connect("pub")
        for topic in ("no/1", "$SYS/x", "$share/g/x", "no/" + "x" * 1000):
            assert publisher.publish(topic, b"", 1) >= 0x80
            assert not core.broker.router.cache
        assert publisher.publish("ok/1", b"", 1) < 0x80
        assert list(core.broker.router.cache) == [b"ok/1"]
        # Topics that the broker alone publishes to, and the topics of wills, are not cached either.
        core.broker.messages.publish_status("$SYS/broker/x", b"1", False)
        core.connect("will", will=Will("ok/will", b"x"))
        assert list(core.broker.router.cache) == [b"ok/1"]


def test_decisions_of_all_clients_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if connection_module.__file__ is None or not connection_module.__file__.endswith(".py"):
        pytest.skip("the limit is compiled in")
    monkeypatch.setattr(connection_module, "MAX_DECISION_BYTES", 2000)
    with Core(tmp_path) as core:
        restrict(core)
        outbound = core.broker.outbound
        clients = [core.connect(name) for name in "ab"]
        for client in clients:
            for number in range(20):
                assert client.publish(f"no/{number}", b"", 1) >= 0x80
        remembered = [len(client.connection.may_publish) for client in clients]
        assert 0 < outbound.decision_bytes <= 2000 and sum(remembered) == outbound.decision_bytes // 154
        core.broker.rules_changed()
        assert outbound.decision_bytes == 0
        assert clients[0].publish("no/1", b"", 1) >= 0x80 and outbound.decision_bytes > 0
        for client in clients:
            client.socket.close()
        assert outbound.decision_bytes == 0


# --- filters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version, code", [(5, 0x97), (4, 0x80)])
def test_filters_of_a_client_are_bounded_in_bytes(tmp_path: Path, version: int, code: int) -> None:
    with Core(tmp_path, max_subscription_bytes_per_client=10_000) as core:
        client = core.connect("sub", version)

        def subscribe(*filters: str) -> list[int]:
            client.send(Subscribe(1, [Subscription(name, 0) for name in filters]))
            return client.expect(Suback).reason_codes

        assert subscribe("a" * 4000, "b" * 4000, "c" * 4000, "$share/g/" + "d" * 4000, "e") == [0, 0, code, code, 0]
        assert subscribe("a" * 4000, "b" * 4000) == [0, 0]  # replaced
        client.unsubscribe("a" * 4000)
        assert subscribe("c" * 4000) == [0]
        session = client.connection.session
        assert session is not None and session.filter_bytes == sum(50 + len(name) for name in session.subscriptions)


def test_filters_of_a_restored_session_count(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        durable(core, "sub").subscribe("a/#", options=1)
        core.kill()
        assert core.broker.registry.sessions["sub"].filter_bytes == 53


# --- ended sessions -----------------------------------------------------------------------------------------------


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def ended_sessions(core: Core) -> list[str]:
    """The client ids of the broker's ended sessions that are still in memory."""
    sessions = [found for found in gc.get_objects() if isinstance(found, Session) and found.context is core.broker.context]
    return [session.client_id for session in sessions if session.ended]


def end(core: Core, client: CoreClient) -> None:
    """End the client's session, and forget the client."""
    if client.connection.session is not None and client.connection.session.expiry_interval:
        client.connection.session.expiry_interval = 0
    client.socket.close()
    client.socket = None  # it refers to the client
    core.clients.remove(client)
    core.broker.outbound.flush_queue.clear()  # there is no flush without a socket


@pytest.mark.parametrize("make", [Core.connect, durable], ids=["transient", "persistent"])
def test_an_ended_session_is_freed_without_the_garbage_collector(tmp_path: Path, make: Any) -> None:
    with Core(tmp_path) as core, no_collection():
        publisher = core.connect("pub")
        publisher.publish("r/1", b"retained", 1, retain=True)
        for number in range(5):
            client = make(core, f"c{number}")
            client.subscribe("r/#", options=1)
            client.subscribe(f"own/{number}", options=2)
            client.subscribe("$share/g/s/#", options=1)
            publisher.publish(f"own/{number}", b"x", 2)
            publisher.publish("s/1", b"x", 1)
            publisher.publish("r/1", b"x", 1)
            end(core, client)
            del client
        core.advance(1)
        core.settle()
        assert not ended_sessions(core)


def test_a_session_that_ends_with_retained_messages_pending_is_freed(tmp_path: Path) -> None:
    with Core(tmp_path) as core, no_collection():
        publisher = core.connect("pub")
        for number in range(300):
            publisher.publish(f"r/{number}", b"retained", 1, retain=True)
        client = core.connect("c")
        client.connection.ready = False
        client.subscribe("r/#", options=1)
        assert client.connection.session is not None and client.connection.session.pending_retained
        end(core, client)
        del client
        core.settle()
        assert not ended_sessions(core)


def test_cached_routes_and_remembered_ones_do_not_keep_ended_sessions(tmp_path: Path) -> None:
    with Core(tmp_path) as core, no_collection():
        publishers = [core.connect(f"pub{number}") for number in range(30)]
        for number in range(30):
            client = core.connect(f"c{number}")
            client.subscribe("t/#")
            for publisher in publishers:  # each remembers its last route
                publisher.publish(f"t/{publisher.connection.client_id}", b"x", 1)
            publishers[0].publish(f"t/never-again/{number}", b"x", 1)
            end(core, client)
            del client
        assert len(core.broker.router.cache) <= 60
        core.advance(1)
        core.advance(1)
        assert not ended_sessions(core)
        assert publishers[3].publish("t/pub3", b"x", 1) == 0x10  # and its route is right


def test_an_abandoned_enhanced_authentication_is_freed(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = core.client()
        connection = client.connection
        handler = core.broker.connect_handler
        pending = PendingConnect(handler, connection, Connect("c", 5))
        # It refers to the connection.
        connection.authentication = ConnectAuthentication(handler.logins, pending, MemoryWire(core))
        connection.authenticator = AcceptAll()
        client.socket.close()
        assert connection.authentication is None and connection.authenticator is None
