"""Abuse by PUBLISH and by its acknowledgements, of connected clients."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from abuse.kinds import kind
from abuse.packets import (
    PINGREQ,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    acknowledgement,
    framed,
    publish,
    split,
    subscribe,
    text,
)
from abuse.target import MIB, Target, reset

# --- volume -----------------------------------------------------------------------------------------------------------


@kind("QoS 0 messages without a pause, from one client to another", short=True)
def qos0_flood(target: Target) -> None:
    reader = target.client("qos0-reader", receive_buffer=1 << 20)
    reader.sendall(subscribe(["qos0"]))
    writer = target.client("qos0-writer")
    chunk = publish("qos0", b"x" * 100) * 500
    while target.push(writer, chunk):
        target.answered.read(reader)


@kind("QoS 1 messages from a client that does not read its acknowledgements")
def unread_acknowledgements(target: Target) -> None:
    lines = [target.client(f"unread{number}", receive_buffer=4096) for number in range(10)]
    chunk = b"".join(publish("unread", b"x", 1, number) for number in range(1, 1000))
    for line in lines:
        line.settimeout(0.2)
    while target.running():
        for line in lines:
            with suppress(OSError):
                line.sendall(chunk)
                target.answered.note("1,000 messages taken")


@kind("messages from 200 clients to one subscriber that reads them")
def fan_in(target: Target) -> None:
    reader = target.client("fan-in", receive_buffer=1 << 20)
    reader.sendall(subscribe(["fan-in/#"]))
    writers = target.clients(200, "fan-in-writer")
    while target.running():
        for number, writer in enumerate(writers):
            target.push(writer, publish(f"fan-in/{number}", b"x" * 100) * 50)
        target.answered.read(reader)


@kind("messages to 1,000 connected subscribers, without a pause")
def fan_out(target: Target) -> None:
    target.until += 2
    lines = target.clients(1000, "fan-out", receive_buffer=65536)
    for line in lines:
        line.sendall(subscribe(["fan-out"]))
    writer = target.client("fan-out-writer")
    while target.push(writer, publish("fan-out", b"x" * 100) * 20):
        for line in lines:
            target.answered.read(line)


@kind("packets of 10 MB, one after the other")
def large_packets(target: Target) -> None:
    target.client("large-reader").sendall(subscribe(["large"]))
    target.flood(lambda: target.client("large-writer"), publish("large", b"x" * 10_000_000))


@kind("packets above the maximum packet size")
def too_large_packets(target: Target) -> None:
    target.flood(lambda: target.client("too-large", 5), publish("large", b"x" * 11_000_000, version=5)[:100_000], 5)


def does_not_read(target: Target, qos: int) -> None:
    readers = [target.client(f"stalled{number}", 5, 4096) for number in range(20)]
    for reader in readers:
        reader.sendall(subscribe(["stalled/#"], qos, version=5))
    writer = target.client("stalled-writer")
    chunk = publish("stalled/1", b"x" * 4096, qos) * 10
    while target.push(writer, chunk):
        pass


@kind("messages to 20 subscribers that do not read, QoS 0", short=True)
def stalled_qos0(target: Target) -> None:
    does_not_read(target, 0)


@kind("messages to 20 subscribers that do not read, QoS 1")
def stalled_qos1(target: Target) -> None:
    does_not_read(target, 1)


@kind("messages to 20 subscribers that do not read, QoS 2")
def stalled_qos2(target: Target) -> None:
    does_not_read(target, 2)


@kind("QoS 1 messages to a persistent session that acknowledges nothing")
def nothing_acknowledged(target: Target) -> None:
    reader = target.client("debtor", 5, expiry=1000)
    reader.sendall(subscribe(["debt"], 1, version=5))
    writer = target.client("creditor", 5)
    number = 0
    while target.running():
        packet_ids = [index % 65535 + 1 for index in range(number, number + 200)]
        chunk = b"".join(publish("debt", b"x" * 500, 1, packet_id, version=5) for packet_id in packet_ids)
        number += 200
        if not target.push(writer, chunk, 5):
            break
        target.answered.read(reader, 5)


# --- topics -----------------------------------------------------------------------------------------------------------


@kind("QoS 0 messages, each with a new topic of 60 kB", short=True)
def long_topics(target: Target) -> None:
    target.client("long-topics-reader").sendall(subscribe(["long/#"]))
    target.flood(lambda: target.client("long-topics"), lambda: publish(f"long/{target.random.random()}/" + "x" * 60_000))


@kind("messages to new topics that the rules deny, 60 kB each", short=True)
def denied_topics(target: Target) -> None:
    def chunk() -> bytes:
        return publish(f"denied/{target.random.random()}/" + "x" * 60_000, b"", 1, version=5)

    target.flood(lambda: target.client("denied", 5), chunk, 5)


@kind("topics of 65,535 slashes")
def deep_topics(target: Target) -> None:
    target.flood(lambda: target.client("deep", 5), publish("/" * 65_535, b"", 1, version=5), 5)


@kind("empty topics, wildcards and invalid UTF-8 in topics")
def invalid_topics(target: Target) -> None:
    topics = (b"", b"a/+", b"#", b"\xff\xfe", b"a\0b", b"$SYS/broker/version", b"$share/g/t")
    target.flood(
        lambda: target.client("invalid-topics", 5),
        lambda: publish(target.random.choice(topics), b"x", 1, version=5) * 3,
        5,
    )


@kind("new topics without a pause")
def new_topics(target: Target) -> None:
    target.client("new-topics-reader").sendall(subscribe(["new/+/x"]))
    target.flood(
        lambda: target.client("new-topics"),
        lambda: b"".join(publish(f"new/{target.random.randrange(1 << 60)}/x") for _ in range(200)),
    )


def alias(number: int) -> bytes:
    return b"\x23" + struct.pack(">H", number)


@kind("topic aliases that change with each message")
def aliases(target: Target) -> None:
    def chunk() -> bytes:
        return b"".join(
            publish(f"alias/{number}/{target.random.random()}", b"x", version=5, properties=alias(number)) for number in range(1, 11)
        )

    target.flood(lambda: target.client("aliases", 5), chunk, 5)


@kind("topic aliases above the maximum, and ones that were never set")
def wrong_aliases(target: Target) -> None:
    def chunk() -> bytes:
        return publish("", b"x", version=5, properties=alias(target.random.choice((1, 0, 11, 65535))))

    target.flood(lambda: target.client("wrong-aliases", 5), chunk, 5)


@kind("50,000 user properties in one PUBLISH")
def user_properties(target: Target) -> None:
    target.client("properties-reader", 5).sendall(subscribe(["properties"], version=5))
    bomb = publish("properties", b"x", version=5, properties=(b"\x26" + text("a") + text("b")) * 50_000)
    target.flood(lambda: target.client("properties", 5), bomb, 5)


@kind("payloads that are not the UTF-8 that they say they are")
def wrong_payload_format(target: Target) -> None:
    packet = publish("format", b"\xff" * 100_000, 1, version=5, properties=b"\x01\x01")
    target.flood(lambda: target.client("format", 5), packet, 5)


@kind("two clients that answer each other through response topics")
def response_loop(target: Target) -> None:
    ends = [target.client(f"loop{number}", 5) for number in range(2)]
    for number, line in enumerate(ends):
        line.sendall(subscribe([f"loop/{number}"], version=5))
        line.recv(100)
    for number in range(100):
        ends[0].sendall(publish("loop/1", b"x" * 100, version=5, properties=b"\x08" + text("loop/0")))
    left = [b"", b""]
    while target.running():
        for number, line in enumerate(ends):
            line.settimeout(0.05)
            with suppress(TimeoutError):
                packets, left[number] = split(left[number] + line.recv(1 << 16))
                properties = b"\x08" + text(f"loop/{number}")
                answer = publish(f"loop/{1 - number}", b"x" * 100, version=5, properties=properties)
                line.settimeout(5.0)
                line.sendall(answer * sum(first >> 4 == 3 for first, _ in packets))
                target.answered.note("answer", len(packets))


# --- acknowledgements and packet ids ----------------------------------------------------------------------------------


@kind("QoS 2 messages that are never released")
def never_released(target: Target) -> None:
    chunk = b"".join(publish("unreleased", b"x" * 100, 2, number, version=5) for number in range(1, 1001))
    target.flood(lambda: target.client("unreleased", 5, expiry=100, clean=False), chunk, 5)


@kind("more messages in flight than Receive Maximum allows")
def above_receive_maximum(target: Target) -> None:
    chunk = b"".join(publish("maximum", b"x", 2, number, version=5) for number in range(1, 1500))
    target.flood(lambda: target.client("maximum", 5), chunk, 5)


@kind("one packet id for all messages")
def reused_packet_ids(target: Target) -> None:
    chunk = (publish("reused", b"1", 2, 7, version=5) + publish("reused", b"2", 1, 7, version=5)) * 200
    target.flood(lambda: target.client("reused", 5), chunk + acknowledgement(PUBREL, 7), 5)


@kind("PUBACK, PUBREC, PUBREL and PUBCOMP of packet ids that nobody used", short=True)
def unknown_acknowledgements(target: Target) -> None:
    chunk = b"".join(acknowledgement(kind, number) for number in range(1, 1000) for kind in (PUBACK, PUBREC, PUBREL, PUBCOMP))
    target.flood(lambda: target.client("unknown", 5), chunk, 5)


@kind("PUBRELs of a persistent session, without a pause")
def releases(target: Target) -> None:
    chunk = b"".join(publish("releases", b"x", 2, number, version=5) + acknowledgement(PUBREL, number) for number in range(1, 300))
    target.flood(lambda: target.client("releases", 5, expiry=100, clean=False), chunk, 5)


@kind("PINGREQ without a pause, from 10 clients", short=True)
def pings(target: Target) -> None:
    target.flood(lambda: target.client(f"pings{target.random.random()}"), PINGREQ * 20_000, lines=10)


@kind("packets that only a broker may send")
def broker_packets(target: Target) -> None:
    packets = (b"\x20\x02\0\0", b"\x90\x03\0\1\0", b"\xd0\0", b"\xb0\x02\0\1", framed(0x90, b"\0\1\0\x80"))
    target.flood(lambda: target.client("as-broker", 5), lambda: target.random.choice(packets), 5)


# --- retained messages ------------------------------------------------------------------------------------------------


@kind("retained messages until the broker has no room for more", short=True)
def retained_until_full(target: Target) -> None:
    line = target.client("retainer", 5)
    number = 0
    while target.running():
        topics = [f"retained/{number + index}" for index in range(100)]
        chunk = b"".join(publish(topic, b"x" * 50_000, 1, index, True, 5) for index, topic in enumerate(topics, 1))
        number += 100
        if not target.push(line, chunk, 5):
            break
        while target.running() and sum(target.answered.counts.values()) < number:
            target.answered.read(line, 5, 0.2)


@kind("`#` over 30,000 retained messages, again and again")
def retained_replays(target: Target) -> None:
    target.until += 4
    writer = target.client("replay-writer")
    for low in range(0, 30_000, 1000):
        topics = [f"replay/{number}/x" for number in range(low, low + 1000)]
        target.push(writer, b"".join(publish(topic, b"retained", retain=True) for topic in topics))
    writer.sendall(PINGREQ)
    writer.recv(2)
    while target.running():
        with suppress(OSError):
            line = target.client(f"replay{target.random.random()}")
            line.sendall(subscribe([target.random.choice(("#", "replay/+/x"))]))
            target.answered.read(line, 4, 0.5)
            line.close()


@kind("the same 5,000 topics retained and cleared in turn")
def retained_and_cleared(target: Target) -> None:
    topics = [f"cleared/{number}" for number in range(5000)]
    chunk = b"".join(publish(topic, b"x" * 100, retain=True) for topic in topics)
    clear = b"".join(publish(topic, retain=True) for topic in topics)
    target.flood(lambda: target.client("clearer"), chunk + clear)


@kind("messages for a stream, without a pause", growth=300 * MIB)
def stream_flood(target: Target) -> None:
    number = 0

    def chunk() -> bytes:
        nonlocal number
        number += 100
        packet_ids = [index % 65535 + 1 for index in range(number, number + 100)]
        return b"".join(publish(f"stream/{index % 100}", b"x" * 1000, 1, index) for index in packet_ids)

    target.flood(lambda: target.client("streamer"), chunk)


@kind("a publisher that resets its connection inside each packet")
def reset_inside_packets(target: Target) -> None:
    packet = publish("inside", b"x" * 300_000, 1)

    def begin() -> socket.socket:
        return target.client("inside")

    while target.running():
        with suppress(OSError):
            line = begin()
            line.sendall(packet[: target.random.randrange(len(packet))])
            reset(line)
            target.answered.note("reset")
