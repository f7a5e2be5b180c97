"""Conformance cases: the packets that clients send, and those that they must receive.

A case names the statements that it tests. Its client ids and topics have a prefix of their own (written ``~``), so that
cases can share a broker and run concurrently. Each step ends with a packet, a closed socket or a PINGRESP; only
``wait`` lets time pass, where the standard counts in seconds.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import ANY
from zlib import crc32

from conformance.wire import ALIAS, MAXIMUM_PACKET_SIZE, Packet, Property, Raw, check, read

LIMIT = 5.0  # seconds for an answer, unless a case sets another limit
Step = Callable[["Run"], None]
Sendable = Packet | Raw | bytes
Props = Sequence[Property] | None


# --- packets ------------------------------------------------------------------------------------------------------


def CONNECT(client: str | bytes = "~a", clean: int = 1, keep_alive: int = 0, will: Packet | None = None,
            user: Any = None, password: Any = None, props: Props = None) -> Packet:  # fmt: skip
    return Packet("CONNECT", client=client, clean=clean, keep_alive=keep_alive, will=will, user=user,
                  password=password, props=props)  # fmt: skip


def CONNACK(code: Any = 0, session: Any = ANY, props: Any = None) -> Packet:
    return Packet("CONNACK", session=session, code=code, props=props)


def PUBLISH(topic: str, payload: Any = b"", qos: Any = 0, id: Any = None, retain: Any = 0, dup: Any = 0,
            props: Any = None) -> Packet:  # fmt: skip
    return Packet("PUBLISH", topic=topic, payload=payload, qos=qos, id=id, retain=retain, dup=dup, props=props)


def PUBACK(id: Any, code: Any = 0, props: Any = None) -> Packet:
    return Packet("PUBACK", id=id, code=code, props=props)


def PUBREC(id: Any, code: Any = 0, props: Any = None) -> Packet:
    return Packet("PUBREC", id=id, code=code, props=props)


def PUBREL(id: Any, code: Any = 0, props: Any = None) -> Packet:
    return Packet("PUBREL", id=id, code=code, props=props)


def PUBCOMP(id: Any, code: Any = 0, props: Any = None) -> Packet:
    return Packet("PUBCOMP", id=id, code=code, props=props)


def SUBSCRIBE(id: int, *filters: tuple[str, int], props: Props = None) -> Packet:
    return Packet("SUBSCRIBE", id=id, filters=filters, props=props)


def SUBACK(id: int, *codes: Any, props: Any = None) -> Packet:
    return Packet("SUBACK", id=id, codes=list(codes), props=props)


def UNSUBSCRIBE(id: int, *filters: str, props: Props = None) -> Packet:
    return Packet("UNSUBSCRIBE", id=id, filters=filters, props=props)


def UNSUBACK(id: int, *codes: int, props: Any = None) -> Packet:
    return Packet("UNSUBACK", id=id, codes=list(codes), props=props)


def DISCONNECT(code: Any = 0, props: Any = None) -> Packet:
    return Packet("DISCONNECT", code=code, props=props)


def AUTH(code: Any, props: Any = None) -> Packet:
    return Packet("AUTH", code=code, props=props)


PINGREQ = Packet("PINGREQ")
PINGRESP = Packet("PINGRESP")


class Codes:
    """Any of several reason codes, where the standard allows more than one."""

    def __init__(self, *codes: int) -> None:
        self.codes = codes

    def __eq__(self, other: object) -> bool:
        return other in self.codes

    def __repr__(self) -> str:
        return "|".join(f"{code:#04x}" for code in self.codes)


BROKEN = Codes(0x81, 0x82)  # where the standard does not decide between Malformed Packet and Protocol Error


def having(*wanted: Property) -> Callable[[list[Property]], bool]:
    """Properties that include these, in this order."""

    def check(found: list[Property]) -> bool:
        rest = iter(found)
        return all(any(one == two for two in rest) for one in wanted)

    return check


def without(*ids: int) -> Callable[[list[Property]], bool]:
    return lambda found: not any(identifier in ids for identifier, _ in found)


# --- clients ------------------------------------------------------------------------------------------------------


class Link:
    """One socket and the bytes received from it."""

    def __init__(self, port: int, version: int) -> None:
        self.version = version
        self.socket = socket.create_connection(("127.0.0.1", port), LIMIT)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""
        self.limit = 1 << 28  # the client's Maximum Packet Size
        self.aliases: dict[int, str] = {}

    def sent(self, packet: Sendable) -> None:
        if isinstance(packet, Packet) and packet.kind == "CONNECT":
            self.limit = dict(packet.props or ()).get(MAXIMUM_PACKET_SIZE, self.limit)

    def next(self, seconds: float) -> Packet | None:
        """The next packet; None if the broker closes; AssertionError if neither happens in time."""
        deadline = time.monotonic() + seconds
        while True:
            packet, size = read(self.buffer, self.version)
            if packet is not None:
                self.buffer = self.buffer[size:]
                check(size <= self.limit, f"{packet.kind} of {size} bytes to a client that takes {self.limit}")
                if packet.kind == "PUBLISH" and ALIAS in dict(packet.props):
                    alias = dict(packet.props)[ALIAS]
                    packet.fields["topic"] = self.aliases[alias] = packet.topic or self.aliases[alias]
                return packet
            self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self.socket.recv(1 << 18)
            except TimeoutError:
                raise AssertionError(f"received nothing within {seconds} s") from None
            except ConnectionError:
                data = b""
            if not data:
                assert not self.buffer, f"closed inside a packet: {self.buffer.hex(' ')}"
                return None
            self.buffer += data


class Run:
    """One case at one version, run against one broker."""

    def __init__(self, case: Case, version: int, port: int) -> None:
        self.case = case
        self.version = version
        self.port = port
        self.prefix = f"k{crc32(case.name.encode())}v{version}"
        self.links: dict[str, Link] = {}
        self.notes: dict[str, Any] = {}  # values that a step stores for later steps
        self.received: list[Packet] = []

    def own(self, name: str) -> str:
        return name.replace("~", self.prefix)

    def play(self) -> None:
        try:
            for number, step in enumerate(self.case.steps, 1):
                try:
                    step(self)
                except (AssertionError, ConnectionError) as error:
                    raise AssertionError(f"step {number}: {error}") from None
        finally:
            for link in self.links.values():
                link.socket.close()

    def send(self, name: str, packets: Sequence[Sendable]) -> None:
        link = self.links[name]
        parts = [p if isinstance(p, bytes) else p.encode(link.version, self.own) for p in packets]
        for packet in packets:
            link.sent(packet)
        link.socket.sendall(b"".join(parts))

    def receive(self, name: str, seconds: float = LIMIT) -> Packet | None:
        packet = self.links[name].next(seconds)
        if packet is not None:
            self.received.append(packet)
        return packet

    def get(self, name: str, wanted: Packet, seconds: float = LIMIT) -> Packet:
        received = self.receive(name, seconds)
        wanted = self.owned(wanted)
        assert received is not None, f"{name} was closed, expected {wanted}"
        assert wanted.fits(received, self.links[name].version), f"{name} got {received}, expected {wanted}"
        return received

    def owned(self, packet: Packet) -> Packet:
        """An expected packet with the case's prefix in its names."""
        fields = dict(packet.fields)
        if isinstance(fields.get("topic"), str):
            fields["topic"] = self.own(fields["topic"])
        if isinstance(fields.get("props"), (list, tuple)):
            fields["props"] = [(i, self.own(v) if isinstance(v, str) else v) for i, v in fields["props"]]
        return Packet(packet.kind, **fields)


