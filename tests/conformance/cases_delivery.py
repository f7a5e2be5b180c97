"""Resumed sessions, ordering, time (keep alive, expiry, will delay) and enhanced authentication."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

from conformance.script import (
    AUTH,
    CONNECT,
    PINGREQ,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    Case,
    Codes,
    Run,
    Step,
    a,
    b,
    c,
    d,
    having,
    verify,
    wait,
    without,
)
from conformance.wire import (
    AUTH_DATA,
    AUTH_METHOD,
    MAXIMUM_PACKET_SIZE,
    MESSAGE_EXPIRY,
    SERVER_KEEP_ALIVE,
    SESSION_EXPIRY,
    WILL_DELAY,
    Packet,
    Property,
    frame,
    props,
)

RESUME = {"stay": 60, "clean": 0, "session": 1}

# --- resumed sessions ---------------------------------------------------------------------------------------------

REDELIVERY = [
    Case("unacknowledged-publishes-are-sent-again", "4.4.0-1 3.3.1-1 4.3.2-1 2.3.1-3",
        "4.4.0-1 3.3.1-1 4.3.2-3 4.3.3-3", [
        a.connect(stay=60, clean=0), a.subscribe("~/t", 2), b.connect(), b.publish("~/t", b"1", 1),
        b.publish("~/t", b"2", 2),
        b.publish("~/t", b"3", 1), b.publish("~/t", b"4", 2),
        a.any_order(*(PUBLISH("~/t", b"%d" % n, 2 - n % 2, n) for n in range(1, 5))), a.cut(), a.connect(**RESUME),
        a.any_order(*(PUBLISH("~/t", b"%d" % n, 2 - n % 2, n, dup=1) for n in range(1, 5))), a.idle(),
        a.send(PUBACK(1)), a.idle(), a.cut(), a.connect(**RESUME),
        a.any_order(*(PUBLISH("~/t", b"%d" % n, 2 - n % 2, n, dup=1) for n in range(2, 5))), a.idle(),
    ]),
    Case("pubrel-is-sent-again-and-publish-is-not", "4.4.0-1 4.3.3-1", "4.4.0-1 4.3.3-5 4.3.3-6", [
        a.connect(stay=60, clean=0), a.subscribe("~/t", 2), b.connect(), b.publish("~/t", b"x", 2),
        a.get(PUBLISH("~/t", b"x", 2, 1)),
        a.send(PUBREC(1)), a.get(PUBREL(1)), a.cut(), a.connect(**RESUME), a.get(PUBREL(1)), a.idle(), a.send(PUBCOMP(1)),
        a.idle(),
        a.cut(), a.connect(**RESUME), a.idle(),
    ]),
    Case("refused-messages-are-not-sent-again", None, "4.4.0-2 4.9.0-2", [
        a.connect(stay=60), a.subscribe("~/t", 2), b.connect(), b.publish("~/t", b"1", 1), b.publish("~/t", b"2", 2),
        a.any_order(PUBLISH("~/t", b"1", 1, 1), PUBLISH("~/t", b"2", 2, 2)), a.send(PUBACK(1, 0x80), PUBREC(2, 0x80)),
        a.idle(),
        a.cut(), a.connect(**RESUME), a.idle(),
    ]),
    Case("packet-ids-in-use-are-not-reused", "2.3.1-4 4.4.0-1", "2.2.1-4 4.3.2-1 4.3.3-1", [
        a.connect(stay=60, clean=0), a.subscribe("~/t", 2), b.connect(), b.publish("~/t", b"1", 1),
        a.get(PUBLISH("~/t", b"1", 1, 1)),
        a.leave(), b.publish("~/t", b"2", 1), a.connect(**RESUME),
        a.get(PUBLISH("~/t", b"1", 1, 1, dup=1), PUBLISH("~/t", b"2", 1, 2)),
        b.publish("~/t", b"3", 1), a.get(PUBLISH("~/t", b"3", 1, 3)),
    ]),
    Case("a-takeover-during-a-delivery", "4.4.0-1 3.1.4-2", "4.4.0-1 3.1.4-3", [
        a.connect(client="~x", stay=60, clean=0), a.subscribe("~/t", 1), b.connect(), b.publish("~/t", b"1", 1),
        a.get(PUBLISH("~/t", b"1", 1, 1)), c.connect(client="~x", **RESUME), a.ended(0x8E),
        c.get(PUBLISH("~/t", b"1", 1, 1, dup=1)),
        b.publish("~/t", b"2", 1), c.get(PUBLISH("~/t", b"2", 1, 2)), c.idle(),
    ]),
    Case("qos-0-is-not-sent-again", "3.3.1-2 4.3.1-1", "3.3.1-2 4.3.1-1", [
        a.connect(stay=60, clean=0), a.subscribe("~/t", 0), b.connect(), b.publish("~/t", b"x", 2),
        a.get(PUBLISH("~/t", b"x", 0)), a.cut(),
        a.connect(**RESUME), a.idle(),
    ]),
]  # fmt: skip


# --- order --------------------------------------------------------------------------------------------------------

COUNT = 60


def in_order(run: Run) -> bool:
    """Whether the received messages of each QoS are in the order of publication."""
    received = [p for p in run.received if p.kind == "PUBLISH"]
    of_qos = [[int(p.payload) for p in received if p.qos == qos] for qos in (0, 1, 2)]
    return len(received) >= COUNT and all(numbers == sorted(numbers) and numbers for numbers in of_qos)


def all_in_order(run: Run) -> bool:
    """Whether all messages of a queue were received, those of each QoS in the order of publication."""
    received = [p for p in run.received if p.kind == "PUBLISH"]
    return all([int(p.payload) for p in received if p.qos == 1 + odd] == list(range(odd, COUNT, 2)) for odd in (0, 1))


def numbered(qos: Callable[[int], int]) -> list[Packet]:
    return [PUBLISH("~/t", b"%d" % n, qos(n), n + 1) for n in range(COUNT)]


ORDER = [
    Case("order-of-a-publisher-per-topic-and-qos", "4.6.0-5 4.6.0-6", "4.6.0-5 4.6.0-6", [
        a.connect(), a.subscribe("~/t", 2), b.connect(), b.send(*numbered(lambda n: n % 3)), a.receive(COUNT),
        verify("in the order of publication", in_order), a.idle(),
    ]),
    Case("order-of-a-queue", "4.6.0-5 4.6.0-6 4.6.0-1", "4.6.0-5 4.6.0-6 4.6.0-1", [
        a.connect(stay=60, clean=0), a.subscribe("~/t", 2), a.leave(), b.connect(),
        b.send(*numbered(lambda n: 1 + n % 2)),
        b.receive(COUNT), a.connect(**RESUME), a.receive(COUNT),
        verify("in the order of publication", all_in_order), a.cut(), lambda run: run.received.clear(), a.connect(**RESUME),
        a.receive(COUNT), verify("in order again", all_in_order),
    ]),
    Case("order-of-acknowledgements", "4.6.0-2 4.6.0-3 4.6.0-4", "4.6.0-2 4.6.0-3 4.6.0-4", [
        d.connect(stay=60, clean=0), d.subscribe("~/t", 2), d.leave(), b.connect(),
        b.send(*numbered(lambda n: 1 + n % 2)),
        b.get(*(PUBACK(n + 1) if n % 2 == 0 else PUBREC(n + 1) for n in range(COUNT))),
        b.send(*(PUBREL(n + 1) for n in range(1, COUNT, 2))), b.get(*(PUBCOMP(n + 1) for n in range(1, COUNT, 2))),
    ]),
    Case("pubrels-in-the-order-of-the-pubrecs", "4.6.0-4", "4.6.0-4", [
        a.connect(stay=60, clean=0), a.subscribe("~/t", 2), b.connect(),
        *(b.publish("~/t", b"%d" % n, 2) for n in range(5)),
        a.get(*(PUBLISH("~/t", b"%d" % n, 2, n + 1) for n in range(5))), a.send(*(PUBREC(n) for n in (3, 1, 5, 2, 4))),
        a.get(*(PUBREL(n) for n in (3, 1, 5, 2, 4))),
    ]),
]  # fmt: skip


# --- time ---------------------------------------------------------------------------------------------------------


LATE = 30


def stamp(run: Run) -> None:
    run.notes["since"] = time.monotonic()


def passed(least: float, most: float) -> Step:
    """Check the seconds since ``stamp``; on a busy machine the broker may be `LATE` seconds later than ``most``."""

    def step(run: Run) -> None:
        seconds = time.monotonic() - run.notes["since"]
        assert least <= seconds <= most + LATE, f"after {seconds:.2f} s, expected {least} to {most}"

    return step


def left(least: int, most: int) -> Callable[[list[Property]], bool]:
    return lambda found: len(found) == 1 and found[0][0] == MESSAGE_EXPIRY and least <= found[0][1] <= most


def will(payload: bytes = b"gone", **fields: Any) -> Packet:
    return PUBLISH("~/will", payload, 1, **fields)


TIMED = [
    Case("a-silent-client-is-closed-and-its-will-published", "3.1.2-24 3.1.2-8", "3.1.2-22 3.1.2-8 3.2.2-22 4.13.2-1", [
        b.connect(), b.subscribe("~/will"), stamp, a.connect(keep_alive=1, will=will(), has=without(SERVER_KEEP_ALIVE)),
        a.ended(0x8D, within=4 + LATE), passed(1.5, 3.2), b.get(PUBLISH("~/will", b"gone")),
    ], timed=True),
    Case("any-packet-restarts-keep-alive", "3.1.2-24", "3.1.2-22", [
        a.connect(keep_alive=5), *(step for packet in (PINGREQ, PUBLISH("~/t", b"x"), PINGREQ) for step in (wait(3),
            a.send(packet))),
        a.get(PINGRESP, PINGRESP), a.idle(),
    ], timed=True),
    Case("keep-alive-0-never-times-out", "3.1.2-24", "3.1.2-22",
        [a.connect(keep_alive=0), wait(3), a.idle()], timed=True),
    Case("the-servers-keep-alive-is-enforced", None, "3.1.2-22 3.1.2-21 3.2.2-21", [
        stamp, a.connect(keep_alive=60, has=having((SERVER_KEEP_ALIVE, 2))), a.ended(0x8D, within=6 + LATE), passed(3, 5.2),
    ], broker="small", timed=True),
    Case("no-resends-within-a-connection", "4.4.0-1", "4.4.0-1", [
        a.connect(stay=60, clean=0), a.subscribe("~/t", 2), b.connect(), b.publish("~/t", b"1", 1),
        b.publish("~/t", b"2", 2),
        a.any_order(PUBLISH("~/t", b"1", 1, 1), PUBLISH("~/t", b"2", 2, 2)), wait(3), a.idle(), a.send(PUBREC(2)),
        a.get(PUBREL(2)), wait(2),
        a.idle(),
    ], timed=True),
    Case("a-session-expires", None, "4.1.0-2 3.1.2-23", [
        b.connect(), a.connect(stay=1), a.subscribe("~/t", 1), a.leave(), b.publish("~/t", b"lost"), wait(2.2),
        a.connect(clean=0, session=0),
        a.idle(),
    ], timed=True),
    Case("a-session-does-not-expire-early-nor-while-connected", None, "4.1.0-1 3.1.2-23", [
        a.connect(stay=1), a.subscribe("~/t", 1), wait(2.2), b.connect(), b.publish("~/t", b"x"),
        a.get(PUBLISH("~/t", b"x", 1, 1)),
        a.leave(props=[(SESSION_EXPIRY, 60)]), wait(1.8), a.connect(clean=0, session=1),
        a.get(PUBLISH("~/t", b"x", 1, 1, dup=1)),
    ], timed=True),
    Case("expired-messages-are-not-delivered", None, "3.3.2-5 3.3.2-6", [
        a.connect(stay=60), a.subscribe("~/t", 2), a.leave(), b.connect(),
        b.publish("~/t", b"gone", 1, props=[(MESSAGE_EXPIRY, 1)]),
        b.publish("~/t", b"gone", 2, props=[(MESSAGE_EXPIRY, 1)]),
        b.publish("~/t", b"left", 1, props=[(MESSAGE_EXPIRY, 60)]),
        b.publish("~/t", b"ever", 1), wait(2.1), a.connect(**RESUME),
        a.get(PUBLISH("~/t", b"left", 1, ANY, props=left(1, 58)), PUBLISH("~/t", b"ever", 1, ANY)), a.idle(),
    ], timed=True),
    Case("messages-expire-while-the-window-is-full", None, "3.3.2-5", [
        a.connect(props=[(0x21, 1)]), a.subscribe("~/t", 1), b.connect(), b.publish("~/t", b"1"),
        b.publish("~/t", b"gone", props=[(MESSAGE_EXPIRY, 1)]), b.publish("~/t", b"3"),
        a.get(PUBLISH("~/t", b"1", 1, 1)), wait(1.3),
        a.send(PUBACK(1)), a.get(PUBLISH("~/t", b"3", 1, 3)), a.idle(),
    ], timed=True),
    Case("retained-messages-expire", None, "3.3.2-5 3.3.2-6", [
        b.connect(), b.publish("~/1", b"gone", 1, 1, [(MESSAGE_EXPIRY, 1)]),
        b.publish("~/2", b"left", 1, 1, [(MESSAGE_EXPIRY, 60)]),
        a.connect(), a.subscribe("~/2"), a.get(PUBLISH("~/2", b"left", retain=1, props=left(1, 60))), wait(2.1),
        a.subscribe("~/+"),
        a.get(PUBLISH("~/2", b"left", retain=1, props=left(1, 58))), a.idle(),
    ], timed=True),
    Case("a-qos-2-exchange-outlives-its-message", None, "4.3.3-7 4.3.3-13", [
        a.connect(stay=60), a.subscribe("~/t", 2), b.connect(),
        b.send(PUBLISH("~/t", b"x", 2, 5, props=[(MESSAGE_EXPIRY, 8)])),
        b.get(PUBREC(5)), a.get(PUBLISH("~/t", b"x", 2, 1, props=left(1, 8))), a.cut(), wait(9), b.send(PUBREL(5)),
        b.get(PUBCOMP(5)),
        a.connect(**RESUME), a.get(PUBLISH("~/t", b"x", 2, 1, dup=1, props=left(0, 7))), a.send(PUBREC(1)),
        a.get(PUBREL(1)), a.send(PUBCOMP(1)),
        a.idle(),
    ], timed=True),
    Case("a-will-waits-for-its-delay", None, "3.1.2-8", [
        b.connect(), b.subscribe("~/will"), a.connect(will=will(props=[(WILL_DELAY, 1)]), stay=60), stamp, a.cut(),
        b.get(PUBLISH("~/will", b"gone")), passed(1, 2.6), a.connect(**RESUME), a.cut(), wait(1.5), b.idle(),
    ], timed=True),
    Case("a-will-does-not-wait-longer-than-its-session", None, "3.1.2-8", [
        b.connect(), b.subscribe("~/will"), a.connect(will=will(props=[(WILL_DELAY, 60)]), stay=1), stamp, a.cut(),
        b.get(PUBLISH("~/will", b"gone")), passed(1, 2.6),
    ], timed=True),
    Case("no-will-after-a-reconnect-within-the-delay", None, "3.1.3-9 3.1.2-10", [
        b.connect(), b.subscribe("~/will"), a.connect(will=will(props=[(WILL_DELAY, 5)]), stay=60), a.cut(), wait(0.3),
        a.connect(**RESUME),
        wait(6), b.idle(), c.connect(client="~a", will=will(b"new", props=[(WILL_DELAY, 5)]), **RESUME), a.ended(0x8E),
        d.connect(client="~a", **RESUME), c.ended(0x8E), wait(6), b.idle(),
    ], timed=True),
    Case("a-wills-expiry-starts-at-its-publication", None, "3.3.2-6 3.1.2-8", [
        b.connect(), b.subscribe("~/will"), a.connect(will=will(props=[(WILL_DELAY, 1), (MESSAGE_EXPIRY, 30)]),
            stay=60), a.cut(),
        b.get(PUBLISH("~/will", b"gone", props=left(30, 30))),
    ], timed=True),
]  # fmt: skip


# --- enhanced authentication --------------------------------------------------------------------------------------


def method(name: str, data: bytes | None = None) -> list[Property]:
    return [(AUTH_METHOD, name)] + ([] if data is None else [(AUTH_DATA, data)])


SCRAM = method("SCRAM-SHA-256", b"n,,n=someone,r=fyko+d2lbbFgONRv9qkxdawL")

AUTHENTICATION = [
    Case("an-unknown-authentication-method", None, "4.12.0-1 3.2.2-7 3.2.2-8", [
        a.open(), a.send(CONNECT(props=method("NO-SUCH-METHOD", b"x"))), a.refused(None, Codes(0x8C, 0x87))]),
    Case("no-auth-without-a-method", None, "4.12.0-6 3.2.0-1", [
        a.connect(has=without(AUTH_METHOD, AUTH_DATA)), a.idle(),
        b.connect(user="u", password="p", has=without(AUTH_METHOD, AUTH_DATA)),
        b.idle(),
    ]),
    Case("auth-before-connack-without-a-method", None, "4.12.0-7", [
        a.open(), a.send(frame(0xF0, b"\x18", props(method("SCRAM-SHA-256")))), a.dropped()]),
    Case("scram-begins-with-auth-0x18", None, "4.12.0-2 4.12.0-5 3.15.2-1 3.15.2-2 3.15.2-3", [
        a.open(), a.send(CONNECT(props=[*SCRAM, (MAXIMUM_PACKET_SIZE, 160)])),
        a.get(AUTH(0x18, having((AUTH_METHOD, "SCRAM-SHA-256")))),
    ], broker="guarded"),
    Case("scram-with-a-wrong-proof", None, "4.12.0-4 3.1.4-2 4.12.0-3", [
        a.open(), a.send(CONNECT(props=SCRAM)), a.get(AUTH(0x18, ANY)),
        a.send(AUTH(0x18, method("SCRAM-SHA-256", b"c=biws,r=no,p=AAAA"))),
        a.refused(None, Codes(0x86, 0x87)),
    ], broker="guarded"),
    Case("only-auth-or-disconnect-while-authenticating", None, "3.1.2-30 3.1.4-6", [
        a.open(), a.send(CONNECT(props=SCRAM)), a.get(AUTH(0x18, ANY)), a.send(PINGREQ), a.refused(None, Codes(0x82)),
    ], broker="guarded"),
]  # fmt: skip

CASES = [*REDELIVERY, *ORDER, *TIMED, *AUTHENTICATION]
