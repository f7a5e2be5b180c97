"""The proof from the shards' logs: what a run acknowledged is in them, in records that count, and each epoch has one owner.

A consumer of Kafka reads the logs, and `LogProof` judges what it read against the record of the clients. It knows nothing of what
the nodes have in memory or in their tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from chaos.record import Record, Sent

from mqttbroker.cluster.log.body import published_of
from mqttbroker.cluster.log.records import CHANGES, CONTINUED, HEADER_BYTES, MORE, TAKEOVER, Header, decode_header
from mqttbroker.cluster.log.view import VALID, LogView
from sessions.write_set import TO_ALL

LOGGED = "acknowledged messages that are in no log"
VOID = "acknowledgements for void records, or before their record"
ONCE = "QoS 2 messages and wills in two valid records"
OWNERS = "valid records that are not of the one owner of their epoch"
UNREAD = "shards of which records were deleted before they were read"
LOG_ROWS = (LOGGED, VOID, ONCE, OWNERS, UNREAD)

READ_AT_ONCE = 1000  # records
READ_WAIT_MS = 1000


class Copy(NamedTuple):
    """A message in a log; ``at`` is when the record was made, in Unix milliseconds."""

    shard: int
    offset: int
    at: int
    valid: bool

    def __str__(self) -> str:
        return f"{'valid' if self.valid else 'void'} record {self.offset} of shard {self.shard}"


class Epoch(NamedTuple):
    """The valid records of one epoch: the ``owner`` of the takeover at the offset ``begin``."""

    begin: int
    owner: bytes


class ShardRecords:
    """The valid records of one shard's log."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.end = 0  # the offset behind the last record that was read
        self.copies: list[tuple[str, bytes, Copy]] = []  # topic and payload of each published message
        self.valid = 0  # records
        self.void = 0
        self.epochs: list[Epoch] = []
        self.faults: list[str] = []  # of the row `OWNERS`
        self._view: LogView | None = None
        self._sequence = 0  # of the last valid record of the epoch
        self._parts: dict[tuple[bytes, int, bool], list[bytes]] = {}  # by owner, epoch and validity

    def read(self, offset: int, at: int, record: bytes) -> None:
        """The next record."""
        header = decode_header(record)
        if self._view is None:
            self._view = LogView(self.shard, header.cluster)
        valid = self._view.read(offset, header) == VALID
        self.end = offset + 1
        if valid:
            self.valid += 1
            self._check_owner(offset, header)
        else:
            self.void += 1
        if header.kind == CHANGES:
            body = self._body(header, record, valid)
            if body is not None:
                self._published(body, Copy(self.shard, offset, at, valid))

    def _check_owner(self, offset: int, header: Header) -> None:
        """Check that a valid record is of the owner that took the shard over last, and in its sequence."""
        where = f"shard {self.shard}, offset {offset}"
        epoch = self.epochs[-1] if self.epochs else None
        if header.kind == TAKEOVER:
            ended = -1 if epoch is None else epoch.begin
            if header.epoch != ended:
                self.faults.append(f"{where}: a takeover that ends the epoch {header.epoch}, in the epoch {ended}")
            self.epochs.append(Epoch(offset, header.owner))
            self._sequence = 0
            return
        if epoch is None or header.epoch != epoch.begin:
            self.faults.append(f"{where}: a record of the epoch {header.epoch} in that of {epoch and epoch.begin}")
            return
        if header.owner != epoch.owner:
            self.faults.append(f"{where}: a record of the owner {header.owner.hex()} in the epoch of {epoch.owner.hex()}")
        if header.sequence != self._sequence + 1:
            self.faults.append(f"{where}: record {header.sequence} of the epoch behind record {self._sequence}")
        self._sequence = header.sequence

    def _body(self, header: Header, record: bytes, valid: bool) -> bytes | None:
        """The body that ends with a record of changes."""
        key = (header.owner, header.epoch, valid)
        if not header.flags & CONTINUED:
            self._parts.pop(key, None)
        parts = self._parts.setdefault(key, [])
        parts.append(record[HEADER_BYTES:])
        if header.flags & MORE:
            return None
        return b"".join(self._parts.pop(key))

    def _published(self, body: bytes, copy: Copy) -> None:
        try:
            sections = published_of(body).sections
            for section in sections:
                if section.destination == TO_ALL:
                    for index in range(len(section.topics)):
                        message = section.message(index)
                        self.copies.append((message.topic, message.payload, copy))
        except ValueError:
            if copy.valid:  # parts of a void body may be missing
                raise


