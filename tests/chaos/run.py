"""``make chaos``: clients at work, a broker killed again and again, and the verdict.

Rule: the seed decides when who dies and what is sent; everything that is waited for is waited for by an event, and a
run that does not come to rest is a finding. Exit status 1 if anything was found.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from typing import Any, Optional

from support.broker_process import BrokerProcess

from chaos.clients import STREAM_FILTERS, SUBSCRIBED, TOPICS, Broker, Client, Publisher, RetainedReader, Subscriber
from chaos.log_reader import LogReader, Stored
from chaos.record import PROTOCOL, Record
from chaos.schedule import CUT, LEAVE, TAKEOVER, Habits, Life, Load, lives
from chaos.verdict import findings, judge_database, judge_deliveries, judge_log, left, table
from mqttbroker import build_kind
from topic_matcher.filters import matches

QUIET = 20.0  # seconds without a packet after which none is expected any more
LOOK = 0.1  # seconds without a packet after which it is looked whether all is done
MOMENT = 2.0  # seconds that a kill waits for its moment
STREAM = "chaos"
CONFIG: dict[str, Any] = {
    # Small, so that queues are paged and segments roll.
    "limits": {"max_queue_memory_messages": 50, "max_inflight": 100},
    "streams": {STREAM: {"filters": list(STREAM_FILTERS), "partitions": 4, "segment_bytes": "256KiB", "seal": False}},
    "http": {"port": "off"},
    "sys_interval": "0s",
}


class Run:
    """One run: ``kills`` lives of a broker that last ``seconds`` together."""

    def __init__(self, seed: str, kills: int, seconds: float) -> None:
        self.seed = seed
        self.record = record = Record()
        self.process = BrokerProcess(config=CONFIG, arguments=["--http-port", "off"])
        self.publishers = [
            Publisher(f"publisher-{n}", 4 + n % 2, record, Load(seed, f"publisher-{n}", len(TOPICS), 0.3))
            for n in range(5)
        ]
        self.subscribers = [
            Subscriber("there-v4", 4, record, 2),
            Subscriber("there-v5", 5, record, 2),
            Subscriber("at-qos-1", 5, record, 1),
            Subscriber("away-v4", 4, record, 2),
            Subscriber("away-v5", 5, record, 2),
            *(Subscriber(f"member-{n}", 4 + n % 2, record, 2, "group") for n in range(3)),
        ]
        self.lasting: list[Client] = [*self.publishers, *self.subscribers]
        self.lives = lives(seed, kills, seconds, len(self.lasting))
        self.visitor = Subscriber("visitor", 5, record, 2, lasting=False)
        self.readers = [RetainedReader(f"reader-v{version}", version, record, seed) for version in (4, 5)]
        self.glimpses: list[Stored] = []
        self.log = LogReader(self.process.data_dir, STREAM)
        self.database = self.process.data_dir / "mqttbroker.db"
        self._awaited: Optional[Life] = None
        self._left = 0
        self._moment = asyncio.Event()
        self._progress = asyncio.Event()
        record.heard = self._heard
        record.progressed = self._progress.set

    async def go(self) -> None:
        """To the end, the verdict in the record."""
        await asyncio.to_thread(self.process.start)
        self.broker = Broker(self.process.port, asyncio.Event(), asyncio.Event())
        self.broker.up.set()
        for subscriber in self.subscribers:
            assert await subscriber.connect(self.process.port) and await subscriber.arrived()
        async with asyncio.TaskGroup() as group:
            living = [group.create_task(client.live(self.broker, self._habits(client))) for client in self.lasting]
            working = [group.create_task(publisher.publish_all()) for publisher in self.publishers]
            working += [group.create_task(reader.look_all(self.broker)) for reader in self.readers]
            working.append(group.create_task(self.visitor.live(self.broker, self._habits(self.visitor))))
            for life in self.lives:
                await self._live(life)
            for task in working:
                task.cancel()
            self.broker.finishing.set()
            await asyncio.gather(*living)
            remaining = [group.create_task(client.remain(self.broker)) for client in self.lasting]
            await self._rest()
            for task in remaining:
                task.cancel()
        for reader in self.readers:
            await reader.look(self.broker)
        await self._end()

    def _habits(self, client: Client) -> Habits:
        away = 1.5 if client.name.startswith(("away", "member")) else 0.05
        return Habits(self.seed, client.name, 1.5, away)

    # --- the broker -----------------------------------------------------------------------------------------------

    async def _live(self, life: Life) -> None:
        """One life of the broker that is up, to the start of the next."""
        await asyncio.sleep(life.seconds)
        deaf = [self.lasting[number].go_deaf() for number in sorted(life.deaf)]
        if life.moment:
            await self._moment_of(life)
        else:
            await asyncio.sleep(life.deafness)
        self.broker.up.clear()
        await asyncio.to_thread(self.process.kill)
        self.record.counts["kills"] += 1
        for link in deaf:
            if link is not None:
                link.closed.set()
        self.glimpses += await asyncio.to_thread(self.log.new_records)
        if life.stillborn:
            self.process.launch()
            await asyncio.sleep(life.stillborn)
            await asyncio.to_thread(self.process.kill)
            self.record.counts["stillborn"] += 1
        await asyncio.to_thread(self.process.start)
        self.broker.up.set()

    async def _moment_of(self, life: Life) -> None:
        self._left = life.count
        self._moment.clear()
        self._awaited = life
        try:
            await asyncio.wait_for(self._moment.wait(), MOMENT)
        except TimeoutError:
            self._awaited = None

    def _heard(self, kind: str) -> None:
        """The moment that a life waits for may have come: the broker dies before the client does anything more."""
        if self._awaited is not None and kind == self._awaited.moment:
            self._left -= 1
            if self._left <= 0:
                self._awaited = None
                os.kill(self.process.pid, signal.SIGKILL)
                self.broker.up.clear()
                self._moment.set()

    # --- the end --------------------------------------------------------------------------------------------------

    async def _rest(self) -> None:
        """Until everything is delivered and completed, or nothing happens any more."""
        quiet = 0.0
        while quiet < QUIET:
            self._progress.clear()
            try:
                await asyncio.wait_for(self._progress.wait(), LOOK)
                quiet = 0.0
            except TimeoutError:
                # Repetitions at QoS 1 may be on their way to clients that have everything.
                if self._complete() and not any((await asyncio.to_thread(left, self.database)).values()):
                    return
                quiet += LOOK

    def _complete(self) -> bool:
        if any(publisher.outgoing for publisher in self.publishers):
            return False
        if any(subscriber.incoming for subscriber in self.subscribers):
            return False
        wanted = sum(matches(SUBSCRIBED, message.topic) for message in self.record.sent.values())
        together: set[int] = set()
        for subscriber in self.subscribers:
            seen = self.record.seen.get(subscriber.name, set())
            if subscriber.group:
                together |= seen
            elif len(seen) < wanted:
                return False
        return len(together) == wanted

    async def _end(self) -> None:
        record = self.record
        for client in self.lasting:
            if client.up:
                await client.ping()
            client.leave()
            for message, received in client.outgoing.values():
                record.fault(PROTOCOL, f"{message}: no {'PUBCOMP' if received else 'acknowledgement'} came")
            for packet_id, number in client.incoming.items():
                record.fault(PROTOCOL, f"{client.name} got no PUBREL {packet_id} for {record.sent[number]}")
        await asyncio.to_thread(self.process.terminate)
        alone = [subscriber.name for subscriber in self.subscribers if not subscriber.group]
        members = [subscriber.name for subscriber in self.subscribers if subscriber.group]
        judge_deliveries(record, SUBSCRIBED, alone, {"group": members})
        judge_log(record, self.log, STREAM_FILTERS, self.glimpses)
        judge_database(record, self.database)

    def summary(self, seconds: float) -> str:
        counts, record = self.record.counts, self.record
        kept = sum(message.retain for message in record.sent.values())
        deliveries = sum(map(len, record.deliveries.values()))
        return (
            f"chaos: seed {self.seed}, {build_kind()} build, {seconds:.0f} s\n"
            f"  broker: {counts['kills']} kills under load, {counts['stillborn']} more while it started\n"
            f"  clients: {counts[CUT]} cut off, {counts[TAKEOVER]} taken over by themselves, {counts[LEAVE]} left\n"
            f"  messages: {len(record.sent) - kept:,} and {kept:,} retained, {len(record.acknowledged):,} acknowledged, "
            f"{deliveries:,} deliveries\n\n{table(record)}"
        )


async def chaos(seed: str, kills: int, seconds: float) -> tuple[Record, str]:
    """The record of a run, judged, and its summary."""
    begin = time.monotonic()
    run = Run(seed, kills, seconds)
    try:
        await run.go()
    finally:
        await asyncio.to_thread(run.process.close)
    return run.record, run.summary(time.monotonic() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description="Kill a broker under load and judge what is left.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the broker's lives together")
    parser.add_argument("--seed", default="1")
    options = parser.parse_args()
    record, summary = asyncio.run(chaos(options.seed, options.kills, options.seconds))
    found = findings(record)
    print(summary)
    print(f"\n{found}" if found else "\nchaos: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
