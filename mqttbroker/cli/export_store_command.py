"""The command export-store."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mqttbroker.config.load import load_settings

COMMAND = "export-store"

# Exit status if not everything was exported.
INCOMPLETE = 3


class _Failure(Exception):
    """The store cannot be exported; the text is one line."""


class _Exported(NamedTuple):
    """The contents of the new store in words, lines about its streams, and lines about what is missing."""

    contents: str
    streams: list[str]
    missing: list[str]


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``mqttbroker``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        COMMAND,
        help="make the data directory of a single broker of the sessions, retained messages and streams of a cluster",
        description="No node of the cluster may run. The cluster's topics are only read. Exit status: 0 if everything was exported,"
        f" {INCOMPLETE} if a line on stderr names what was not, 1 if nothing was, 2 if the call was wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the data directory of the single broker: empty, or not there yet")
    parser.add_argument("--config", metavar="FILE", type=Path, required=True, help="the TOML file of a node of the cluster")
    parser.add_argument(
        "--leave-out", metavar="STREAM", action="append", default=[],
        help="do not export the records of this stream; may be given several times",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError if the settings cannot be used."""
    from mqttbroker.admin.data.files import set_umask
    from mqttbroker.cluster.kafka.log import LogFailure
    from mqttbroker.cluster.shard.snapshots import SnapshotFailure
    from sessions.store.interface import StoreError

    settings = load_settings(options.config, os.environ, {})
    if not settings.cluster.configured:
        print(f"mqttbroker {COMMAND}: {options.config} has no [cluster]", file=sys.stderr)
        return 2
    set_umask(settings.data_mode)
    try:
        exported = asyncio.run(_export(settings, Path(os.path.abspath(options.directory)), options.leave_out))
    except (_Failure, LogFailure, SnapshotFailure, StoreError, sqlite3.Error) as error:
        reason = str(error)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    else:
        print(f"{settings.cluster.log_topic} -> {options.directory}: {exported.contents}")
        for line in exported.streams:
            print(line)
        for missing in exported.missing:
            print(f"not exported: {missing}", file=sys.stderr)
        return INCOMPLETE if exported.missing else 0
    print(f"mqttbroker {COMMAND}: {reason}", file=sys.stderr)
    return 1


async def _export(settings: Any, directory: Path, left_out: list[str]) -> _Exported:
    """Write the store beside ``directory``, and rename it when it is complete."""
    if directory.is_symlink() or (directory.exists() and (not directory.is_dir() or any(directory.iterdir()))):
        raise _Failure(f"{directory}: is not an empty directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", suffix=".part", dir=directory.parent))
    try:
        exported = await _write(settings, unfinished, left_out)
        (unfinished / "store").rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return exported


async def _write(settings: Any, unfinished: Path, left_out: list[str]) -> _Exported:
    from mqttbroker.admin.data.repair import DATABASE
    from mqttbroker.auth.security import Security
    from mqttbroker.cluster.kafka.connection import connection
    from mqttbroker.cluster.kafka.log import KafkaLog
    from mqttbroker.cluster.nodes.checks import nodes_of, prepare_topics
    from mqttbroker.cluster.shard.snapshot_keeper import load_snapshot
    from mqttbroker.cluster.shard.snapshots import Snapshots
    from mqttbroker.cluster.transfer.offline_shards import OfflineShards
    from mqttbroker.cluster.transfer.store_merge import merge_shards
    from mqttbroker.cluster.transfer.stream_export import StreamExport
    from mqttbroker.core.broker import Broker
    from mqttbroker.core.delivery.cluster_port import ClusterPort
    from mqttbroker.server.assembly import build_broker, restore
    from sessions.store.interface import Recovered
    from sessions.store.salvage import set_stream_ends

    cluster = settings.cluster
    security = Security(settings)
    kafka_connection = connection(cluster)
    record_cluster = await prepare_topics(kafka_connection, replace(cluster, create_topics=False))
    if nodes := await nodes_of(kafka_connection, cluster):
        raise _Failure(f"{nodes} nodes of {cluster.id} run, or were killed a moment ago: stop all nodes first")
    store = unfinished / "store"
    streams = StreamExport(kafka_connection, cluster.id, settings.streams, store / "streams", left_out)
    await streams.plan()
    snapshots = Snapshots(kafka_connection, cluster.id, COMMAND, time.time)

    async def prepare(shard: int, place: Path, log_start: int) -> None:
        await load_snapshot(snapshots, shard, cluster.log_topic, place, log_start)

    def build(recovered: Recovered, port: ClusterPort) -> Broker:
        broker = build_broker(settings, recovered, security, port)
        restore(broker, recovered, time.time())
        return broker

    log = KafkaLog(kafka_connection, cluster.log_topic, cluster.append_timeout)
    await log.start()
    try:
        shards = OfflineShards(log, record_cluster, cluster.shards, unfinished, prepare, build)
        await shards.read()
        store.mkdir()
        exported = await streams.run(log, record_cluster, shards.ends)
    finally:
        await log.stop()
    merged = merge_shards(store / DATABASE, [shards.database(shard) for shard in range(cluster.shards)])
    set_stream_ends(store / DATABASE, streams.ends)
    missing = []
    if shards.without_member:
        missing.append(f"{shards.without_member} messages of shared subscriptions that have no member any more")
    lines = [
        f"{stream.topic} -> stream {stream.name}: {stream.records} records in {stream.partitions} partitions, with their offsets"
        + (f"; {stream.late} of them were in the logs only" if stream.late else "")
        for stream in exported
    ]
    return _Exported(
        f"{merged.sessions} sessions, {merged.subscriptions} subscriptions, {merged.queued} queued messages,"
        f" {merged.retained} retained messages, {merged.readers} readers of streams",
        lines,
        missing,
    )
