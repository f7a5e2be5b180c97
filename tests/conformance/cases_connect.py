"""CONNECT and CONNACK, sessions, takeover, wills and DISCONNECT."""

from __future__ import annotations

from string import ascii_letters, digits

from conformance.script import (
    BROKEN,
    CONNACK,
    CONNECT,
    DISCONNECT,
    PINGREQ,
    PINGRESP,
    PUBACK,
    PUBLISH,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    Case,
    Codes,
    Props,
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
    ASSIGNED_ID,
    AUTH_DATA,
    AUTH_METHOD,
    CONTENT_TYPE,
    CORRELATION,
    MAXIMUM_PACKET_SIZE,
    MAXIMUM_QOS,
    MESSAGE_EXPIRY,
    PAYLOAD_FORMAT,
    PROBLEM_INFORMATION,
    RECEIVE_MAXIMUM,
    RESPONSE_INFORMATION,
    RESPONSE_REQUEST,
    RESPONSE_TOPIC,
    RETAIN_AVAILABLE,
    SERVER_KEEP_ALIVE,
    SERVER_REFERENCE,
    SESSION_EXPIRY,
    USER,
    WILL_DELAY,
    Packet,
    frame,
    none,
    s,
)


def will(payload: bytes = b"gone", topic: str = "~/will", qos: int = 1, retain: int = 0, props: Props = None) -> Packet:
    return PUBLISH(topic, payload, qos, retain=retain, props=props)


def accepted(client_id: str) -> list[Step]:
    return [a.connect(client=client_id), a.idle(), a.leave()]


ALPHABET = digits + ascii_letters
IDS = [ALPHABET[at : at + 23] for at in range(0, len(ALPHABET), 23)] + ["0", "z", "A"]

