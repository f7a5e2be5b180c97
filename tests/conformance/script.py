"""Cases of the conformance table: what clients send, and what must come back.

Rule: a case names the statements it holds the broker to, and fails when the broker breaks one of them. Its clients,
topics (``~`` stands for a prefix of its own) and packets are its own, so that cases share a broker and run at once.
Every wait ends with a packet, a closed socket or the answer to a PINGREQ; only ``wait`` lets time pass, where the
standard counts in seconds.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union
from unittest.mock import ANY
from zlib import crc32

from conformance.wire import ALIAS, MAXIMUM_PACKET_SIZE, Packet, Property, Raw, check, read

LIMIT = 5.0  # seconds in which a broker answers, unless the case says otherwise
Step = Callable[["Run"], None]
Sendable = Union[Packet, Raw, bytes]
Props = Optional[Sequence[Property]]


# --- packets ------------------------------------------------------------------------------------------------------


def CONNECT(client: Union[str, bytes] = "~a", clean: int = 1, keep_alive: int = 0, will: Optional[Packet] = None,
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
    """Any of some reason codes, where the standard names none or several."""

    def __init__(self, *codes: int) -> None:
        self.codes = codes

    def __eq__(self, other: object) -> bool:
        return other in self.codes

    def __repr__(self) -> str:
        return "|".join(f"{code:#04x}" for code in self.codes)


BROKEN = Codes(0x81, 0x82)  # malformed or against the protocol: where the standard does not say which of the two


def having(*wanted: Property) -> Callable[[list[Property]], bool]:
    """Properties that hold all of these, in this order, among others."""

    def check(found: list[Property]) -> bool:
        rest = iter(found)
        return all(any(one == two for two in rest) for one in wanted)

    return check


def without(*ids: int) -> Callable[[list[Property]], bool]:
    return lambda found: not any(identifier in ids for identifier, _ in found)


# --- clients ------------------------------------------------------------------------------------------------------


class Link:
    """One socket and what came over it."""

    def __init__(self, port: int, version: int) -> None:
        self.version = version
        self.socket = socket.create_connection(("127.0.0.1", port), LIMIT)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""
        self.limit = 1 << 28  # the Maximum Packet Size that the client announced
        self.aliases: dict[int, str] = {}

    def sent(self, packet: Sendable) -> None:
        if isinstance(packet, Packet) and packet.kind == "CONNECT":
            self.limit = dict(packet.props or ()).get(MAXIMUM_PACKET_SIZE, self.limit)

    def next(self, seconds: float) -> Optional[Packet]:
        """The next packet, None when the broker closes instead; AssertionError when neither comes in time."""
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
                raise AssertionError(f"nothing came within {seconds} s") from None
            except ConnectionError:
                data = b""
            if not data:
                assert not self.buffer, f"closed inside a packet: {self.buffer.hex(' ')}"
                return None
            self.buffer += data


class Run:
    """One case on one broker at one version."""

    def __init__(self, case: Case, version: int, port: int) -> None:
        self.case = case
        self.version = version
        self.port = port
        self.prefix = f"k{crc32(case.name.encode())}v{version}"
        self.links: dict[str, Link] = {}
        self.notes: dict[str, Any] = {}  # what a step keeps for a later one
        self.came: list[Packet] = []

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

    def take(self, name: str, seconds: float = LIMIT) -> Optional[Packet]:
        packet = self.links[name].next(seconds)
        if packet is not None:
            self.came.append(packet)
        return packet

    def get(self, name: str, wanted: Packet, seconds: float = LIMIT) -> Packet:
        came = self.take(name, seconds)
        wanted = self.owned(wanted)
        assert came is not None, f"{name} was closed, expected {wanted}"
        assert wanted.fits(came, self.links[name].version), f"{name} got {came}, expected {wanted}"
        return came

    def owned(self, packet: Packet) -> Packet:
        """An expected packet with the names that are the case's own."""
        fields = dict(packet.fields)
        if isinstance(fields.get("topic"), str):
            fields["topic"] = self.own(fields["topic"])
        if isinstance(fields.get("props"), (list, tuple)):
            fields["props"] = [(i, self.own(v) if isinstance(v, str) else v) for i, v in fields["props"]]
        return Packet(packet.kind, **fields)


