"""Another core: what it has been told of the filters here, and its own filters in the router here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from mqttbroker.cluster.links.messages import (
    ADD,
    AVAILABLE,
    BEGIN,
    CONNECTED,
    END,
    GROUP,
    PERSISTENT,
    REMOVE,
    TOPIC,
    Change,
    Done,
    LinkMessage,
    MemberState,
    Ping,
    Pong,
    Update,
    decode,
    encode,
)
from mqttbroker.codec.data_types import text_of
from mqttbroker.codec.frames import encode_publish
from mqttbroker.codec.reason_codes import PROTOCOL_ERROR, MQTTError
from mqttbroker.core.broker import Broker
from mqttbroker.core.client.connection import Connection
from mqttbroker.core.client.outgoing import Outgoing
from mqttbroker.core.delivery.cluster_port import CommitGate
from mqttbroker.core.packets.core_link import LinkReceiver, open_link, shared_packet
from mqttbroker.core.routing.groups import Group, RemoteMember
from mqttbroker.core.sessions.subscriptions import subscription_memory
from sessions.message import Message
from sessions.row_kinds import SUBSCRIPTIONS
from sessions.rows import SubscriptionRow
from sessions.session import CORE_PREFIX, NEVER, RETAIN_AS_PUBLISHED, Session, Subscription
from topic_matcher.filters import is_valid_filter, parse_shared, text_bytes

UPDATE_BYTES: Final = 32_768  # of the filters and members in one update, about
MAX_UNANSWERED: Final = 4  # updates
MEMBER_BYTES: Final = 12
MAX_MEMBERS: Final = 50_000  # of a shared subscription here that other cores are told, so that an update is no packet too long
SHARE: Final = "$share/"

_OPTIONS: Final = RETAIN_AS_PUBLISHED | 2  # of the subscriptions that stand for those of a core


class Announcement:
    """A call that waits for the answers of several cores."""

    def __init__(self, done: Callable[[], object]) -> None:
        self.timer: Any = None
        self._done: Callable[[], object] | None = done
        self._missing = 1  # one for `begun`

    @property
    def waits(self) -> bool:
        return self._missing > 1

    def expect(self) -> None:
        self._missing += 1

    def answered(self) -> None:
        """One of the cores has answered, or is not waited for any more."""
        self._missing -= 1
        if self._missing == 0:
            self.finish()

    def finish(self) -> None:
        """Wait no longer."""
        done, self._done = self._done, None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if done is not None:
            done()


class PeerOwner(Protocol):
    """What a `Peer` asks of the core that it is a peer of."""

    broker: Broker

    def all_changes(self) -> Iterable[Change]:
        """An `ADD` for each filter of this core, and a `GROUP` without members for each of its shared subscriptions."""

    def members(self, key: str) -> tuple[MemberState, ...]:
        """The members here of the shared subscription ``key``, its name and filter."""

    def schedule(self) -> None:
        """Have `Peer.flush` called soon."""

    def peer_message(self, shard: int, topic: str, payload: bytes) -> None:
        """A message of the core of a shard that is not for its peer here."""

    def all_in_log(self) -> bool:
        """`LinkUser.all_in_log`."""

    def peer_synchronized(self) -> None:
        """`Peer.synchronized` has become true."""


class Peer(LinkReceiver):
    """The core of another shard, with or without a link to it."""

    def __init__(self, owner: PeerOwner, shard: int) -> None:
        broker = owner.broker
        self.shard = shard
        self.connection: Connection | None = None
        self._owner = owner
        self._broker = broker
        self._client_id = f"{CORE_PREFIX}{shard}"
        self._session = Session(broker.context, 0, self._client_id)  # of its filters
        self._members = Session(broker.context, 0, self._client_id)  # of its members of shared subscriptions; never connected
        self._session.remote = self._members.remote = True
        # Filters and shared subscriptions of the other core in the router, with the last `BEGIN` before they were named.
        self._filters: dict[str, int] = {}
        self._groups: dict[str, tuple[int, tuple[MemberState, ...]]] = {}
        self._joined: dict[str, list[RemoteMember]] = {}  # the members in the router
        self._generation = 0
        self._received_all = False  # since the link is up
        self._sent_all = False  # and answered
        self._changes: deque[Change | Announcement] = deque()  # not sent
        self._unanswered: deque[tuple[int, list[Announcement]]] = deque()
        self._number = 0  # of the last update

    @property
    def linked(self) -> bool:
        return self.connection is not None

    @property
    def synchronized(self) -> bool:
        """Whether both cores have all filters of each other."""
        return self.connection is not None and self._received_all and self._sent_all

    @property
    def filters(self) -> int:
        """The number of filters of the other core in the router."""
        return len(self._filters)

    def silent_since(self, time: float) -> bool:
        """Whether nothing was received over the link since ``time``, on the monotonic clock of the loop."""
        return self.connection is not None and self.connection.last_received < time

    # -- the link -----------------------------------------------------------------

    def up(self, connection: Connection) -> None:
        """There is a link, the only one."""
        open_link(connection, self._session)
        self.connection = connection
        self._received_all = self._sent_all = False
        self._changes.clear()
        self._changes.append(Change(BEGIN))
        self._changes.extend(self._owner.all_changes())
        self._changes.append(Change(END))
        self._owner.schedule()

    def down(self) -> None:
        """The link is lost. Members of shared subscriptions can be given messages through the log."""
        self.connection = None
        self._session.connection = None
        waiting = [change for change in self._changes if isinstance(change, Announcement)]
        for _, announcements in self._unanswered:
            waiting.extend(announcements)
        self._changes.clear()
        self._unanswered.clear()
        for key, (_, members) in self._groups.items():
            self._join(key, members)
        for announcement in waiting:
            announcement.answered()

    def send(self, topic: bytes, payload: bytes) -> bool:
        """Send a message of this core; false without a link, or if it is longer than the other core takes."""
        connection = self.connection
        if connection is None:
            return False
        packet = encode_publish(topic, payload, 0, False, False, 0, 5, b"")
        if len(packet) > connection.maximum_packet_size:
            connection.drops().too_large += 1
            return False
        connection.send(packet)
        return True

    def send_shared(self, key: str, outgoing: Outgoing) -> None:
        """Send a message at QoS 0 for a member of a shared subscription, or drop it."""
        connection = self.connection
        if connection is None:
            self._session.deliveries.drops().slow_subscriber += 1
            return
        try:
            packet = shared_packet(key, outgoing)
        except (MQTTError, ValueError):
            connection.drops().too_large += 1
            return
        if len(packet) > connection.maximum_packet_size:
            connection.drops().too_large += 1
            return
        connection.send_publish(packet, len(outgoing.message.payload), True)

    def ping(self) -> None:
        self._say(Ping())

    def _say(self, message: LinkMessage) -> None:
        self.send(TOPIC, encode(message))

    # -- filters of this core -----------------------------------------------------

    def tell(self, change: Change) -> None:
        """Tell the other core a change, unless it is told everything when its link is up."""
        if self.connection is not None:
            self._changes.append(change)
            self._owner.schedule()

    def wait(self, announcement: Announcement) -> None:
        """Have an announcement wait until the other core has answered for everything it was told before."""
        if self.connection is not None and (self._changes or self._unanswered):
            announcement.expect()
            self._changes.append(announcement)

    def settle(self, announcement: Announcement) -> None:
        """Have an announcement wait until what was retained on the other core before is in its log."""
        if self.connection is not None:
            announcement.expect()
            self._number += 1
            self._unanswered.append((self._number, [announcement]))
            self._say(Update(self._number, ()))

    def flush(self) -> None:
        """Send changes."""
        while self._changes and self.connection is not None:
            if len(self._unanswered) >= MAX_UNANSWERED and not isinstance(self._changes[0], Announcement):
                return
            self._send_update()

    def _send_update(self) -> None:
        changes: list[Change] = []
        announcements: list[Announcement] = []
        size = 0
        while self._changes and size < UPDATE_BYTES:
            change = self._changes.popleft()
            if isinstance(change, Announcement):
                announcements.append(change)
                if not changes:
                    break
                continue
            if change.kind == GROUP:
                change = Change(GROUP, change.text, self._owner.members(change.text))
            changes.append(change)
            size += len(change.text) + 8 + MEMBER_BYTES * len(change.members)
        if changes:
            self._number += 1
            self._unanswered.append((self._number, announcements))
            self._say(Update(self._number, tuple(changes)))
        elif self._unanswered:
            self._unanswered[-1][1].extend(announcements)
        else:
            for announcement in announcements:
                announcement.answered()

    def _answered(self, number: int) -> None:
        answered: list[Announcement] = []
        while self._unanswered and self._unanswered[0][0] <= number:
            answered.extend(self._unanswered.popleft()[1])
        if not self._unanswered and not self._changes and not self._sent_all:
            self._sent_all = True
            self._check_synchronized()
        self.flush()
        for announcement in answered:
            announcement.answered()

    def _check_synchronized(self) -> None:
        if self.synchronized:
            self._owner.peer_synchronized()

    # -- filters of the other core --------------------------------------------------

    def core_message(self, topic: bytes, payload: bytes) -> None:
        if topic != TOPIC:
            self._owner.peer_message(self.shard, text_of(topic), payload)
            return
        message = decode(payload)
        if isinstance(message, Update):
            self._update(message)
        elif isinstance(message, Done):
            self._answered(message.number)
        elif isinstance(message, Ping):
            self._say(Pong())

    def shared_message(self, key: str, message: Message) -> None:
        if not self._broker.publisher.give_to_group(key, message):
            self._broker.outbound.counters.away.no_member += 1

    def _update(self, update: Update) -> None:
        journal = self._broker.journal
        stored = False
        for change in update.changes:
            stored = self._apply(change) or stored
        number, connection = update.number, self.connection
        waits = stored or not self._owner.all_in_log()
        if not waits or not journal.gated:
            self._say(Done(number))
            return

        def committed(failed: bool) -> None:
            if not failed and self.connection is connection:
                self._say(Done(number))

        journal.wait_for_commit(CommitGate(committed))

    def _apply(self, change: Change) -> bool:
        """Put one change in force; whether something is to be stored."""
        if change.kind == ADD:
            self._add(change.text)
        elif change.kind == REMOVE:
            self._remove(change.text)
        elif change.kind == GROUP:
            return self._set_group(change.text, change.members)
        elif change.kind == BEGIN:
            self._generation += 1
        elif change.kind == END:
            return self._end()
        return False

    def _add(self, topic_filter: str) -> None:
        if not is_valid_filter(topic_filter) or topic_filter.startswith(SHARE):
            raise MQTTError(PROTOCOL_ERROR, "not a filter")
        if topic_filter not in self._filters:
            self._broker.router.subscribe(Subscription(self._session, topic_filter, RETAIN_AS_PUBLISHED, 0))
        self._filters[topic_filter] = self._generation

    def _remove(self, topic_filter: str) -> None:
        if self._filters.pop(topic_filter, None) is not None:
            self._broker.router.unsubscribe(Subscription(self._session, topic_filter, RETAIN_AS_PUBLISHED, 0))

    def _end(self) -> bool:
        """Remove what was not named since `BEGIN`; whether something is to be stored."""
        for topic_filter in [one for one, generation in self._filters.items() if generation != self._generation]:
            self._remove(topic_filter)
        stored = False
        gone = [key for key, (generation, _) in self._groups.items() if generation != self._generation]
        gone.extend(key for key in self._stored_groups() if key not in self._groups)
        for key in gone:
            stored = self._set_group(key, ()) or stored
        self._received_all = True
        self._check_synchronized()
        return stored

    # -- shared subscriptions of the other core -------------------------------------

    def _set_group(self, key: str, members: tuple[MemberState, ...]) -> bool:
        """The other core has these members of a shared subscription; whether that is to be stored."""
        if not is_valid_filter(SHARE + key) or parse_shared(SHARE + key) is None:
            raise MQTTError(PROTOCOL_ERROR, "not a shared subscription")
        if members:
            self._groups[key] = (self._generation, members)
        else:
            self._groups.pop(key, None)
        if any(one.flags & PERSISTENT for one in members):
            changed = self._store(key)
            if changed:
                self._joined.pop(key, None)
        else:
            changed = self._unstore(key)
        self._join(key, members)
        return changed

    def _join(self, key: str, states: tuple[MemberState, ...]) -> None:
        """Have the router choose among these members, too."""
        joined = self._joined.get(key)
        if joined is None or [int(one.client_id_hash) for one in joined] != [one.client_id_hash for one in states]:
            subscription = Subscription(self._members, SHARE + key, _OPTIONS, 0)
            joined = [RemoteMember(subscription, self.shard, one.client_id_hash) for one in states]
            name, _, topic_filter = key.partition("/")
            self._broker.router.join_remote(name, topic_filter, self.shard, joined)
            if joined:
                self._joined[key] = joined
            else:
                self._joined.pop(key, None)
        linked = self.linked
        for member, state in zip(joined, states):
            member.connected = linked and bool(state.flags & CONNECTED)
            member.available = linked and bool(state.flags & AVAILABLE)
            member.persistent = not linked or bool(state.flags & PERSISTENT)
            member.load = state.load

    def _stored_groups(self) -> list[str]:
        """Shared subscriptions in the store of this core that have persistent members on the other one."""
        session = self._broker.registry.get(self._client_id)
        return [] if session is None else [full[len(SHARE) :] for full in session.subscriptions]

    def _store(self, key: str) -> bool:
        """Have messages wait for the members also after this core has ended; whether that is new."""
        broker = self._broker
        session = broker.registry.get(self._client_id)
        if session is None:
            session = broker.registry.create(self._client_id, True)
            session.remote = True
            session.expiry_interval = NEVER
            session.disconnected_at = broker.lifecycle.now
            broker.lifecycle.save(session, True)
        full = SHARE + key
        if full in session.subscriptions:
            return False
        broker.subscriptions.load(Subscription(session, full, _OPTIONS, 0))
        broker.journal.save(SUBSCRIPTIONS, SubscriptionRow(session.id, full, _OPTIONS & 3, _OPTIONS, 0))
        return True

    def _unstore(self, key: str) -> bool:
        session = self._broker.registry.get(self._client_id)
        full = SHARE + key
        if session is None or session.subscriptions.pop(full, None) is None:
            return False
        session.filter_bytes -= text_bytes(full)
        self._broker.context.subscription_bytes -= subscription_memory(full)
        self._broker.journal.remove(SUBSCRIPTIONS, (session.id, full))
        return True


def local_states(group: Group) -> tuple[MemberState, ...]:
    """The members of a shared subscription on this core, no more than `MAX_MEMBERS`. A message of another core for one of them goes to any of them."""
    states: list[MemberState] = []
    for member in group.local_members().members:
        if len(states) == MAX_MEMBERS:
            break
        session = member.session
        if session.ended:
            continue
        flags = PERSISTENT if session.id else 0
        connection = session.connection
        if connection is not None:
            flags |= CONNECTED
            if connection.ready and session.deliveries.window.is_open:
                flags |= AVAILABLE
        states.append(MemberState(int(member.client_id_hash), flags, session.deliveries.queued_messages))
    return tuple(states)