CONNACKS = [
    Case("connack-comes-first-and-once", "3.2.0-1 3.1.4-4 3.2.2-1", "3.2.0-1 3.2.0-2 3.1.4-5 3.2.2-1 3.2.2-2", [
        a.open(), a.send(CONNECT(), SUBSCRIBE(1, ("~/t", 0)), PINGREQ),
        a.get(CONNACK(0, session=0), SUBACK(1, 0), PINGRESP), a.idle(),
    ]),
    Case("client-ids-of-1-to-23-letters-and-digits", "3.1.3-5 3.1.3-2", "3.1.3-5 3.1.3-2",
         [step for client_id in IDS for step in accepted(client_id)]),
    Case("client-ids-of-other-characters", "3.1.3-4", "3.1.3-4", [
        step for client_id in ("~/é€", "~" + "x" * 300, "~ a+b#") for step in accepted(client_id)]),
    Case("an-empty-client-id-gets-an-assigned-one", "3.1.3-6", None, [
        a.connect(client=""), b.connect(client=""), a.subscribe("~/t"), b.publish("~/t", b"x"),
        a.get(PUBLISH("~/t", b"x")),
        a.idle(), b.idle(),
    ]),
    Case("an-assigned-client-id-is-in-connack", None, "3.1.3-6 3.1.3-7 3.2.2-16", [
        a.connect(client="", stay=60), b.connect(client=""),
        verify("two ids that differ", lambda run: len({dict(p.props).get(ASSIGNED_ID) for p in run.received} - {None,
            ""}) == 2),
        a.subscribe("~/t", 1), a.leave(), b.publish("~/t", b"kept"),
        lambda run: c.connect(client=dict(run.received[0].props)[ASSIGNED_ID], stay=60, session=1)(run),
        c.get(PUBLISH("~/t", b"kept", 1, 1)), a.connect(client="~a", has=without(ASSIGNED_ID)),
    ]),
    Case("an-empty-client-id-with-clean-session-0", "3.1.3-7 3.1.3-8 3.1.3-9 3.2.2-4 3.2.2-5", None, [
        a.open(), a.send(CONNECT("", clean=0), PINGREQ), a.refused(2, None)]),
    Case("packets-after-a-refused-connect-are-ignored", "3.1.4-5 3.2.2-5", None, [
        a.open(), a.send(CONNECT("", clean=0), PUBLISH("~/t", b"no", retain=1)), a.refused(2, None),
        b.connect(), b.subscribe("~/t"), b.idle(),
    ]),
    Case("packets-after-a-refused-connect-are-ignored-in-5.0", None, "3.1.4-6 3.2.2-7 3.2.2-6 4.13.2-1", [
        b.connect(),
        a.open(), a.send(CONNECT(props=[(RECEIVE_MAXIMUM, 0)]), PUBLISH("~/t", b"no", retain=1)),
        a.refused(None, BROKEN),
        b.subscribe("~/t"), b.idle(),
    ]),
    Case("a-client-that-is-not-authorized", "3.2.2-4 3.2.2-5", "3.1.4-2 3.2.2-6 3.2.2-7 3.2.2-8 4.13.2-1", [
        a.open(), a.send(CONNECT()), a.refused(5, 0x87),
        a.open(), a.send(CONNECT(user="nobody", password="wrong")), a.refused(Codes(4, 5), Codes(0x86, 0x87)),
    ], broker="guarded"),
    Case("a-server-that-has-moved", "3.2.2-4 3.2.2-5", "3.2.2-6 3.2.2-7 3.2.2-8", [
        a.open(), a.send(CONNECT()),
        a.get(CONNACK(Codes(3, 0x9D), 0, props=having((SERVER_REFERENCE, "other.example:1883")))), a.dropped(),
    ], broker="moved"),
    Case("connack-omits-default-limits", None, "3.2.2-9 3.2.2-10 4.12.0-6 3.2.2-22 3.2.2-8", [
        a.connect(has=without(MAXIMUM_QOS, RETAIN_AVAILABLE, RESPONSE_INFORMATION, AUTH_METHOD, AUTH_DATA,
            SERVER_KEEP_ALIVE,
                              ASSIGNED_ID)),
        a.send(SUBSCRIBE(1, ("~/0", 0), ("~/1", 1), ("~/2", 2))), a.get(SUBACK(1, 0, 1, 2)),
    ]),
    Case("response-information-on-request", None, "3.1.2-28", [
        a.connect(client="asking", props=[(RESPONSE_REQUEST, 1)], has=having((RESPONSE_INFORMATION, "replies/asking"))),
        a.connect(props=[(RESPONSE_REQUEST, 0)], has=without(RESPONSE_INFORMATION)),
        a.connect(has=without(RESPONSE_INFORMATION)),
    ], broker="small"),
    Case("connack-respects-the-clients-maximum-packet-size", None, "3.1.2-24 3.2.2-19 3.2.2-20", [
        a.open(), a.send(CONNECT(will=will(retain=1), props=[(MAXIMUM_PACKET_SIZE, 12)])), a.refused(None, 0x9A),
        a.open(), a.send(CONNECT(props=[(MAXIMUM_PACKET_SIZE, 5)])), a.refused(None, 0x95),
        a.open(), a.send(CONNECT(props=[(MAXIMUM_PACKET_SIZE, 4)])), a.dropped(),
    ], broker="small"),
    Case("a-refusal-without-a-3.1.1-return-code", "3.2.2-6", "3.2.2-7 3.2.2-8", [
        a.open(), a.send(CONNECT(will=will(topic="x/" * 200 + "~"))), a.refused(None, 0x90)]),
    Case("retained-will-without-retain-available", None, "3.2.2-13 3.2.2-6 3.2.2-7", [
        a.open(), a.send(CONNECT(will=will(retain=1))), a.refused(None, 0x9A),
        b.connect(has=having((RETAIN_AVAILABLE, 0))),
    ], broker="small"),
    Case("retained-publish-without-retain-available", None, "3.2.2-14 4.13.1-1", [
        a.connect(), a.send(PUBLISH("~/t", b"x", retain=1)), a.ended(0x9A)], broker="small"),
    Case("a-packet-above-the-servers-maximum", None, "3.2.2-15", [
        a.connect(has=having((MAXIMUM_PACKET_SIZE, 1024))), a.send(PUBLISH("~/t", b"x" * 900)), a.idle(),
        a.send(PUBLISH("~/t", b"x" * 1024)), a.ended(0x95)], broker="small"),
    Case("a-topic-alias-that-is-not-granted", None, "3.2.2-18 3.2.2-17", [
        a.connect(has=without(ALIAS_MAXIMUM)), a.send(PUBLISH("~/t", b"x", props=[(ALIAS, 1)])), a.ended(0x94)],
        broker="small"),
    Case("the-servers-keep-alive", None, "3.1.2-21 3.2.2-21", [
        a.connect(keep_alive=60, has=having((SERVER_KEEP_ALIVE, 2))),
        b.connect(keep_alive=0, has=having((SERVER_KEEP_ALIVE, 2))),
        c.connect(keep_alive=1, has=without(SERVER_KEEP_ALIVE)),
    ], broker="small"),
]  # fmt: skip


