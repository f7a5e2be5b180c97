"""SCRAM-SHA-256: a client is authenticated only if it proves that it knows the password."""

from __future__ import annotations

import hashlib
import hmac
import re
from base64 import b64encode
from collections.abc import Iterator
from random import Random

from fuzz.guided.target import Target
from fuzz.verdict import Finding
from mqttbroker.auth.scram import Credentials, Exchange, ScramError, derive

NONCE = "servernonce"
SALT = b"0123456789abcdef"
USERS = {"alice": b"secret", "b=2C,": b"other"}
KNOWN = {name: derive(password, SALT, 2) for name, password in USERS.items()}
INVENTED = derive(b"nobody knows it", SALT, 2)


class Scram(Target):
    """The input is the client's messages, one per line; ``{nonce}`` and ``{proof}`` in it become the right values."""

    modules = ("mqttbroker.auth.scram",)
    words = (
        b"n,,",
        b"y,,",
        b"p=x,,",
        b"n=alice",
        b",r=",
        b"c=biws,",
        b"{nonce}",
        b",p={proof}",
        b"=2C",
        b"=3D",
        b"a=alice",
    )
    max_bytes = 300

    def check(self, data: bytes) -> None:
        exchange = Exchange(_find, NONCE)
        sent: list[bytes] = []
        server_first = b""
        for line in data.split(b"\n")[:4]:
            message = line.replace(b"{nonce}", NONCE.encode())
            if b"{proof}" in message and sent:
                without = message.rpartition(b",p=")[0]
                message = message.replace(b"{proof}", _proof(_user(sent[0]), sent[0], server_first, without))
            try:
                answer = exchange.step(message)
            except ScramError:
                if exchange.done:
                    raise Finding(f"authenticated by a message that was refused: {data!r}") from None
                break
            sent.append(message)
            if len(sent) == 1:
                server_first = answer
        if exchange.done:
            self._authenticated(exchange.username, sent, server_first, data)

    def _authenticated(self, username: str, sent: list[bytes], server_first: bytes, data: bytes) -> None:
        if len(sent) != 2 or username not in USERS:
            raise Finding(f"{username!r} is authenticated after {len(sent)} messages: {data!r}")
        without, _, proof = sent[1].rpartition(b",p=")
        if proof != _proof(username, sent[0], server_first, without):
            raise Finding(f"{username!r} is authenticated with another proof: {data!r}")
        if sent[0][:2] == b"p=":
            raise Finding(f"channel binding was claimed: {data!r}")
        header = sent[0][: sent[0].index(b"n=")] if sent[0].count(b"n=") == 1 else None
        if header is not None and not without.startswith(b"c=" + b64encode(header) + b","):
            raise Finding(f"another channel binding: {data!r}")
        if b",r=" not in without or NONCE.encode() not in without:
            raise Finding(f"without the server's nonce: {data!r}")

    def changed(self, data: bytes, random: Random) -> bytes:
        """One field of a right exchange, or of this one, replaced, removed or repeated."""
        text = data if b"\n" in data and random.random() < 0.5 else random.choice(list(self.seeds()))
        fields = re.split(rb"([,\n])", text)
        at = random.randrange(0, len(fields), 2)
        word = random.choice((*self.words, b"", b"r=x{nonce}", b"p={proof}", b"i=1", b"\xff", random.choice(fields)))
        fields[at] = random.choice((word, fields[at] + word, fields[at] + b"," + fields[at], fields[at][:-1]))
        return b"".join(fields)

    def seeds(self) -> Iterator[bytes]:
        for user in (b"alice", b"b=3D2C=2C", b"carol"):
            for header in (b"n,,", b"y,,", b"n,a=" + user + b","):
                first = header + b"n=" + user + b",r=abc"
                yield first + b"\nc=" + b64encode(header) + b",r=abc{nonce},p={proof}"
        yield b"p=tls-unique,,n=alice,r=abc"
        yield b"n,,n=alice,r=abc,x=1\nc=biws,r=abc{nonce},y=2,p={proof}"


def _find(username: str) -> Credentials:
    return KNOWN.get(username, INVENTED)


def _user(first: bytes) -> str:
    """The user that a client-first-message names, as `Exchange` understands it."""
    name = first.split(b"n=", 1)[-1].split(b",", 1)[0].decode(errors="replace")
    if first[:1] == b"n" and b",a=" in first[:4]:
        name = first.split(b",n=", 1)[-1].split(b",", 1)[0].decode(errors="replace")
    return name.replace("=2C", ",").replace("=3D", "=")


def _proof(username: str, first: bytes, server_first: bytes, without: bytes) -> bytes:
    """The client's side of RFC 5802, section 3."""
    bare = first.split(b",", 2)[-1]
    salted = hashlib.pbkdf2_hmac("sha256", USERS.get(username, b"guess"), SALT, 2)
    client_key = hmac.new(salted, b"Client Key", "sha256").digest()
    message = bare + b"," + server_first + b"," + without
    signature = hmac.new(hashlib.sha256(client_key).digest(), message, "sha256").digest()
    return b64encode(bytes(one ^ other for one, other in zip(client_key, signature)))
