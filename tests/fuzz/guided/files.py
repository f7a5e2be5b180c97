"""Files of operators: the configuration, access rules and passwords. A mistake is one line that names its place."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any
from zlib import crc32

from support.paths import ROOT

from fuzz.guided.target import Target
from fuzz.guided.topics import is_match
from fuzz.reference import is_topic
from fuzz.verdict import Finding
from mqttbroker.auth.acl import AclError, parse_acl
from mqttbroker.auth.passwords import PasswordFileError, hash_password, parse_passwords, scram_password
from mqttbroker.config.load import ConfigError, load_settings
from mqttbroker.config.settings import Listener, Settings, Stream
from mqttbroker.server.reload import flatten, with_key

CONF = ROOT / "conf" / "mqttbroker.toml"
SECRET = "hunter2"


def expect_line(text: str, start: str) -> None:
    """Raises Finding unless ``text`` is one printable line with that beginning."""
    if not text.startswith(start) or not text.isprintable():
        raise Finding(f"not a line that begins with {start!r}: {text!r}")


class Configuration(Target):
    """A TOML file, or, if it begins with a variable's name, the environment."""

    modules = ("mqttbroker.config.load", "mqttbroker.config.setting_kinds", "mqttbroker.config.settings")
    max_bytes = 2000
    words = tuple(
        word.encode()
        for section in (Settings, Listener, Stream)
        for field in dataclasses.fields(section)
        for word in (field.name, *(inner.name for inner in dataclasses.fields(field.metadata.get("section", Listener))))
    ) + (
        b"[[listeners]]\n",
        b"[streams.s]\n",
        b" = ",
        b'"global"',
        b"MQTTBROKER_",
        b"__",
        b'"64KiB"',
        b'"10s"',
        b"[",
        b"{",
    )

    def check(self, data: bytes) -> None:
        warnings: list[str] = []
        if data.startswith(b"MQTTBROKER_"):
            lines = data.decode("utf-8", "replace").replace("\0", "").split("\n")
            variables = dict(line.split("=", 1) for line in lines if "=" in line)
            start, path = "", None
        else:
            path = self.directory / "broker.toml"
            path.write_bytes(data)
            variables, start = {}, str(path)
        try:
            settings = load_settings(path, variables, {}, warnings.append)
        except ConfigError as error:
            for problem in error.problems:
                expect_line(problem, start)
                if not start and not problem.strip('"').startswith("MQTTBROKER_"):
                    raise Finding(f"no variable is named: {problem!r}") from None
            if not error.problems:
                raise Finding("refused without a reason") from None
            return
        for warning in warnings:
            expect_line(warning, start)
        values = flatten(settings)
        key = list(values)[crc32(data) % len(values)]
        if flatten(with_key(settings, key, values[key])) != values:
            raise Finding(f"{key} cannot be set")
        if f'token = "{SECRET}"'.encode() in data and SECRET in repr(settings):
            raise Finding("a secret is shown")

    def seeds(self) -> Iterator[bytes]:
        text = CONF.read_text(encoding="utf-8")
        for section in re.split(r"\n(?=\[)", re.sub(r"^#.*\n?|\n\n+", "", text, flags=re.MULTILINE)):
            lines = [line for line in section.split("\n") if line]
            head = [lines.pop(0)] if lines[0].startswith("[") else []
            for at in range(0, len(lines), 15):
                yield "\n".join([*head, *lines[at : at + 15]]).encode()
        yield b'[streams.s]\nfilters = ["a/#", "b"]\npartitions = 3\nkey = "user-property:k"\nretention_age = "7d"\n'
        yield f'[http]\ntoken = "{SECRET}"\n'.encode()
        yield b"a = " + b"[" * 900
        yield b"limits.crowded_queue_messages = 5\nlimits.queue_high_watermark_messages = 5"
        yield b"MQTTBROKER_LISTENERS__0__PORT=1\nMQTTBROKER_LISTENERS__1__TYPE=unix\nMQTTBROKER_LISTENERS__1__PATH=x"
        yield b"MQTTBROKER_STREAMS__S__FILTERS=a/#,b\nMQTTBROKER_LIMITS__CROWDED_QUEUE_BYTES=1KiB"


CLIENTS: tuple[tuple[str, str | None], ...] = (
    ("c", None), ("c", "alice"), ("a/b", "alice"), ("+", "bob"), ("c", "#"), ("$SYS", "x/y"), ("", "bob"),
)  # fmt: skip
ACCESS = {"read": "r", "write": "w", "readwrite": "rw", "deny": ""}


