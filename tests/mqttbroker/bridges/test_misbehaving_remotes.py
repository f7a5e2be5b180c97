"""Remote brokers that break the protocol, or the connection, in one way each."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from support.bridges import bridge_config
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.patience import PATIENCE
from support.raw_client import RawClient
from support.scripted_broker import Peer, ScriptedBroker

from mqttbroker.codec.packets import (
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
)
from mqttbroker.codec.properties import Properties

Start = Callable[..., BrokerProcess]
QUICK = {"reconnect_first": "20ms", "reconnect_longest": "20ms"}
TOPICS = [{"filter": "t/#", "direction": "both", "qos": 2}]
RETAINED = 5000


def accepted(peer: Peer) -> Iterator[Packet]:
    """Accept the bridge and its subscription; the packets after that."""
    packets = peer.welcome()
    for packet in packets:
        if isinstance(packet, Subscribe):
            peer.send(Suback(packet.packet_id, [2] * len(packet.subscriptions)))
            break
    for packet in packets:
        if isinstance(packet, Pingreq):
            peer.send(Pingresp())
        yield packet


def wait_for_end(packets: Iterator[Packet]) -> None:
    for _ in packets:
        pass


def closes_at_once(peer: Peer) -> None:
    pass


def resets_at_once(peer: Peer) -> None:
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def closes(peer: Peer) -> None:
    next(peer.packets())


def accepts_and_closes(peer: Peer) -> None:
    next(accepted(peer))


def sends_garbage(peer: Peer) -> None:
    next(peer.packets())
    peer.socket.sendall(b"\xff" * 100)
    wait_for_end(peer.packets())


def sends_a_huge_packet(peer: Peer) -> None:
    packets = peer.welcome()
    peer.socket.sendall(b"\x30\xff\xff\xff\x7f" + bytes(100_000))
    wait_for_end(packets)


def acknowledges_another_subscribe(peer: Peer) -> None:
    for packet in peer.welcome():
        if isinstance(packet, Subscribe):
            peer.send(Suback(packet.packet_id - 1, [2]))


def acknowledges_what_was_not_sent(peer: Peer) -> None:
    packets = accepted(peer)
    next(packets)  # a message of the bridge
    peer.send(Puback(70), Pubrec(71), Pubcomp(72), Pubrel(73), Pubrec(71))
    wait_for_end(packets)


def never_acknowledges(peer: Peer) -> None:
    wait_for_end(accepted(peer))


def has_much_that_is_retained(peer: Peer) -> None:
    packets = accepted(peer)
    next(packets)
    peer.socket.sendall(b"".join(Publish(f"t/{number}", b"r", 0, True).encode(5) for number in range(RETAINED)))
    wait_for_end(packets)


REASONS: dict[Callable[[Peer], None], str] = {
    closes: "the remote closes the connection",
    sends_garbage: "Malformed Packet (0x81): ",
    sends_a_huge_packet: "Packet too large (0x95): packet of ",
    acknowledges_another_subscribe: "the remote acknowledges packet id ",
    acknowledges_what_was_not_sent: "",
    never_acknowledges: "",
    has_much_that_is_retained: "",
}


def listed(broker: BrokerProcess) -> dict[str, Any]:
    return {one["name"]: one for one in json.loads(broker.get("/api/v1/bridges"))["items"]}


def test_the_broker_serves_its_clients_and_says_once_what_is_wrong(start_broker: Start) -> None:
    with ExitStack() as stack:
        sections = []
        for script in REASONS:
            port = stack.enter_context(ScriptedBroker(script)).port
            name = script.__name__
            sections.append({"name": name, "addresses": [f"mqtt://127.0.0.1:{port}"], "topics": TOPICS, **QUICK})
        here = start_broker(config={"bridges": sections})
        with RawClient(here.port) as client:
            client.connect("client")
            client.subscribe("t/#", options=0)
            for number in range(60):  # more than the window of a bridge
                assert client.publish("t", b"%d" % number, 2) == 0
            failing = {script.__name__: reason for script, reason in REASONS.items() if reason}
            wait_until(lambda: all(listed(here)[name]["failures"] > 3 for name in failing), 20.0)
            found = listed(here)
            for name, reason in failing.items():
                assert found[name]["reason"].startswith(reason), found[name]
                assert here.log.count(f"event=bridge_disconnected bridge={name} ") == 1
            # The window, and messages that wait for it.
            assert found["never_acknowledges"]["state"] == "connected"
            assert found["never_acknowledges"]["queued_messages"] >= 40
            wait_until(lambda: listed(here)["has_much_that_is_retained"]["messages_in"] >= RETAINED, 20.0)
            assert client.publish("t", b"last", 2) == 0
        here.terminate()  # the bridges are stopped before their remotes


def test_reasons_that_change_are_logged_a_few_times_only(start_broker: Start) -> None:
    def refuses(peer: Peer) -> None:
        properties = Properties()
        properties.reason_string = f"the time is {peer.number}"
        wait_for_end(peer.welcome(0x88, properties))

    with ScriptedBroker(refuses) as there:
        here = start_broker(config=bridge_config(there.port, TOPICS, **QUICK))
        wait_until(lambda: listed(here)["there"]["failures"] > 30, 20.0)
        assert here.log.count("event=bridge_disconnected") == 20
        here.terminate()


def test_each_of_several_addresses_is_logged_once(start_broker: Start) -> None:
    with unused_port() as one, unused_port() as two:
        addresses = [f"mqtt://127.0.0.1:{one}", f"mqtt://127.0.0.1:{two}"]
        here = start_broker(config=bridge_config(addresses, TOPICS, **QUICK))
        wait_until(lambda: listed(here)["there"]["failures"] > 6, 20.0)
        assert here.log.count("event=bridge_disconnected") == 2


@pytest.mark.parametrize("round_robin", [False, True])
def test_addresses_that_close_at_once_are_passed_over(start_broker: Start, round_robin: bool) -> None:
    there = start_broker()
    with ExitStack() as stack:
        scripts = (closes_at_once, resets_at_once, closes, accepts_and_closes)
        closing = [stack.enter_context(ScriptedBroker(script)) for script in scripts]
        addresses = [f"mqtt://127.0.0.1:{port}" for port in (*(each.port for each in closing), there.port)]
        options = {"reconnect_first": "1h", "reconnect_longest": "1h", "round_robin": round_robin}
        here = start_broker(config=bridge_config(addresses, TOPICS, notifications="both", **options))
        here.wait_for_log(f"event=bridge_connected bridge=there address=mqtt://127.0.0.1:{there.port} ")
        with RawClient(there.port) as reader, RawClient(here.port) as client:
            reader.connect("reader")
            reader.subscribe("t/#")
            client.connect("client")
            assert client.publish("t/1", b"1", 2) == 0
            assert reader.take().payload == b"1"
            found = listed(here)["there"]
            assert (found["connects"], found["failures"]) == (2, len(scripts))
            here.terminate()


def test_a_first_address_that_closes_at_once_does_not_get_the_bridge_back(start_broker: Start) -> None:
    there = start_broker()
    looks = threading.Semaphore(0)
    with ScriptedBroker(lambda peer: looks.release()) as first:
        addresses = [f"mqtt://127.0.0.1:{first.port}", f"mqtt://127.0.0.1:{there.port}"]
        here = start_broker(config=bridge_config(addresses, TOPICS, **QUICK))
        here.wait_for_log("event=bridge_connected ")
        for _ in range(10):
            assert looks.acquire(timeout=PATIENCE)
        found = listed(here)["there"]
        assert (found["state"], found["connects"]) == ("connected", 1)
        here.terminate()


@contextmanager
def unused_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def test_refused_filters_are_logged_once(start_broker: Start) -> None:
    def refuses(peer: Peer) -> None:
        for packet in peer.welcome():
            if isinstance(packet, Subscribe):
                peer.send(Suback(packet.packet_id, [0x87]))
                return

    with ScriptedBroker(refuses) as there:
        here = start_broker(config=bridge_config(there.port, TOPICS, **QUICK))
        wait_until(lambda: listed(here)["there"]["connects"] > 3, 20.0)
        assert here.log.count("event=bridge_filter_refused") == 1
        assert here.log.count("event=bridge_connected") == 2  # once more after the line that said why it ended
        here.terminate()


def test_a_websocket_that_is_never_opened_ends(start_broker: Start) -> None:
    waiting = threading.Event()

    def is_silent(peer: Peer) -> None:
        while peer.socket.recv(1 << 16):
            waiting.set()

    with ScriptedBroker(is_silent) as there:
        address = f"ws://127.0.0.1:{there.port}"
        here = start_broker(config=bridge_config([address], TOPICS, connect_timeout="1s", **QUICK))
        here.wait_for_log('event=bridge_disconnected .*reason="no WebSocket: no answer in time"')
        assert waiting.is_set()
        here.terminate()