class LogProof:
    """Judges the logs of so many shards, which are read in the order of their offsets."""

    def __init__(self, shards: int) -> None:
        self.shards = [ShardRecords(shard) for shard in range(shards)]
        self._deleted: list[str] = []

    async def read(self, bootstrap: Sequence[str], topic: str) -> None:
        """Read all logs to the ends that they have now, from where the last call ended."""
        consumer = AIOKafkaConsumer(bootstrap_servers=list(bootstrap), group_id=None, enable_auto_commit=False, auto_offset_reset="none")
        await consumer.start()
        try:
            places = [TopicPartition(topic, records.shard) for records in self.shards]
            consumer.assign(places)
            begins, ends = await consumer.beginning_offsets(places), await consumer.end_offsets(places)
            for place, records in zip(places, self.shards):
                if begins[place] > records.end:
                    self._deleted.append(f"shard {records.shard}: {records.end} to {begins[place]}")
                    return
                consumer.seek(place, records.end)
            while any(self.shards[place.partition].end < ends[place] for place in places):
                found = await consumer.getmany(timeout_ms=READ_WAIT_MS, max_records=READ_AT_ONCE)
                for place, batch in found.items():
                    for one in batch:
                        self.shards[place.partition].read(one.offset, one.timestamp, one.value or b"")
        finally:
            await consumer.stop()

    def judge(self, record: Record, wills: Iterable[Sent] = ()) -> None:
        """Check all acknowledged messages of ``record``, and the logs themselves; ``wills`` are acknowledged, too."""
        record.checked[UNREAD] += len(self.shards)
        for text in self._deleted:
            record.fault(UNREAD, text)
        for shard in self.shards:
            record.checked[OWNERS] += shard.valid
            for text in shard.faults:
                record.fault(OWNERS, text)
        copies = self._copies()
        for message in wills:
            self._judge(record, message, copies)
        for message in record.all_acknowledged():
            if message.payload:
                self._judge(record, message, copies)
        self._judge_cleared(record, copies)

    def _copies(self) -> dict[tuple[str, bytes], list[Copy]]:
        found: dict[tuple[str, bytes], list[Copy]] = defaultdict(list)
        for shard in self.shards:
            for topic, payload, copy in shard.copies:
                found[topic, payload].append(copy)
        return found

    def _judge(self, record: Record, message: Sent, copies: dict[tuple[str, bytes], list[Copy]]) -> None:
        found = copies.get((message.topic, message.payload), [])
        valid = [copy for copy in found if copy.valid]
        record.checked[LOGGED] += 1
        if not found:
            record.fault(LOGGED, f"{message} is in no record")
            return
        record.checked[VOID] += 1
        if not valid:
            record.fault(VOID, f"{message} is only in {', '.join(map(str, found))}")
            return
        at = record.acknowledged_at.get(message.number)
        first = min(valid, key=lambda copy: copy.at)
        if at is not None and at * 1000 < first.at:
            late = first.at - at * 1000
            record.fault(VOID, f"{message} was acknowledged {late:.0f} ms before its {first} was made")
        record.checked[ONCE] += message.qos == 2 or at is None
        if len(valid) > 1 and (message.qos == 2 or at is None):
            record.fault(ONCE, f"{message} is in {', '.join(map(str, valid))}")

    def _judge_cleared(self, record: Record, copies: dict[tuple[str, bytes], list[Copy]]) -> None:
        """Empty payloads have no number: so many as were acknowledged are to be in valid records of their topic."""
        for topic, numbers in record.cleared.items():
            acknowledged = sum(number in record.acknowledged for number in numbers)
            valid = sum(copy.valid for copy in copies.get((topic, b""), []))
            record.checked[LOGGED] += acknowledged
            if valid < acknowledged:
                record.fault(LOGGED, f"{topic} was cleared {acknowledged} times, {valid} of them in valid records")

    def summary(self) -> str:
        return (
            f"logs: {sum(shard.valid for shard in self.shards):,} valid records, "
            f"{sum(shard.void for shard in self.shards):,} void, {sum(len(shard.epochs) for shard in self.shards):,} epochs"
        )
