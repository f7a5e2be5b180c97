"""Access control lists in Mosquitto's syntax, decided as by Mosquitto 2.

The rules of the client's user are checked first (those before any ``user`` line for an anonymous client), then the
patterns; the first of the two with a match decides. In each, a matching ``deny`` overrides the other rules. Without a
match, access is denied. ``%c`` and ``%u`` stand for one whole level, and a client with a wildcard in its name matches
no pattern, so that a name cannot widen a pattern.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

from mqttbroker.core.access.policy import Authorizer
from topic_matcher.filters import covers, is_valid_filter, matches, overlap

DENY: Final = 0
READ: Final = 1
WRITE: Final = 2
_ACCESS: Final = {"read": READ, "write": WRITE, "readwrite": READ | WRITE, "deny": DENY}


# mypyc frees the weak references to an exception of a native class once too often.
@mypyc_attr(native_class=False)
class AclError(Exception):
    """One line: the file, its line and the reason."""


class Rule:
    """Access to the topics of a filter; the filter of a pattern may have the levels ``%c`` and ``%u``."""

    def __init__(self, access: int, topic_filter: str) -> None:
        self.access = access
        self.topic_filter = topic_filter
        levels = topic_filter.split("/")
        self.of_client = "%c" in levels
        self.of_user = "%u" in levels

    def matches(self, client_id: str, username: str | None, topic: str) -> bool:
        """Whether this rule, as a pattern, matches a topic for the client."""
        if topic.startswith("$") != self.topic_filter.startswith("$"):
            return False  # a name must not be the $ level
        topic_filter = self.filter_for(client_id, username)
        return topic_filter != "" and matches(topic_filter, topic)

    def filter_for(self, client_id: str, username: str | None) -> str:
        """The filter of this rule, as a pattern, for the client; "" if it has none."""
        if self.of_user:
            if not username or "/" in username:
                return ""
        if self.of_client and "/" in client_id:
            return ""
        levels = self.topic_filter.split("/")
        index: int = 0
        while index < len(levels):
            if levels[index] == "%c":
                levels[index] = client_id
            elif levels[index] == "%u" and username is not None:
                levels[index] = username
            index += 1
        return "/".join(levels)


class Section:
    """The rules of one user, or all patterns."""

    def __init__(self) -> None:
        self.denials: list[Rule] = []
        self.grants: list[Rule] = []

    def add(self, rule: Rule) -> None:
        if rule.access == DENY:
            self.denials.append(rule)
        else:
            self.grants.append(rule)


_NO_RULES: Final = Section()


class Acl(Authorizer):
    """The rules of one file."""

    def __init__(self) -> None:
        super().__init__(True)
        self.anonymous = Section()
        self.users: dict[str, Section] = {}
        self.patterns = Section()

    def replace(self, other: Acl) -> None:
        """Use the rules of another file from now on."""
        self.anonymous = other.anonymous
        self.users = other.users
        self.patterns = other.patterns

    def may_publish(self, client_id: str, username: str | None, topic: str) -> bool:
        return self._allows(WRITE, client_id, username, topic)

    def may_read(self, client_id: str, username: str | None, topic: str) -> bool:
        return self._allows(READ, client_id, username, topic)

    def may_subscribe(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        """False only if a denial covers the whole filter."""
        for rule in self._section(username).denials:
            if covers(rule.topic_filter, topic_filter):
                return False
        return True

    def may_read_all(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        """A rule of the user, or a pattern, covers the filter, and no denial before it overlaps with the filter."""
        section = self._section(username)
        for rule in section.denials:
            if overlap(rule.topic_filter, topic_filter):
                return False
        for rule in section.grants:
            if rule.access & READ and covers(rule.topic_filter, topic_filter):
                return True
        if not _fit_patterns(client_id, username):
            return False
        for rule in self.patterns.denials:
            denied = rule.filter_for(client_id, username)
            if denied != "" and overlap(denied, topic_filter):
                return False
        for rule in self.patterns.grants:
            if rule.access & READ == 0 or rule.topic_filter.startswith("$") != topic_filter.startswith("$"):
                continue
            allowed = rule.filter_for(client_id, username)
            if allowed != "" and covers(allowed, topic_filter):
                return True
        return False

    def may_read_some(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        """A rule of the user, or a pattern, overlaps with the filter."""
        for rule in self._section(username).grants:
            if rule.access & READ and overlap(rule.topic_filter, topic_filter):
                return True
        if not _fit_patterns(client_id, username):
            return False
        for rule in self.patterns.grants:
            if rule.access & READ:
                allowed = rule.filter_for(client_id, username)
                if allowed != "" and overlap(allowed, topic_filter):
                    return True
        return False

    def denies(self, client_id: str, username: str | None, topic: str) -> bool:
        for rule in self._section(username).denials:
            if matches(rule.topic_filter, topic):
                return True
        if _fit_patterns(client_id, username):
            for rule in self.patterns.denials:
                if rule.matches(client_id, username, topic):
                    return True
        return False

    def _section(self, username: str | None) -> Section:
        return self.anonymous if username is None else self.users.get(username, _NO_RULES)

    def _allows(self, access: int, client_id: str, username: str | None, topic: str) -> bool:
        section = self._section(username)
        for rule in section.denials:
            if matches(rule.topic_filter, topic):
                return False
        for rule in section.grants:
            if rule.access & access and matches(rule.topic_filter, topic):
                return True
        if not _fit_patterns(client_id, username):
            return False
        for rule in self.patterns.denials:
            if rule.matches(client_id, username, topic):
                return False
        for rule in self.patterns.grants:
            if rule.access & access and rule.matches(client_id, username, topic):
                return True
        return False


def _fit_patterns(client_id: str, username: str | None) -> bool:
    """Whether these names may take the place of %c and %u: a wildcard in them would widen a pattern."""
    names = client_id if username is None else client_id + username
    return "+" not in names and "#" not in names


def parse_acl(text: str, name: str) -> Acl:
    """The rules in the text of an ACL file; ``name`` names the file in errors. Raises AclError."""
    acl = Acl()
    section = acl.anonymous
    number: int = 0
    for line in text.split("\n"):
        number += 1
        words = line.split(None, 1)
        if not words or words[0].startswith("#"):
            continue
        rest = words[1].strip() if len(words) > 1 else ""
        try:
            if words[0] == "user":
                if not rest:
                    raise ValueError("user without a name")
                section = acl.users.setdefault(rest, Section())
            elif words[0] == "topic":
                section.add(parse_rule(rest, False))
            elif words[0] == "pattern":
                acl.patterns.add(parse_rule(rest, True))
            else:
                raise ValueError(f'must begin with "user", "topic" or "pattern", not {words[0]!r}')
        except ValueError as error:
            raise AclError(f"{name}:{number}: {error}") from None
    return acl


def parse_rule(text: str, pattern: bool) -> Rule:
    """The rule in ``[read|write|readwrite|deny] FILTER``, the rest of a line that begins with ``topic`` or ``pattern``.

    Raises ValueError with the reason.
    """
    access = READ | WRITE
    words = text.split(None, 1)
    if len(words) == 2:
        if words[0] not in _ACCESS:
            raise ValueError(f"access must be read, write, readwrite or deny, not {words[0]!r}")
        access = _ACCESS[words[0]]
        text = words[1].strip()
    if not text:
        raise ValueError("no topic filter")
    if not is_valid_filter(text) or text.startswith("$share/"):
        raise ValueError(f"not a topic filter: {text!r}")
    if pattern:
        for level in text.split("/"):
            if level != "%c" and level != "%u" and ("%c" in level or "%u" in level):
                raise ValueError(f"%c and %u must be a whole level, not part of {level!r}")
    return Rule(access, text)
