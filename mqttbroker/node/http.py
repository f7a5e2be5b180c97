"""HTTP of a node of a cluster: nodes and shards, and the metrics of all its cores, each with a label `shard`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
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
        view, owned, front = await asyncio.wrap_future(self._runner.call(self._state))
        texts = await asyncio.gather(*(self._cores.metrics(shard) for shard in owned), return_exceptions=True)
        families = Families()
        for line in (*node_metrics(view), *front):
            families.add(line, "")
        families.add("# HELP mqttbroker_core_up 1 if a core of this node that owns its shard gives its metrics.", "")
        families.add("# TYPE mqttbroker_core_up gauge", "")
        for shard, text in zip(owned, texts):
            up = isinstance(text, str)
            families.add(f"mqttbroker_core_up {int(up)}", str(shard))
            for line in text.splitlines() if isinstance(text, str) else ():
                families.add(line, str(shard))
        return families.text().encode()

    def _state(self) -> tuple[dict[str, Any], list[int], list[str]]:
        """On the event loop: the node's view, the shards whose cores serve HTTP here, and the node's own metrics."""
        owned = [core.shard for core in self._shards.cores if http_port_of(core) is not None]
        return cluster_view(self._shards), owned, list(front_metrics(self._workers, self._counters))


_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?(.*)")
_PARTS = re.compile(r"_(bucket|sum|count|created)$")


class Families:
    """Samples of several processes, grouped by the name of the metric, as Prometheus' text format wants them."""

    def __init__(self) -> None:
        self._comments: dict[str, dict[str, str]] = {}
        self._samples: dict[str, list[str]] = {}

    def add(self, line: str, shard: str) -> None:
        """A line of Prometheus' text format; ``shard`` "" = no label."""
        if line.startswith("# "):
            _, kind, name, *_ = line.split(" ", 3)
            if kind in ("HELP", "TYPE"):
                self._comments.setdefault(name, {}).setdefault(kind, line)
                self._samples.setdefault(name, [])
            return
        match = _SAMPLE.fullmatch(line)
        if match is None:
            return
        name, brace, rest = match.groups()
        family = name if name in self._comments else _PARTS.sub("", name)
        if shard:
            labels = f'shard="{shard}"'
            rest = f"{{{labels},{rest}" if brace and not rest.startswith("}") else f"{{{labels}{rest if brace else '}' + rest}"
        elif brace:
            rest = "{" + rest
        self._samples.setdefault(family, []).append(name + rest)

    def text(self) -> str:
        return "".join(
            f"{line}\n" for name, samples in self._samples.items() for line in (*self._comments.get(name, {}).values(), *samples)
        )


def node_metrics(view: dict[str, Any]) -> Iterator[str]:
    """The metrics of a node, from what it knows of its cluster."""

    def family(name: str, kind: str, text: str) -> Iterator[str]:
        yield f"# HELP mqttbroker_cluster_{name} {text}"
        yield f"# TYPE mqttbroker_cluster_{name} {kind}"

    yield from family("nodes", "gauge", "Nodes in the cluster")
    yield f"mqttbroker_cluster_nodes {len(view['nodes'])}"
    yield from family("shards", "gauge", "Shards that each node owns")
    for node in view["nodes"]:
        yield f'mqttbroker_cluster_shards{{node="{node["node"]}"}} {len(node["owns"])}'
    yield from family("generation", "counter", "Changes of the assignment of shards to nodes")
    yield f"mqttbroker_cluster_generation {view['generation']}"
    cores = [(one["shard"], one["core"]) for one in view["shards"] if one["core"] is not None]
    for key, name, kind, text in (
        ("lag", "log_lag_records", "gauge", "Records of its log that a core of this node has not read"),
        ("bus_lag", "bus_lag_records", "gauge", "Records of the other logs that a core of this node has not read"),
        ("epoch_changes", "epoch_changes_total", "counter", "Takeovers that a core of this node has seen"),
        ("starts", "core_starts_total", "counter", "Starts of a core of this node"),
        ("snapshots", "snapshots_total", "counter", "Snapshots that a core of this node has written"),
        ("resident", "core_resident_bytes", "gauge", "Resident memory of a core of this node"),
    ):
        yield from family(name, kind, text)
        for shard, core in cores:
            yield f'mqttbroker_cluster_{name}{{shard="{shard}",role="{core["role"]}"}} {core[key]}'
    yield from family("links_missing", "gauge", "Cores that own another shard to which a core of this node has no link")
    for shard, core in cores:
        yield f'mqttbroker_cluster_links_missing{{shard="{shard}",role="{core["role"]}"}} {len(core["links_missing"])}'
    yield from family("streams_failing", "gauge", "1 if a core of this node cannot copy messages to the topics of streams now")
    for shard, core in cores:
        failing = int(core["stream_problem"] is not None)
        yield f'mqttbroker_cluster_streams_failing{{shard="{shard}",role="{core["role"]}"}} {failing}'


def front_metrics(own_workers: Workers, counters: Counters) -> Iterator[str]:
    """The metrics of a node's workers, and of what was refused before a client had a core; called on its event loop."""

    def family(name: str, kind: str, text: str) -> Iterator[str]:
        yield f"# HELP mqttbroker_{name} {text}"
        yield f"# TYPE mqttbroker_{name} {kind}"

    own_workers.memory()
    workers = own_workers.statuses()
    values: tuple[tuple[str, str, str, Callable[[WorkerStatus], float]], ...] = (
        ("up", "gauge", "1 if a connection worker serves clients.", lambda one: int(one.up)),
        ("clients", "gauge", "Open connections of a worker.", lambda one: one.clients),
        ("resident_bytes", "gauge", "Memory of the worker's process.", lambda one: one.resident_bytes),
        ("cpu_seconds_total", "counter", "CPU time of the worker's process.", lambda one: one.cpu_seconds),
        ("starts_total", "counter", "Starts of a worker's process.", lambda one: one.starts),
    )
    for name, kind, text, value in values:
        yield from family(f"worker_{name}", kind, text)
        for one in workers:
            yield f'mqttbroker_worker_{name}{{worker="{one.number}"}} {value(one)}'
    failures = {"tls": counters.tls_failures, "websocket": counters.websocket_failures, "proxy": counters.proxy_failures}
    for name, label, counts, text in (
        ("connections_refused_total", "", {"": counters.connections_refused}, "Connections closed because no socket was free."),
        ("connections_evicted_total", "", {"": counters.connections_evicted},
         "Connections without a CONNECT that were closed for newer ones."),
        ("handshakes_failed_total", "layer", failures, "Connections that failed before MQTT or HTTP began."),
        ("limits_reached_total", "limit", counters.limits_reached,
         "Times that a limit refused, delayed or closed something, by the name of the setting."),
    ):  # fmt: skip
        yield from family(name, "counter", text)
        for key, count in counts.items():
            labels = f'{{{label}="{key}"}}' if label else ""
            yield f"mqttbroker_{name}{labels} {count}"
