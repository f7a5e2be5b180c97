"""The nodes of a cluster as a consumer group of Kafka: who is there, and which shards each node should own and follow.

Kafka's group protocol is spoken without a consumer: aiokafka's one fetches, watches topics and leaves the group when it is idle. The
group only proposes; the logs of the shards decide who owns them. Of two members of one name the one that came first stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec
from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.group import HeartbeatRequest, JoinGroupRequest, LeaveGroupRequest, SyncGroupRequest

from mqttbroker.cluster.formats import SPOKEN, Versions
from mqttbroker.cluster.nodes.assignment import Member, ShardNodes, assign

log = logging.getLogger("mqttbroker.cluster")

PROTOCOL_TYPE: Final = "mqttbroker"
PROTOCOL: Final = "shards-1"  # members with another one cannot be in one group
HEARTBEATS: Final = 5  # in a session timeout
RETRY_AFTER: Final = 0.1  # seconds
LOOKUP_TIMEOUT: Final = 2.0  # seconds until another Kafka broker is asked for the coordinator
ANSWER_MARGIN: Final = 5.0  # seconds that the answer to a join may take beyond the time in which the others must join
UNSETTLED_INTERVAL: Final = 3.0  # seconds until the leader looks again whether a planned move can be done
# Session timeouts to try when the Kafka brokers permit none as short as the one asked for. 6 s is their default minimum.
LONGER_TIMEOUTS: Final = (6.0, 10.0, 30.0, 60.0)

NO_ERROR: Final = 0
NOT_AVAILABLE: Final = (14, 15, 16)  # the coordinator loads the group, is not there, or is another one
ILLEGAL_GENERATION: Final = 22
UNKNOWN_MEMBER_ID: Final = 25
INCONSISTENT_GROUP_PROTOCOL: Final = 23
INVALID_SESSION_TIMEOUT: Final = 26
REBALANCE_IN_PROGRESS: Final = 27
MEMBER_ID_REQUIRED: Final = 79


def nodes_group(cluster_id: str) -> str:
    """The name of the group in Kafka."""
    return f"{cluster_id}.nodes"


class NodeInfo(msgspec.Struct):
    """The description of a node that joins.

    ``start`` is the Unix time of its start, ``address`` and ``link_port`` where its links are, ``http`` the URL of its HTTP server or "".
    ``owned`` has the epoch of each shard that it owns or takes over, ``follows``, ``warm`` and ``failed`` as in `Member`. ``pins`` has the
    operator's choices that it knows: node and Unix time, by shard. ``link_key`` is the key of links to it, and not in the text of this
    object. ``version`` is the release, ``formats`` what it speaks.
    """

    node: str
    start: float
    address: str
    link_port: int
    version: str
    http: str = ""
    owned: dict[int, int] = {}
    follows: list[int] = []
    warm: list[int] = []
    draining: bool = False
    pins: dict[int, tuple[str, float]] = {}
    failed: list[int] = []
    link_key: str = ""
    formats: Versions = SPOKEN

    def __repr__(self) -> str:
        return f"NodeInfo({self.node})"


class Directory(msgspec.Struct):
    """The message of the group's leader to all members. ``shards`` has the owner and the standbys of each shard; ``moving`` those that
    wait for a node that does not follow them yet. ``refused`` are the starts of nodes whose name is taken, or that speak no version
    that all of ``members`` do."""

    generation: int
    members: dict[str, NodeInfo]
    shards: list[tuple[str | None, list[str]]]
    pins: dict[int, tuple[str, float]] = {}
    moving: bool = False
    refused: list[float] = []


_encode = msgspec.json.encode
_decode_info = msgspec.json.Decoder(NodeInfo).decode
_decode_directory = msgspec.json.Decoder(Directory).decode


def make_directory(generation: int, infos: list[NodeInfo], shards: int, standbys: int) -> Directory:
    """The directory for these members: a function of them alone."""
    members: dict[str, NodeInfo] = {}
    refused = []
    pins: dict[int, tuple[str, float]] = {}
    spoken: Versions | None = None
    # Nodes that serve shards stay, whatever their clocks said at their start.
    for info in sorted(infos, key=lambda one: (not one.owned, one.start, one.node)):
        common = info.formats if spoken is None else spoken.common(info.formats)
        if info.node in members or common is None:
            refused.append(info.start)
            continue
        spoken = common
        members[info.node] = info
        for shard, pin in info.pins.items():
            pins[shard] = max(pin, pins.get(shard, pin), key=lambda one: one[1])
    chosen = {shard: node for shard, (node, _) in pins.items()}
    places = assign(shards, [_member(info) for info in members.values()], standbys, chosen)
    return Directory(
        generation,
        members,
        [(place.owner, place.standbys) for place in places],
        pins,
        places != assign(shards, _later(members, places), standbys, chosen),
        refused,
    )


def _member(info: NodeInfo) -> Member:
    failed = frozenset(info.failed)
    return Member(info.node, info.owned, frozenset(info.follows), frozenset(info.warm), info.draining, failed)


def _later(members: dict[str, NodeInfo], places: list[ShardNodes]) -> list[Member]:
    """The members once each has what ``places`` give it."""
    found = []
    for name, info in members.items():
        owned = {shard: 0 for shard, place in enumerate(places) if place.owner == name}
        follows = frozenset(shard for shard, place in enumerate(places) if name in place.standbys)
        found.append(Member(name, owned, follows, follows, info.draining))
    return found


def refusal(own: NodeInfo, members: dict[str, NodeInfo]) -> str:
    """Why the node ``own`` is not among ``members``."""
    other = members.get(own.node)
    if other is not None:
        return f"another node of the name {own.node} is in the cluster, at {other.address}:{other.link_port}"
    for other in members.values():
        if own.formats.common(other.formats) is None:
            return (
                f"this program ({own.version}) speaks {own.formats} of the links and logs, and node {other.node} ({other.version})"
                f" {other.formats}: upgrade by way of a release that speaks both, or stop all nodes first"
            )
    return "the leader of the group has refused it"


class Refused(Exception):
    """This node cannot be a member; the text is one line."""


class Membership:
    """This node in the group ``group``, from `run` to `leave`.

    ``describe`` returns what this node says of itself, ``assigned`` is called with each directory. A node that Kafka does not hear of
    for ``session_timeout`` seconds is no member any more.
    """

    def __init__(
        self,
        connection: dict[str, Any],
        group: str,
        session_timeout: float,
        shards: int,
        standbys: int,
        describe: Callable[[], NodeInfo],
        assigned: Callable[[Directory], None],
    ) -> None:
        self.directory: Directory | None = None
        self.session_timeout = session_timeout
        self.joined = False  # Kafka has this node as a member, as far as is known
        self._connection = connection
        self._group = group
        self._wanted_timeout = session_timeout
        self._longer = [one for one in LONGER_TIMEOUTS if one > session_timeout]
        self._shards = shards
        self._standbys = standbys
        self._describe = describe
        self._assigned = assigned
        self._client: AIOKafkaClient | None = None
        self._coordinator: int | None = None
        self._coordinator_missed = False  # since the last answer that was no error
        self._member_id = ""
        self._generation = -1
        self._leads = False
        self._changed = asyncio.Event()
        self._refused_since = 0.0  # in the time of the loop; 0 = it is not

    def changed(self) -> None:
        """What `describe` returns has changed, so that the shards may have to be assigned anew."""
        self._changed.set()

    async def run(self) -> None:
        """Be a member until cancelled. Raises `Refused` if that cannot be."""
        while True:
            try:
                await self._connect()
                await self._join()
                await self._stay()
            except (TimeoutError, KafkaError, OSError) as error:
                self._lost_coordinator(f"{type(error).__name__} {error}".strip())
                await asyncio.sleep(RETRY_AFTER)

    async def leave(self) -> None:
        """Have Kafka assign this node's shards to others at once, and close."""
        client, self._client = self._client, None
        if client is None:
            return
        if self.joined and self._coordinator is not None:
            with suppress(KafkaError, OSError, asyncio.TimeoutError):
                async with asyncio.timeout(LOOKUP_TIMEOUT):
                    request = LeaveGroupRequest(self._group, self._member_id)
                    await client.send(self._coordinator, request, group=ConnectionGroup.COORDINATION)
        self.joined = False
        await client.close()

    # -- the coordinator ------------------------------------------------------------

    async def _connect(self) -> None:
        """Find the Kafka broker that coordinates the group."""
        if self._client is None:
            client = AIOKafkaClient(
                **self._connection,
                client_id="mqttbroker",
                request_timeout_ms=int((LONGER_TIMEOUTS[-1] + ANSWER_MARGIN) * 1000),
                metadata_max_age_ms=30_000,
            )
            try:
                await client.bootstrap()
            except BaseException:
                await client.close()
                raise
            self._client = client
        if self._coordinator is None:
            async with asyncio.timeout(LOOKUP_TIMEOUT):
                self._coordinator = await self._client.coordinator_lookup(CoordinationType.GROUP, self._group)

    def _lost_coordinator(self, reason: str) -> None:
        if not self._coordinator_missed:
            log.warning("event=group_coordinator_lost reason=%s", reason)
        self._coordinator_missed = True
        self._coordinator = None
        if self._client is not None:
            self._client.force_metadata_update()

    async def _send(self, request: Any, timeout: float) -> Any:
        assert self._client is not None and self._coordinator is not None
        async with asyncio.timeout(timeout):
            return await self._client.send(self._coordinator, request, group=ConnectionGroup.COORDINATION)

    def _failed(self, code: int) -> None:
        """Handle an error that ends this node's place in the group, or only its coordinator. Raises KafkaError for the others."""
        if code in (UNKNOWN_MEMBER_ID, ILLEGAL_GENERATION):
            if self.joined:
                log.warning("event=node_expelled reason=%s", f"Kafka did not hear of this node for {self.session_timeout:g} s")
            self.joined = False
            if code == UNKNOWN_MEMBER_ID:
                self._member_id = ""
        elif code in NOT_AVAILABLE:
            self._lost_coordinator(for_code(code).__name__)
        elif code != REBALANCE_IN_PROGRESS:
            raise for_code(code)()

    # -- joining -----------------------------------------------------------------

    async def _join(self) -> None:
        """Join until there is a directory."""
        while self._coordinator is not None:
            self._changed.clear()
            milliseconds = int(self.session_timeout * 1000)
            request = JoinGroupRequest(
                self._group, milliseconds, milliseconds, self._member_id, None, PROTOCOL_TYPE,
                [(PROTOCOL, _encode(self._describe()))],
            )  # fmt: skip
            answer = await self._send(request, self.session_timeout + ANSWER_MARGIN)
            code = answer.error_code
            if code == MEMBER_ID_REQUIRED:
                self._member_id = answer.member_id
            elif code == INVALID_SESSION_TIMEOUT and self._longer:
                self.session_timeout = self._longer.pop(0)
                reason = f"the Kafka brokers' group.min.session.timeout.ms does not permit {self._wanted_timeout:g} s"
                log.warning("event=longer_session_timeout seconds=%g reason=%s", self.session_timeout, reason)
            elif code == INCONSISTENT_GROUP_PROTOCOL:
                self._refuse(f"the members of the group {self._group} in Kafka speak another protocol than {PROTOCOL}")
                await asyncio.sleep(RETRY_AFTER)
            elif code != NO_ERROR:
                self._failed(code)
                await asyncio.sleep(RETRY_AFTER)
            else:
                self._member_id, self._generation = answer.member_id, answer.generation_id
                if await self._sync(answer):
                    return

    async def _sync(self, joined: Any) -> bool:
        """Get the directory, from this node if it leads the group."""
        assignments = []
        self._leads = joined.leader_id == joined.member_id
        if self._leads:
            infos = [_decode_info(metadata) for *_, metadata in joined.members]
            directory = make_directory(self._generation, infos, self._shards, self._standbys)
            assignments = [(member_id, _encode(directory)) for member_id, *_ in joined.members]
        request = SyncGroupRequest(self._group, self._generation, self._member_id, None, assignments)
        answer = await self._send(request, self.session_timeout + ANSWER_MARGIN)
        if answer.error_code != NO_ERROR:
            self._failed(answer.error_code)
            await asyncio.sleep(RETRY_AFTER)
            return False
        self.joined = True
        self._coordinator_missed = False
        self._take(_decode_directory(answer.member_assignment))
        return True

    def _take(self, directory: Directory) -> None:
        own = self._describe()
        if own.start in directory.refused:
            self._refuse(refusal(own, directory.members))
            return
        self._refused_since = 0.0
        self.directory = directory
        log.info(
            "event=shards_assigned generation=%d nodes=%s own=%s follows=%s", directory.generation, ",".join(sorted(directory.members)),
            ",".join(str(shard) for shard, (owner, _) in enumerate(directory.shards) if owner == own.node),
            ",".join(str(shard) for shard, (_, standbys) in enumerate(directory.shards) if own.node in standbys),
        )  # fmt: skip
        self._assigned(directory)

    def _refuse(self, reason: str) -> None:
        """Raise `Refused` if this node is refused for longer than one that was killed may still be a member."""
        now = asyncio.get_running_loop().time()
        if not self._refused_since:
            self._refused_since = now
        elif now - self._refused_since > 2 * self.session_timeout:
            raise Refused(reason)

    # -- staying -----------------------------------------------------------------

    async def _stay(self) -> None:
        """Send heartbeats until this node has to join again."""
        loop = asyncio.get_running_loop()
        interval = self.session_timeout / HEARTBEATS
        began = loop.time()
        while self._coordinator is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._changed.wait()
                return
            unsettled = self.directory is not None and self.directory.moving and self._leads
            if unsettled and loop.time() - began > UNSETTLED_INTERVAL:
                return
            if self._refused_since and loop.time() - self._refused_since > 2 * self.session_timeout:
                return
            request = HeartbeatRequest(self._group, self._generation, self._member_id)
            answer = await self._send(request, self.session_timeout)
            if answer.error_code != NO_ERROR:
                self._failed(answer.error_code)
                return
            self._coordinator_missed = False