class AccessRules(Target):
    """An ACL file; its decisions against those of a second reading of the file."""

    modules = ("mqttbroker.auth.acl",)
    max_bytes = 300
    words = (
        b"user ",
        b"topic ",
        b"pattern ",
        b"read ",
        b"write ",
        b"readwrite ",
        b"deny ",
        b"%c",
        b"%u",
        b"/#",
        b"+/",
        b"\n",
        b"alice",
        b"bob",
        b"$SYS/",
    )

    def check(self, data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        try:
            acl = parse_acl(text, "rules.acl")
        except AclError as error:
            expect_line(str(error), "rules.acl:")
            return
        sections, patterns = _rules(text)
        topics = {"a", "a/b", "c/alice", "$SYS/x"}
        for rules in (*sections.values(), patterns):
            for _, topic_filter in rules:
                for name in ("c", "alice"):
                    replaced = topic_filter.replace("%c", name).replace("%u", name).replace("+", "b").replace("#", "b/c")
                    topics.add(replaced)
        for topic in sorted(topic for topic in topics if is_topic(topic))[:20]:
            for client_id, username in CLIENTS:
                for access, decide in (("w", acl.may_publish), ("r", acl.may_read)):
                    expected = _allowed(sections, patterns, access, client_id, username, topic)
                    if decide(client_id, username, topic) is not expected:
                        raise Finding(f"{access} {topic!r} by {client_id!r}, {username!r}: {expected} is right: {text!r}")

    def seeds(self) -> Iterator[bytes]:
        yield b"topic read public/#\n\nuser alice\ntopic readwrite plant/#\ntopic deny plant/safety/#\n"
        yield b"# c\npattern write devices/%c/telemetry\npattern read users/%u/#\npattern deny %c/%u"
        yield b"user bob\ntopic a b\ntopic $SYS/#\nuser alice\ntopic write +/b\nuser bob\ntopic deny #\r\n"


def _rules(text: str) -> tuple[dict[str | None, list[tuple[str, str]]], list[tuple[str, str]]]:
    """The rules of each user, None for anonymous clients, and the patterns; each as access and filter."""
    sections: dict[str | None, list[tuple[str, str]]] = {None: []}
    patterns: list[tuple[str, str]] = []
    user: str | None = None
    for line in text.split("\n"):
        found = re.match(r"\s*(user|topic|pattern)\s+(.*?)\s*\Z", line, re.DOTALL)
        if found is None:
            continue
        if found[1] == "user":
            user = found[2]
            sections.setdefault(user, [])
            continue
        access, topic_filter = "readwrite", found[2]
        words = re.match(r"(read|write|readwrite|deny)\s+(.+)\Z", topic_filter, re.DOTALL)
        if words is not None:
            access, topic_filter = words[1], words[2]
        (patterns if found[1] == "pattern" else sections[user]).append((ACCESS[access], topic_filter))
    return sections, patterns


def _allowed(
    sections: dict[str | None, list[tuple[str, str]]], patterns: list[tuple[str, str]],
    access: str, client_id: str, username: str | None, topic: str,
) -> bool:  # fmt: skip
    matching = [rule for rule, topic_filter in sections.get(username, []) if is_match(topic_filter, topic)]
    if "" in matching or any(access in rule for rule in matching):
        return "" not in matching
    if any(sign in name for sign in "+#" for name in (client_id, username or "")):
        return False
    matching = []
    for rule, pattern in patterns:
        names = {"%c": client_id, "%u": username}
        used = [names[level] for level in pattern.split("/") if level in names]
        if any(name is None or "/" in name for name in used) or (not username and "%u" in pattern.split("/")):
            continue
        filled = "/".join(str(names.get(level, level)) for level in pattern.split("/"))
        if pattern.startswith("$") is topic.startswith("$") and filled and is_match(filled, topic):
            matching.append(rule)
    return "" not in matching and any(access in rule for rule in matching)


class PasswordFile(Target):
    """A password file: its mistakes do not show hashes or passwords, and cheap hashes can be checked."""

    modules = ("mqttbroker.auth.passwords",)
    max_bytes = 400
    words = (
        b"$7$",
        b"$6$",
        b"$argon2id$v=19$m=8,t=1,p=1$",
        b"$scram-sha-256$",
        b"1$",
        b"\n",
        b"alice:",
        b"hunter2hunter2",
        b"==",
    )

    def check(self, data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        try:
            passwords = parse_passwords(text, "users.txt")
        except PasswordFileError as error:
            expect_line(str(error), "users.txt:")
            if SECRET in str(error):
                raise Finding(f"a secret is shown: {error}") from None
            return
        if set(passwords.hashes) != set(passwords.fingerprints):
            raise Finding("users without a hash")
        for username, encoded in passwords.fingerprints.items():
            if f"{username}" not in text or encoded not in text:
                raise Finding(f"{username!r} is not in the file: {text!r}")
            if _is_cheap(encoded):
                for password in (b"", b"hunter2", b"\xff" * 30):
                    if passwords.verify(username, password) not in (True, False):
                        raise Finding("neither right nor wrong")

    def seeds(self) -> Iterator[bytes]:
        yield b"alice:$7$101$Z6pYhOoBUxBUxxBq$" + b"A" * 86 + b"==\n# x\n\nbob:$6$c2FsdA==$" + b"B" * 86 + b"==\n"
        yield f"alice:{hash_password(b'x')}\nbob:{scram_password(b'x')}\n".encode()
        yield b"alice:$argon2id$v=19$m=8,t=1,p=1$c2FsdHNhbHRzYWx0$" + b"A" * 43
        yield b"hunter2\nalice:hunter2\n:x\n"


def _is_cheap(encoded: str) -> bool:
    numbers: list[Any] = re.findall(r"\d+", encoded.rpartition("$")[0][:60])
    if encoded.startswith("$argon2id$"):
        return all(int(number) <= 64 for number in numbers[2:5])
    return encoded.startswith("$6$") or bool(re.match(r"\$(7|scram-sha-256)\$\d{1,3}\$", encoded))
