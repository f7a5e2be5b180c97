"""HTTP of a node of a cluster: nodes and shards, and the metrics of all its cores, each with a label `shard`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.control.views import WorkerStatus
from mqttbroker.admin.http.access import Right
from mqttbroker.admin.http.operations import Call, route
from mqttbroker.admin.http.parameters import Field, Word
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import Route
from mqttbroker.admin.http.schemas import BOOLEAN, INTEGER, NUMBER, TEXT, array, described, nullable, record
from mqttbroker.config.setting_kinds import Boolean, Integer
from mqttbroker.node.core_http import CoreHttp, http_port_of
from mqttbroker.node.shards import NodeShards
from mqttbroker.server.workers import Workers
from sessions.counters import Counters

_NODE = record(
    "Node",
    node=TEXT, address=described(TEXT, "of its links"), link_port=INTEGER, http=described(TEXT, "URL; empty = none"),
    version=TEXT, started_at=described(NUMBER, "Unix time in seconds"), draining=BOOLEAN,
    owns=array(INTEGER), follows=array(INTEGER),
)  # fmt: skip
_CORE = record(
    "Core",
    role=described(TEXT, "owner or standby"),
    state=described(TEXT, "starting, standby, taking over, owner, checking, released or fenced"),
    problem=described(nullable(TEXT), "why it does not serve"),
    epoch=described(INTEGER, "offset of the takeover in force; -1 = none"),
    epoch_changes=INTEGER,
    lag=described(INTEGER, "records of its own log that it has not read"),
    bus_lag=described(INTEGER, "records of the other logs that it has not read"),
    links_missing=described(array(INTEGER), "shards with an owner to whose core it has no link"),
    stream_problem=described(nullable(TEXT), "why messages are not copied to the topics of streams"),
    end=described(INTEGER, "offset behind the last record that it has"),
    clients=INTEGER, sessions=INTEGER, resident=described(INTEGER, "bytes"), starts=INTEGER, snapshots=INTEGER, pid=INTEGER,
)  # fmt: skip
_SHARD = record(
    "Shard",
    shard=INTEGER,
    owner=described(nullable(TEXT), "the node that owns it; null = none"),
    address=described(nullable(TEXT), "host and port of its owner for links"),
    standbys=array(TEXT),
    core=described(nullable(_CORE), "its process on the node that answers; null = none"),
)
CLUSTER = record(
    "Cluster",
    id=TEXT, node=described(TEXT, "the one that answers"), generation=described(INTEGER, "of the assignment; -1 = none yet"),
    moving=described(BOOLEAN, "whether shards wait for a node that does not follow them yet"),
    session_timeout=described(NUMBER, "seconds"), problems=array(TEXT), nodes=array(_NODE), shards=array(_SHARD),
)  # fmt: skip


class ClusterRoutes:
    """The routes of a node's view of its cluster."""

    def __init__(self, node: NodeShards, runner: ControlRunner) -> None:
        self._node = node
        self._runner = runner

    def routes(self) -> list[Route]:
        shards = Integer(0, self._node.cluster.shards - 1)
        return [
            route("GET", "/cluster", self._show_cluster, Right.LIST, "Nodes and shards", CLUSTER, tag="cluster"),
            route("POST", "/cluster/move", self._move_shard, Right.OPERATE, "Have a node own a shard", CLUSTER,
                  body=[Field("shard", shards, "its number"), Field("node", Word(1), "the name of the node")],
                  action="move_shard", tag="cluster"),
            route("POST", "/cluster/drain", self._drain_node, Right.OPERATE,
                  "Move all shards of the node that answers to others, or let it have shards again", CLUSTER,
                  body=[Field("on", Boolean(), "false = let it have shards again", True)], action="drain_node", tag="cluster"),
            route("POST", "/cluster/snapshot", self._write_snapshots, Right.OPERATE,
                  "Have the shards that the node owns write snapshots soon", CLUSTER, action="write_snapshots", tag="cluster"),
        ]  # fmt: skip

    async def _show_cluster(self, call: Call) -> dict[str, Any]:
        return await asyncio.wrap_future(self._runner.call(cluster_view, self._node))

    async def _move_shard(self, call: Call) -> dict[str, Any]:
        problem = await asyncio.wrap_future(self._runner.call(self._node.move, call["shard"], call["node"]))
        if problem:
            raise RequestError(400, problem)
        return await self._show_cluster(call)

    async def _drain_node(self, call: Call) -> dict[str, Any]:
        await asyncio.wrap_future(self._runner.call(self._node.drain, call["on"]))
        return await self._show_cluster(call)

    async def _write_snapshots(self, call: Call) -> dict[str, Any]:
        await asyncio.wrap_future(self._runner.call(self._node.write_snapshots))
        return await self._show_cluster(call)