SESSIONS = [
    Case("clean-session-discards-the-session", "3.1.2-6 3.2.2-1 3.1.4-3 3.1.2-4", "3.1.2-4 3.2.2-2 3.1.4-4", [
        b.connect(), a.connect(stay=60, clean=0), a.subscribe("~/t", 1), a.leave(), b.publish("~/t", b"lost"),
        a.connect(clean=1, session=0), a.idle(), b.publish("~/t", b"lost too"), a.idle(), a.leave(),
        a.connect(clean=0, session=0), a.idle(), b.publish("~/t", b"not subscribed"), a.idle(),
    ]),
    Case("a-session-is-resumed", "3.1.2-4 3.1.2-5 3.2.2-2 3.2.2-3 3.1.3-2 4.1.0-1 4.5.0-1",
         "3.1.2-5 3.1.2-6 3.1.2-23 3.2.2-3 3.1.3-2 4.5.0-1", [
        a.connect(stay=60, clean=0, session=0), a.subscribe("~/#", 2), a.leave(), b.connect(),
        b.publish("~/1", b"one", 1), b.publish("~/2", b"two", 2), b.publish("~/3", b"three", 1),
        a.connect(stay=60, clean=0, session=1),
        a.any_order(PUBLISH("~/1", b"one", 1, 1), PUBLISH("~/2", b"two", 2, 2), PUBLISH("~/3", b"three", 1, 3)),
        a.cut(), a.connect(stay=60, clean=0, session=1),
    ]),
    Case("a-session-is-resumed-by-a-takeover", "3.1.2-4 3.2.2-2", "3.1.2-23 3.2.2-3", [
        a.connect(stay=60, clean=0), a.subscribe("~/t", 1), a.connect(stay=60, clean=0, session=1),
        b.connect(), b.publish("~/t", b"x"), a.get(PUBLISH("~/t", b"x", 1, 1)),
    ]),
    Case("clean-session-0-without-state", "3.2.2-3", "3.1.2-6 3.2.2-3", [a.connect(clean=0, session=0)]),
    Case("a-session-lasts-as-long-as-its-connection", "4.1.0-2", "4.1.0-1", [
        a.connect(clean=1), a.subscribe("~/t"), b.connect(), b.publish("~/t", b"1"), a.get(PUBLISH("~/t", b"1")),
    ]),
    Case("a-session-without-expiry-ends-with-its-connection", None, "4.1.0-2 3.1.2-23", [
        a.connect(clean=0), a.subscribe("~/t", 1), a.leave(), a.connect(clean=0, session=0), a.leave(),
        a.connect(clean=0, stay=60, session=0), a.leave(props=[(SESSION_EXPIRY, 0)]), a.connect(clean=0, session=0),
    ]),
    Case("disconnect-does-not-raise-expiry-from-0", None, "4.13.1-1", [
        a.connect(), a.send(DISCONNECT(0, [(SESSION_EXPIRY, 10)])), a.ended(0x82)]),
    Case("a-client-id-is-taken-over", "3.1.4-2 3.1.3-2 4.8.0-1", "3.1.4-3 3.1.3-2", [
        a.connect(client="~x", stay=60, clean=0), a.subscribe("~/t", 1),
        b.connect(client="~x", stay=60, clean=0, session=1), a.ended(0x8E),
        c.connect(), c.publish("~/t", b"x"), b.get(PUBLISH("~/t", b"x", 1, 1)), b.idle(),
    ]),
    Case("a-client-id-is-taken-over-clean", "3.1.4-2", "3.1.4-3 3.1.2-4", [
        a.connect(client="~x"), a.subscribe("~/t", 1), b.connect(client="~x", session=0), a.ended(0x8E),
        c.connect(), c.publish("~/t", b"x"), b.idle(),
    ]),
    Case("a-version-may-change-with-the-session", "3.1.2-4", "3.1.2-5", [
        a.connect(client="~x", stay=60, clean=0, version=4), a.subscribe("~/t", 1), a.leave(),
        a.connect(client="~x", stay=60, clean=0, session=1, version=5), b.connect(), b.publish("~/t", b"x"),
        a.get(PUBLISH("~/t", b"x", 1, 1)), a.idle(),
    ]),
    Case("retained-messages-outlive-the-session", "3.1.2-7", "3.3.1-5", [
        a.connect(), a.publish("~/t", b"kept", retain=1), a.leave(), a.connect(), a.leave(),
        b.connect(), b.subscribe("~/t"), b.get(PUBLISH("~/t", b"kept", retain=1)), b.idle(),
    ]),
]  # fmt: skip


