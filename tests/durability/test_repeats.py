"""A publisher that numbers its messages and sends them all again after each kill of the broker."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from chaos.log_reader import LogReader
from support.broker_process import BrokerProcess
from support.metric_samples import samples
from support.raw_client import RawClient

from mqttbroker.codec.packets import Puback, Publish
from mqttbroker.codec.properties import Properties

StartBroker = Callable[..., BrokerProcess]
MESSAGES = 900  # below Receive Maximum
KILLS = 4


def packet(number: int) -> Publish:
    properties = Properties()
    properties.user_properties += [("producer-id", "meter-7"), ("seq", str(number))]
    return Publish(f"s/{number % 8}", b"%d" % number, 1, False, False, number + 1, properties)


@pytest.mark.parametrize("durability", ["commit", "interval"])
def test_each_number_is_in_the_stream_once_through_kills(start_broker: StartBroker, durability: str) -> None:
    stream = {"filters": ["s/#"], "partitions": 3, "dedup": True, "segment_bytes": "1KiB", "seal": False}
    broker = start_broker(config={"durability": durability, "streams": {"s": stream}})
    moments = random.Random(7)
    for _ in range(KILLS):
        client = RawClient(broker.port)
        client.connect("meter")
        client.send(*map(packet, range(MESSAGES)))
        for _ in range(moments.randrange(MESSAGES)):
            assert client.expect(Puback).reason_code == 0
        broker.restart(kill=True)
    with RawClient(broker.port) as client:
        client.connect("meter")
        client.send(*map(packet, range(MESSAGES)))
        assert [client.expect(Puback).packet_id for _ in range(MESSAGES)] == list(range(1, MESSAGES + 1))
        # With durability interval the acknowledgements do not wait for the commit; this one does in both modes.
        broker.restart()
    records = LogReader(broker.data_dir, "s").records()
    assert Counter(int(record.payload) for record in records) == Counter(range(MESSAGES))
    assert samples(broker.get("/metrics"))["mqttbroker_stream_producers"] == 1
