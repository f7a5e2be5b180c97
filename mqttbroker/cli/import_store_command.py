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

# Exit status if not everything was imported.
INCOMPLETE = 3

TOPICS_WAIT = 20.0  # seconds until all Kafka brokers know the topics that were created
TOPICS_RETRY = 0.5  # seconds


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``mqttbroker``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        COMMAND,
        help="carry the sessions and retained messages of a single broker into a new cluster",
        description="The broker must have been stopped in order, and no node of the cluster may run yet. Exit status: 0 if"
        f" everything was imported, {INCOMPLETE} if a line on stderr names what was not, 1 if nothing was, 2 if the call was wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the data directory of the single broker")
    parser.add_argument("--config", metavar="FILE", type=Path, required=True, help="the TOML file of a node of the cluster")


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError if the settings cannot be used."""
    from mqttbroker.cluster.kafka_log import LogFailure
    from mqttbroker.cluster.store_import import ImportFailure
    from sessions.store.interface import StoreError

    settings = load_settings(options.config, os.environ, {})
    if not settings.cluster.configured:
        print(f"mqttbroker {COMMAND}: {options.config} has no [cluster]", file=sys.stderr)
        return 2
    try:
        carried = asyncio.run(_import(settings, options.directory))
    except (ImportFailure, LogFailure, StoreError, sqlite3.Error) as error:
        reason = str(error)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    else:
        print(
            f"{options.directory} -> {settings.cluster.log_topic}: {carried.sessions} sessions, {carried.subscriptions}"
            f" subscriptions, {carried.queued} queued messages, {carried.retained} retained messages"
        )
        if carried.readers:
            print(f"not imported: the offsets of {carried.readers} readers of streams, which are topics of Kafka in a cluster",
                  file=sys.stderr)  # fmt: skip
        return INCOMPLETE if carried.readers else 0
    print(f"mqttbroker {COMMAND}: {reason}", file=sys.stderr)
    return 1


async def _import(settings: Any, directory: Path) -> Any:
    from mqttbroker import __version__
    from mqttbroker.admin.repair import DATABASE
    from mqttbroker.cluster.kafka_connection import connection
    from mqttbroker.cluster.kafka_log import KafkaLog
    from mqttbroker.cluster.records import ID_BYTES, Takeover
    from mqttbroker.cluster.store_import import StoreImport, lock_store

    cluster = settings.cluster
    lock = lock_store(directory, directory / DATABASE)
    try:
        kafka_connection = connection(cluster)
        record_cluster = await _prepare_topics(kafka_connection, cluster)
        log = KafkaLog(kafka_connection, cluster.log_topic, cluster.append_timeout)
        shards = await log.start()
        try:
            takeover = Takeover(COMMAND, "", __version__)
            owner = secrets.token_bytes(ID_BYTES)
            store_import = StoreImport(log, record_cluster, owner, takeover, cluster.max_record_bytes)
            return await store_import.run(directory / DATABASE, shards)
        finally:
            await log.stop()
    finally:
        os.close(lock)


async def _prepare_topics(kafka_connection: Any, cluster: Any) -> bytes:
    """Create the topics, and wait until they can be used; returns the id of the cluster that is in each record."""
    from mqttbroker.cluster.checks import KafkaUnreachable, prepare_topics

    loop = asyncio.get_running_loop()
    until = loop.time() + TOPICS_WAIT
    while True:
        try:
            return await prepare_topics(kafka_connection, cluster)
        except KafkaUnreachable:
            if loop.time() > until:
                raise
            await asyncio.sleep(TOPICS_RETRY)
