"""The shards as one node of a cluster knows them: its membership, the directory of all nodes, and its core processes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from mqttbroker import __version__
from mqttbroker.cluster.formats import SPOKEN
from mqttbroker.cluster.links.keys import key_of, new_key
from mqttbroker.cluster.links.server import CORE, WORKER
from mqttbroker.cluster.nodes.core_control import Owners, Snapshot, link_port
from mqttbroker.cluster.nodes.core_processes import FOLLOW, NOTHING, SERVE, CoreProcess
from mqttbroker.cluster.nodes.membership import Directory, Membership, NodeInfo, Refused, nodes_group
from mqttbroker.config.settings import Cluster
from mqttbroker.net.link_address import LinkAddress

log = logging.getLogger("mqttbroker.cluster")

MOVE_PATIENCE = 15.0  # seconds in which a living owner has to release a shard that moves
DRAIN_TIMEOUT = 30.0  # seconds that a node waits at its end for other nodes to follow its shards
MOVING = "cluster: shards are about to move to another node, which will disconnect their clients"  # a warning


class NodeShards:
    """The shards of ``cluster``, on the node that its settings name.

    ``core_setup`` returns the encoded `CoreSetup` of a core, ``timeout`` the seconds without a sign of life after which it is killed.
    ``directed`` is called when shards have other owners, with the addresses of these for links of workers; ``served`` when a core here has
    begun to serve its shard; ``fail`` with the reason why the node cannot be a member.
    """

    def __init__(
        self,
        cluster: Cluster,
        core_setup: Callable[[], str],
        timeout: Callable[[], float],
        directed: Callable[[dict[int, LinkAddress]], None],
        served: Callable[[int], None],
        fail: Callable[[str], None],
    ) -> None:
        self.cluster = cluster
        self.name = cluster.node_name
        self.started_at = time.time()
        self.link_key = new_key()
        self.http_url = ""  # "" = no HTTP server
        self.kafka_problem = "Kafka is not reached yet"
        self.draining = False
        self.stopping = False
        self.pins: dict[int, tuple[str, float]] = {}
        self.directory: Directory | None = None
        self.membership: Membership | None = None
        self.cores = [CoreProcess(shard, core_setup, self.owners, timeout, self._core_changed) for shard in range(cluster.shards)]
        self._directed = directed
        self._served = served
        self._serving: set[int] = set()
        self._fail = fail

    # -- membership ----------------------------------------------------------------

    async def be_member(self, connection: Any) -> None:
        """Be a member of the cluster, until cancelled."""
        self.membership = Membership(
            connection, nodes_group(self.cluster.id), self.cluster.session_timeout, self.cluster.shards,
            self.cluster.standbys, self.describe, self._assigned,
        )  # fmt: skip
        try:
            await self.membership.run()
        except Refused as error:
            self._fail(f"cluster: {error}")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("event=defect in=membership")
            self._fail(f"cluster: {error!r}")

    async def leave(self) -> None:
        """Be no member any more; without effect on a node that is none."""
        if self.membership is not None:
            await self.membership.leave()

    def describe(self) -> NodeInfo:
        """This node's description for the other nodes."""
        return NodeInfo(
            self.name,
            self.started_at,
            self.cluster.address,
            self.cluster.link_port,
            __version__,
            self.http_url,
            {core.shard: core.epoch for core in self.cores if core.claims},
            [core.shard for core in self.cores if core.runs and core.role != NOTHING and not core.claims],
            [core.shard for core in self.cores if core.role == FOLLOW and core.warm],
            self.draining,
            self.pins,
            [core.shard for core in self.cores if core.failed],
            self.link_key,
            SPOKEN,
        )

    def _assigned(self, directory: Directory) -> None:
        """Give each shard its core and its role as the leader of the group says."""
        self.directory = directory
        self.pins = directory.pins
        for core, (owner, standbys) in zip(self.cores, directory.shards):
            if owner == self.name:
                others = [info for name, info in directory.members.items() if name != self.name]
                lives = any(core.shard in info.owned for info in others)
                core.take_role(SERVE, MOVE_PATIENCE if lives else 0.0, directory.generation)
            else:
                core.take_role(FOLLOW if self.name in standbys else NOTHING, 0.0, directory.generation)
        owners = self.owners()
        assert owners is not None
        for core in self.cores:
            core.tell_owners(owners)
        self._directed(self._addresses(directory, WORKER))

    def owners(self) -> Owners | None:
        """Where the cores are that own the shards, as far as the directory says."""
        directory = self.directory
        if directory is None:
            return None
        return Owners(self.cluster.shards, self._addresses(directory, CORE), len(directory.members))

    def _addresses(self, directory: Directory, kind: str) -> dict[int, LinkAddress]:
        """Where processes of a kind have links to the owners of the shards."""
        found = {}
        for shard, (owner, _) in enumerate(directory.shards):
            if owner in directory.members:
                info = directory.members[owner]
                found[shard] = LinkAddress(info.address, link_port(info.link_port, shard), key_of(info.link_key, kind))
        return found

    def _core_changed(self, core: CoreProcess) -> None:
        """Have the shards assigned anew if a core of this node lost one, or can take over one that is to move here."""
        if core.epoch < 0:
            self._serving.discard(core.shard)
        elif core.shard not in self._serving:
            self._serving.add(core.shard)
            self._served(core.shard)
        directory, membership = self.directory, self.membership
        if directory is None or membership is None or self.stopping and not self.draining:
            return
        owner, standbys = directory.shards[core.shard]
        lost = owner == self.name and not core.owns
        if lost or (directory.moving and core.warm and self.name in standbys):
            membership.changed()

    # -- for operators ---------------------------------------------------------------

    def move(self, shard: int, node: str) -> str:
        """Have ``node`` own a shard from now on; returns why that cannot be, or "". An operator's choice lasts while the node lives."""
        directory, membership = self.directory, self.membership
        if directory is None or membership is None:
            return "this node is not in the cluster yet"
        if not 0 <= shard < self.cluster.shards:
            return f"there is no shard {shard}, they are 0 to {self.cluster.shards - 1}"
        if node not in directory.members:
            return f"there is no node {node}, there are {', '.join(sorted(directory.members))}"
        if directory.members[node].draining:
            return f"node {node} is draining"
        self.pins = {**self.pins, shard: (node, time.time())}
        membership.changed()
        return ""

    def drain(self, on: bool) -> None:
        """Have other nodes take over all shards of this one, or let it have shards again."""
        self.draining = on
        if self.membership is not None:
            self.membership.changed()

    def write_snapshots(self) -> None:
        """Have the cores of this node that own a shard write snapshots soon."""
        for core in self.cores:
            if core.owns:
                core.send(Snapshot())

    def reload(self) -> None:
        """Have the cores use the settings as they are now."""
        for core in self.cores:
            core.reload()

    def unready(self) -> list[str]:
        """The reasons why clients should not connect to this node now."""
        if self.kafka_problem:
            return [f"kafka: {self.kafka_problem}"]
        if self.stopping or self.draining:
            return ["cluster: this node is draining"]
        if self.membership is None or self.directory is None or not self.membership.joined:
            return ["cluster: this node is not a member yet"]
        without = [str(shard) for shard, (owner, _) in enumerate(self.directory.shards) if owner is None]
        reasons = [f"cluster: shards without an owner: {', '.join(without)}"] if without else []
        return reasons + [reason for core in self.cores if (reason := core.unready())]

    def warnings(self) -> list[str]:
        """Problems that keep no client away. On any thread."""
        directory = self.directory
        moving = [MOVING] if directory is not None and directory.moving else []
        return moving + [warning for core in self.cores for warning in core.warnings()]

    # -- the end -----------------------------------------------------------------------

    async def drain_to_end(self) -> None:
        """Have other nodes take over the shards of this one, as far as there are any."""
        membership = self.membership
        if membership is None or not membership.joined:
            return
        self.drain(True)
        until = asyncio.get_running_loop().time() + DRAIN_TIMEOUT
        while any(core.role == SERVE or core.owns for core in self.cores):
            directory = self.directory
            if directory is None or all(one.draining for name, one in directory.members.items() if name != self.name):
                return
            if asyncio.get_running_loop().time() >= until:
                log.warning("event=drain_ended reason=%s", f"after {DRAIN_TIMEOUT:g} s other nodes do not follow all shards")
                return
            await asyncio.sleep(0.05)
        log.info("event=drained node=%s", self.name)

    async def stop(self) -> None:
        """Release the shards, and end the cores."""
        await asyncio.gather(*(core.stop() for core in self.cores))
