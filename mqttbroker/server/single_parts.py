"""The parts of a single broker: a store and streams on its disk, and sockets that listen."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from bridge_spark.log.stream_files import STREAMS
from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.admin.data.repair import DATABASE, recover
from mqttbroker.admin.data.version import record_program
from mqttbroker.config.settings import Settings
from mqttbroker.core.broker import Broker
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.listeners import OpenListener
from mqttbroker.net.passed_sockets import PassedSockets
from mqttbroker.server.assembly import stream_config
from mqttbroker.server.config_check import unsealed
from mqttbroker.server.stream_control import created_definitions, with_created_streams
from sessions.store.interface import Recovered
from sessions.store.writer import SqliteStore

log = logging.getLogger("mqttbroker")


class SingleParts:
    """The `BrokerParts` of a broker with these settings. Its listeners use the sockets of ``passed`` that have their addresses."""

    clustered = False
    cluster = None

    def __init__(self, settings: Settings, passed: PassedSockets) -> None:
        self.definitions = created_definitions(settings)
        self.settings = settings = with_created_streams(settings, self.definitions)
        for text in unsealed(stream for stream in settings.streams if stream.name in self.definitions):
            log.warning("event=configuration_warning reason=%s", text)
        configs = [stream_config(stream, self.definitions.get(stream.name)) for stream in settings.streams]
        self.stream_logs = StreamLogs(settings.data_dir / STREAMS, configs)
        self.store = SqliteStore(
            settings.data_dir / DATABASE,
            settings.durability,
            self.stream_logs,
            settings.commit_log_bytes,
            settings.apply_interval,
            settings.limits.max_unapplied_bytes,
        )
        self.repaired = ""
        self._passed = passed

    def recover(self) -> Recovered:
        """The store repairs itself first if the settings say so."""
        recovered, self.repaired = recover(self.store, self.settings.data_dir, self.settings.on_corrupt_store)
        record_program(self.settings.data_dir)
        return recovered

    def built(self, broker: Broker, scheduler: FlushScheduler) -> None:
        """It is complete."""

    async def start(self, broker: Broker, scheduler: FlushScheduler) -> None:
        """Clients may connect at once."""

    async def open(self, listener: OpenListener) -> None:
        await listener.open(self._passed)

    async def accept(self, listeners: Sequence[OpenListener], scheduler: FlushScheduler) -> None:
        """They do since they are open."""

    def stop_accepting(self) -> None:
        """The listeners are closed."""

    async def stop(self) -> None:
        """The store is stopped by its runner."""

    def unready(self) -> list[str]:
        return []

    def sys_topics(self) -> dict[str, object]:
        return {}
