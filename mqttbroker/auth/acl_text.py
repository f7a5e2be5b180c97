"""Single rules of an ACL file, and changes of its text that keep comments and the order of the other rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mqttbroker.auth.acl import DENY, READ, WRITE, Acl, Rule, Section, parse_rule

ACCESS_WORDS = {READ: "read", WRITE: "write", READ | WRITE: "readwrite", DENY: "deny"}


class AclRule(NamedTuple):
    """One rule. ``username`` None = of anonymous clients, or of all if ``pattern``; ``access`` as in the file."""

    username: str | None
    pattern: bool
    access: str
    topic_filter: str

    def line(self) -> str:
        """The rule as in a file."""
        return f"{'pattern' if self.pattern else 'topic'} {self.access} {self.topic_filter}"


def rules_in(acl: Acl) -> Iterator[AclRule]:
    """The rules of anonymous clients, of each user, and the patterns. In each section denials come first."""
    yield from _of_section(acl.anonymous, None, False)
    for username, section in acl.users.items():
        yield from _of_section(section, username, False)
    yield from _of_section(acl.patterns, None, True)


def _of_section(section: Section, username: str | None, pattern: bool) -> Iterator[AclRule]:
    for rule in [*section.denials, *section.grants]:
        yield _described(rule, username, pattern)


def _described(rule: Rule, username: str | None, pattern: bool) -> AclRule:
    return AclRule(username, pattern, ACCESS_WORDS[rule.access], rule.topic_filter)


def check_username(username: str) -> None:
    """Raise ValueError if an ACL file cannot contain this user name."""
    if not username or username != username.strip() or "\n" in username or "\r" in username:
        raise ValueError("a user name must not be empty, begin or end with a blank or have a line break")


def _lines(text: str) -> tuple[list[str], list[tuple[str, str | None, AclRule | None]]]:
    """The lines of a valid text; and for each its kind ("user", "topic", "pattern" or ""), its user, and its rule."""
    lines = text.split("\n")
    parsed: list[tuple[str, str | None, AclRule | None]] = []
    user: str | None = None
    for line in lines:
        words = line.split(None, 1)
        kind = words[0] if words and not words[0].startswith("#") else ""
        rest = words[1].strip() if len(words) > 1 else ""
        rule = None
        if kind == "user":
            user = rest
        elif kind:
            pattern = kind == "pattern"
            rule = _described(parse_rule(rest, pattern), None if pattern else user, pattern)
        parsed.append((kind, user, rule))
    return lines, parsed


def has_rule(text: str, rule: AclRule) -> bool:
    """Whether a valid text has a rule."""
    return any(found == rule for _, _, found in _lines(text)[1])


def with_rule(text: str, rule: AclRule) -> str:
    """A valid text with one more rule: behind the last one of its user, or of the patterns, else at the end.

    The first rule of anonymous clients is put before the first user.
    """
    lines, parsed = _lines(text)
    ending = "\r" if "\r\n" in text else ""
    new = [rule.line() + ending]
    alike = [
        number
        for number, (_, _, found) in enumerate(parsed)
        if found is not None and (found.username, found.pattern) == (rule.username, rule.pattern)
    ]
    users = [number for number, (kind, _, _) in enumerate(parsed) if kind == "user"]
    own = [number for number in users if parsed[number][1] == rule.username and not rule.pattern]
    if alike:
        place = alike[-1] + 1
    elif own:
        place = own[-1] + 1
    elif rule.username is None and not rule.pattern and users:
        place, new = users[0], [*new, ending]
    else:
        place = len(lines) - 1 if lines[-1] == "" else len(lines)
        if rule.username is not None:
            new.insert(0, f"user {rule.username}{ending}")
        if place and lines[place - 1].strip():
            new.insert(0, ending)
        if place == len(lines):
            new.append("")
    return "\n".join(lines[:place] + new + lines[place:])


def without_rule(text: str, rule: AclRule) -> str:
    """A valid text without a rule, however often it is there. The ``user`` line stays, for the rules behind it."""
    lines, parsed = _lines(text)
    return "\n".join(line for line, (_, _, found) in zip(lines, parsed) if found != rule)
