"""Compares a data directory after a power loss with the answers that clients had received before it.

Every answer must still hold, and nothing may be there that was not requested before the loss. Store and stream log are
opened by the broker's own recovery; their contents are read from the files.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bridge_spark.log.record_batch import decode_messages, read_batch, scan_batches
from bridge_spark.log.sealed.footer import load_footer, verify_file
from bridge_spark.log.segment_names import is_sealed
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from disk.workload import PARTITIONS, History, Ident, Publication, SubscriptionChange, ident_of
from mqttbroker.admin.data.repair import DATABASE
from sessions.journal import AWAIT_PUBCOMP, AWAIT_PUBREC
from sessions.store.writer import SqliteStore

Offsets = dict[tuple[str, int], dict[int, Ident]]  # by stream and partition: the message at each offset

QUEUE = (
    "SELECT client_id, seq, packet_id, state, payload FROM queue JOIN sessions USING (session_id)"
    " JOIN messages ON messages.id = message_id ORDER BY client_id, seq"
)
RECEIVED = "SELECT client_id, packet_id FROM received JOIN sessions USING (session_id)"
SUBSCRIPTIONS = "SELECT topic_filter FROM subscriptions JOIN sessions USING (session_id) WHERE client_id = ?"
UNREFERENCED = "SELECT count(*) FROM messages WHERE id NOT IN (SELECT message_id FROM queue)"


def new_logs(data: Path) -> StreamLogs:
    """The streams of `disk.workload.STREAMS`."""
    return StreamLogs(
        data / "streams",
        [
            StreamConfig("load", ["load/#"], PARTITIONS, segment_bytes=256 << 10),
            StreamConfig("short", ["load/#"], 1, segment_bytes=64 << 10, retention_bytes=256 << 10),
        ],
    )


class Judge:
    """Recovers one data directory and compares it with the history. AssertionError describes a fault."""

    def __init__(self, data: Path, history: History, moment: int) -> None:
        self.data = data
        self.history = history
        self.moment = moment
        self.sent = {p.ident: p for p in history.all_publications() if p.sent < moment}
        self.accepted = [p for p in self.sent.values() if p.accepted(moment)]

    def judge(self) -> Offsets:
        """Check everything; returns the contents of the streams."""
        logs = new_logs(self.data)
        store = SqliteStore(self.data / DATABASE, "commit", logs)
        store.recover()
        try:
            connection = sqlite3.connect(self.data / DATABASE)
            try:
                self._state(connection)
            finally:
                connection.close()
            return self._streams(logs)
        finally:
            store.stop()
            logs.close()

    def _state(self, connection: sqlite3.Connection) -> None:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute(UNREFERENCED).fetchone() == (0,), "messages without a queue entry"
        queues: dict[str, list[Any]] = {}
        for client_id, _, packet_id, state, payload in connection.execute(QUEUE):
            queues.setdefault(client_id, []).append((ident_of(payload), packet_id, state, payload))
        for client_id in ("away-4-2", "away-5-2"):
            queue = self._queue(client_id, queues.get(client_id, []))
            for publication in self.accepted:
                assert publication.ident in queue, f"{client_id} lost {publication.ident}"
        for client_id in ("online-4-1", "online-5-2"):
            queue = self._queue(client_id, queues.get(client_id, []))
            self._online(client_id, queue)
        self._received(set(connection.execute(RECEIVED)))
        self._retained(dict(connection.execute("SELECT topic, payload FROM retained")))
        self._subscriptions({topic_filter for (topic_filter,) in connection.execute(SUBSCRIPTIONS, ("changing-5-1",))})

    def _queue(self, client_id: str, rows: list[Any]) -> dict[Ident, tuple[int, int]]:
        """Packet id and state of each entry of a queue; each message is there once, unchanged and in order."""
        queue: dict[Ident, tuple[int, int]] = {}
        last: dict[str, int] = {}
        for ident, packet_id, state, payload in rows:
            assert ident in self.sent and payload == self.sent[ident].payload, f"{client_id} never got {ident}"
            if self._again(ident, ident in queue):
                continue
            assert ident not in queue, f"{client_id} has {ident} twice"
            self._in_order(client_id, ident, last)
            queue[ident] = (packet_id, state)
        return queue

    def _again(self, ident: Ident, stored: bool) -> bool:
        """Whether this may be the second copy of a QoS 1 message that was sent again."""
        return stored and self.sent[ident].qos == 1 and self.sent[ident].repeated

    def _in_order(self, where: str, ident: Ident, last: dict[str, int]) -> None:
        """Check the order within the topic; a message that was refused and sent again may follow a later one."""
        publication = self.sent[ident]
        before = last.get(publication.topic, -1)
        assert before < ident[1] or publication.repeated, f"{where} has {ident} out of order"
        last[publication.topic] = max(before, ident[1])

    def _online(self, client_id: str, queue: dict[Ident, tuple[int, int]]) -> None:
        deliveries = {d.ident: d for d in self.history.deliveries.get(client_id, []) if d.came < self.moment}
        for publication in self.accepted:
            if publication.ident not in deliveries:
                assert publication.ident in queue, f"{client_id} lost {publication.ident}"
        for ident, delivery in deliveries.items():
            row = queue.get(ident)
            where = f"{client_id}: {ident} with packet id {delivery.packet_id} is {row}"
            if delivery.qos == 1:
                known = delivery.answered < self.moment or not self.sent[ident].accepted(self.moment)
                assert row is not None or known, where
            elif row is None:
                assert delivery.completed < self.moment, where
            else:
                # The PUBLISH was sent after the commit of its packet id, the PUBREL after that of the PUBREC.
                assert row[0] == delivery.packet_id, where
                if delivery.answered >= self.moment:
                    assert row[1] == AWAIT_PUBREC, where
                elif delivery.released < self.moment:
                    assert row[1] == AWAIT_PUBCOMP, where

    def _received(self, pairs: set[tuple[str, int]]) -> None:
        for publication in self.sent.values():
            pair = (publication.ident[0], publication.packet_id)
            if publication.qos < 2 or publication.completed < self.moment or publication.reason >= 0x80:
                assert pair not in pairs or publication.acked >= self.moment, f"{pair} was given back"
            elif publication.accepted(self.moment) and publication.released >= self.moment:
                assert pair in pairs, f"{pair} was received"

    def _retained(self, stored: dict[str, bytes]) -> None:
        wanted: dict[str, Publication] = {}
        for publication in self.accepted:
            if publication.retain:
                wanted[publication.topic] = publication
        for topic, publication in wanted.items():
            assert topic in stored, f"the retained message of {topic} is lost"
            found = ident_of(stored[topic])
            assert found in self.sent, f"{topic} has {found}"
            # A QoS 2 message that was refused and sent again follows a later one that was stored.
            again = self.sent[found].qos == 2 and self.sent[found].repeated
            in_order = found[1] >= publication.ident[1] or again
            assert in_order, f"{topic} has {found}, not {publication.ident}"

    def _subscriptions(self, filters: set[str]) -> None:
        last: dict[str, list[SubscriptionChange]] = {}
        for change in self.history.changes:
            if change.sent < self.moment:
                last.setdefault(change.topic_filter, []).append(change)
        for topic_filter, changes in last.items():
            acked = [change for change in changes if change.acked < self.moment]
            unsure = [change for change in changes if change.acked >= self.moment]
            allowed = {change.wanted for change in acked[-1:] + unsure} | ({False} if not acked else set())
            assert (topic_filter in filters) in allowed, f"the subscription to {topic_filter} is not as acknowledged"

    def _streams(self, logs: StreamLogs) -> Offsets:
        shown = self.history.shown(self.moment)
        offsets: Offsets = {}
        for key in [("load", number) for number in range(PARTITIONS)] + [("short", 0)]:
            (view,) = [p for p in logs.manifest(key[0])["partitions"] if p["partition"] == key[1]]
            assert view["high_watermark"] >= shown.get(key, 0), f"{key}: the high watermark went back"
            offsets[key] = self._records(key, view)
        counts = Counter(ident for (stream, _), one in offsets.items() if stream == "load" for ident in one.values())
        for ident, count in counts.items():
            assert ident in self.sent and (count == 1 or self._again(ident, True)), f"stream: {ident} {count} times"
        for publication in self.accepted:
            assert publication.ident in counts, f"stream: {publication.ident} is lost"
        return offsets

    def _records(self, key: tuple[str, int], view: dict[str, Any]) -> dict[int, Ident]:
        """The messages that a reader finds, in the order of each topic; no file has more."""
        found: dict[int, Ident] = {}
        directory = self.data / "streams" / key[0] / str(key[1])
        names = {part["file"]: part["bytes"] for part in view["segments"]}
        sizes = {path.name: path.stat().st_size for path in directory.iterdir() if path.suffix in (".seg", ".parquet")}
        assert sizes == names
        last: dict[str, int] = {}
        for part in view["segments"]:
            for offset, payload in _payloads(directory / part["file"], part["bytes"], part["first_offset"]):
                ident = ident_of(payload)
                assert payload == self.sent[ident].payload, f"{key}: {ident} is not what was sent"
                self._in_order(f"{key}", ident, last)
                found[offset] = ident
        assert sorted(found) == list(range(view["log_start_offset"], view["high_watermark"])), f"{key} has gaps"
        return found


def _payloads(path: Path, size: int, first_offset: int) -> Iterator[tuple[int, bytes]]:
    """The records of a segment, sealed or not, as (offset, payload)."""
    with open(path, "rb") as file:
        if is_sealed(path.name):
            from bridge_spark.log.sealed.reader import SealedFile

            verify_file(path)
            opened = SealedFile(lambda position, length: os.pread(file.fileno(), length, position), size)
            for _, _, rows in opened.rows(["payload"], 0, load_footer(path).end_offset):
                yield from zip(rows["offset"].to_pylist(), rows["payload"].to_pylist())
            return
        for _, batch, data in scan_batches(file, 0, size, first_offset):
            messages = decode_messages(data, read_batch(data))
            yield from ((offset, message.payload) for offset, message in enumerate(messages, batch.first_offset))


def agree(known: Offsets, offsets: Offsets, history: History, moment: int) -> None:
    """Check that messages visible to readers before ``moment`` are the same after each loss; adds them to ``known``."""
    for key, watermark in history.shown(moment).items():
        before = known.setdefault(key, {})
        for offset, ident in offsets[key].items():
            if offset < watermark:
                assert before.setdefault(offset, ident) == ident, f"{key}: offset {offset} was shown as {before[offset]}"
