"""Permissions that a login brings with it, in the formats of EMQX's ``acl`` claim.

A list of permissions is searched in its order, and the first that matches decides; without a match the rules of the
listener decide, if it has any. The lists ``pub``, ``sub`` and ``all`` allow the topics they name and deny the rest.
"""

from __future__ import annotations

import json
from typing import Any, Final

from mypy_extensions import mypyc_attr

from mqttbroker.core.access.policy import ALLOWED, DENIED, UNDECIDED, Permissions
from topic_matcher.filters import covers, is_valid_filter, matches, overlap

PUBLISH: Final = 1
SUBSCRIBE: Final = 2
_ACTIONS: Final = {"publish": PUBLISH, "pub": PUBLISH, "subscribe": SUBSCRIBE, "sub": SUBSCRIBE, "all": PUBLISH | SUBSCRIBE}
_LISTS: Final = {"pub": PUBLISH, "sub": SUBSCRIBE, "all": PUBLISH | SUBSCRIBE}
_PLACEHOLDERS: Final = {"${clientid}": "%c", "${username}": "%u"}

MAX_BYTES: Final = 65_536  # of the text of one client's permissions
MAX_PERMISSIONS: Final = 256  # topics; each decision may look at all of them
PERMISSION_BYTES: Final = 200  # memory of one, with its filter
MAX_SHARED: Final = 1000  # parsed permissions that clients with the same ones share


# mypyc frees the weak references to an exception of a native class once too often.
@mypyc_attr(native_class=False)
class PermissionsError(Exception):
    """One line with the reason."""


class Permission:
    """``verdict`` on the actions ``action`` in the topics of a filter, in which %c and %u stand for the client's names.

    With ``literal`` it is about the filter itself, as the filter of a SUBSCRIBE.
    """

    def __init__(self, verdict: int, action: int, topic_filter: str, literal: bool) -> None:
        self.verdict = verdict
        self.action = action
        self.topic_filter = topic_filter
        self.literal = literal
        self.of_client = "%c" in topic_filter
        self.of_user = "%u" in topic_filter

    def filter_for(self, client_id: str, username: str | None) -> str:
        """The filter with the client's names; "", which matches nothing, if a name would change its levels."""
        found = self.topic_filter
        if self.of_client:
            if not _is_part_of_level(client_id):
                return ""
            found = found.replace("%c", client_id)
        if self.of_user:
            if username is None or not _is_part_of_level(username):
                return ""
            # The client id may contain "%u".
            parts = self.topic_filter.split("%u")
            if self.of_client:
                parts = [part.replace("%c", client_id) for part in parts]
            found = username.join(parts)
        if found.startswith("$") and not self.topic_filter.startswith("$"):
            return ""  # a name must not lead to the $ topics
        return found


class TokenPermissions(Permissions):
    """The permissions in a token, or in the answer of an authentication server."""

    def __init__(self, text: str, permissions: list[Permission], otherwise: int) -> None:
        super().__init__(text, len(text) + PERMISSION_BYTES * len(permissions))
        self.permissions = permissions
        self.otherwise = otherwise

    def may_publish(self, client_id: str, username: str | None, topic: str) -> int:
        for permission in self.permissions:
            if permission.action & PUBLISH:
                found = permission.filter_for(client_id, username)
                if found == topic or (found and not permission.literal and matches(found, topic)):
                    return permission.verdict
        return self.otherwise

    def may_read(self, client_id: str, username: str | None, topic: str) -> int:
        for permission in self.permissions:
            # A denial of a literal filter is not about the topics that the filter matches.
            if permission.action & SUBSCRIBE and not (permission.literal and permission.verdict == DENIED):
                found = permission.filter_for(client_id, username)
                if found and matches(found, topic):
                    return permission.verdict
        return self.otherwise

    def may_subscribe(self, client_id: str, username: str | None, topic_filter: str) -> int:
        for permission in self.permissions:
            if permission.action & SUBSCRIBE:
                found = permission.filter_for(client_id, username)
                if found == topic_filter or (found and not permission.literal and covers(found, topic_filter)):
                    return permission.verdict
        return self.otherwise

    def may_read_some(self, client_id: str, username: str | None, topic_filter: str) -> int:
        for permission in self.permissions:
            if permission.action & SUBSCRIBE:
                found = permission.filter_for(client_id, username)
                if not found:
                    continue
                if permission.verdict == ALLOWED and overlap(found, topic_filter):
                    return ALLOWED
                if not permission.literal and covers(found, topic_filter):
                    return permission.verdict
        return self.otherwise


