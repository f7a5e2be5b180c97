"""PUBLISH: retained messages, properties, topic aliases, packet ids and the exchanges of each QoS."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import ANY

from conformance.script import (
    PINGREQ,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    Case,
    Codes,
    Step,
    a,
    b,
    c,
    having,
    verify,
    without,
)
from conformance.wire import (
    ALIAS,
    ALIAS_MAXIMUM,
    CONTENT_TYPE,
    CORRELATION,
    MAXIMUM_PACKET_SIZE,
    MESSAGE_EXPIRY,
    PAYLOAD_FORMAT,
    REASON,
    RECEIVE_MAXIMUM,
    RESPONSE_TOPIC,
    USER,
    Property,
)

TAKEN = Codes(0, 0x10)  # with or without a matching subscriber
# The standard lets a server that knows say that there is none; a core of a cluster appends the message to its log, and does not know.
UNMATCHED = TAKEN if os.environ.get("TEST_CLUSTER") else 0x10

# --- retained messages --------------------------------------------------------------------------------------------

RETAINED = [
    Case("retained-messages-keep-their-qos", "3.3.1-5 3.3.1-6 3.3.1-8", "3.3.1-5 3.3.1-9", [
        a.connect(), a.publish("~/0", b"zero", 0, retain=1), a.publish("~/1", b"one", 1, retain=1),
        a.publish("~/2", b"two", 2, retain=1),
        b.connect(), b.subscribe("~/0", 2), b.get(PUBLISH("~/0", b"zero", 0, retain=1)),
        b.subscribe("~/1", 2), b.get(PUBLISH("~/1", b"one", 1, 1, retain=1)),
        b.subscribe("~/2", 2), b.get(PUBLISH("~/2", b"two", 2, 2, retain=1)), b.idle(),
        c.connect(), c.subscribe("~/+", 1),
        c.any_order(PUBLISH("~/0", b"zero", 0, retain=1), PUBLISH("~/1", b"one", 1, ANY, 1),
            PUBLISH("~/2", b"two", 1, ANY, 1)),
        c.idle(),
    ]),
    Case("a-retained-message-replaces-the-last", "3.3.1-5 3.3.1-6 3.3.1-7", "3.3.1-5", [
        a.connect(), a.publish("~/t", b"1", 1, retain=1), a.publish("~/t", b"2", 2, retain=1),
        b.connect(), b.subscribe("~/t", 2), b.get(PUBLISH("~/t", b"2", 2, 1, retain=1)), b.idle(),
        a.publish("~/t", b"3", 0, retain=1), c.connect(), c.subscribe("~/t", 2),
        c.get(PUBLISH("~/t", b"3", 0, retain=1)), c.idle(),
    ]),
    Case("an-empty-payload-deletes-the-retained-message", "3.3.1-10 3.3.1-11", "3.3.1-6 3.3.1-7", [
        a.connect(), a.publish("~/t", b"1", 1, retain=1), b.connect(), b.subscribe("~/t", 1),
        b.get(PUBLISH("~/t", b"1", 1, 1, retain=1)),
        a.publish("~/t", b"", 1, retain=1), b.get(PUBLISH("~/t", b"", 1, 2)), b.idle(),
        c.connect(), c.subscribe("~/t", 1), c.idle(),
        a.publish("~/never", b"", 1, retain=1), c.subscribe("~/never", 1), c.idle(),
    ]),
    Case("retain-0-neither-stores-nor-removes", "3.3.1-12", "3.3.1-8", [
        a.connect(), a.publish("~/t", b"kept", 1, retain=1), a.publish("~/t", b"passing", 1), a.publish("~/t", b"", 1),
        a.publish("~/u", b"passing", 2), b.connect(), b.subscribe("~/+", 0), b.get(PUBLISH("~/t", b"kept", retain=1)),
        b.idle(),
    ]),
    Case("established-subscriptions-get-retain-0", "3.3.1-9", "3.3.1-12", [
        b.connect(), b.subscribe("~/t", 2), a.connect(), *(a.publish("~/t", b"x", qos, retain=1) for qos in (0, 1, 2)),
        b.any_order(PUBLISH("~/t", b"x", 0), PUBLISH("~/t", b"x", 1, ANY), PUBLISH("~/t", b"x", 2, ANY)), b.idle(),
    ]),
    Case("retain-as-published", None, "3.3.1-13 3.3.1-12", [
        b.connect(), b.subscribe("~/t", 2 | 8), a.connect(),
        a.publish("~/t", b"x", 0, retain=1), b.get(PUBLISH("~/t", b"x", 0, retain=1)),
        a.publish("~/t", b"y", 0), b.get(PUBLISH("~/t", b"y", 0)),
        a.publish("~/t", b"x", 1, retain=1), b.get(PUBLISH("~/t", b"x", 1, 1, retain=1)),
        a.publish("~/t", b"y", 1), b.get(PUBLISH("~/t", b"y", 1, 2)),
    ]),
    Case("retain-handling", None, "3.3.1-9 3.3.1-10 3.3.1-11", [
        a.connect(), a.publish("~/t", b"x", 1, retain=1), b.connect(), b.subscribe("~/t", 0x20), b.idle(),
        b.subscribe("~/t", 0x10), b.idle(), b.subscribe("~/t", 0x00), b.get(PUBLISH("~/t", b"x", retain=1)),
        b.subscribe("~/t", 0x20), b.idle(), c.connect(), c.subscribe("~/t", 0x10),
        c.get(PUBLISH("~/t", b"x", retain=1)),
        c.subscribe("~/t", 0x10), c.idle(),
    ]),
]  # fmt: skip


# --- properties and aliases ---------------------------------------------------------------------------------------

ALL: list[Property] = [
    (USER, ("k", "2")), (CONTENT_TYPE, "text/é"), (PAYLOAD_FORMAT, 1), (USER, ("", "")), (CORRELATION, b"\0\xff"),
    (USER, ("k", "1")),
    (RESPONSE_TOPIC, "~/answer"), (USER, ("k", "2")),
]  # fmt: skip


def passed_on() -> Iterator[Case]:
    ids = "3.3.2-4 3.3.2-15 3.3.2-16 3.3.2-17 3.3.2-18 3.3.2-20"
    for qos in (0, 1, 2):
        yield Case(f"properties-are-forwarded-at-qos-{qos}", None, ids, [
            a.connect(), a.subscribe("~/t", 2), b.connect(), b.publish("~/t", b"text", qos, props=ALL),
            a.get(PUBLISH("~/t", b"text", qos, 1 if qos else None, props=ALL)), a.idle(),
        ])  # fmt: skip
    yield Case("properties-are-kept-with-retained-and-queued-messages", None, ids, [
        b.connect(), b.publish("~/r", b"text", 1, 1, ALL), a.connect(stay=60), a.subscribe("~/r", 1),
        a.get(PUBLISH("~/r", b"text", 1, 1, 1, props=ALL)), a.send(PUBACK(1)), a.leave(),
        b.publish("~/r", b"queued", 2, 0, [*ALL, (MESSAGE_EXPIRY, 600)]), a.connect(stay=60, session=1),
        a.get(PUBLISH("~/r", b"queued", 1, 2, props=lambda found: found[:-1] == [
            (i, v if i != RESPONSE_TOPIC else ANY) for i,
            v in ALL] and found[-1][0] == MESSAGE_EXPIRY and 590 < found[-1][1] <= 600)),
    ])  # fmt: skip
    yield Case("no-properties-are-added", "2.3.1-5 4.3.1-1", "2.2.2-1 2.2.1-2 4.3.1-1 3.1.2-27", [
        a.connect(), a.subscribe("~/t", 2), b.connect(version=4), b.publish("~/t", b"x", 0),
        a.get(PUBLISH("~/t", b"x", 0, None, props=[])),
        b.connect(version=5), b.publish("~/t", b"y", 0), a.get(PUBLISH("~/t", b"y", 0, None, props=[])),
    ])  # fmt: skip
    yield Case("a-version-4-subscriber-gets-no-properties", "3.3.2-3", None, [
        a.connect(), a.subscribe("~/t", 1), b.connect(version=5), b.publish("~/t", b"x", 1, props=ALL),
        a.get(PUBLISH("~/t", b"x", 1, 1)),
    ])  # fmt: skip
    yield Case("a-payload-that-is-not-utf-8", None, "4.13.1-1", [
        b.connect(), b.subscribe("~/t"), a.connect(), a.send(PUBLISH("~/t", b"\xff", props=[(PAYLOAD_FORMAT, 1)])),
        a.ended(0x99),
        b.idle(),
    ])  # fmt: skip


ALIASES = [
    Case("topic-aliases-from-1-to-the-maximum", None, "3.3.2-12 3.1.2-27", [
        b.connect(), b.subscribe("~/#"), a.connect(has=having((ALIAS_MAXIMUM, 10))),
        *(step for n in range(1, 11) for step in (
            a.send(PUBLISH(f"~/{n}", b"set", props=[(ALIAS, n)])), b.get(PUBLISH(f"~/{n}", b"set")))),
        *(step for n in range(1, 11) for step in (
            a.send(PUBLISH("", b"used", n % 3, 20 + n, props=[(ALIAS, n)])), b.get(PUBLISH(f"~/{n}", b"used")))),
        a.send(PUBLISH("~/new", b"", props=[(ALIAS, 3)]), PUBLISH("", b"again", props=[(ALIAS, 3)])),
        b.get(PUBLISH("~/new"), PUBLISH("~/new", b"again")), b.idle(),
    ]),
    Case("topic-alias-above-the-maximum", None, "3.3.2-9 3.2.2-17", [
        a.connect(), a.send(PUBLISH("~/t", b"x", props=[(ALIAS, 11)])), a.ended(0x94)]),
    Case("topic-aliases-end-with-the-connection", None, "3.3.2-7", [
        a.connect(stay=60), a.send(PUBLISH("~/t", b"x", props=[(ALIAS, 1)])), a.idle(), b.connect(),
        b.send(PUBLISH("", b"x", props=[(ALIAS, 1)])), b.ended(Codes(0x82, 0x94)), a.leave(),
        a.connect(stay=60, session=1), a.send(PUBLISH("", b"x", props=[(ALIAS, 1)])), a.ended(Codes(0x82, 0x94)),
    ]),
    Case("no-topic-alias-to-a-client-without-a-maximum", None, "3.1.2-27 3.3.2-11", [
        *(step for given in ([], [(ALIAS_MAXIMUM, 0)]) for step in (
            a.connect(props=given), a.subscribe("~/t", 1), b.connect(),
            *(b.publish("~/t", b"x", n % 2) for n in range(4)),
            *(a.get(PUBLISH("~/t", b"x", n % 2, ANY, props=without(ALIAS))) for n in range(4)))),
    ]),
    Case("topic-aliases-to-a-client-within-its-maximum", None, "3.1.2-26 3.3.2-11 3.3.2-8 3.3.2-7", [
        step for _ in range(2) for step in (
            a.connect(props=[(ALIAS_MAXIMUM, 2)]), a.subscribe("~/#", 1), b.connect(),
            *(b.publish(f"~/{n % 4}", b"%d" % n, n // 4 % 2) for n in range(16)),
            *(a.get(PUBLISH(f"~/{n % 4}", b"%d" % n, n // 4 % 2, ANY, props=lambda found: all(
                i == ALIAS and 1 <= v <= 2 for i, v in found))) for n in range(16)))]),
    Case("topic-aliases-to-a-client-are-used", None, "", [
        a.connect(props=[(ALIAS_MAXIMUM, 5)]), a.subscribe("~/#"), b.connect(),
        *(step for n in range(3) for step in (b.publish("~/a/long/topic", b"%d" % n, 0),
            a.get(PUBLISH("~/a/long/topic", b"%d" % n, props=ANY)))),
        verify("a PUBLISH with an alias in place of its topic", lambda run: any(
            p.kind == "PUBLISH" and p.bytes[2:4] == b"\0\0" for p in run.received)),
    ]),
]  # fmt: skip


# --- one exchange after the other: QoS 1 and 2 ----------------------------------------------------------------------

EXCHANGES = [
    Case("the-server-acknowledges-by-qos", "3.3.4-1 2.3.1-6 4.3.2-2 4.5.0-1",
        "3.3.4-1 2.2.1-5 4.3.2-4 4.3.3-8 3.4.2-1 3.5.2-1 3.7.2-1 4.5.0-1", [
        b.connect(), b.subscribe("~/#", 2), a.connect(), a.send(PUBLISH("~/t", b"0", 0)), a.idle(),
        a.send(PUBLISH("~/t", b"1", 1, 7)), a.get(PUBACK(7)), a.send(PUBLISH("~/t", b"2", 2, 65535)),
        a.get(PUBREC(65535)), a.idle(),
        a.send(PUBREL(65535)), a.get(PUBCOMP(65535)), a.idle(),
        b.any_order(PUBLISH("~/t", b"0", 0), PUBLISH("~/t", b"1", 1, ANY), PUBLISH("~/t", b"2", 2, ANY)), b.idle(),
    ]),
    Case("short-acknowledgements", "2.3.1-6 3.6.1-1", "2.2.1-5 3.6.1-1 2.1.3-1", [
        b.connect(), b.subscribe("~/t", 2), a.connect(), a.send(PUBLISH("~/t", b"1", 1, 1)), a.get(PUBACK(1)),
        a.send(PUBLISH("~/t", b"2", 2, 2)), a.get(PUBREC(2)), a.send(PUBREL(2)), a.get(PUBCOMP(2)),
        b.any_order(PUBLISH("~/t", b"1", 1, 1), PUBLISH("~/t", b"2", 2, 2)), b.send(PUBREC(2)), b.get(PUBREL(2)),
        verify("acknowledgements of 4 bytes", lambda run: all(
            p.size == 4 for p in run.received if p.kind in ("PUBACK", "PUBREC", "PUBREL", "PUBCOMP"))),
    ]),
    Case("no-matching-subscribers", "3.3.4-1", "3.3.4-1 3.4.2-1 3.5.2-1", [
        a.connect(), a.send(PUBLISH("~/t", b"1", 1, 1)), a.get(PUBACK(1, UNMATCHED)), a.send(PUBLISH("~/t", b"1", 2, 2)),
        a.get(PUBREC(2, UNMATCHED)),
        a.send(PUBREL(2)), a.get(PUBCOMP(2)),
    ]),
    Case("pubrel-of-an-unknown-id", "4.3.3-2", "3.7.2-1 4.3.3-11",
        [a.connect(), a.send(PUBREL(77)), a.get(PUBCOMP(77, 0x92)), a.idle()]),
    Case("pubrec-of-an-unknown-id", None, "3.6.2-1",
        [a.connect(), a.send(PUBREC(77)), a.get(PUBREL(77, 0x92)), a.idle()]),
    Case("acknowledgements-of-unknown-ids", "4.8.0-1", "4.13.1-1", [
        b.connect(), b.subscribe("~/t", 1), a.connect(), a.send(PUBACK(77), PUBCOMP(78)), a.idle(),
        a.publish("~/t", b"x"),
        b.get(PUBLISH("~/t", b"x", 1, 1)),
    ]),
    Case("a-reused-qos-1-packet-id-is-a-new-message", "4.3.2-2", "4.3.2-5", [
        b.connect(), b.subscribe("~/t", 1), a.connect(), a.send(PUBLISH("~/t", b"x", 1, 5)), a.get(PUBACK(5)),
        a.send(PUBLISH("~/t", b"x", 1, 5, dup=1)), a.get(PUBACK(5)),
        b.get(PUBLISH("~/t", b"x", 1, 1), PUBLISH("~/t", b"x", 1, 2)), b.idle(),
    ]),
    Case("qos-2-is-delivered-once", "4.3.3-2", "4.3.3-8 4.3.3-10 4.3.3-11 4.3.3-12", [
        b.connect(), b.subscribe("~/t", 0), a.connect(stay=60), a.send(PUBLISH("~/t", b"1", 2, 5)),
        a.get(PUBREC(5, TAKEN)),
        a.send(PUBLISH("~/t", b"1", 2, 5, dup=1)), a.get(PUBREC(5, TAKEN)), a.cut(), a.connect(stay=60, session=1),
        a.send(PUBLISH("~/t", b"1", 2, 5, dup=1)), a.get(PUBREC(5, TAKEN)), a.send(PUBREL(5)), a.get(PUBCOMP(5)),
        a.send(PUBLISH("~/t", b"2", 2, 5)), a.get(PUBREC(5, TAKEN)), a.send(PUBREL(5)), a.get(PUBCOMP(5)),
        b.get(PUBLISH("~/t", b"1"), PUBLISH("~/t", b"2")), b.idle(),
    ]),
    Case("a-refused-qos-2-packet-id-is-free", None, "4.3.3-9", [
        b.connect(), b.subscribe("~/t", 0), a.connect(), a.send(PUBLISH("$SYS/~", b"x", 2, 5)), a.get(PUBREC(5, 0x87)),
        a.send(PUBLISH("~/t", b"y", 2, 5)), a.get(PUBREC(5)), b.get(PUBLISH("~/t", b"y")),
    ]),
    Case("incoming-dup-is-not-forwarded", "3.3.1-3 3.3.1-2", "3.3.1-3 3.3.1-2", [
        b.connect(), b.subscribe("~/t", 2), a.connect(), a.send(PUBLISH("~/t", b"1", 1, 5, dup=1)), a.get(PUBACK(5)),
        b.get(PUBLISH("~/t", b"1", 1, 1, dup=0)), a.send(PUBLISH("~/t", b"2", 2, 6, dup=1)), a.get(PUBREC(6)),
        b.get(PUBLISH("~/t", b"2", 2, 2, dup=0)), b.subscribe("~/t", 0), a.send(PUBLISH("~/t", b"3", 1, 7, dup=1)),
        a.get(PUBACK(7)),
        b.get(PUBLISH("~/t", b"3", 0, dup=0)),
    ]),
    Case("unauthorised-publish", "3.3.5-2", "3.4.2-1", [
        b.connect(), b.subscribe("$SYS/~/#", 1), a.connect(), a.send(PUBLISH("$SYS/~/x", b"no", 1, 5)),
        a.get(PUBACK(5, 0x87)),
        a.idle(), b.idle(),
    ]),
    Case("packet-ids-of-the-server", "2.3.1-4 4.3.2-1 4.3.3-1", "2.2.1-4 4.3.2-1 4.3.2-2 4.3.3-1 4.3.3-2", [
        b.connect(), b.subscribe("~/t", 2), a.connect(), *(a.publish("~/t", b"%d" % n, 1 + n % 2) for n in range(6)),
        b.any_order(*(PUBLISH("~/t", b"%d" % n, 1 + n % 2, ANY) for n in range(6))),
        verify("ids 1 to 6", lambda run: sorted(p.id for p in run.received if p.kind == "PUBLISH") == [1, 2, 3, 4, 5, 6]),
        b.send(PUBACK(1)), a.publish("~/t", b"x", 1), b.get(PUBLISH("~/t", b"x", 1, 7)),
    ]),
    Case("qos-2-to-a-subscriber", "4.3.3-1 2.3.1-6 3.6.1-1", "4.3.3-4 4.3.3-6 2.2.1-5 3.6.2-1", [
        b.connect(), b.subscribe("~/t", 2), a.connect(), a.publish("~/t", b"x", 2), b.get(PUBLISH("~/t", b"x", 2, 1)),
        b.send(PUBREC(1)), b.get(PUBREL(1)), b.send(PUBREC(1)), b.get(PUBREL(1)), b.send(PUBCOMP(1)), b.idle(),
    ]),
    Case("small-packets-to-a-client-with-a-small-maximum", None,
         "3.1.2-24 3.4.2-2 3.4.2-3 3.5.2-2 3.5.2-3 3.6.2-2 3.6.2-3 3.7.2-2 3.7.2-3 3.9.2-1 3.9.2-2 3.11.2-1 3.11.2-2", [
        a.connect(props=[(MAXIMUM_PACKET_SIZE, 24)]), a.send(SUBSCRIBE(1, ("x/" * 200 + "x", 0))),
        a.get(SUBACK(1, 0x8F)),
        a.send(PUBLISH("$SYS/~", b"x", 1, 3)), a.get(PUBACK(3, 0x87)), a.send(PUBLISH("$SYS/~", b"x", 2, 4)),
        a.get(PUBREC(4, 0x87)),
        a.send(PUBREL(9)), a.get(PUBCOMP(9, 0x92)), a.send(PUBREC(10)), a.get(PUBREL(10, 0x92)),
        a.send(UNSUBSCRIBE(11, "~/none")), a.get(UNSUBACK(11, 0x11)),
    ]),
    Case("a-suback-too-large-for-its-client", None, "3.1.2-24", [
        a.connect(props=[(MAXIMUM_PACKET_SIZE, 24)]), a.send(SUBSCRIBE(1, *((f"~/{n}", 0) for n in range(30)))),
        a.ended(0x95)]),
    Case("messages-too-large-for-their-subscriber", None, "3.1.2-24 3.1.2-25", [
        b.connect(props=[(MAXIMUM_PACKET_SIZE, 60), (RECEIVE_MAXIMUM, 1)], stay=60), b.subscribe("~/t", 2), c.connect(),
        c.subscribe("~/t"), a.connect(),
        *(step for qos in (0, 1, 2) for step in (
            a.publish("~/t", b"x" * 60, qos), c.get(PUBLISH("~/t", b"x" * 60)), a.publish("~/t", b"%d" % qos, qos),
            c.get(PUBLISH("~/t", b"%d" % qos)))),
        b.get(PUBLISH("~/t", b"0"), PUBLISH("~/t", b"1", 1, ANY)), lambda run: b.send(PUBACK(run.received[-1].id))(run),
        b.get(PUBLISH("~/t", b"2", 2, ANY)), b.idle(),
        b.connect(stay=60, session=1), b.get(PUBLISH("~/t", b"2", 2, ANY, dup=1)), b.idle(),
    ]),
    Case("reason-codes-of-clients", None, "3.4.2-1 3.5.2-1 4.4.0-2", [
        b.connect(), b.subscribe("~/t", 2), a.connect(), a.publish("~/t", b"1", 1), a.publish("~/t", b"2", 2),
        b.any_order(PUBLISH("~/t", b"1", 1, 1), PUBLISH("~/t", b"2", 2, 2)),
        b.send(PUBACK(1, 0x80, [(REASON, "no"), (USER, ("k", "v"))]), PUBREC(2, 0x97, [(REASON, "full")])), b.idle(),
    ]),
]  # fmt: skip


# --- the window ---------------------------------------------------------------------------------------------------


def windows() -> Iterator[Case]:
    yield Case("the-clients-receive-maximum", None, "3.3.4-9 4.9.0-1 4.9.0-2", [
        b.connect(props=[(RECEIVE_MAXIMUM, 3)]), b.subscribe("~/t", 2), a.connect(),
        *(a.publish("~/t", b"%d" % n, 2) for n in range(6)),
        b.get(*(PUBLISH("~/t", b"%d" % n, 2, n + 1) for n in range(3))), b.idle(),
        b.send(PUBREC(1)), b.get(PUBREL(1)), b.idle(), b.send(PUBCOMP(1)), b.get(PUBLISH("~/t", b"3", 2, 4)), b.idle(),
        b.send(PUBREC(2, 0x80)), b.get(PUBLISH("~/t", b"4", 2, 5)), b.idle(),
    ])  # fmt: skip
    yield Case("a-window-of-one", None, "3.3.4-9 4.9.0-1 4.9.0-2", [
        b.connect(props=[(RECEIVE_MAXIMUM, 1)]), b.subscribe("~/t", 1), a.connect(),
        *(a.publish("~/t", b"%d" % n, 1) for n in range(3)),
        *(step for n in range(3) for step in (b.get(PUBLISH("~/t", b"%d" % n, 1, n + 1)), b.idle(),
            b.send(PUBACK(n + 1, 0x80 * (n % 2))))),
        b.idle(),
    ])  # fmt: skip
    yield Case("a-full-window-delays-no-other-packet", None, "3.3.4-10 4.9.0-3 3.3.4-8", [
        b.connect(props=[(RECEIVE_MAXIMUM, 1)]), b.subscribe("~/t", 1), a.connect(), a.publish("~/t", b"1", 1),
        a.publish("~/t", b"2", 1),
        b.get(PUBLISH("~/t", b"1", 1, 1)), a.publish("~/t", b"zero", 0), b.get(PUBLISH("~/t", b"zero", 0)),
        b.send(SUBSCRIBE(9, ("~/u", 1)), PUBLISH("~/none", b"", 1, 8)), b.get(SUBACK(9, 1), PUBACK(8, TAKEN)),
        b.send(PINGREQ), b.get(PINGRESP),
        b.send(PUBLISH("~/none", b"", 2, 7)), b.get(PUBREC(7, TAKEN)), b.send(PUBREL(7)), b.get(PUBCOMP(7)),
    ])  # fmt: skip
    over: list[Step] = [a.send(*(PUBLISH("~/t", b"x", 2, n) for n in range(1, 6)))]
    yield Case("the-servers-receive-maximum", None, "3.3.4-7 4.13.1-1", [
        a.connect(has=having((RECEIVE_MAXIMUM, 5))), *over, a.get(*(PUBREC(n, TAKEN) for n in range(1, 6))), a.idle(),
        a.send(PUBREL(1)), a.get(PUBCOMP(1)), a.send(PUBLISH("~/t", b"x", 2, 6)), a.get(PUBREC(6, TAKEN)),
        a.send(PUBLISH("~/t", b"x", 1, 7)), a.ended(0x93),
    ], broker="small")  # fmt: skip


CASES = [*RETAINED, *passed_on(), *ALIASES, *EXCHANGES, *windows()]