class Actor:
    """A client of a case; each method returns a step."""

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, version: int | None = None) -> Step:
        """Open a connection and send nothing."""

        def step(run: Run) -> None:
            old = run.links.get(self.name)
            if old is not None:
                old.socket.close()
            run.links[self.name] = Link(run.port, version or run.version)

        return step

    def connect(self, stay: int = 0, session: Any = ANY, code: int = 0, version: int | None = None, has: Any = None,
                **fields: Any) -> Step:  # fmt: skip
        """CONNECT and CONNACK; ``stay``: the session expiry in seconds (version 4: never)."""
        fields.setdefault("client", "~" + self.name)
        given = list(fields.pop("props", None) or ())
        if stay:
            given.append((0x11, stay))

        def step(run: Run) -> None:
            self.open(version)(run)
            clean = fields.get("clean", 0 if stay else 1)
            run.send(self.name, [CONNECT(**{**fields, "clean": clean}, props=given)])
            run.get(self.name, CONNACK(code, session, has))

        return step

    def send(self, *packets: Sendable) -> Step:
        return lambda run: run.send(self.name, packets)

    def get(self, *packets: Packet, within: float = LIMIT) -> Step:
        """Receive exactly these packets, in this order."""

        def step(run: Run) -> None:
            for packet in packets:
                run.get(self.name, packet, within)

        return step

    def any_order(self, *packets: Packet) -> Step:
        """Receive exactly these packets, in any order."""

        def step(run: Run) -> None:
            left = [run.owned(packet) for packet in packets]
            while left:
                received = run.receive(self.name)
                assert received is not None, f"{self.name} was closed, expected {left}"
                fitting = [wanted for wanted in left if wanted.fits(received, run.links[self.name].version)]
                assert fitting, f"{self.name} got {received}, expected one of {left}"
                left.remove(fitting[0])

        return step

    def idle(self) -> Step:
        """Receive nothing before the answer to a PINGREQ."""

        def step(run: Run) -> None:
            run.send(self.name, [PINGREQ])
            run.get(self.name, PINGRESP)

        return step

    def ended(self, code: Any = ANY, within: float = LIMIT) -> Step:
        """The broker closes; a version 5 client gets DISCONNECT with this code first."""

        def step(run: Run) -> None:
            if run.links[self.name].version >= 5:
                run.get(self.name, DISCONNECT(code), within)
            received = run.receive(self.name, within)
            assert received is None, f"{self.name} got {received}, expected the end of the connection"

        return step

    def dropped(self, within: float = LIMIT) -> Step:
        """The broker closes without a packet."""

        def step(run: Run) -> None:
            received = run.receive(self.name, within)
            assert received is None, f"{self.name} got {received}, expected the end of the connection"

        return step

    def refused(self, v4: Any, v5: Any) -> Step:
        """CONNACK with this code (None: no CONNACK), then the broker closes."""

        def step(run: Run) -> None:
            code = v5 if run.links[self.name].version >= 5 else v4
            if code is not None:
                run.get(self.name, CONNACK(code, 0))
            self.dropped()(run)

        return step

    def cut(self) -> Step:
        """Lose the connection."""
        return lambda run: run.links[self.name].socket.close()

    def leave(self, code: int = 0, props: Props = None) -> Step:
        """DISCONNECT; the broker closes without a packet."""
        return both(self.send(DISCONNECT(code, props)), self.dropped())

    def subscribe(self, topic_filter: str, options: int = 0, id: int = 1, props: Props = None) -> Step:
        """SUBSCRIBE and SUBACK."""
        return both(self.send(SUBSCRIBE(id, (topic_filter, options), props=props)), self.get(SUBACK(id, options & 3)))

    def receive(self, count: int) -> Step:
        """Receive any ``count`` packets; they are in ``run.received``."""

        def step(run: Run) -> None:
            for _ in range(count):
                run.receive(self.name)

        return step

    def publish(self, topic: str, payload: bytes = b"", qos: int = 1, retain: int = 0, props: Props = None,
                id: int = 100) -> Step:  # fmt: skip
        """PUBLISH and its acknowledgements."""

        def step(run: Run) -> None:
            run.send(self.name, [PUBLISH(topic, payload, qos, id, retain, props=props)])
            if qos == 0:
                self.idle()(run)
            elif qos == 1:
                run.get(self.name, PUBACK(id, Codes(0, 0x10)))
            else:
                run.get(self.name, PUBREC(id, Codes(0, 0x10)))
                run.send(self.name, [PUBREL(id)])
                run.get(self.name, PUBCOMP(id))

        return step


def wait(seconds: float) -> Step:
    return lambda run: time.sleep(seconds)


def verify(condition: str, holds: Callable[[Run], bool]) -> Step:
    """A condition on all received packets, which are in ``run.received``."""

    def step(run: Run) -> None:
        assert holds(run), condition

    return step


def both(first: Step, second: Step) -> Step:
    def step(run: Run) -> None:
        first(run)
        second(run)

    return step


# --- the table ----------------------------------------------------------------------------------------------------


class Case:
    """One case.

    ``v4`` and ``v5`` are the statements of 3.1.1 and 5.0 that it tests, without ``MQTT-``; None: not at that version.
    ``broker`` is the name of its settings in ``cases.BROKERS``. A ``timed`` case takes seconds and runs beside others.
    """

    def __init__(self, name: str, v4: str | None, v5: str | None, steps: Sequence[Step], broker: str = "default",
                 timed: bool = False) -> None:  # fmt: skip
        self.name = name
        self.ids = {version: tuple(f"MQTT-{n}" for n in numbers.split())
                    for version, numbers in ((4, v4), (5, v5)) if numbers is not None}  # fmt: skip
        self.steps = list(steps)
        self.broker = broker
        self.timed = timed


a, b, c, d = (Actor(name) for name in "abcd")
