"""Targets of a route, and shared subscriptions: the strategies that choose the member of a group (section 4.8.2).

Every strategy prefers members that are available: connected, with room in the outbox and in the in-flight window. Then
come other connected members, and last members whose persistent session stores the message until the client returns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Final, cast
from zlib import crc32

from mypy_extensions import i64

from mqttbroker.codec.data_types import encode_varint
from sessions.session import RETAIN_AS_PUBLISHED, Session, Subscription

_MASK: Final = 0xFFFFFFFF


class Target:
    """One session in a route: its matching subscriptions, merged.

    The highest QoS counts [MQTT-3.3.4-2], and all subscription identifiers are sent [MQTT-3.3.4-4].
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.qos = 0
        self.subscription_ids: bytes = b""  # encoded properties
        self.retain_as_published = False
        self.zero_copy = True  # no subscription identifiers: the publisher's bytes may be sent unchanged
        self.no_local = False  # a subscription has No Local; the session's own messages go to `without_no_local`
        self.without_no_local: Target | None = None

    def merge(self, subscription: Subscription) -> None:
        self.merge_options(subscription)
        if subscription.identifier:
            self.subscription_ids += b"\x0b" + encode_varint(subscription.identifier)
            self.zero_copy = False

    def merge_options(self, subscription: Subscription) -> None:
        """`merge` without the subscription identifier."""
        self.qos = max(self.qos, subscription.qos)
        if subscription.options & RETAIN_AS_PUBLISHED:
            self.retain_as_published = True


class Member(Target):
    """A session in a group."""

    def __init__(self, subscription: Subscription) -> None:
        super().__init__(subscription.session)
        self.merge(subscription)
        self.client_id_hash: i64 = crc32(subscription.session.client_id.encode("utf-8"))


class RemoteMember(Member):
    """A member whose session is on another core of a cluster; `session` stands for it, and is never connected.

    ``connected`` is false also while there is no link to the core. A ``persistent`` one can be given messages at any time, at
    QoS 1 and 2.
    """

    def __init__(self, subscription: Subscription, shard: int, client_id_hash: int) -> None:
        super().__init__(subscription)
        self.shard = shard
        self.client_id_hash = client_id_hash
        self.connected = False
        self.available = False  # connected, with room in the outbox and in the in-flight window, when last heard of
        self.persistent = True
        self.load = 0  # messages that it has not acknowledged: those last heard of, and those given to it since


class Group:
    """A shared subscription, or a copy of one with the members that may read a topic."""

    def __init__(self, name: str, topic_filter: str) -> None:
        self.name = name
        self.topic_filter = topic_filter
        self.members: list[Member] = []
        self.persistent_members = 0  # members whose session stores its messages
        self.original: Group | None = None  # of a copy, the group that it was made of
        self.cursor = 0  # where the next choice starts
        self.local: Group | None = None  # in a cluster, the same without remote members, once `local_members` has made it

    @property
    def full_name(self) -> str:
        """The filter as in SUBSCRIBE."""
        return f"$share/{self.name}/{self.topic_filter}"

    @property
    def complete(self) -> Group:
        """The group with all members, which owns the cursor."""
        original = self.original
        return self if original is None else original

    @property
    def available(self) -> bool:
        """Whether a member would be sent a message at once."""
        for member in self.members:
            session = member.session
            connection = session.connection
            if connection is not None and connection.ready and session.deliveries.window.is_open:
                return True
            if session.remote and cast(RemoteMember, member).available:
                return True
        return False

    def add(self, member: Member) -> None:
        """Add a member, or replace the one that its session has."""
        old = self.member(member.session)
        if old is not None:
            self.members[self.members.index(old)] = member
            self.local = None
            return
        self.members.append(member)
        self.local = None
        if member.session.id != 0:
            self.persistent_members += 1

    def remove(self, session: Session) -> None:
        member = self.member(session)
        if member is not None:
            self.members.remove(member)
            self.local = None
            if session.id != 0:
                self.persistent_members -= 1

    def replace_remote(self, shard: int, members: list[RemoteMember]) -> None:
        """Have these members, and no others, on the core of a shard."""
        kept: list[Member] = []
        self.persistent_members = 0
        for member in self.members:
            if not member.session.remote or cast(RemoteMember, member).shard != shard:
                kept.append(member)
        kept.extend(members)
        for member in kept:
            if member.session.id != 0:
                self.persistent_members += 1
        self.members = kept
        self.local = None

    def local_members(self) -> Group:
        """The group as it is on this core alone, with a cursor of its own."""
        local = self.local
        if local is None:
            local = Group(self.name, self.topic_filter)
            for member in self.members:
                if not member.session.remote:
                    local.members.append(member)
            self.local = local
        return local

    def member(self, session: Session) -> Member | None:
        for member in self.members:
            if member.session is session:
                return member
        return None