class Actor:
    """A client of a case; each method gives a step of the script."""

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, version: Optional[int] = None) -> Step:
        """A connection without a packet."""

        def step(run: Run) -> None:
            old = run.links.get(self.name)
            if old is not None:
                old.socket.close()
            run.links[self.name] = Link(run.port, version or run.version)

        return step

    def connect(self, stay: int = 0, session: Any = ANY, code: int = 0, version: Optional[int] = None, has: Any = None,
                **fields: Any) -> Step:  # fmt: skip
        """CONNECT and its CONNACK; ``stay``: a session that outlives the connection by so many seconds (v4: always)."""
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
        """These packets, in this order and with nothing between them."""

        def step(run: Run) -> None:
            for packet in packets:
                run.get(self.name, packet, within)

        return step

    def any_order(self, *packets: Packet) -> Step:
        """These packets and no other, in any order."""

        def step(run: Run) -> None:
            left = [run.owned(packet) for packet in packets]
            while left:
                came = run.take(self.name)
                assert came is not None, f"{self.name} was closed, expected {left}"
                fitting = [wanted for wanted in left if wanted.fits(came, run.links[self.name].version)]
                assert fitting, f"{self.name} got {came}, expected one of {left}"
                left.remove(fitting[0])

        return step

    def idle(self) -> Step:
        """Nothing was sent to this client before the answer to its PINGREQ."""

        def step(run: Run) -> None:
            run.send(self.name, [PINGREQ])
            run.get(self.name, PINGRESP)

        return step

    def ended(self, code: Any = ANY, within: float = LIMIT) -> Step:
        """Closed; a version 5 client is told why first."""

        def step(run: Run) -> None:
            if run.links[self.name].version >= 5:
                run.get(self.name, DISCONNECT(code), within)
            came = run.take(self.name, within)
            assert came is None, f"{self.name} got {came}, expected the end of the connection"

        return step

    def dropped(self, within: float = LIMIT) -> Step:
        """Closed without a packet."""

        def step(run: Run) -> None:
            came = run.take(self.name, within)
            assert came is None, f"{self.name} got {came}, expected the end of the connection"

        return step

    def refused(self, v4: Any, v5: Any) -> Step:
        """CONNACK with this code, None for no CONNACK, and the end of the connection."""

        def step(run: Run) -> None:
            code = v5 if run.links[self.name].version >= 5 else v4
            if code is not None:
                run.get(self.name, CONNACK(code, 0))
            self.dropped()(run)

        return step

    def cut(self) -> Step:
        """The connection is lost."""
        return lambda run: run.links[self.name].socket.close()

    def leave(self, code: int = 0, props: Props = None) -> Step:
        """DISCONNECT, after which the broker closes in silence."""
        return both(self.send(DISCONNECT(code, props)), self.dropped())

    def subscribe(self, topic_filter: str, options: int = 0, id: int = 1, props: Props = None) -> Step:
        """SUBSCRIBE and its SUBACK."""
        return both(
            self.send(SUBSCRIBE(id, (topic_filter, options), props=props)), self.get(SUBACK(id, options & 3))
        )

    def take(self, count: int) -> Step:
        """So many packets, whatever they are; ``run.came`` has them."""

        def step(run: Run) -> None:
            for _ in range(count):
                run.take(self.name)

        return step

    def publish(self, topic: str, payload: bytes = b"", qos: int = 1, retain: int = 0, props: Props = None,
                id: int = 100) -> Step:  # fmt: skip
        """PUBLISH and the rest of its exchange."""

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


def verify(what: str, holds: Callable[[Run], bool]) -> Step:
    """What cannot be said of one packet; ``run.came`` has all that came."""

    def step(run: Run) -> None:
        assert holds(run), what

    return step


def both(first: Step, second: Step) -> Step:
    def step(run: Run) -> None:
        first(run)
        second(run)

    return step


# --- the table ----------------------------------------------------------------------------------------------------


class Case:
    """``v4`` and ``v5``: numbers of the statements of 3.1.1 and 5.0, without ``MQTT-``; None: not for that version.

    ``broker``: the settings of the broker it needs, by name in ``cases.BROKERS``; ``timed``: takes seconds because
    the standard does, and runs beside the others.
    """

    def __init__(self, name: str, v4: Optional[str], v5: Optional[str], steps: Sequence[Step], broker: str = "default",
                 timed: bool = False) -> None:  # fmt: skip
        self.name = name
        self.ids = {version: tuple(f"MQTT-{n}" for n in numbers.split())
                    for version, numbers in ((4, v4), (5, v5)) if numbers is not None}  # fmt: skip
        self.steps = list(steps)
        self.broker = broker
        self.timed = timed


a, b, c, d = (Actor(name) for name in "abcd")
