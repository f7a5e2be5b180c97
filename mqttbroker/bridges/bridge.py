"""One bridge: it connects to its remotes, one at a time, again and again, and keeps its local session."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

from mqttbroker.bridges.bridge_progress import CONNECTED, CONNECTING, DISABLED, WAITING, BridgeProgress
from mqttbroker.bridges.context import BridgeContext, BridgeStatus
from mqttbroker.bridges.link import Link
from mqttbroker.bridges.local_session_update import LocalSessionUpdate
from mqttbroker.bridges.relay import Relay
from mqttbroker.bridges.relay_terms import Counts, LocalState, RelayError, RelayTerms
from mqttbroker.bridges.remote_sessions import RemoteSessions
from mqttbroker.bridges.remotes import TlsTerms, answers, connect, reason_of
from mqttbroker.config import settings as config
from mqttbroker.config.remote_address import Address, parse_address
from mqttbroker.core.sessions.connect_handler import OF_BRIDGES
from mqttbroker.system.defects import keep_running
from sessions.session import Session
from topic_matcher.remapping import echoed

log = logging.getLogger("mqttbroker.bridges")

STABLE: Final = 10.0  # seconds; a link that ends before counts as an attempt that failed


class Bridge:
    """The bridge of one section of the settings, from `start` to `stop`."""

    def __init__(self, settings: config.Bridge, context: BridgeContext) -> None:
        self.settings = settings
        self.counts = Counts()
        self.local_client_id = OF_BRIDGES + settings.name
        self._context = context
        self._rules = settings.rules()
        self._addresses = [parse_address(text) for text in settings.addresses]
        self._progress = BridgeProgress(settings.name, self._addresses[0])
        self._remotes = RemoteSessions(
            context.directory / f"{settings.name}.json",
            context.new_identity(),
            {rule.remote.topic_filter for rule in self._rules if rule.comes_in},
            settings.shared_sessions,
        )
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._private = settings.try_private and settings.version == "3.1.1"
        self._new_filters: list[str] = []  # local ones, subscribed to since the last link

    @property
    def topic(self) -> str:
        return f"$SYS/broker/connection/{self.settings.name}/state"

    @property
    def client_id(self) -> str:
        return self.settings.client_id or f"{self.settings.name}-{self._remotes.identity}"

    @property
    def session(self) -> Session | None:
        return self._context.broker.registry.get(self.local_client_id)

    def start(self) -> None:
        self._publish(b"0")
        if self.settings.enabled:
            self._task = asyncio.get_running_loop().create_task(keep_running("bridge", self._run))

    async def stop(self, forget: bool = False) -> None:
        """Disconnect; with ``forget`` the bridge is removed, and its sessions on both sides end."""
        self._stopping = True
        if self._link is not None:
            self._link.close(RelayError("the bridge is stopped"), forget)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._link is not None:
            await self._link.ended
        self._enter(DISABLED)
        if forget:
            self._publish(b"")
            self._remotes.remove()

    def status(self) -> BridgeStatus:
        session, counts, progress = self.session, self.counts, self._progress
        return BridgeStatus(
            self.settings.name,
            progress.state,
            str(progress.address),
            tuple(map(str, self._addresses)),
            self.settings.version,
            self.client_id,
            progress.since,
            progress.reason,
            progress.failures,
            progress.connects,
            counts.messages_out,
            counts.messages_in,
            counts.bytes_out,
            counts.bytes_in,
            tuple(counts.dropped.items()),
            0 if session is None else session.deliveries.queued_messages,
            0 if session is None else session.deliveries.queue.byte_count,
            tuple(progress.refused_filters),
            progress.down_since,
        )

    # -- the life of a bridge -------------------------------------------------------

    async def _run(self) -> None:
        settings, progress = self.settings, self._progress
        delay = settings.reconnect_first
        index = 0
        await self._update_local_session()
        while True:
            progress.address = address = self._addresses[index]
            connects = progress.connects
            self._enter(CONNECTING)
            error = await self._connect(address)
            if self._stopping:  # a connect that fails when it is cancelled ends with its error
                return
            lasted = progress.connects > connects and time.time() - progress.since >= STABLE
            if lasted:
                delay = settings.reconnect_first
                progress.forget_problems()
            if self._note(error):
                continue
            if error.first_answers:
                index = 0
                continue
            if lasted:
                index = (index + 1) % len(self._addresses) if settings.round_robin else 0
            else:
                index = (index + 1) % len(self._addresses)
                if index:
                    continue
            self._enter(WAITING)
            await asyncio.sleep(delay * (0.5 + 0.5 * self._context.random()))
            delay = min(2.0 * delay, settings.reconnect_longest)

    async def _update_local_session(self) -> None:
        """Make the local session, or its subscriptions those of the settings, before there is a link."""
        while True:
            try:
                await self._try_update()
                return
            except RelayError as error:
                self._note(error)
            self._enter(WAITING)
            await asyncio.sleep(self.settings.reconnect_first)

    async def _try_update(self) -> None:
        """Raises RelayError."""
        session = self.session
        if session is None:
            self._remotes.reset()
        self._remotes.save()
        known = [] if session is None else list(session.subscriptions)
        wanted = {rule.local.topic_filter for rule in self._rules if rule.goes_out}
        self._new_filters = [each for each in wanted if each not in known]
        if session is not None and wanted == set(known):
            return
        update = LocalSessionUpdate(
            asyncio.get_running_loop(),
            self._context.endpoint,
            f"bridge:{self.settings.name}",
            self.local_client_id,
            self._rules,
            known,
        )
        update.start()
        reason = await update.done
        if reason:
            raise RelayError(reason)

    def _note(self, error: RelayError) -> bool:
        """Note why there is no link; returns whether to connect again at once."""
        progress = self._progress
        if error.ended_session:
            self._remotes.ended(progress.address)
            return True
        reason = str(error)
        if error.unsupported_version and self._private:
            loop = echoed(self._rules)
            if loop is None:
                self._private = False
                log.info("event=bridge_not_private bridge=%s address=%s", self.settings.name, progress.address)
                return True
            reason = f"messages of {loop} would come back: the remote does not know bridges, so give them prefixes"
        progress.failed(reason)
        return False

    async def _connect(self, address: Address) -> RelayError:
        """Connect, and stay connected; returns why that ended."""
        settings = self.settings
        loop = asyncio.get_running_loop()
        link = Link(
            loop,
            self._relay(address),
            self._context.endpoint,
            f"bridge:{settings.name}",
            settings.connect_timeout,
            self._connected,
        )
        protocol: Any = link
        if address.websocket:
            from mqttbroker.bridges.websocket import WebSocketClient

            protocol = WebSocketClient(link, address, self._context.max_packet_size(), settings.connect_timeout)
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
            watch = loop.create_task(keep_running("bridge", lambda: self._watch_first(link)))
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
                link.close(RelayError("the first address answers again", first_answers=True))
                return

    def _connected(self) -> None:
        link, progress = self._link, self._progress
        assert link is not None
        self._remotes.confirm(progress.address)
        progress.connected(self.client_id, link.relay.remote.session_present, link.relay.setup.refused_filters)
        self._new_filters = []
        self._enter(CONNECTED)

    def _enter(self, state: str) -> None:
        if self._progress.enter(state):
            self._publish(b"1" if state == CONNECTED else b"0")

    def _publish(self, payload: bytes) -> None:
        if self.settings.notifications != "off":
            self._context.publish_state(self.topic, payload)

    def _relay(self, address: Address) -> Relay:
        def local_state() -> LocalState:
            session = self.session
            assert session is not None
            return self._remotes.join(address, session)

        return Relay(
            self._terms(address),
            self.counts,
            local_state,
            lambda: self._remotes.assign_ids(address),
            self._remotes.history(address, self._new_filters),
        )

    def _terms(self, address: Address) -> RelayTerms:
        settings = self.settings
        terms = RelayTerms(self.client_id, self.local_client_id, self._rules)
        terms.version = 5 if settings.version == "5.0" else 4
        terms.private = self._private
        terms.transient = settings.clean_start
        terms.clean_start = settings.clean_start or self._remotes.is_new(address)
        terms.username = settings.username
        terms.password = None if settings.password is None else settings.password.encode("utf-8")
        terms.keep_alive = int(settings.keep_alive)
        if settings.clean_start:
            terms.session_expiry = 0
        elif settings.session_expiry is not None:
            terms.session_expiry = int(settings.session_expiry)
        terms.receive_maximum = settings.receive_maximum
        terms.max_inflight = settings.max_inflight
        terms.max_packet_size = self._context.max_packet_size()
        terms.outgoing_retain = settings.outgoing_retain
        if settings.loop_detection:
            terms.identity = f"{self._remotes.identity}/{settings.name}"
        if settings.notifications == "both":
            terms.notification = settings.notification_topic or f"$SYS/broker/connection/{self.client_id}/state"
        return terms