class Strategy:
    """How the messages of a group are divided among its members."""

    @abstractmethod
    def choose(self, group: Group, topic: str) -> Member | None:
        """The member that gets the next message of this topic; None if no member is connected or persistent."""


class RoundRobin(Strategy):
    """Members in turn."""

    def choose(self, group: Group, topic: str) -> Member | None:
        members = group.members
        count: int = len(members)
        complete = group.complete
        cursor: int = complete.cursor
        fallback: Member | None = None
        offset: int = 0
        while offset < count:
            member = members[(cursor + offset) % count]
            session = member.session
            connection = session.connection
            offset += 1
            if connection is not None:
                if connection.ready and session.deliveries.window.is_open:
                    complete.cursor = (cursor + offset) % count
                    return member
                if fallback is None or fallback.session.connection is None:
                    fallback = member
            elif session.remote:
                remote = cast(RemoteMember, member)
                if remote.available:
                    complete.cursor = (cursor + offset) % count
                    return member
                if fallback is None and (remote.connected or remote.persistent):
                    fallback = member
            elif fallback is None and session.id != 0 and not session.ended:
                fallback = member
        if fallback is not None:
            complete.cursor = (cursor + 1) % count
        return fallback


class RandomMember(Strategy):
    """A random member; ``uniform`` returns numbers of [0, 1)."""

    def __init__(self, uniform: Callable[[], float]) -> None:
        self._uniform = uniform

    def choose(self, group: Group, topic: str) -> Member | None:
        members = _candidates(group)
        if not members:
            return None
        return members[int(self._uniform() * len(members))]


class HashTopic(Strategy):
    """Messages of one topic go to one member while it is available.

    Rendezvous hashing: a member that joins takes topics from all others; when one leaves, only its topics move.
    """

    def choose(self, group: Group, topic: str) -> Member | None:
        key: i64 = crc32(topic.encode("utf-8"))
        chosen: Member | None = None
        highest: i64 = -1
        for member in _candidates(group):
            weight = _mix(key ^ member.client_id_hash)
            if weight > highest:
                highest = weight
                chosen = member
        return chosen


class LeastLoaded(Strategy):
    """The member with the fewest unacknowledged and queued QoS 1 and 2 messages; equal ones in turn."""

    def choose(self, group: Group, topic: str) -> Member | None:
        members = _candidates(group)
        count: int = len(members)
        complete = group.complete
        chosen: Member | None = None
        offset: int = 0
        while offset < count:
            member = members[(complete.cursor + offset) % count]
            offset += 1
            if chosen is None or _load(member) < _load(chosen):
                chosen = member
        complete.cursor += 1
        if chosen is not None and chosen.session.remote:
            cast(RemoteMember, chosen).load += 1
        return chosen


def _load(member: Member) -> int:
    return cast(RemoteMember, member).load if member.session.remote else member.session.deliveries.queued_messages


def _candidates(group: Group) -> list[Member]:
    """The members of the best class that has any, in the order they joined."""
    available: list[Member] = []
    connected: list[Member] = []
    persistent: list[Member] = []
    for member in group.members:
        session = member.session
        connection = session.connection
        if session.remote:
            remote = cast(RemoteMember, member)
            if remote.available:
                available.append(member)
            elif remote.connected:
                connected.append(member)
            elif remote.persistent:
                persistent.append(member)
        elif connection is None:
            if session.id != 0 and not session.ended:
                persistent.append(member)
        elif connection.ready and session.deliveries.window.is_open:
            available.append(member)
        else:
            connected.append(member)
    return available or connected or persistent


def _mix(number: i64) -> i64:
    """A permutation of the 32-bit numbers that maps similar numbers to dissimilar ones."""
    number = ((number ^ (number >> 16)) * 0x45D9F3B) & _MASK
    number = ((number ^ (number >> 16)) * 0x45D9F3B) & _MASK
    return number ^ (number >> 16)
