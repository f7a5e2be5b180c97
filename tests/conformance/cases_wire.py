"""Malformed packets: strings, flags, lengths, packet ids and properties that the standard forbids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from conformance.script import BROKEN, CONNECT, PINGREQ, PUBLISH, Case, Codes, Sendable, Step, a, b
from conformance.wire import FORMS, Raw, frame, none, prop, props, s, varint

BAD_STRINGS = (b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xc0\x80", b"a\xc3", b"\xff")
NUL = b"a\0b"


def breaks(name: str, v4: str | None, v5: str | None, *packets: Sendable, code: Any = BROKEN) -> Case:
    """Each of these packets, after a valid CONNECT, closes the connection."""
    steps: list[Step] = []
    for packet in packets:
        steps += [a.connect(), a.send(packet), a.ended(code)]
    return Case(name, v4, v5, steps)


def connect(flags: int, *payload: bytes, five: bytes = b"\0") -> Raw:
    """CONNECT with these flags, properties and payload."""
    return frame(0x10, s("MQTT"), lambda v: bytes((v, flags)), b"\0\0", lambda v: five if v >= 5 else b"", *payload)


def spoils(name: str, v4: str | None, v5: str | None, *connects: Sendable, code: Any = BROKEN) -> Case:
    """Each of these CONNECTs is malformed: 3.1.1 closes without CONNACK, 5.0 sends its reason code."""
    steps: list[Step] = []
    for packet in connects:
        steps += [a.open(), a.send(packet), a.refused(None, code)]
    return Case(name, v4, v5, steps)


def in_text(texts: Sequence[bytes]) -> Iterator[tuple[str, str, str, list[Raw]]]:
    """Each string field of both versions: (name, 3.1.1 id, 5.0 id, packets with these strings in it)."""
    yield "publish-topic", "3.3.2-1", "3.3.2-1", [frame(0x30, s(t), none) for t in texts]
    yield "subscribe-filter", "3.8.3-1", "3.8.3-1", [frame(0x82, b"\0\1", none, s(t), b"\0") for t in texts]
    yield "unsubscribe-filter", "3.10.3-1", "3.10.3-1", [frame(0xA2, b"\0\1", none, s(t)) for t in texts]


def in_connect(texts: Sequence[bytes]) -> Iterator[tuple[str, str, str, list[Raw]]]:
    yield "client-id", "3.1.3-4", "3.1.3-4", [connect(2, s(t)) for t in texts]
    yield "will-topic", "3.1.3-10", "3.1.3-11", [frame(
        0x10, s("MQTT"), lambda v: bytes((v, 6)), b"\0\0", none, s("w"), none, s(t),
        s("x")) for t in texts]  # fmt: skip
    yield "user-name", "3.1.3-11", "3.1.3-12", [connect(0x82, s("u"), s(t)) for t in texts]


def in_property(texts: Sequence[bytes]) -> Iterator[tuple[str, str, list[Raw]]]:
    """Each property of type string: (name, 5.0 id, packets)."""

    def packets(head: int, start: bytes, *ends: bytes) -> list[Raw]:
        return [frame(head, start, varint(len(end)), end) for end in ends]

    def of(number: int) -> list[bytes]:
        return [bytes((number,)) + s(t) for t in texts]

    pairs = [b"\x26" + s(t) + s("v") for t in texts] + [b"\x26" + s("k") + s(t) for t in texts]
    yield "response-topic", "3.3.2-13", packets(0x30, s("t"), *of(0x08))
    yield "content-type", "3.3.2-19", packets(0x30, s("t"), *of(0x03))
    yield "user-property", "1.5.7-1", packets(0x30, s("t"), *pairs) + packets(0xE0, b"\0", *pairs)
    yield "reason-string", "", packets(0x40, b"\0\1\0", *of(0x1F)) + packets(0xE0, b"\4", *of(0x1F))


def strings() -> Iterator[Case]:
    for fault, texts, four, five in (
        ("not-utf-8", BAD_STRINGS, "1.5.3-1", "1.5.4-1"),
        ("with-nul", (NUL,), "1.5.3-2 4.7.3-2", "1.5.4-2 4.7.3-2"),
    ):
        for place, v4, v5, packets in in_text(texts):
            yield breaks(f"{place}-{fault}", f"{v4} {four} 4.8.0-1", f"{v5} {five} 4.13.1-1", *packets, code=Codes(0x81))
        for place, v4, v5, packets in in_connect(texts):
            yield spoils(f"{place}-{fault}", f"{v4} {four} 3.1.4-1", f"{v5} {five} 3.1.4-1", *packets, code=0x81)
        for place, v5, packets in in_property(texts):
            yield breaks(f"{place}-{fault}", None, f"{v5} {five}", *packets, code=0x81)
    yield Case("byte-order-mark-is-kept", "1.5.3-3 4.7.3-4", "1.5.4-3 4.7.3-4", [
        a.connect(client="\ufeff~a"),
        a.subscribe("~/\ufeffx"), a.subscribe("~/y"),
        b.connect(client="~a"), b.publish("~/x", b"plain"), b.publish("~/\ufeffy", b"marked"),
        b.publish("~/\ufeffx", b"mark"),
        a.get(PUBLISH("~/\ufeffx", b"mark")), a.idle(), b.idle(),
    ])  # fmt: skip


# --- the fixed header ---------------------------------------------------------------------------------------------


def rest_of(kind: int) -> list[Any]:
    """A valid body of each packet type that a client sends."""
    acks = {4: b"\0\1", 5: b"\0\1", 6: b"\0\1", 7: b"\0\1"}
    bodies: dict[int, list[Any]] = {8: [b"\0\1", none, s("t"), b"\0"], 10: [b"\0\1", none, s("t")]}
    return bodies.get(kind, [acks.get(kind, b"")])


def flagged(kind: int, right: int) -> list[Raw]:
    return [frame(kind << 4 | flags, *rest_of(kind)) for flags in range(16) if flags != right]


FIXED_HEADER = [
    breaks("puback-flags", "2.2.2-1 2.2.2-2", "2.1.3-1", *flagged(4, 0), code=0x81),
    breaks("pubrec-flags", "2.2.2-1 2.2.2-2", "2.1.3-1", *flagged(5, 0), code=0x81),
    breaks("pubrel-flags", "3.6.1-1 2.2.2-2", "3.6.1-1 2.1.3-1", *flagged(6, 2), code=0x81),
    breaks("pubcomp-flags", "2.2.2-1 2.2.2-2", "2.1.3-1", *flagged(7, 0), code=0x81),
    breaks("subscribe-flags", "3.8.1-1 2.2.2-2", "3.8.1-1 2.1.3-1", *flagged(8, 2), code=0x81),
    breaks("unsubscribe-flags", "3.10.1-1 2.2.2-2", "3.10.1-1 2.1.3-1", *flagged(10, 2), code=0x81),
    breaks("pingreq-flags", "2.2.2-1 2.2.2-2", "2.1.3-1", *flagged(12, 0), code=0x81),
    breaks("disconnect-flags", "3.14.1-1 2.2.2-2", "3.14.1-1 2.1.3-1", *flagged(14, 0), code=0x81),
    breaks("auth-flags", None, "3.15.1-1", *flagged(15, 0), code=0x81),
    Case("connect-flags-in-the-header", "2.2.2-1 2.2.2-2 3.1.4-1", "2.1.3-1 3.1.4-1", [
        a.open(), a.send(frame(0x11, s("MQTT"), lambda v: bytes((v, 2)), b"\0\0", none, s("h"))), a.dropped(),
    ]),
    breaks("publish-qos-3", "3.3.1-4 2.2.2-2", "3.3.1-4 4.13.1-1", frame(0x36, s("t"), b"\0\1", none),
           frame(0x3E, s("t"), b"\0\1", none), frame(0x37, s("t"), b"\0\1", none), code=0x81),
    breaks("publish-dup-with-qos-0", "3.3.1-2", "3.3.1-2", frame(0x38, s("t"), none), code=BROKEN),
    breaks("packet-types-of-the-server", "4.8.0-1", "4.13.1-1", frame(0x20, b"\0\0", none),
        frame(0x90, b"\0\1", none, b"\0"),
           frame(0xB0, b"\0\1", none, lambda v: b"\0" if v >= 5 else b""), frame(0xD0)),
    breaks("packet-type-0", "4.8.0-1", "4.13.1-1", frame(0x00)),
    breaks("packet-type-15", "4.8.0-1", None, frame(0xF0)),
    breaks("remaining-length-overlong", None, "1.5.5-1 4.13.1-1", b"\xc0\x80\x00", b"\x30\x85\x80\x00\x00\x01t\x00x",
           code=0x81),
    breaks("remaining-length-of-five-bytes", "4.8.0-1", "1.5.5-1 4.13.1-1", b"\x30\xff\xff\xff\xff\x01",
           b"\x30\x80\x80\x80\x80\x00", code=0x81),
    breaks("property-length-overlong", None, "1.5.5-1", frame(0x30, s("t"), b"\x80\x00", b"x"),
           frame(0x82, b"\0\1", b"\x82\x80\x00\x0b\x05", s("t"), b"\0"), code=0x81),
    breaks("subscription-identifier-overlong", None, "1.5.5-1",
        frame(0x82, b"\0\1", b"\x03\x0b\x81\x00", s("t"), b"\0"),
           code=0x81),
    breaks("packets-cut-short", "4.8.0-1", "4.13.1-1 1.5.4-1", frame(0x30), frame(0x30, b"\0"), frame(0x30, b"\0\5abc"),
           frame(0x32, s("t"), b"\0"), frame(0x40), frame(0x40, b"\0"), frame(0x62, b"\0"), frame(0x82),
           frame(0x82, b"\0\1", none, s("t")),
           frame(0xA2, b"\0"), code=0x81),
    breaks("packets-too-long", "4.8.0-1", "4.13.1-1", frame(0xC0, b"\0"), frame(0x40, b"\0\1\0\0\0"),
           frame(0xE0, b"\0\0\0"), code=0x81),
]  # fmt: skip


# --- packet ids, topics, empty lists ------------------------------------------------------------------------------

BODIES = [
    breaks("packet-id-0-in-publish", "2.3.1-1", "2.2.1-3", frame(0x32, s("t"), b"\0\0", none),
        frame(0x34, s("t"), b"\0\0", none)),
    breaks("packet-id-0-in-subscribe", "2.3.1-1", "2.2.1-3", frame(0x82, b"\0\0", none, s("t"), b"\0")),
    breaks("packet-id-0-in-unsubscribe", "2.3.1-1", "2.2.1-3", frame(0xA2, b"\0\0", none, s("t"))),
    breaks("packet-id-0-in-an-acknowledgement", "2.3.1-6", "2.2.1-5",
        *(frame(head, b"\0\0") for head in (0x40, 0x50, 0x62, 0x70))),
    breaks("wildcard-in-a-topic-name", "3.3.2-2 4.7.1-1", "3.3.2-2 4.7.0-1", *(
        frame(0x30, s(topic), none) for topic in ("+", "#", "a/+", "a/#", "a+b", "a#")), code=Codes(0x81, 0x82, 0x90)),
    spoils("wildcard-in-a-will-topic", "4.7.1-1", "4.7.0-1",
        frame(0x10, s("MQTT"), lambda v: bytes((v, 6)), b"\0\0", none,
        s("w"), none, s("a/#"), s("")), code=Codes(0x81, 0x82, 0x90)),
    breaks("empty-topic-name", "4.7.3-1", "4.7.3-1", frame(0x30, s(""), none, b"x"), code=Codes(0x81, 0x82, 0x90)),
    breaks("empty-topic-filter", "4.7.3-1", "4.7.3-1", frame(0x82, b"\0\1", none, s(""), b"\0"),
           frame(0xA2, b"\0\1", none, s("")), code=Codes(0x81, 0x82)),
    breaks("misplaced-wildcards", "4.7.1-2 4.7.1-3 4.8.0-1", "4.7.1-1 4.7.1-2 4.13.1-1", *(
        frame(0x82, b"\0\1", none, s(name), b"\0") for name in ("a#", "a/#/b", "#/a", "a/b#", "a+", "+a/b", "a/+b/c",
            "##")),
        code=Codes(0x81, 0x82)),
    breaks("misplaced-wildcards-in-unsubscribe", "4.7.1-2 4.7.1-3 4.8.0-1", "4.7.1-1 4.7.1-2 4.13.1-1", *(
        frame(0xA2, b"\0\1", none, s(name)) for name in ("a#", "a/#/b", "a+")), code=Codes(0x81, 0x82)),
    breaks("subscribe-without-a-filter", "3.8.3-3", "3.8.3-2", frame(0x82, b"\0\1", none)),
    breaks("unsubscribe-without-a-filter", "3.10.3-2", "3.10.3-2", frame(0xA2, b"\0\1", none)),
    breaks("subscribe-reserved-bits", "3.8.3-4", "3.8.3-5", *(
        frame(0x82, b"\0\1", none, s("t"), bytes((bits,))) for bits in (0x40, 0x80, 0xC0)), code=0x81),
    breaks("subscribe-options-in-3.1.1", "3.8.3-4", None, *(
        frame(0x82, b"\0\1", none, s("t"), bytes((bits,))) for bits in (4, 8, 16, 32))),
    breaks("subscribe-qos-3", "3.8.3-4", "4.13.1-1", frame(0x82, b"\0\1", none, s("t"), b"\3")),
    breaks("subscribe-retain-handling-3", None, "4.13.1-1", frame(0x82, b"\0\1", none, s("t"), b"\x30")),
    breaks("subscribe-no-local-when-shared", None, "3.8.3-4", frame(0x82, b"\0\1", none, s("$share/g/t"), b"\4"),
        code=0x82),
    breaks("invalid-share-names", None, "4.8.2-1 4.8.2-2", *(
        frame(0x82, b"\0\1", none, s(name), b"\0") for name in ("$share/g", "$share/", "$share//t", "$share/g/",
            "$share/+/t",
                                                               "$share/#/t", "$share/a+b/t")), code=BROKEN),
    breaks("response-topic-with-a-wildcard", None, "3.3.2-14", *(
        frame(0x30, s("t"), props([(8, topic)])) for topic in ("a/+", "#")), code=BROKEN),
    breaks("subscription-identifier-from-a-client", None, "3.3.4-6", frame(0x30, s("t"), props([(0x0B, 1)]))),
    breaks("unlisted-code-in-an-acknowledgement", None, "3.4.2-1 3.5.2-1 3.6.2-1 3.7.2-1", frame(0x40, b"\0\1\1"),
           frame(0x40, b"\0\1\x92"), frame(0x50, b"\0\1\x92"), frame(0x62, b"\0\1\x10"), frame(0x62, b"\0\1\x80"),
           frame(0x70, b"\0\1\x87")),
    breaks("unlisted-code-in-disconnect", None, "3.14.2-1", frame(0xE0, b"\1"), frame(0xE0, b"\x84"),
        frame(0xE0, b"\xff")),
    breaks("unlisted-code-in-auth", None, "3.15.2-1", frame(0xF0, b"\1", props([(0x15, "m")]))),
    breaks("auth-without-a-method-in-connect", None, "4.12.0-7 4.12.1-1 4.12.1-2",
        frame(0xF0, b"\x19", props([(0x15, "m")])), code=BROKEN),
]  # fmt: skip


# --- properties ---------------------------------------------------------------------------------------------------

_SAMPLE: dict[int | str, Any] = {"s": "t", "b": b"t", "v": 1, "p": ("k", "v")}
_LEGAL: dict[str, tuple[int, ...]] = {
    "publish": (0x01, 0x02, 0x03, 0x08, 0x09, 0x0B, 0x23, 0x26),
    "puback": (0x1F, 0x26), "pubrec": (0x1F, 0x26), "pubrel": (0x1F, 0x26), "pubcomp": (0x1F, 0x26),
    "subscribe": (0x0B, 0x26), "unsubscribe": (0x26,), "disconnect": (0x11, 0x1C, 0x1F, 0x26),
}  # fmt: skip


def sample(identifier: int) -> bytes:
    return prop(identifier, _SAMPLE.get(FORMS[identifier], 1))


def with_properties(kind: str, body: bytes) -> Raw:
    """A packet of this type with these bytes as its properties."""
    five = varint(len(body)) + body
    heads = {"puback": 0x40, "pubrec": 0x50, "pubrel": 0x62, "pubcomp": 0x70}
    if kind in heads:
        return frame(heads[kind], b"\0\1\0", five)
    if kind == "publish":
        return frame(0x30, s("t"), five)
    if kind == "connect":
        return connect(2, s("p"), five=five)
    if kind == "will":
        return connect(6, s("p"), five, s("t"), s("x"))
    if kind == "disconnect":
        return frame(0xE0, b"\0", five)
    return frame(0x82, b"\0\1", five, s("t"), b"\0") if kind == "subscribe" else frame(0xA2, b"\0\1", five, s("t"))


def properties() -> Iterator[Case]:
    for kind, legal in _LEGAL.items():
        foreign = [with_properties(kind, sample(i)) for i in FORMS if i not in legal]
        yield breaks(f"{kind}-with-properties-of-others", None, "4.13.1-1", *foreign)
        twice = [with_properties(kind, sample(i) * 2) for i in legal if i != 0x26 and (kind, i) != ("publish", 0x0B)]
        if twice:
            yield breaks(f"{kind}-with-a-property-twice", None, "4.13.1-1", *twice)
        yield breaks(f"{kind}-with-unknown-properties", None, "4.13.1-1", *(
            with_properties(kind, body) for body in (b"\0\0", b"\x04\0", b"\x7f\0", b"\x2b\0")), code=0x81)  # fmt: skip
    connects = (0x11, 0x15, 0x16, 0x17, 0x19, 0x21, 0x22, 0x26, 0x27)
    wills = (0x01, 0x02, 0x03, 0x08, 0x09, 0x18, 0x26)
    for kind, legal in (("connect", connects), ("will", wills)):
        packets = [with_properties(kind, sample(i)) for i in FORMS if i not in legal]
        packets += [with_properties(kind, sample(i) * 2) for i in legal if i not in (0x26, 0x16)]
        yield spoils(f"{kind}-with-wrong-properties", None, "3.1.4-1 4.13.1-1", *packets)
    yield spoils("connect-with-values-out-of-range", None, "3.1.4-1 4.13.1-1", *(
        with_properties("connect", body) for body in (b"\x17\2", b"\x19\2", b"\x21\0\0", b"\x27\0\0\0\0",
            sample(0x16))))  # fmt: skip
    yield breaks("values-out-of-range", None, "4.13.1-1", with_properties("publish", b"\1\2"),
                 with_properties("subscribe", b"\x0b\0"))  # fmt: skip
    yield breaks("topic-alias-0", None, "3.3.2-8", with_properties("publish", b"\x23\0\0"), code=0x94)
    yield breaks("properties-beyond-the-packet", None, "4.13.1-1 2.2.2-1", frame(0x30, s("t"), b"\x05\1"),
                 frame(0x30, s("t")), frame(0x82, b"\0\1"), code=0x81)  # fmt: skip


# --- CONNECT and before -------------------------------------------------------------------------------------------

CONNECTS = [
    spoils("reserved-connect-flag", "3.1.2-3 3.1.4-1", "3.1.2-3 3.1.4-1", connect(3, s("c")), code=0x81),
    spoils("will-qos-without-will", "3.1.2-11 3.1.2-13", "3.1.2-11", connect(0x0A, s("c")), connect(0x12, s("c")),
        code=BROKEN),
    spoils("will-retain-without-will", "3.1.2-11 3.1.2-15", "3.1.2-13", connect(0x22, s("c")), code=BROKEN),
    spoils("will-qos-3", "3.1.2-14", "3.1.2-12", frame(
        0x10, s("MQTT"), lambda v: bytes((v, 0x1E)), b"\0\0", none, s("c"), none, s("t"), s("x")), code=0x81),
    spoils("will-flag-without-will", "3.1.2-9", "3.1.2-9", connect(6, s("c")), connect(6, s("c"), s("t")), code=0x81),
    spoils("user-name-flag-without-user-name", "3.1.2-19", "3.1.2-17", connect(0x82, s("c")), code=0x81),
    spoils("user-name-without-its-flag", "3.1.2-18", "3.1.2-16", connect(2, s("c"), s("u")), code=0x81),
    spoils("password-flag-without-password", "3.1.2-21", "3.1.2-19", connect(0xC2, s("c"), s("u")), code=0x81),
    spoils("password-without-its-flag", "3.1.2-20", "3.1.2-18", connect(0x82, s("c"), s("u"), s("p")), code=0x81),
    spoils("password-without-user-name", "3.1.2-22", None, connect(0x42, s("c"), s("p"))),
    spoils("connect-without-client-id", "3.1.3-3", "3.1.3-3", connect(2), code=0x81),
    spoils("connect-cut-short", "3.1.4-1", "3.1.4-1", frame(0x10, s("MQTT"), lambda v: bytes((v,))),
           frame(0x10, s("MQTT"), lambda v: bytes((v, 2)), b"\0"), connect(2, b"\0\5abc"), code=0x81),
    Case("wrong-protocol-name", "3.1.2-1", "3.1.2-1", [
        step for name in ("MQTX", "mqtt", "MQT", "") for step in (
            a.open(), a.send(frame(0x10, s(name), lambda v: bytes((v, 2)), b"\0\0", none, s("n"))), a.dropped())]),
    Case("unsupported-protocol-level", "3.1.2-2 3.2.2-4 3.2.2-5", None, [
        step for level in (b"\0", b"\2", b"\3") for step in (
            a.open(), a.send(frame(0x10, s("MQTT"), level, b"\2\0\0", s("n"))), a.refused(1, None))]),
    Case("unsupported-protocol-version", None, "3.1.2-2 3.2.2-6 3.2.2-7", [
        step for level in (b"\6", b"\x7f") for step in (
            a.open(), a.send(frame(0x10, s("MQTT"), level, b"\2\0\0\0", s("n"))), a.refused(None, 0x84))]),
    Case("packets-before-connect", "3.1.0-1 3.2.0-1", "3.1.0-1 3.2.0-1 3.14.0-1", [
        step for packet in (PINGREQ, PUBLISH("~/t", b"x"), frame(0x82, b"\0\1", none, s("t"), b"\0"),
            frame(0x40, b"\0\1"),
                            frame(0xE0), frame(0xA2, b"\0\1", none, s("t"))) for step in (
            a.open(), a.send(packet, CONNECT()), a.dropped())]),
    Case("a-second-connect", "3.1.0-2", "3.1.0-2 4.13.1-1 3.2.0-2", [a.connect(), a.send(CONNECT()), a.ended(0x82)]),
]  # fmt: skip

CASES = [*strings(), *FIXED_HEADER, *BODIES, *properties(), *CONNECTS]
