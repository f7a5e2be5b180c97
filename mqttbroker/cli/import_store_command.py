"""The command import-store."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sqlite3
import sys
from pathlib import Path
from typing import Any

from mqttbroker.config.load import load_settings

COMMAND = "import-store"

TOPICS_WAIT = 20.0  # seconds until all Kafka brokers know the topics that were created
TOPICS_RETRY = 0.5  # seconds


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``mqttbroker``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        COMMAND,
        help="carry the sessions, retained messages and streams of a single broker into a new cluster",
        description="The broker must have been stopped in order, and no node of the cluster may run yet. Exit status: 0 if"
        " everything was imported, 1 if not, with one line that says what to do, 2 if the call was wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the data directory of the single broker")
    parser.add_argument("--config", metavar="FILE", type=Path, required=True, help="the TOML file of a node of the cluster")
    parser.add_argument(
        "--leave-out", metavar="STREAM", action="append", default=[],
        help="do not import the records of this stream; may be given several times",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError if the settings cannot be used."""
    from mqttbroker.cluster.kafka.log import LogFailure
    from mqttbroker.cluster.transfer.store_import import ImportFailure
    from sessions.store.interface import StoreError

    settings = load_settings(options.config, os.environ, {})
    if not settings.cluster.configured:
        print(f"mqttbroker {COMMAND}: {options.config} has no [cluster]", file=sys.stderr)
        return 2
    try:
        carried, streams = asyncio.run(_import(settings, options.directory, options.leave_out))
    except (ImportFailure, LogFailure, StoreError, sqlite3.Error) as error:
        reason = str(error)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    else:
        print(
            f"{options.directory} -> {settings.cluster.log_topic}: {carried.sessions} sessions, {carried.subscriptions}"
            f" subscriptions, {carried.queued} queued messages, {carried.retained} retained messages,"
            f" {carried.readers} readers of streams"
        )
        for stream in streams:
            print(f"stream {stream.name} -> {stream.topic}: {stream.records} records in {stream.partitions} partitions, with their offsets")
            for partition, first, end in stream.lost:
                print(f"stream {stream.name}, partition {partition}: offsets {first} to {end - 1} were lost to damage before")
        return 0
    print(f"mqttbroker {COMMAND}: {reason}", file=sys.stderr)
    return 1


async def _import(settings: Any, directory: Path, left_out: list[str]) -> tuple[Any, list[Any]]:
    """Import everything; returns what the store and each stream had. All that can be checked is checked before anything is written."""
    from mqttbroker import __version__
    from mqttbroker.admin.data.repair import DATABASE
    from mqttbroker.cluster.kafka.connection import connection
    from mqttbroker.cluster.kafka.log import KafkaLog
    from mqttbroker.cluster.log.records import ID_BYTES, Takeover
    from mqttbroker.cluster.transfer.store_import import StoreImport, lock_store
    from mqttbroker.cluster.transfer.stream_import import StreamImport

    cluster = settings.cluster
    database = directory / DATABASE
    lock = lock_store(directory, database)
    try:
        kafka_connection = connection(cluster)
        streams = StreamImport(kafka_connection, cluster, settings.streams, settings.longest_packet, directory, left_out)
        streams.plan(database)
        record_cluster = await _prepare_topics(kafka_connection, cluster)
        log = KafkaLog(kafka_connection, cluster.log_topic, cluster.append_timeout)
        shards = await log.start()
        try:
            takeover = Takeover(COMMAND, "", __version__)
            owner = secrets.token_bytes(ID_BYTES)
            store_import = StoreImport(log, record_cluster, owner, takeover, cluster.max_record_bytes)
            await store_import.check(shards)
            await streams.prepare()
            # The logs are last: while they are empty, a cluster that is started has nothing, and not a part of it.
            carried_streams = await streams.run()
            return await store_import.run(database, shards), carried_streams
        finally:
            await log.stop()
    finally:
        os.close(lock)


async def _prepare_topics(kafka_connection: Any, cluster: Any) -> bytes:
    """Create the topics, and wait until they can be used; returns the id of the cluster that is in each record."""
    from mqttbroker.cluster.nodes.checks import KafkaUnreachable, prepare_topics

    loop = asyncio.get_running_loop()
    until = loop.time() + TOPICS_WAIT
    while True:
        try:
            return await prepare_topics(kafka_connection, cluster)
        except KafkaUnreachable:
            if loop.time() > until:
                raise
            await asyncio.sleep(TOPICS_RETRY)
