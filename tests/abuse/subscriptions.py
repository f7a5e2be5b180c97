"""Abuse by subscriptions, and of the HTTP server."""

from __future__ import annotations

import itertools
from contextlib import suppress

from abuse.kinds import kind
from abuse.packets import DISCONNECT, OTHER, connect, framed, publish, subscribe, unsubscribe
from abuse.target import TOKEN, Target

# --- SUBSCRIBE and UNSUBSCRIBE ----------------------------------------------------------------------------------------


@kind("SUBSCRIBE to new filters without a pause, until the client has no room for more", short=True)
def subscriptions(target: Target) -> None:
    number = 0

    def chunk() -> bytes:
        nonlocal number
        number += 500
        return subscribe([f"sub/{number + index}/+" for index in range(500)], version=5)

    target.flood(lambda: target.client("subscriber", 5), chunk, 5)


@kind("SUBSCRIBE and UNSUBSCRIBE of the same 5,000 filters")
def resubscriptions(target: Target) -> None:
    filters = [f"again/{number}/#" for number in range(5000)]
    target.flood(lambda: target.client("again", 5), subscribe(filters, version=5) + unsubscribe(filters, version=5), 5)


@kind("clients that subscribe to 40,000 filters and disconnect")
def ended_subscribers(target: Target) -> None:
    packets = b"".join(subscribe([f"ended/{low + index}/+" for index in range(4000)]) for low in range(0, 40_000, 4000))
    while target.running():
        with suppress(OSError):
            line = target.client(f"ended{target.random.random()}")
            target.push(line, packets + DISCONNECT)
            target.answered.read(line, 4, 5.0)
            line.close()


@kind("UNSUBSCRIBE packets of 10 MB, 3.4 million filters each", short=True)
def large_unsubscribe(target: Target) -> None:
    target.flood(lambda: target.client("large-unsubscribe", 5), framed(0xA2, b"\0\1\0" + b"\0\1x" * 3_400_000), 5)


@kind("SUBSCRIBE to invalid filters")
def invalid_filters(target: Target) -> None:
    filters = ("a/#/b", "a+", "#/", "", "$share/g", "$share//t", "$share/g+/t", "a\0b")
    target.flood(
        lambda: target.client("invalid-filters", 5),
        lambda: subscribe([target.random.choice(filters)], version=5),
        5,
    )


@kind("2^12 overlapping filters, and messages to new topics that match them all", short=True)
def overlapping_filters(target: Target) -> None:
    reader = target.client("overlap-reader", receive_buffer=1 << 20)
    filters = ["+/" + "/".join(levels) for levels in itertools.product("a+", repeat=12)]
    for low in range(0, len(filters), 1000):
        reader.sendall(subscribe(filters[low : low + 1000]))
    writer = target.client("overlap-writer")
    while target.running():
        chunk = b"".join(publish(f"{target.random.random()}" + "/a" * 12, b"x") for _ in range(20))
        if not target.push(writer, chunk):
            break
        target.answered.read(reader)