def leaves_will(name: str, v4: str, v5: str, end: list[Step], *, published: bool, clean: int = 1) -> Case:
    """A client with a will whose connection ends by the steps ``end``."""
    return Case(name, v4, v5, [
        b.connect(), b.subscribe("~/will", 2), a.connect(will=will(), clean=clean), *end,
        b.get(PUBLISH("~/will", b"gone", 1, 1), ) if published else b.idle(),
    ])  # fmt: skip


WILLS = [
    leaves_will("will-on-a-lost-connection", "3.1.2-8", "3.1.2-7 3.1.2-8", [a.cut()], published=True),
    leaves_will("will-on-a-protocol-error", "3.1.2-8", "3.1.2-8", [a.send(frame(0x30, s("#"), none)), a.ended()],
        published=True),
    leaves_will("no-will-after-disconnect", "3.14.4-3 3.1.2-10", "3.14.4-3 3.1.2-10", [a.leave()], published=False),
    leaves_will("will-on-takeover", "3.1.2-8 3.1.4-2", "3.1.2-8 3.1.4-3", [c.connect(client="~a"), a.ended(0x8E)],
        published=True),
    Case("disconnect-with-will", None, "3.1.2-8", [
        b.connect(), b.subscribe("~/will"), a.connect(will=will()), a.leave(0x04), b.get(PUBLISH("~/will", b"gone")),
    ]),
    Case("a-will-is-published-once", "3.1.2-10 3.1.2-12", "3.1.2-10", [
        b.connect(), b.subscribe("~/will"), a.connect(will=will(), clean=0, stay=60), a.cut(),
        b.get(PUBLISH("~/will", b"gone")),
        a.connect(clean=0, stay=60, session=1), c.connect(client="~a", clean=0, stay=60), a.ended(0x8E), b.idle(),
    ]),
    Case("a-connect-without-will-publishes-none", "3.1.2-12", "3.1.2-10", [
        b.connect(), b.subscribe("~/#"), a.connect(will=will(), clean=0, stay=60), a.leave(),
        a.connect(clean=0, stay=60),
        c.connect(client="~a", clean=0, stay=60), a.ended(0x8E), b.idle(),
    ]),
    Case("the-will-of-the-last-connect-is-published", "3.1.2-8", "3.1.2-8", [
        b.connect(), b.subscribe("~/#"), a.connect(will=will(b"old", "~/old")), a.leave(),
        a.connect(will=will(b"new", "~/new")),
        a.cut(), b.get(PUBLISH("~/new", b"new")), b.idle(),
    ]),
    Case("will-retain-0", "3.1.2-16", "3.1.2-14", [
        b.connect(), b.subscribe("~/will", 0), a.connect(will=will(retain=0)), a.cut(),
        b.get(PUBLISH("~/will", b"gone", retain=0)),
        c.connect(), c.subscribe("~/will"), c.idle(),
    ]),
    Case("will-retain-1", "3.1.2-17", "3.1.2-15", [
        b.connect(), b.subscribe("~/will", 0), a.connect(will=will(retain=1)), a.cut(),
        b.get(PUBLISH("~/will", b"gone", retain=0)),
        c.connect(), c.subscribe("~/will", 2), c.get(PUBLISH("~/will", b"gone", 1, 1, retain=1)), c.idle(),
    ]),
    Case("will-qos-and-an-empty-will", "3.1.2-8", "3.1.2-8", [
        step for qos in (0, 1, 2) for step in (
            b.connect(), b.subscribe("~/will", 2), a.connect(will=will(b"", qos=qos)), a.cut(),
            b.get(PUBLISH("~/will", b"", qos, 1 if qos else None)))]),
    Case("connect-payload-order", "3.1.3-1 3.1.3-3", "3.1.3-1 3.1.3-3", [
        b.connect(), b.subscribe("~/will", 2),
        a.connect(will=will(b"\0\1binary\xff"), user="~someone", password=b"\0secret", keep_alive=60), a.idle(),
        a.cut(),
        b.get(PUBLISH("~/will", b"\0\1binary\xff", 1, 1)),
    ]),
    Case("will-properties", None, "3.1.3-10 3.3.2-4 3.3.2-15 3.3.2-16 3.3.2-17 3.3.2-18 3.3.2-20", [
        b.connect(), b.subscribe("~/will"),
        a.connect(will=will(b"text", props=[
            (PAYLOAD_FORMAT, 1), (CONTENT_TYPE, "text/plain"), (RESPONSE_TOPIC, "answer"), (CORRELATION, b"\0\1"),
            (USER, ("k", "2")), (USER, ("j", "1")), (USER, ("k", "1")), (USER, ("k", "2")), (WILL_DELAY, 0),
            (MESSAGE_EXPIRY, 60)])),
        a.cut(),
        b.get(PUBLISH("~/will", b"text", props=lambda found: sorted(found[:4] + found[-1:]) + found[4:-1] == [
            (PAYLOAD_FORMAT, 1), (MESSAGE_EXPIRY, 60), (CONTENT_TYPE, "text/plain"), (RESPONSE_TOPIC, "answer"),
            (CORRELATION, b"\0\1"), (USER, ("k", "2")), (USER, ("j", "1")), (USER, ("k", "1")), (USER, ("k", "2"))])),
    ]),
    Case("will-delay-and-a-session-that-ends-first", None, "3.1.2-8", [
        b.connect(), b.subscribe("~/will"), a.connect(will=will(props=[(WILL_DELAY, 60)])), a.cut(),
        b.get(PUBLISH("~/will", b"gone")),
        a.connect(will=will(b"again", props=[(WILL_DELAY, 60)]), stay=60), a.cut(), c.connect(client="~a", clean=1),
        b.get(PUBLISH("~/will", b"again")),
    ]),
]  # fmt: skip


