"""``mqttbroker streams tail``: the last records of a stream, read from its files over HTTP."""

from __future__ import annotations

import argparse
import base64
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from bridge_spark.log.record_batch import SegmentError, decode_messages, iter_batches
from bridge_spark.log.segment_names import is_sealed
from bridge_spark.log.sparse_index import decode_index
from bridge_spark.source.http_client import NotFound
from mqttbroker.cli.broker_api import DONE, FAILED, BrokerApi, CommandError, in_path
from mqttbroker.cli.tables import cell, print_json

POLL = 0.5  # seconds between looks for new records
SHOWN = 200  # characters of a payload
_COLUMNS = ("timestamp", "topic", "payload", "client_id")


class Record(NamedTuple):
    """A record of a stream; ``timestamp`` is in µs since the Unix epoch."""

    timestamp: int
    partition: int
    offset: int
    topic: str
    payload: bytes
    client_id: str


def tail(api: BrokerApi, options: argparse.Namespace) -> int:
    """Print the last records, and with ``--follow`` those that come."""
    try:
        reader = _Reader(api, options.name)
        ends = reader.ends()
        if options.partition is not None:
            if options.partition not in ends:
                raise CommandError(f"stream {options.name!r} has no partition {options.partition}", FAILED)
            ends = {options.partition: ends[options.partition]}
        last = [record for number, end in ends.items() for record in reader.read(number, end - options.number, end)]
        last.sort()
        for record in last[-options.number :] if options.number else ():
            _print(record, options.json)
        while options.follow:
            sys.stdout.flush()
            time.sleep(POLL)
            reached = reader.ends()
            new = [record for number, end in ends.items() for record in reader.read(number, end, reached.get(number, end))]
            ends = {number: reached.get(number, end) for number, end in ends.items()}
            for record in sorted(new):
                _print(record, options.json)
    except NotFound as error:
        raise CommandError(str(error), FAILED) from None
    except SegmentError as error:
        raise CommandError(f"damaged segment: {error}", FAILED) from None
    except KeyboardInterrupt:
        pass
    return DONE


def _print(record: Record, as_json: bool) -> None:
    if as_json:
        fields: Mapping[str, Any] = {**record._asdict(), "payload_base64": base64.b64encode(record.payload).decode()}
        print_json({name: value for name, value in fields.items() if name != "payload"})
        return
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.timestamp / 1e6))
    payload = record.payload.decode(errors="replace")
    shown = payload if len(payload) <= SHOWN else payload[:SHOWN] + "…"
    print(f"{at}.{record.timestamp % 1_000_000 // 1000:03d}  {record.partition}:{record.offset}  {cell(record.topic)}  {cell(shown)}")


class _Reader:
    """Reads records from the files of a stream. Methods raise CommandError, `HttpError` or `SegmentError`."""

    def __init__(self, api: BrokerApi, name: str) -> None:
        self._api = api
        self._path = f"/streams/{in_path(name)}"
        self._partitions: dict[int, Any] = {}

    def ends(self) -> dict[int, int]:
        """The end offset of each partition now."""
        answer = self._api.request("GET", self._path, None, {})
        self._partitions = {part["partition"]: part for part in answer["partitions"]}
        return {number: part["high_watermark"] for number, part in self._partitions.items()}

    def read(self, number: int, start: int, end: int) -> Iterator[Record]:
        """The records of a partition from one offset up to another that the data directory has."""
        for segment in self._partitions[number]["segments"]:
            if segment["first_offset"] >= end or segment["end_offset"] <= start:
                continue
            rows = self._sealed if is_sealed(segment["file"]) else self._unsealed
            yield from rows(number, segment, start, end)

    def _unsealed(self, number: int, segment: Any, start: int, end: int) -> Iterator[Record]:
        path = f"{self._path}/{number}/{segment['file']}"
        try:
            entries = decode_index(self._api.read(path.replace(".seg", ".idx"), 0, None))
        except NotFound:  # a broker writes it a moment later, or again after its next start
            entries = []
        place = bisect_right(entries, start, key=attrgetter("first_offset")) - 1
        position = entries[place].position if place >= 0 else 0
        data = self._api.read(path, position, segment["bytes"] - position)
        for batch in iter_batches(data):
            if batch.lost or batch.end_offset <= start:
                continue
            for offset, message in enumerate(decode_messages(data, batch), batch.first_offset):
                if start <= offset < end:
                    yield Record(message.timestamp, number, offset, message.topic, message.payload, message.publisher)

    def _sealed(self, number: int, segment: Any, start: int, end: int) -> Iterator[Record]:
        try:
            from bridge_spark.log.sealed.reader import SealedFile
        except ImportError:
            raise CommandError('sealed segments need pyarrow: pip install "mqttbroker[parquet]"', FAILED) from None
        path = f"{self._path}/{number}/{segment['file']}"
        file = SealedFile(lambda position, length: self._api.read(path, position, length), segment["bytes"])
        for _, _, rows in file.rows(_COLUMNS, start, end):
            for row in [] if rows is None else rows.to_pylist():
                received = round(row["timestamp"].timestamp() * 1e6)
                yield Record(received, number, row["offset"], row["topic"], row["payload"], row["client_id"])