@kind("2^12 overlapping filters with subscription identifiers")
def overlapping_identifiers(target: Target) -> None:
    reader = target.client("identifier-reader", 5, receive_buffer=1 << 20)
    filters = ["+/" + "/".join(levels) for levels in itertools.product("a+", repeat=12)]
    for low in range(0, len(filters), 64):
        identifier = b"\x0b" + bytes((1 + low // 64,))
        reader.sendall(subscribe(filters[low : low + 64], version=5, properties=identifier))
    writer = target.client("identifier-writer")
    while target.running():
        if not target.push(writer, publish(f"{target.random.random()}" + "/a" * 12, b"x") * 5):
            break
        target.answered.read(reader, 5)


@kind("filters of 60 kB, until the client has no room for more")
def long_filters(target: Target) -> None:
    target.flood(
        lambda: target.client("long-filters", 5),
        lambda: subscribe([f"{target.random.random()}/" + "x" * 60_000 + "/+"], version=5),
        5,
    )


@kind("filters of 128 levels of +, and topics that match them")
def wildcard_levels(target: Target) -> None:
    reader = target.client("levels-reader")
    for levels in range(1, 128):
        reader.sendall(subscribe(["/".join("+" * levels), "/".join("+" * levels) + "/#"]))
    target.flood(
        lambda: target.client("levels-writer"),
        lambda: publish("/".join(str(target.random.randrange(10)) for _ in range(127)), b"x") * 20,
    )


# --- shared subscriptions ---------------------------------------------------------------------------------------------


@kind("members that join and leave shared subscriptions while messages arrive")
def shared_churn(target: Target) -> None:
    writer = target.client("shared-writer")
    members = target.clients(50, "member")
    while target.running():
        for line in members:
            groups = [f"$share/g{target.random.randrange(20)}/shared/#" for _ in range(5)]
            target.push(line, subscribe(groups, 1) + unsubscribe(groups[:3]))
        target.push(writer, publish("shared/1", b"x", 1) * 20)


@kind("messages to a shared subscription of 1,000 members that are away")
def shared_away(target: Target) -> None:
    target.until += 3
    for number in range(1000):
        with suppress(OSError):
            line = target.open()
            hello = connect(f"away{number}", clean=False) + subscribe(["$share/away/shared/away"], 1) + DISCONNECT
            line.sendall(hello)
            line.recv(100)
            line.close()
    target.flood(lambda: target.client("away-writer"), publish("shared/away", b"x" * 100, 1) * 100)


@kind("a member of a shared subscription that takes 1,000 messages, acknowledges none and leaves, again and again")
def shared_leavers(target: Target) -> None:
    writer = target.client("leaver-writer")
    while target.running():
        with suppress(OSError):
            lines = [target.client(f"leaver{number}") for number in range(2)]
            for line in lines:
                line.sendall(subscribe(["$share/leavers/shared/left"], 1))
            target.push(writer, publish("shared/left", b"x", 1) * 2000)
            target.pause(0.05)
            for line in lines:
                line.close()
            target.answered.note("left")


# --- $SYS -------------------------------------------------------------------------------------------------------------


@kind("1,500 subscribers of $SYS/#")
def sys_subscribers(target: Target) -> None:
    lines = target.clients(1500, "sys")
    for line in lines:
        with suppress(OSError):
            line.sendall(subscribe(["$SYS/#"]))
    target.watch(lines)


# --- HTTP -------------------------------------------------------------------------------------------------------------


@kind("500 HTTP connections that send nothing")
def idle_http(target: Target) -> None:
    lines = target.connections(500, target.ports.http)
    while target.running():
        with suppress(OSError):
            target.http("/readyz")
        target.pause(0.2)
    target.watch(lines, OTHER)


def request_once(target: Target, request: bytes) -> None:
    """Send a request, or several, over a new connection, and count the status code of the first answer."""
    with suppress(OSError):
        line = target.open(target.ports.http)
        line.settimeout(1.0)
        with suppress(OSError):
            line.sendall(request)
        data = line.recv(1 << 20)
        target.answered.note(f"HTTP {data[9:12].decode(errors='replace')}" if data else "closed")
        line.close()


@kind("HTTP headers of 1 MB", short=True)
def large_http_headers(target: Target) -> None:
    headers = b"".join(b"X-%d: %s\r\n" % (number, b"y" * 1000) for number in range(1000))
    while target.running():
        request_once(target, b"GET /livez HTTP/1.1\r\n" + headers + b"\r\n")


@kind("1,000 HTTP requests in one write")
def pipelined_http(target: Target) -> None:
    while target.running():
        request_once(target, b"GET /livez HTTP/1.1\r\nHost: broker\r\n\r\n" * 1000)


@kind("HTTP requests with wrong tokens")
def wrong_tokens(target: Target) -> None:
    while target.running():
        with suppress(OSError):
            target.http("/metrics", token=str(target.random.random()))


@kind("thousands of ranges of a stream's files, overlapping and invalid ones")
def http_ranges(target: Target) -> None:
    ranges = ("0-", "5-1", "-1", ",".join(["0-1"] * 5000), "0-99999999999999999999", "a-b")
    while target.running():
        with suppress(OSError):
            header = f"Range: bytes={target.random.choice(ranges)}\r\n"
            target.http(target.random.choice(("/streams", "/streams/abused", "/streams/abused/0/x")), header, TOKEN)


@kind("invalid HTTP: smuggled lengths, unknown methods, random bytes")
def http_garbage(target: Target) -> None:
    requests = (
        b"POST /livez HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"BREW /livez HTTP/9.9\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    )
    while target.running():
        request_once(target, target.random.choice((*requests, target.random.randbytes(300) + b"\r\n\r\n")))


@kind("/metrics without a pause")
def metrics_flood(target: Target) -> None:
    while target.running():
        with suppress(OSError):
            target.http("/metrics", token=TOKEN)