DISCONNECTS = [
    Case("packets-after-disconnect-are-ignored", "3.14.4-1 3.14.4-2", "3.14.4-1 3.14.4-2", [
        b.connect(), b.subscribe("~/t"), a.connect(), a.send(DISCONNECT(), PUBLISH("~/t", b"late")), a.dropped(),
        b.idle(),
    ]),
    Case("the-server-closes-after-its-disconnect", None, "3.14.4-1 3.14.4-2 4.13.2-1 3.14.2-1 3.14.2-2", [
        a.connect(), a.send(frame(0x82, b"\0\1\0"), PUBLISH("~/t", b"late"), PINGREQ), a.ended(BROKEN)]),
    Case("disconnect-respects-the-clients-maximum-packet-size", None, "3.14.2-3 3.14.2-4 3.1.2-24", [
        a.connect(props=[(MAXIMUM_PACKET_SIZE, 20)]), a.send(frame(0x82, b"\0\1\0")), a.ended(BROKEN)]),
    Case("no-reason-strings-on-request", None, "3.1.2-29", [
        a.connect(props=[(PROBLEM_INFORMATION, 0)]),
        a.send(SUBSCRIBE(1, ("c/" * 200 + "c", 0))), a.get(SUBACK(1, 0x8F, props=[])),
        a.send(UNSUBSCRIBE(2, "~/none")), a.get(UNSUBACK(2, 0x11, props=[])),
        a.send(PUBLISH("$SYS/~", b"x", 1, 3)), a.get(PUBACK(3, 0x87, props=[])),
    ]),
    Case("pings-are-answered", "3.12.4-1", "3.12.4-1",
        [a.connect(), a.send(PINGREQ, PINGREQ), a.get(PINGRESP, PINGRESP), a.idle()]),
    Case("other-clients-are-not-affected", "4.8.0-1", "4.13.1-1", [
        b.connect(), b.subscribe("~/t", 1), a.connect(), a.send(frame(0x30, s("#"), none)), a.ended(),
        b.publish("~/u", b"x"), c.connect(), c.publish("~/t", b"y"), b.get(PUBLISH("~/t", b"y", 1, 1)), b.idle(),
    ]),
]  # fmt: skip

CASES = [*CONNACKS, *SESSIONS, *WILLS, *DISCONNECTS]