def cluster_view(node: NodeShards) -> dict[str, Any]:
    """The cluster as a node knows it; called on its event loop."""
    directory = node.directory
    places: Sequence[tuple[str | None, list[str]]] = [(None, [])] * node.cluster.shards if directory is None else directory.shards
    members = {} if directory is None else directory.members
    owners = node.owners()
    addresses = {} if owners is None else owners.owners
    return {
        "id": node.cluster.id,
        "node": node.name,
        "generation": -1 if directory is None else directory.generation,
        "moving": directory is not None and directory.moving,
        "session_timeout": node.cluster.session_timeout if node.membership is None else node.membership.session_timeout,
        "problems": node.unready(),
        "nodes": [
            {
                "node": info.node, "address": info.address, "link_port": info.link_port, "http": info.http,
                "version": info.version, "started_at": round(info.start, 3), "draining": info.draining,
                "owns": [shard for shard, (owner, _) in enumerate(places) if owner == info.node],
                "follows": [shard for shard, (_, standbys) in enumerate(places) if info.node in standbys],
            }
            for _, info in sorted(members.items())
        ],
        "shards": [
            {
                "shard": shard,
                "owner": owner,
                "address": str(addresses[shard]) if shard in addresses else None,
                "standbys": standbys,
                "core": _core_view(node, shard),
            }
            for shard, (owner, standbys) in enumerate(places)
        ],
    }  # fmt: skip


def _core_view(node: NodeShards, shard: int) -> dict[str, Any] | None:
    core = node.cores[shard]
    status = core.status
    if not core.runs:
        return None
    return {
        "role": "owner" if core.owns else "standby",
        "state": "starting" if status is None else status.state,
        "problem": None if status is None else status.problem or None,
        "epoch": -1 if status is None else status.epoch,
        "epoch_changes": 0 if status is None else status.epoch_changes,
        "lag": 0 if status is None else status.lag,
        "bus_lag": 0 if status is None else status.bus_lag,
        "links_missing": [] if status is None else status.links_missing,
        "stream_problem": None if status is None else status.stream_problem or None,
        "end": 0 if status is None else status.end,
        "clients": 0 if status is None else status.clients,
        "sessions": 0 if status is None else status.sessions,
        "resident": 0 if status is None else status.resident,
        "starts": core.starts,
        "snapshots": 0 if status is None else status.snapshots,
        "pid": core.pid,
    }


# -- metrics -----------------------------------------------------------------------


class ClusterMetrics:
    """The text of `/metrics`: those of the node, and those of each of its cores with a label `shard`."""

    def __init__(self, shards: NodeShards, cores: CoreHttp, workers: Workers, counters: Counters, runner: ControlRunner) -> None:
        self._shards = shards
        self._cores = cores
        self._workers = workers
        self._counters = counters
        self._runner = runner

    async def render(self) -> bytes:
        view, owned, workers = await asyncio.wrap_future(self._runner.call(self._state))
        texts = await asyncio.gather(*(self._cores.metrics(shard) for shard in owned), return_exceptions=True)
        cores = {shard: text if isinstance(text, str) else None for shard, text in zip(owned, texts)}
        from mqttbroker.node.metrics import node_page  # loads Prometheus' client, which the node needs for nothing else

        return node_page(view, workers, self._counters, cores)

    def _state(self) -> tuple[dict[str, Any], list[int], Sequence[WorkerStatus]]:
        """On the event loop: the node's view, the shards whose cores serve HTTP here, and the node's workers."""
        owned = [core.shard for core in self._shards.cores if http_port_of(core) is not None]
        self._workers.memory()
        return cluster_view(self._shards), owned, self._workers.statuses()
