"""A broker with its store: the core, put together from settings and rows, and what runs it on an event loop."""

from __future__ import annotations

import asyncio
import logging
import time

from mqttbroker.admin.data.files import restrict
from mqttbroker.admin.data.repair import SalvageReport
from mqttbroker.admin.metrics.latency import Latency
from mqttbroker.auth.security import Security
from mqttbroker.bridges.context import RULES as BRIDGE_RULES
from mqttbroker.core.access.policy import AllowAll
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.server.assembly import build_broker, restore
from mqttbroker.server.parts import BrokerParts
from mqttbroker.server.store_runner import StoreRunner
from mqttbroker.server.stream_reads import StreamReads
from mqttbroker.system.memory_limit import ProcessMemory, part_limits

log = logging.getLogger("mqttbroker")


class LoadedBroker:
    """Reads the store, which repairs itself first if the settings say so, and builds the broker. Its threads are not started.

    ``base`` are the bytes of memory that the process takes without the rows. Raises StoreError.
    """

    def __init__(self, parts: BrokerParts, security: Security, memory: ProcessMemory, loop: asyncio.AbstractEventLoop) -> None:
        settings = parts.settings
        restrict(settings.data_dir, settings.data_mode)
        self.base = memory.resident()
        self._recovered = parts.recover()
        self.broker = build_broker(settings, self._recovered, security, parts.cluster)
        self.store = parts.store
        self.streams = parts.stream_logs
        self.salvage = SalvageReport(settings.data_dir, parts.repaired)
        for path in self.salvage.files:
            log.warning("event=damaged_file_kept file=%s", path)
        self.latency = Latency()
        self.store_runner = StoreRunner(parts.store, self.latency, loop)
        self.scheduler = FlushScheduler(self.broker, loop, self.store_runner.submit, settings.durability != "interval")
        self.stream_reads = StreamReads(loop, self.streams, self.broker.chunk_reads, self.scheduler.update_clock)
        parts.built(self.broker, self.scheduler)
        security.rules.by_name[BRIDGE_RULES] = AllowAll()
        self._part_limits = sum(part_limits(settings).values())

    def restore(self) -> None:
        """Put the rows into the broker."""
        restore(self.broker, self._recovered, time.time())
        log.info(
            "event=memory_limit max_memory=%s all_parts=%d before_clients=%d",
            self.broker.terms.max_memory or "unlimited",
            self._part_limits,
            self.base,
        )