def _is_part_of_level(name: str) -> bool:
    return name != "" and "/" not in name and "+" not in name and "#" not in name


class PermissionsReader:
    """Reads permissions; clients with the same ones share an object."""

    def __init__(self) -> None:
        self._shared: dict[str, Permissions] = {}

    def of_claim(self, claim: object) -> Permissions:
        """The permissions in a claim, or in the member of a JSON object. Raises PermissionsError."""
        return self.of_text(json.dumps(claim, separators=(",", ":"), ensure_ascii=False))

    def of_text(self, text: str) -> Permissions:
        """The permissions of the text `Permissions.text`. Raises PermissionsError."""
        found = self._shared.get(text)
        if found is None:
            found = _parse(text)
            if len(self._shared) >= MAX_SHARED:
                del self._shared[next(iter(self._shared))]
            self._shared[text] = found
        return found


class NoPermissions(Permissions):
    """Denies everything: for a stored text that this version cannot read."""

    def __init__(self, text: str) -> None:
        super().__init__(text, len(text))

    def may_publish(self, client_id: str, username: str | None, topic: str) -> int:
        return DENIED

    def may_read(self, client_id: str, username: str | None, topic: str) -> int:
        return DENIED

    def may_subscribe(self, client_id: str, username: str | None, topic_filter: str) -> int:
        return DENIED

    def may_read_some(self, client_id: str, username: str | None, topic_filter: str) -> int:
        return DENIED


def _parse(text: str) -> Permissions:
    if len(text) > MAX_BYTES:
        raise PermissionsError(f"more than {MAX_BYTES} bytes")
    try:
        claim: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise PermissionsError("not JSON") from None
    permissions: list[Permission] = []
    if isinstance(claim, dict):
        for name, topics in claim.items():
            if name not in _LISTS:
                raise PermissionsError(f"unknown list {name!r}")
            _add(permissions, ALLOWED, _LISTS[name], topics)
        otherwise = DENIED
    elif isinstance(claim, list):
        for item in claim:
            if not isinstance(item, dict):
                raise PermissionsError("a permission must be an object")
            _add_object(permissions, item)
        otherwise = UNDECIDED
    else:
        raise PermissionsError("must be a list of permissions, or an object with pub, sub and all")
    if len(permissions) > MAX_PERMISSIONS:
        raise PermissionsError(f"more than {MAX_PERMISSIONS} topics")
    return TokenPermissions(text, permissions, otherwise)


def _add_object(permissions: list[Permission], item: dict[str, Any]) -> None:
    """Add the permission of an object of the newer format."""
    for name in item:
        if name not in ("permission", "action", "topic", "topics", "qos", "retain"):
            raise PermissionsError(f"{name!r} is not supported")
    verdict = item.get("permission")
    if verdict != "allow" and verdict != "deny":
        raise PermissionsError('permission must be "allow" or "deny"')
    action = item.get("action")
    if not isinstance(action, str) or action not in _ACTIONS:
        raise PermissionsError('action must be "publish", "subscribe" or "all"')
    qos = item.get("qos", [0, 1, 2])
    if not isinstance(qos, list) or any(each not in qos for each in (0, 1, 2)) or item.get("retain", "all") != "all":
        raise PermissionsError("a permission for some QoS, or by the retain flag, is not supported")
    topics = [item[name] for name in ("topic", "topics") if name in item]
    if not topics:
        raise PermissionsError("no topic")
    for each in topics:
        _add(permissions, ALLOWED if verdict == "allow" else DENIED, _ACTIONS[action], each)


def _add(permissions: list[Permission], verdict: int, action: int, topics: Any) -> None:
    if isinstance(topics, str):
        topics = [topics]
    if not isinstance(topics, list):
        raise PermissionsError("topics must be a list")
    for topic in topics:
        if not isinstance(topic, str):
            raise PermissionsError("a topic must be a string")
        literal = topic.startswith("eq ")
        topic_filter = topic[3:] if literal else topic
        for placeholder, short in _PLACEHOLDERS.items():
            topic_filter = topic_filter.replace(placeholder, short)
        if "${" in topic_filter:
            raise PermissionsError(f"unknown placeholder in {topic!r}")
        if not is_valid_filter(topic_filter) or topic_filter.startswith("$share/"):
            raise PermissionsError(f"not a topic filter: {topic!r}")
        permissions.append(Permission(verdict, action, topic_filter, literal))
