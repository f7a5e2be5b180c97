"""``make chaos``: runs clients against a broker that is killed repeatedly, and checks the record.

The seed decides the schedule of kills, connections and messages.  Exit status 1 if there is any finding.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from random import Random
from typing import Any

from support.broker_process import BrokerProcess, worker_pids

from chaos.clients import (
    STREAM_FILTERS,
    SUBSCRIBED,
    TOPICS,
    Broker,
    Client,
    Publisher,
    Quota,
    RetainedReader,
    Subscriber,
)
from chaos.log_reader import LogReader, StoredRecord
from chaos.record import PROTOCOL, Record
from chaos.schedule import CUT, LEAVE, TAKEOVER, Habits, Life, Load, lives
from chaos.verdict import findings, judge_database, judge_deliveries, judge_log, left, table
from mqttbroker import build_kind
from topic_matcher.filters import matches

QUIET = 20.0  # seconds without a packet after which a run ends
IDLE = 0.1  # seconds without a packet after which the run checks whether everything is complete
TRIGGER_WAIT = 2.0  # seconds that a kill waits for its trigger
STREAM = "chaos"
CONFIG: dict[str, Any] = {
    # Small, so that queues are paged and segments roll.
    "limits": {"max_queue_memory_messages": 50, "max_inflight": 100},
    "streams": {STREAM: {"filters": list(STREAM_FILTERS), "partitions": 4, "segment_bytes": "256KiB", "seal": False}},
    "http": {"port": "off"},
    "sys_interval": "0s",
}


class Run:
    """One run: a broker is killed ``kills`` times within ``messages``. One with ``workers`` loses one of them before
    each kill, or, with ``only_workers``, in the place of each kill."""

    def __init__(self, seed: str, kills: int, messages: int, workers: int = 0, only_workers: bool = False) -> None:
        self.seed = seed
        self.record = record = Record()
        arguments = ["--http-port", "off", *(["--workers", str(workers)] if workers else [])]
        self.process = BrokerProcess(config=CONFIG, arguments=arguments)
        self.workers = Random(f"{seed}:workers") if workers else None
        self.only_workers = only_workers
        self.outages: list[float] = []  # seconds from the kill of a worker until the next one listens
        self.quota = Quota()
        self.publishers = [
            Publisher(f"publisher-{n}", 4 + n % 2, record, Load(seed, f"publisher-{n}", len(TOPICS), 0.3), self.quota) for n in range(5)
        ]
        self.subscribers = [
            Subscriber("there-v4", 4, record, 2),
            Subscriber("there-v5", 5, record, 2),
            Subscriber("at-qos-1", 5, record, 1),
            Subscriber("away-v4", 4, record, 2),
            Subscriber("away-v5", 5, record, 2),
            *(Subscriber(f"member-{n}", 4 + n % 2, record, 2, "group") for n in range(3)),
        ]
        self.persistent: list[Client] = [*self.publishers, *self.subscribers]
        self.lives = lives(seed, kills, messages, len(self.persistent))
        self.transient = Subscriber("visitor", 5, record, 2, persistent=False)
        self.readers = [RetainedReader(f"reader-v{version}", version, record, seed) for version in (4, 5)]
        self.early_reads: list[StoredRecord] = []
        self.log = LogReader(self.process.data_dir, STREAM)
        self.database = self.process.data_dir / "mqttbroker.db"
        self._first_line = 0  # of the log of the broker's last start
        self._awaited: Life | None = None
        self._left = 0
        self._triggered = asyncio.Event()
        self._progress = asyncio.Event()
        record.on_packet = self._on_packet
        record.progressed = self._progress.set

    async def run(self) -> None:
        """Run to the end and check the record."""
        await asyncio.to_thread(self.process.start)
        self.broker = Broker([(self.process.host, self.process.port)])
        self.broker.up.set()
        for subscriber in self.subscribers:
            assert await subscriber.connect(self.broker.address) and await subscriber.arrived()
        async with asyncio.TaskGroup() as group:
            following = [group.create_task(client.follow(self.broker, self._habits(client))) for client in self.persistent]
            working = [group.create_task(publisher.publish_all()) for publisher in self.publishers]
            working += [group.create_task(reader.check_repeatedly(self.broker)) for reader in self.readers]
            working.append(group.create_task(self.transient.follow(self.broker, self._habits(self.transient))))
            for life in self.lives:
                await self._live(life)
            for task in working:
                task.cancel()
            self.broker.finishing.set()
            await asyncio.gather(*following)
            connected = [group.create_task(client.stay_connected(self.broker)) for client in self.persistent]
            await self._wait_until_complete()
            for task in connected:
                task.cancel()
        for reader in self.readers:
            await reader.check(self.broker)
        await self._check()

    def _habits(self, client: Client) -> Habits:
        away = 1.5 if client.name.startswith(("away", "member")) else 0.05
        return Habits(self.seed, client.name, 1.5, away)

    # --- the broker -----------------------------------------------------------------------------------------------

    async def _live(self, life: Life) -> None:
        """Let the broker run, kill it and restart it."""
        if self.only_workers:
            await self._live_without_a_worker(life)
            return
        if self.workers is None:
            await self.quota.sent(life.messages)
        else:
            await self.quota.sent(life.messages // 2)
            # A broker of which a worker ends before all have started ends, too.
            await asyncio.to_thread(self.process.wait_for_log, "event=started", 60.0, self._first_line)
            if await asyncio.to_thread(kill_worker, self.process, self.workers):
                self.record.counts["worker kills"] += 1
            await self.quota.sent(life.messages // 2)
        unread = [self.persistent[number].stop_reading() for number in sorted(life.not_reading)]
        if life.trigger:
            await self._wait_for_trigger(life)
        else:
            await asyncio.sleep(life.not_reading_s)
        self.broker.up.clear()
        await asyncio.to_thread(self.process.kill)
        self.record.counts["kills"] += 1
        for link in unread:
            if link is not None:
                link.closed.set()
        self.early_reads += await asyncio.to_thread(self.log.new_records)
        if life.restart_kill_s:
            self.process.launch()
            await asyncio.sleep(life.restart_kill_s)
            await asyncio.to_thread(self.process.kill)
            self.record.counts["kills at start"] += 1
        self._first_line = len(self.process.lines)
        await asyncio.to_thread(self.process.start)
        self.broker.up.set()

    async def _live_without_a_worker(self, life: Life) -> None:
        """Let the broker run, kill a worker and wait for the next one."""
        await self.quota.sent(life.messages)
        unread = [self.persistent[number].stop_reading() for number in sorted(life.not_reading)]
        await self._wait_for_trigger(life) if life.trigger else await asyncio.sleep(life.not_reading_s)
        assert self.workers is not None
        first = len(self.process.lines)
        begin = time.monotonic()
        assert await asyncio.to_thread(kill_worker, self.process, self.workers)
        self.record.counts["worker kills"] += 1
        await asyncio.to_thread(self.process.wait_for_log, "event=worker_started", 60.0, first)
        self.outages.append(time.monotonic() - begin)
        for link in unread:
            if link is not None:
                link.closed.set()

    async def _wait_for_trigger(self, life: Life) -> None:
        self._left = life.count
        self._triggered.clear()
        self._awaited = life
        try:
            await asyncio.wait_for(self._triggered.wait(), TRIGGER_WAIT)
        except TimeoutError:
            self._awaited = None

    def _on_packet(self, kind: str) -> None:
        """Kill the broker at its trigger, before the client handles the packet."""
        if self._awaited is not None and kind == self._awaited.trigger:
            self._left -= 1
            if self._left <= 0:
                self._awaited = None
                if not self.only_workers:
                    os.kill(self.process.pid, signal.SIGKILL)
                    self.broker.up.clear()
                self._triggered.set()

    # --- the end --------------------------------------------------------------------------------------------------

    async def _wait_until_complete(self) -> None:
        """Wait until everything is delivered and acknowledged, or no packet arrives for `QUIET` seconds."""
        quiet = 0.0
        while quiet < QUIET:
            self._progress.clear()
            try:
                await asyncio.wait_for(self._progress.wait(), IDLE)
                quiet = 0.0
            except TimeoutError:
                # QoS 1 messages may be sent again to clients that have them.
                if self._complete() and not any((await asyncio.to_thread(left, self.database)).values()):
                    return
                quiet += IDLE

    def _complete(self) -> bool:
        if any(publisher.outgoing for publisher in self.publishers):
            return False
        if any(subscriber.incoming for subscriber in self.subscribers):
            return False
        expected = sum(matches(SUBSCRIBED, message.topic) for message in self.record.sent.values())
        together: set[int] = set()
        for subscriber in self.subscribers:
            seen = self.record.seen.get(subscriber.name, set())
            if subscriber.group:
                together |= seen
            elif len(seen) < expected:
                return False
        return len(together) == expected

    async def _check(self) -> None:
        record = self.record
        for client in self.persistent:
            if client.up:
                await client.ping()
            client.leave()
            for message, received in client.outgoing.values():
                record.fault(PROTOCOL, f"{message}: no {'PUBCOMP' if received else 'acknowledgement'} came")
            for packet_id, number in client.incoming.items():
                record.fault(PROTOCOL, f"{client.name} got no PUBREL {packet_id} for {record.sent[number]}")
        self.transient.leave()
        await asyncio.to_thread(self.process.terminate)
        single = [subscriber.name for subscriber in self.subscribers if not subscriber.group]
        members = [subscriber.name for subscriber in self.subscribers if subscriber.group]
        judge_deliveries(record, SUBSCRIBED, single, {"group": members})
        judge_log(record, self.log, STREAM_FILTERS, self.early_reads)
        judge_database(record, self.database)

    def summary(self, seconds: float) -> str:
        counts, record = self.record.counts, self.record
        retained = sum(message.retain for message in record.sent.values())
        deliveries = sum(map(len, record.deliveries.values()))
        outages = sorted(self.outages)
        shown = f", back after {outages[len(outages) // 2]:.2f} s (at most {outages[-1]:.2f})" if outages else ""
        return (
            f"chaos: seed {self.seed}, {build_kind()} build, {seconds:.0f} s\n"
            f"  broker: {counts['kills']} kills under load, {counts['kills at start']} more during a start, "
            f"{counts['worker kills']} kills of workers{shown}\n"
            f"  clients: {counts[CUT]} cut off, {counts[TAKEOVER]} taken over, {counts[LEAVE]} disconnected\n"
            f"  messages: {len(record.sent) - retained:,} and {retained:,} retained, "
            f"{len(record.acknowledged):,} acknowledged, {deliveries:,} deliveries\n\n{table(record)}"
        )


def kill_worker(process: BrokerProcess, random: Random) -> bool:
    """Kill a connection worker; whether there was one."""
    workers = worker_pids(process.pid)
    if workers:
        os.kill(random.choice(workers), signal.SIGKILL)
    return bool(workers)


async def chaos(seed: str, kills: int, messages: int, workers: int = 0, only_workers: bool = False) -> tuple[Record, str]:
    """Run; return the checked record and its summary."""
    begin = time.monotonic()
    run = Run(seed, kills, messages, workers, only_workers)
    try:
        await run.run()
    finally:
        await asyncio.to_thread(run.process.close)
    return run.record, run.summary(time.monotonic() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description="Kill a broker under load and check what it kept.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--messages", type=int, default=24_000, help="messages published meanwhile: about 200 in a second")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--workers", type=int, default=0, help="connection workers, which are killed, too")
    parser.add_argument("--only-workers", action="store_true", help="kill workers, and never the broker's process")
    options = parser.parse_args()
    if options.only_workers and not options.workers:
        parser.error("--only-workers needs --workers")
    record, summary = asyncio.run(chaos(options.seed, options.kills, options.messages, options.workers, options.only_workers))
    found = findings(record)
    print(summary)
    print(f"\n{found}" if found else "\nchaos: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
