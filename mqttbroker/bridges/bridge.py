"""One bridge: it connects to its remotes, one at a time, again and again, and keeps its local session."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any, Callable, Final, List, NamedTuple, Optional, Sequence, Tuple, cast

from mqttbroker.auth.replace_file import replace_file
from mqttbroker.bridges.link import Link
from mqttbroker.bridges.preparation import Preparation
from mqttbroker.bridges.relay import Counts, LocalState, Relay, RelayError, RelayTerms
from mqttbroker.bridges.remotes import TlsTerms, answers, connect, reason_of
from mqttbroker.bridges.state_file import BridgeState, encode_state, read_state
from mqttbroker.bridges.websocket import WebSocketClient
from mqttbroker.codec.reason_codes import name as name_of_code
from mqttbroker.config import settings as config
from mqttbroker.config.remote_address import Address, parse_address
from mqttbroker.core.broker import Broker
from mqttbroker.core.connect_handler import OF_BRIDGES
from mqttbroker.net.wire import Endpoint
from sessions.delivery import Delivery
from sessions.session import Session
from topic_matcher.remapping import echoed

log = logging.getLogger("mqttbroker.bridges")

# States of a bridge, as listed.
DISABLED: Final = "disabled"
CONNECTING: Final = "connecting"
CONNECTED: Final = "connected"
WAITING: Final = "waiting"  # until the next attempt

SHARED: Final = "*"
"""Stands for all remotes of a bridge, in its file, if they share sessions."""
STABLE: Final = 10.0  # seconds that a link must last before the next failure counts as a new one
_MAX_REASON: Final = 500  # characters


class BridgeStatus(NamedTuple):
    """A bridge as lists show it. Times are Unix times in seconds, sizes in bytes."""

    name: str
    state: str
    address: str  # of the remote, or of the last one that was tried
    addresses: Tuple[str, ...]
    version: str
    client_id: str  # at the remote
    since: float  # when the state began
    reason: str  # why the last link ended or could not be made; "" if none has
    failures: int  # attempts that failed and links that ended, since the bridge began
    connects: int
    messages_out: int
    messages_in: int
    bytes_out: int
    bytes_in: int
    dropped: Tuple[Tuple[str, int], ...]  # messages by cause
    queued_messages: int
    queued_bytes: int
    refused_filters: Tuple[str, ...]  # that the remote does not let the bridge subscribe to
    down_since: float  # when the last link ended, or the bridge began; 0.0 if connected or disabled


class Surroundings(NamedTuple):
    """The parts of the broker that all its bridges use.

    ``random`` returns a number from 0 to 1; ``publish_state`` takes a topic and the payload of its retained message.
    """

    broker: Broker
    endpoint: Endpoint
    directory: Path
    random: Callable[[], float]
    new_identity: Callable[[], str]
    publish_state: Callable[[str, bytes], None]
    max_packet_size: Callable[[], int]


class Bridge:
    """The bridge of one section of the settings, from `start` to `stop`."""

    def __init__(self, settings: config.Bridge, around: Surroundings) -> None:
        self.settings = settings
        self.counts = Counts()
        self._around = around
        self._rules = settings.rules()
        self._addresses = [parse_address(text) for text in settings.addresses]
        self._path = around.directory / f"{settings.name}.json"
        self._state = BridgeState("")
        self._link: Optional[Link] = None
        self._task: Optional[asyncio.Task[None]] = None
        self._stopping = False
        self._private = settings.try_private and settings.version == "3.1.1"
        self._new_filters: List[str] = []  # local ones, subscribed since the last link
        self._ended: set[str] = set()  # remotes whose old session was ended
        self.local_client_id = OF_BRIDGES + settings.name
        # For `status`.
        self._now_state = DISABLED
        self._since = self._down_since = time.time()
        self._address = self._addresses[0]
        self._reason = ""
        self._logged = ""  # the reason that was logged last
        self._told = ""  # the last reason when a link was logged
        self._failures = 0
        self._failed_since = 0  # failures since the last link
        self._connects = 0
        self._refused: Sequence[str] = ()

    @property
    def topic(self) -> str:
        return f"$SYS/broker/connection/{self.settings.name}/state"

    @property
    def client_id(self) -> str:
        return self.settings.client_id or f"{self.settings.name}-{self._state.identity}"

    @property
    def session(self) -> Optional[Session]:
        return self._around.broker.registry.get(self.local_client_id)

    def start(self) -> None:
        self._state = read_state(self._path, self._around.new_identity())
        self._save()
        self._publish(b"0")
        if self.settings.enabled:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self, forget: bool = False) -> None:
        """Disconnect; with ``forget`` the bridge is removed, and its sessions on both sides end."""
        self._stopping = True
        if self._link is not None:
            self._link.close("the bridge is stopped", forget)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._link is not None:
            await self._link.ended
        self._set_state(DISABLED)
        if forget:
            self._publish(b"")
            self._path.unlink(missing_ok=True)

    def status(self) -> BridgeStatus:
        session, counts = self.session, self.counts
        return BridgeStatus(
            self.settings.name,
            self._now_state,
            str(self._address),
            tuple(map(str, self._addresses)),
            self.settings.version,
            self.client_id,
            self._since,
            self._reason,
            self._failures,
            self._connects,
            counts.messages_out,
            counts.messages_in,
            counts.bytes_out,
            counts.bytes_in,
            tuple(counts.dropped.items()),
            0 if session is None else session.queued_messages,
            0 if session is None else session.queue.byte_count,
            tuple(self._refused),
            self._down_since if self._now_state in (CONNECTING, WAITING) else 0.0,
        )

    # -- the life of a bridge -------------------------------------------------------

    async def _run(self) -> None:
        settings = self.settings
        delay = settings.reconnect_first
        index = 0
        await self._prepare()
        while True:
            self._address = address = self._addresses[index]
            connects = self._connects
            self._set_state(CONNECTING)
            error = await self._connect(address)
            if self._stopping:  # a connect that fails when it is cancelled ends with its error
                return
            connected = self._connects > connects
            if connected and time.time() - self._since >= STABLE:
                delay = settings.reconnect_first
                self._logged = ""
            again_at_once = self._note(error)
            if connected:
                index = (index + 1) % len(self._addresses) if settings.round_robin else 0
            elif not again_at_once:
                index = (index + 1) % len(self._addresses)
                if index:
                    continue
            if again_at_once:
                continue
            self._set_state(WAITING)
            await asyncio.sleep(delay * (0.5 + 0.5 * self._around.random()))
            delay = min(2.0 * delay, settings.reconnect_longest)

    async def _prepare(self) -> None:
        """Make the local session, or its subscriptions those of the settings, before there is a link."""
        while True:
            session = self.session
            if session is None and self._state.filters:
                # The store is another one: no packet id of the remotes' sessions means anything now.
                self._state = BridgeState(self._state.identity)
                self._save()
            known = [] if session is None else list(session.subscriptions)
            wanted = {rule.local.topic_filter for rule in self._rules if rule.goes_out}
            self._new_filters = [each for each in wanted if each not in known]
            if session is not None and wanted == set(known):
                return
            preparation = Preparation(
                asyncio.get_running_loop(),
                self._around.endpoint,
                f"bridge:{self.settings.name}",
                self.local_client_id,
                self._rules,
                known,
            )
            preparation.start()
            reason = await preparation.done
            if not reason:
                return
            self._note(RelayError(reason))
            self._set_state(WAITING)
            await asyncio.sleep(self.settings.reconnect_first)

    def _note(self, error: RelayError) -> bool:
        """Log why there is no link, a repeated reason once; returns whether to connect again at once."""
        if error.ended_session:
            self._ended.add(self._key(self._address))
            return True
        reason = str(error)[:_MAX_REASON]
        if error.unsupported_version and self._private:
            loop = echoed(self._rules)
            if loop is None:
                self._private = False
                log.info("event=bridge_not_private bridge=%s address=%s", self.settings.name, self._address)
                return True
            reason = f"messages of {loop} would come back: the remote does not know bridges, so give them prefixes"
        self._reason = reason
        self._failures += 1
        self._failed_since += 1
        text = f"{self._address} {reason}"
        if self._logged != text:
            self._logged = text
            log.warning(
                "event=bridge_disconnected bridge=%s address=%s reason=%s", self.settings.name, self._address, reason
            )
        return False

    async def _connect(self, address: Address) -> RelayError:
        """Connect, and stay connected; returns why that ended."""
        settings = self.settings
        loop = asyncio.get_running_loop()
        link = Link(
            loop,
            self._relay(address),
            self._around.endpoint,
            f"bridge:{settings.name}",
            settings.connect_timeout,
            self._connected,
        )
        protocol: Any = WebSocketClient(link, address) if address.websocket else link
        tls = TlsTerms(
            settings.cafile,
            settings.certfile,
            settings.keyfile,
            settings.verify,
            settings.server_name,
            settings.tls_version,
        )
        self._link = link
        try:
            await connect(address, tls, lambda: protocol, settings.connect_timeout)
        except (OSError, ValueError) as error:
            self._link = None
            return RelayError(reason_of(error))
        watch = None
        if address != self._addresses[0] and not settings.round_robin:
            watch = loop.create_task(self._watch_first(link))
        try:
            return await asyncio.shield(link.ended)
        finally:
            if watch is not None:
                watch.cancel()
            if not self._stopping:
                self._link = None

    async def _watch_first(self, link: Link) -> None:
        """Leave for the first address when it answers again."""
        while True:
            await asyncio.sleep(self.settings.reconnect_longest)
            if await answers(self._addresses[0], self.settings.connect_timeout):
                link.close("the first address answers again")
                return

    def _connected(self) -> None:
        link = self._link
        assert link is not None
        self._asked(self._key(self._address))
        self._connects += 1
        self._refused = [topic_filter for topic_filter, _ in link.relay.refused_filters]
        for topic_filter, code in link.relay.refused_filters:
            log.warning(
                "event=bridge_filter_refused bridge=%s address=%s filter=%s reason=%s",
                self.settings.name, self._address, topic_filter, name_of_code(code),
            )
        log.log(
            # Once more only after a failure that was logged.
            logging.INFO if self._told != self._logged or not self._logged else logging.DEBUG,
            "event=bridge_connected bridge=%s address=%s client=%s session_present=%s failures=%d",
            self.settings.name, self._address, self.client_id, link.relay.session_present, self._failed_since,
        )
        self._failed_since = 0
        self._told = self._logged
        self._new_filters = []
        self._set_state(CONNECTED)

    def _set_state(self, state: str) -> None:
        before, self._now_state = self._now_state, state
        if before != state:
            self._since = time.time()
            if before == CONNECTED:
                self._down_since = self._since
            if CONNECTED in (before, state):
                self._publish(b"1" if state == CONNECTED else b"0")

    def _publish(self, payload: bytes) -> None:
        if self.settings.notifications != "off":
            self._around.publish_state(self.topic, payload)

    # -- one relay ------------------------------------------------------------------

    def _key(self, address: Address) -> str:
        """The remote's name in the file."""
        return SHARED if self.settings.shared_sessions else str(address)

    def _relay(self, address: Address) -> Relay:
        settings, state = self.settings, self._state
        terms = RelayTerms(self.client_id, self.local_client_id, self._rules)
        key = self._key(address)
        fresh = key not in state.filters
        terms.version = 5 if settings.version == "5.0" else 4
        terms.private = self._private
        terms.transient = settings.clean_start
        terms.clean_start = settings.clean_start or (fresh and key not in self._ended)
        terms.username = settings.username
        terms.password = None if settings.password is None else settings.password.encode("utf-8")
        terms.keep_alive = int(settings.keep_alive)
        if settings.clean_start:
            terms.session_expiry = 0
        elif settings.session_expiry is not None:
            terms.session_expiry = int(settings.session_expiry)
        terms.receive_maximum = settings.receive_maximum
        terms.max_inflight = settings.max_inflight
        terms.largest = self._around.max_packet_size()
        terms.outgoing_retain = settings.outgoing_retain
        if settings.loop_detection:
            terms.identity = f"{state.identity}/{settings.name}"
        if settings.notifications == "both":
            terms.notification = settings.notification_topic or f"$SYS/broker/connection/{self.client_id}/state"
        return Relay(
            terms,
            self.counts,
            lambda: self._local_state(key),
            lambda: self._prepared(key),
            state.remote not in ("", key),
            state.left_behind.get(key, ()),
            state.filters.get(key, ()),
            self._new_filters,
        )

    def _local_state(self, key: str) -> LocalState:
        """The state of the local session. Its ids in flight belong to the remote that was connected last."""
        session = self.session
        assert session is not None
        state = self._state
        in_flight = self._in_flight(session)
        if state.remote not in ("", key):
            known = state.left_behind.get(state.remote, [])
            left = sorted({*known, *(each for each, qos in in_flight.items() if qos == 2)})
            if left != known:
                state.left_behind[state.remote] = left
                self._save()
        return LocalState(
            [cast(int, each) for each in session.received],
            list(session.subscriptions),
            lambda count: _free_ids(in_flight, int(session.window.last_packet_id), count),
        )

    def _prepared(self, key: str) -> None:
        """From now on packet ids of the session belong to this remote, which is asked for these filters."""
        state = self._state
        filters = sorted({*self._remote_filters(), *state.filters.get(key, ())})
        if state.remote != key or state.filters.get(key) != filters:
            state.remote = key
            state.filters[key] = filters
            self._save()

    def _asked(self, key: str) -> None:
        """The remote has answered: it holds no ids from earlier, and has no subscription but those of the settings."""
        state = self._state
        filters = sorted(self._remote_filters())
        if key in state.left_behind or state.filters.get(key) != filters:
            state.left_behind.pop(key, None)
            state.filters[key] = filters
            self._save()

    def _remote_filters(self) -> set[str]:
        return {rule.remote.topic_filter for rule in self._rules if rule.comes_in}

    def _save(self) -> None:
        """Write the file. Raises RelayError."""
        problem = replace_file(self._path, [encode_state(self._state)], True)
        if problem:
            raise RelayError(f"{self._path}: {problem}")

    @staticmethod
    def _in_flight(session: Session) -> dict[int, int]:
        """The QoS of the messages in flight by packet id."""
        found: dict[int, int] = {}
        for key, message in session.window.in_flight.items():
            found[cast(int, key)] = message.qos if isinstance(message, Delivery) else 2
        for entry in session.queue.entries:
            if entry.packet_id:
                found[entry.packet_id] = entry.qos
        return found


def _free_ids(used: dict[int, int], last: int, count: int) -> List[int]:
    """Packet ids that are not used, as far as possible from those that the session uses next."""
    found: List[int] = []
    packet_id = last
    while len(found) < count:
        if packet_id < 1:
            packet_id = 65535
        if packet_id not in used:
            found.append(packet_id)
        packet_id -= 1
    return found
