"""SUBSCRIBE, UNSUBSCRIBE, topic filters, subscription identifiers and shared subscriptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import ANY

from conformance.script import (
    PUBACK,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    Case,
    Step,
    a,
    b,
    c,
    d,
    verify,
)
from conformance.wire import SUBSCRIPTION_ID, Property, frame, none, s

TOO_DEEP = "~/" + "x/" * 200 + "x"  # valid, and deeper than the broker allows

SUBACKS = [
    Case("suback-has-a-code-for-each-filter-in-order", "3.8.4-1 3.8.4-2 3.8.4-4 3.8.4-5 3.9.3-1 3.9.3-2 2.3.1-7",
         "3.8.4-1 3.8.4-2 3.8.4-5 3.8.4-6 3.8.4-7 3.9.3-1 3.9.3-2 2.2.1-6", [
        a.connect(version=4), a.send(SUBSCRIBE(513, ("~/a", 2), (TOO_DEEP, 1), ("~/b", 0), ("~/c", 1))),
        a.get(SUBACK(513, 2, 0x80, 0, 1)),
        a.connect(version=5), a.send(SUBSCRIBE(65535, ("~/a", 2), (TOO_DEEP, 1), ("~/b", 0), ("~/c", 1))),
        a.get(SUBACK(65535, 2, 0x8F, 0, 1)), a.idle(),
        b.connect(), *(b.publish(f"~/{t}", t.encode(), 2) for t in "abc"),
        a.any_order(PUBLISH("~/a", b"a", 2, ANY), PUBLISH("~/b", b"b"), PUBLISH("~/c", b"c", 1, ANY)),
    ]),
    Case("several-filters-equal-several-subscribes", "3.8.4-4", "3.8.4-5", [
        b.connect(), b.publish("~/t", b"kept", 1, 1), a.connect(),
        a.send(SUBSCRIBE(1, ("~/t", 0), ("~/u", 1), ("~/+", 1))),
        a.get(SUBACK(1, 0, 1, 1)), a.any_order(PUBLISH("~/t", b"kept", 0, retain=1), PUBLISH("~/t", b"kept", 1, 1, 1)),
        b.publish("~/t", b"x", 1), a.get(PUBLISH("~/t", b"x", 1, ANY)), a.idle(),
    ]),
    Case("a-repeated-filter-in-a-subscribe", "3.8.4-4", "3.8.4-5", [
        b.connect(), b.publish("~/t", b"kept", 2, 1), a.connect(), a.send(SUBSCRIBE(1, ("~/t", 2), ("~/t", 0))),
        a.get(SUBACK(1, 2, 0)), a.any_order(PUBLISH("~/t", b"kept", 2, 1, 1), PUBLISH("~/t", b"kept", 0, retain=1)),
        b.publish("~/t", b"x", 2), a.get(PUBLISH("~/t", b"x", 0)), a.idle(),
    ]),
    Case("the-same-filter-replaces-the-subscription", "3.8.4-3", "3.8.4-3 3.8.4-4", [
        b.connect(), b.publish("~/t", b"kept", 1, 1), a.connect(), a.subscribe("~/t", 2),
        a.get(PUBLISH("~/t", b"kept", 1, 1, 1)),
        b.publish("~/t", b"1", 2), a.get(PUBLISH("~/t", b"1", 2, 2)), a.subscribe("~/t", 0),
        a.get(PUBLISH("~/t", b"kept", 0, retain=1)),
        b.publish("~/t", b"2", 2), a.get(PUBLISH("~/t", b"2", 0)), a.idle(), a.send(PUBREC(2)), a.get(PUBREL(2)),
    ]),
    Case("replacing-a-subscription-loses-no-message", "3.8.4-3", "3.8.4-4", [
        b.connect(), a.connect(), a.subscribe("~/t", 1),
        b.send(*(PUBLISH("~/t", b"%d" % n, 1, n) for n in range(1, 21))),
        a.send(*(SUBSCRIBE(n, ("~/t", 1)) for n in range(1, 6))), b.get(*(PUBACK(n) for n in range(1, 21))),
        b.publish("~/t", b"last"), a.receive(26), a.idle(),
        verify("each message once, in order", lambda run: [p.payload for p in run.received if p.kind == "PUBLISH"] == [
            *(b"%d" % n for n in range(1, 21)), b"last"]),
    ]),
    Case("delivery-qos-is-the-lower-one", "3.8.4-6", "3.8.4-8", [
        b.connect(), a.connect(), *(step for granted in (0, 1, 2) for step in (a.subscribe(f"~/{granted}", granted), *(
            step for qos in (0, 1, 2) for step in (b.publish(f"~/{granted}", b"x", qos), a.get(
                PUBLISH(f"~/{granted}", b"x", min(qos, granted), ANY if min(qos, granted) else None)))))), a.idle(),
    ]),
    Case("an-accepted-message-goes-to-every-subscriber", "4.5.0-1", "4.5.0-1", [
        a.connect(), a.subscribe("~/t", 0), b.connect(), b.subscribe("~/#", 1), c.connect(stay=60),
        c.subscribe("~/+", 2), c.leave(),
        d.connect(version=4), d.publish("~/t", b"x", 2), a.get(PUBLISH("~/t", b"x")), b.get(PUBLISH("~/t", b"x", 1, 1)),
        c.connect(stay=60), c.get(PUBLISH("~/t", b"x", 2, 1)),
    ]),
    Case("no-local", None, "3.8.3-3", [
        a.connect(), a.send(SUBSCRIBE(1, ("~/t", 1 | 4))), a.get(SUBACK(1, 1)), b.connect(),
        a.publish("~/t", b"mine", 1), a.publish("~/t", b"mine", 0), a.idle(),
        b.publish("~/t", b"other", 1), a.get(PUBLISH("~/t", b"other", 1, 1)), a.send(PUBACK(1)),
        a.subscribe("~/t", 0), a.send(PUBLISH("~/t", b"mine")), a.get(PUBLISH("~/t", b"mine")), a.idle(),
    ]),
    Case("filters-up-to-65535-bytes", "4.7.3-3", "4.7.3-3", [
        a.connect(), a.send(frame(0x82, b"\0\1", none, s("x" * 65535), b"\0")), a.get(SUBACK(1, 0)), b.connect(),
        b.send(frame(0x30, s("x" * 65535), none, b"long")), a.get(PUBLISH("x" * 65535, b"long")),
    ]),
    Case("large-packets-arrive-whole", "7.1.1-1 7.0.0-2", "4.2-1", [
        a.connect(), a.subscribe("~/t", 1), b.connect(), b.publish("~/t", b"0123456789abcdef" * 65536, 1),
        b.publish("~/t", b"after"),
        a.get(PUBLISH("~/t", b"0123456789abcdef" * 65536, 1, 1), PUBLISH("~/t", b"after", 1, 2)),
    ]),
]  # fmt: skip


UNSUBACKS = [
    Case("unsuback-answers-every-unsubscribe", "3.10.4-4 3.10.4-5 3.10.4-6 2.3.1-7",
        "3.10.4-4 3.10.4-5 3.10.4-6 3.11.3-1 3.11.3-2 2.2.1-6", [
        a.connect(), a.send(SUBSCRIBE(1, ("~/a", 0), ("~/b", 0), ("~/+", 0))), a.get(SUBACK(1, 0, 0, 0)),
        a.send(UNSUBSCRIBE(513, "~/none", "~/a", "~/c", "~/b", "~/a")), a.get(UNSUBACK(513, 0x11, 0, 0x11, 0, 0x11)),
        a.send(UNSUBSCRIBE(2, "~/none")), a.get(UNSUBACK(2, 0x11)), a.idle(),
        b.connect(), b.publish("~/a", b"x"), a.get(PUBLISH("~/a", b"x")), a.idle(),
    ]),
    Case("unsubscribe-compares-character-by-character", "3.10.4-1", "3.10.4-1", [
        a.connect(), a.subscribe("~/A/b", 0), a.send(UNSUBSCRIBE(2, "~/a/b", "~/A/+", "~/#", "~/A/b/", "~/A")),
        a.get(UNSUBACK(2, *[0x11] * 5)), b.connect(), b.publish("~/A/b", b"x"), a.get(PUBLISH("~/A/b", b"x")),
        a.send(UNSUBSCRIBE(3, "~/A/b")), a.get(UNSUBACK(3, 0)), b.publish("~/A/b", b"y"), a.idle(),
    ]),
    Case("no-new-messages-after-unsuback", "3.10.4-2", "3.10.4-2", [
        a.connect(stay=60), a.subscribe("~/t", 2), b.connect(), b.publish("~/t", b"1", 0), a.get(PUBLISH("~/t", b"1")),
        a.send(UNSUBSCRIBE(2, "~/t")), a.get(UNSUBACK(2, 0)), *(b.publish("~/t", b"2", qos) for qos in (0, 1, 2)),
        a.idle(), a.leave(),
        a.connect(stay=60, session=1), a.idle(), b.publish("~/t", b"3", 1), a.idle(),
    ]),
    Case("started-deliveries-are-completed", "3.10.4-3", "3.10.4-3", [
        a.connect(stay=60), a.subscribe("~/t", 2), b.connect(), b.publish("~/t", b"1", 1), b.publish("~/t", b"2", 2),
        a.any_order(PUBLISH("~/t", b"1", 1, 1), PUBLISH("~/t", b"2", 2, 2)), a.send(UNSUBSCRIBE(2, "~/t")),
        a.get(UNSUBACK(2, 0)), a.cut(),
        a.connect(stay=60, session=1), a.any_order(PUBLISH("~/t", b"1", 1, 1, dup=1),
            PUBLISH("~/t", b"2", 2, 2, dup=1)),
        a.send(PUBACK(1), PUBREC(2)), a.get(PUBREL(2)),
    ]),
]  # fmt: skip

# filter, topics it matches, topics it does not
MATCHES = (
    ("~/a", ("~/a",), ("~/A", "~/a/", "/~/a", "~/a/b", "~")),
    ("~/#", ("~", "~/", "~/a", "~/a/b", "~//"), ("~a", "a/~")),
    ("~/+", ("~/", "~/a", "~/$x"), ("~", "~/a/b", "~/a/")),
    ("~/+/c", ("~/b/c", "~//c"), ("~/c", "~/b/b/c", "~/b/c/d")),
    ("~/+/+", ("~//", "~/a/b"), ("~/a",)),
    ("+/~", ("/~", "x/~"), ("~", "x/y/~", "$x/~")),
    ("+/~/#", ("/~/a", "x/~"), ("$x/~", "$x/~/a")),
    ("/+/~", ("/x/~", "//~"), ("x/~", "/~")),
    ("$x/~/#", ("$x/~", "$x/~/a"), ("x/~/a",)),
    ("~/\u00e9", ("~/\u00e9",), ("~/e\u0301", "~/e", "~/\u00c9")),
    ("~/ x", ("~/ x",), ("~/x", "~/  x", "~/ x ")),
    ("~/100%", ("~/100%",), ("~/100%25",)),
)


def matching() -> Iterator[Case]:
    for number, (topic_filter, hits, misses) in enumerate(MATCHES, 1):
        ids = "4.7.1-3 4.7.3-4 3.3.2-3", "4.7.1-2 4.7.3-4 3.3.2-3"
        if topic_filter.startswith("+"):
            ids = f"{ids[0]} 4.7.2-1", f"{ids[1]} 4.7.2-1"
        if "#" in topic_filter:
            ids = f"{ids[0]} 4.7.1-2", f"{ids[1]} 4.7.1-1"
        steps: list[Step] = [b.connect(), a.connect(), a.subscribe(topic_filter, 0)]
        steps += [b.publish(topic, b"miss", 1) for topic in misses]
        for topic in hits:
            steps += [b.publish(topic, topic.encode(), 1), a.get(PUBLISH(topic, topic.encode()))]
        yield Case(f"filter-matches-{number}", *ids, [*steps, a.idle()])
    yield Case("the-filter-of-all-topics", "4.7.2-1", "4.7.2-1", [
        a.connect(), a.send(SUBSCRIBE(1, ("#", 0), ("+/~", 0), ("+/#", 0))), a.get(SUBACK(1, 0, 0, 0)), b.connect(),
        b.publish("$x/~", b"no", 1), b.publish("$~", b"no", 1), b.publish("/~", b"yes", 1),
        a.get(PUBLISH("/~", b"yes")), a.idle(),
    ], broker="small")  # fmt: skip


# --- overlapping subscriptions and their identifiers --------------------------------------------------------------


def identified(*wanted: int) -> Callable[[list[Property]], bool]:
    """Exactly these subscription identifiers, in any order."""

    def check(found: list[Property]) -> bool:
        return sorted(found) == [(SUBSCRIPTION_ID, n) for n in sorted(wanted)]

    return check


OVERLAPS = [
    Case("overlapping-filters-deliver-at-the-highest-qos", "3.3.5-1", "3.3.4-2", [
        a.connect(), a.send(SUBSCRIBE(1, ("~/#", 1), ("~/t", 2), ("~/+", 0))), a.get(SUBACK(1, 1, 2, 0)), b.connect(),
        b.publish("~/t", b"x", 2), a.get(PUBLISH("~/t", b"x", 2, 1)), b.publish("~/u", b"y", 2),
        a.get(PUBLISH("~/u", b"y", 1, 2)),
        b.publish("~/u/v", b"z", 0), a.get(PUBLISH("~/u/v", b"z", 0)), a.idle(),
    ]),
    Case("subscription-identifiers", None, "3.3.4-3 3.3.4-4", [
        a.connect(), a.subscribe("~/#", 1, 1, [(SUBSCRIPTION_ID, 268435455)]),
        a.subscribe("~/t", 2, 2, [(SUBSCRIPTION_ID, 1)]),
        a.subscribe("~/+", 0, 3), a.subscribe("~/t/#", 0, 4, [(SUBSCRIPTION_ID, 1)]), b.connect(),
        b.publish("~/u", b"1", 0), a.get(PUBLISH("~/u", b"1", 0, props=identified(268435455))),
        b.publish("~/t", b"2", 2), a.get(PUBLISH("~/t", b"2", 2, 1, props=lambda found: set(found) == {
            (SUBSCRIPTION_ID, 1), (SUBSCRIPTION_ID, 268435455)})),
        b.publish("~/u", b"3", 1, 1), a.get(PUBLISH("~/u", b"3", 1, 2, props=identified(268435455))), a.idle(),
        c.connect(), c.subscribe("~/u", 1, 1, [(SUBSCRIPTION_ID, 128)]),
        c.get(PUBLISH("~/u", b"3", 1, 1, 1, props=identified(128))),
    ]),
    Case("a-subscription-identifier-is-replaced", None, "3.8.4-3 3.3.4-3", [
        a.connect(stay=60), a.subscribe("~/t", 1, 1, [(SUBSCRIPTION_ID, 7)]),
        a.subscribe("~/t", 1, 1, [(SUBSCRIPTION_ID, 8)]), b.connect(),
        b.publish("~/t", b"1", 1), a.get(PUBLISH("~/t", b"1", 1, 1, props=identified(8))), a.send(PUBACK(1)), a.leave(),
        b.publish("~/t", b"2", 1), a.connect(stay=60), a.get(PUBLISH("~/t", b"2", 1, 2, props=identified(8))),
        a.subscribe("~/t", 1), b.publish("~/t", b"3", 1), a.get(PUBLISH("~/t", b"3", 1, 3, props=[])),
    ]),
]  # fmt: skip


SHARED = [
    Case("shared-delivery-respects-the-granted-qos", None, "4.8.2-3 4.8.2-1", [
        a.connect(), a.subscribe("$share/g/~/t", 0), b.connect(), b.publish("~/t", b"1", 2),
        a.get(PUBLISH("~/t", b"1", 0)),
        a.subscribe("$share/g/~/t", 1), b.publish("~/t", b"2", 2), a.get(PUBLISH("~/t", b"2", 1, 1)), a.idle(),
    ]),
    Case("a-shared-message-goes-to-one-member-of-each-group", None, "4.8.2-3", [
        a.connect(), a.subscribe("$share/g/~/t", 1), b.connect(), b.subscribe("$share/g/~/t", 1), c.connect(),
        c.subscribe("$share/h/~/#", 1),
        d.connect(), *(d.publish("~/t", b"%d" % n, 1) for n in range(4)),
        c.get(*(PUBLISH("~/t", b"%d" % n, 1, n + 1) for n in range(4))),
        a.receive(2), b.receive(2), a.idle(), b.idle(),
        verify("two each", lambda run: len([p for p in run.received if p.kind == "PUBLISH"]) == 8 and len(
            {p.payload for p in run.received if p.kind == "PUBLISH"}) == 4),
    ]),
    Case("no-retained-message-for-a-shared-subscription", None, "", [
        b.connect(), b.publish("~/t", b"kept", 1, 1), a.connect(), a.subscribe("$share/g/~/t", 1), a.idle(),
    ]),
    Case("a-started-qos-2-delivery-is-completed-with-its-member", None, "4.8.2-4", [
        a.connect(stay=60), a.subscribe("$share/g/~/t", 2), d.connect(), d.publish("~/t", b"x", 2),
        a.get(PUBLISH("~/t", b"x", 2, 1)),
        b.connect(stay=60), b.subscribe("$share/g/~/t", 2), a.cut(), a.connect(stay=60, session=1),
        a.get(PUBLISH("~/t", b"x", 2, 1, dup=1)),
        a.send(PUBREC(1)), a.get(PUBREL(1)), b.idle(),
    ]),
    Case("a-started-qos-2-delivery-ends-with-its-members-session", None, "4.8.2-5", [
        a.connect(stay=60), a.subscribe("$share/g/~/t", 2), d.connect(), d.publish("~/t", b"x", 2),
        a.get(PUBLISH("~/t", b"x", 2, 1)),
        b.connect(), b.subscribe("$share/g/~/t", 2), a.connect(clean=1, session=0), b.idle(), a.idle(),
    ]),
    Case("messages-refused-by-a-member-go-to-no-other", None, "4.8.2-6 4.4.0-2", [
        a.connect(), a.subscribe("$share/g/~/t", 2), d.connect(), d.publish("~/t", b"1", 1), d.publish("~/t", b"2", 2),
        a.any_order(PUBLISH("~/t", b"1", 1, 1), PUBLISH("~/t", b"2", 2, 2)), b.connect(),
        b.subscribe("$share/g/~/t", 2),
        a.send(PUBACK(1, 0x80), PUBREC(2, 0x83)), a.idle(), b.idle(), a.leave(), b.idle(),
    ]),
    Case("unacknowledged-messages-of-a-member-go-to-another", None, "", [
        a.connect(), a.subscribe("$share/g/~/t", 1), d.connect(), d.publish("~/t", b"1", 1),
        a.get(PUBLISH("~/t", b"1", 1, 1)),
        b.connect(), b.subscribe("$share/g/~/t", 1), a.leave(), b.get(PUBLISH("~/t", b"1", 1, 1, dup=ANY)),
    ]),
    Case("unsubscribe-from-a-shared-subscription", None, "3.10.4-1 3.10.4-2", [
        a.connect(), a.subscribe("$share/g/~/t", 1), a.subscribe("~/t", 0),
        a.send(UNSUBSCRIBE(3, "~/t", "$share/h/~/t")),
        a.get(UNSUBACK(3, 0, 0x11)), b.connect(), b.publish("~/t", b"1", 1), a.get(PUBLISH("~/t", b"1", 1, 1)),
        a.idle(),
        a.send(UNSUBSCRIBE(4, "$share/g/~/t")), a.get(UNSUBACK(4, 0)), b.publish("~/t", b"2", 1), a.idle(),
    ]),
]  # fmt: skip

CASES = [*SUBACKS, *UNSUBACKS, *matching(), *OVERLAPS, *SHARED]
