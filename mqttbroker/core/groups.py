"""Shared subscriptions: which member of a group gets a message (section 4.8.2).

The rule kept here, whatever the strategy: a message goes to a member that is
able, which is connected, takes output and has room in its window; only if
there is none to one that is connected, and only if nobody is to one whose
session keeps the message until its client comes back.
"""

from __future__ import annotations

from typing import Callable, Final, List, Optional
from zlib import crc32

from mypy_extensions import i64

from mqttbroker.codec.properties import encode_varint
from sessions.session import RETAIN_AS_PUBLISHED, Session, Subscription

_MASK: Final = 0xFFFFFFFF


class Target:
    """One session's part in a route: its subscriptions that match, merged.

    The highest QoS counts [MQTT-3.3.4-2] and every identifier goes along
    [MQTT-3.3.4-4].  ``plain`` means that the packet needs nothing of its own.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.qos = 0
        self.subscription_ids: bytes = b""
        self.retain_as_published = False
        self.plain = True
        # What the session gets of its own messages, if that is less [MQTT-3.8.3-3].
        self.own_differs = False
        self.own: Optional[Target] = None

    def merge(self, subscription: Subscription) -> None:
        self.qos = max(self.qos, subscription.qos)
        if subscription.identifier:
            self.subscription_ids += b"\x0b" + encode_varint(subscription.identifier)
            self.plain = False
        if subscription.options & RETAIN_AS_PUBLISHED:
            self.retain_as_published = True


class Member(Target):
    """A session's part in a group."""

    def __init__(self, subscription: Subscription) -> None:
        super().__init__(subscription.session)
        self.merge(subscription)
        self.seed: i64 = crc32(subscription.session.client_id.encode("utf-8"))


class Group:
    """A shared subscription."""

    def __init__(self, name: str, topic_filter: str) -> None:
        self.name = name
        self.topic_filter = topic_filter
        self.members: List[Member] = []
        self.keepers = 0  # members whose sessions keep what they are given
        # Where this is only the part that may read a topic, the group itself; the turn is its.
        self.whole: Group = self
        self.turn = 0

    @property
    def able(self) -> bool:
        """Whether somebody would take a message at once."""
        for member in self.members:
            session = member.session
            outlet = session.connection
            if outlet is not None and outlet.ready and session.packet_ids_in_use < session.send_maximum:
                return True
        return False

    def add(self, member: Member) -> None:
        """Take a member in, in the place of the one that its session had."""
        old = self.member(member.session)
        if old is not None:
            self.members[self.members.index(old)] = member
            return
        self.members.append(member)
        if member.session.id != 0:
            self.keepers += 1

    def remove(self, session: Session) -> None:
        member = self.member(session)
        if member is not None:
            self.members.remove(member)
            if session.id != 0:
                self.keepers -= 1

    def member(self, session: Session) -> Optional[Member]:
        for member in self.members:
            if member.session is session:
                return member
        return None


class Strategy:
    """How the members of a group share its messages; this one is round robin."""

    def choose(self, group: Group, topic: str) -> Optional[Member]:
        """The member that gets the next message of this topic; None if nobody can take it."""
        members = group.members
        count: int = len(members)
        whole = group.whole
        turn: int = whole.turn
        fallback: Optional[Member] = None
        offset: int = 0
        while offset < count:
            member = members[(turn + offset) % count]
            session = member.session
            outlet = session.connection
            offset += 1
            if outlet is not None:
                if outlet.ready and session.packet_ids_in_use < session.send_maximum:
                    whole.turn = (turn + offset) % count
                    return member
                if fallback is None or fallback.session.connection is None:
                    fallback = member
            elif fallback is None and session.id != 0:
                fallback = member
        if fallback is not None:
            whole.turn = (turn + 1) % count
        return fallback


class RandomMember(Strategy):
    """Any of them, each as likely; ``uniform`` gives numbers of [0, 1)."""

    def __init__(self, uniform: Callable[[], float]) -> None:
        self._uniform = uniform

    def choose(self, group: Group, topic: str) -> Optional[Member]:
        members = _candidates(group)
        if not members:
            return None
        return members[int(self._uniform() * len(members))]


class HashTopic(Strategy):
    """The messages of a topic go to one member as long as it is able.

    By rendezvous hashing: who comes takes a share of the topics from everybody,
    and of who goes only its own topics move.
    """

    def choose(self, group: Group, topic: str) -> Optional[Member]:
        key: i64 = crc32(topic.encode("utf-8"))
        chosen: Optional[Member] = None
        highest: i64 = -1
        for member in _candidates(group):
            weight = _mixed(key ^ member.seed)
            if weight > highest:
                highest = weight
                chosen = member
        return chosen


class LeastLoaded(Strategy):
    """The member with the fewest QoS 1 and 2 messages unacknowledged or queued; equals take turns."""

    def choose(self, group: Group, topic: str) -> Optional[Member]:
        members = _candidates(group)
        count: int = len(members)
        whole = group.whole
        chosen: Optional[Member] = None
        offset: int = 0
        while offset < count:
            member = members[(whole.turn + offset) % count]
            offset += 1
            if chosen is None or member.session.queued_messages < chosen.session.queued_messages:
                chosen = member
        whole.turn += 1
        return chosen


def _candidates(group: Group) -> List[Member]:
    """The members who come first, in the order they joined."""
    able: List[Member] = []
    connected: List[Member] = []
    keeping: List[Member] = []
    for member in group.members:
        session = member.session
        outlet = session.connection
        if outlet is None:
            if session.id != 0:
                keeping.append(member)
        elif outlet.ready and session.packet_ids_in_use < session.send_maximum:
            able.append(member)
        else:
            connected.append(member)
    return able or connected or keeping


def _mixed(number: i64) -> i64:
    """A permutation of the 32-bit numbers that leaves no likeness between near ones."""
    number = ((number ^ (number >> 16)) * 0x45D9F3B) & _MASK
    number = ((number ^ (number >> 16)) * 0x45D9F3B) & _MASK
    return number ^ (number >> 16)
