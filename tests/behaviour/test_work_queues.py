"""Work queues ($queue/<name>): one consumer for each message, redelivery, dead letters, and what survives a kill."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.broker_process import BrokerProcess
from support.metric_samples import samples
from support.raw_client import RawClient

from mqttbroker.codec.packets import Puback, Publish
from mqttbroker.codec.properties import Properties

CONFIG = {
    "sys_interval": "1s",
    "consumers": {"interval": "100ms"},
    "streams": {
        "jobs": {"filters": ["jobs/#"], "partitions": 2, "seal": False},
        "dead": {"filters": ["no/such/topic"], "partitions": 1, "seal": False},
    },
    "queues": {
        "jobs": {"max_deliveries": 3, "dead_letter": "dead"},
        "hasty": {"stream": "jobs", "lease": "1s", "max_deliveries": 2},
        "nowhere": {"stream": "none"},
    },
}


@pytest.fixture
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(config=CONFIG) as started:
        yield started


def publish(broker: BrokerProcess, first: int, last: int, topic: str = "jobs/a", qos: int = 1) -> None:
    with RawClient(broker.port) as publisher:
        publisher.connect()
        for number in range(first, last + 1):
            publisher.publish(topic, b"%d" % number, qos)


def consume(broker: BrokerProcess, window: int = 65535, topic_filter: str = "$queue/jobs", qos: int = 1,
            version: int = 5) -> RawClient:
    client = RawClient(broker.port, version)
    properties = Properties()
    if version == 5:
        properties.receive_maximum = window
    client.connect(properties=properties)
    assert client.subscribe(topic_filter, options=qos).reason_codes == [min(qos, 1)]
    return client


def receive(client: RawClient, count: int) -> list[Publish]:
    return [client.expect(Publish) for _ in range(count)]


def numbers(messages: list[Publish]) -> list[int]:
    return [int(message.payload) for message in messages]


def properties_of(message: Publish) -> dict[str, str]:
    return dict(message.properties.user_properties)


def acknowledge(client: RawClient, messages: list[Publish], reason_code: int = 0) -> None:
    client.send(*(Puback(message.packet_id, reason_code) for message in messages))
    client.ping()


def test_messages_wait_for_the_first_consumer_and_each_goes_to_one(broker: BrokerProcess) -> None:
    publish(broker, 1, 12)
    broker.restart(kill=True)
    consumers = [consume(broker, 3) for _ in range(3)]
    found: list[int] = []
    counts = [0, 0, 0]
    while len(found) < 12:
        for index, consumer in enumerate(consumers):
            part = [packet for packet in consumer.ping() if isinstance(packet, Publish)]
            counts[index] += len(part)
            found += numbers(part)
            consumer.send(*(Puback(message.packet_id) for message in part))
    assert sorted(found) == list(range(1, 13)) and min(counts) > 0
    for consumer in consumers:
        consumer.expect_nothing()


@pytest.mark.parametrize("version", [4, 5])
def test_a_lost_connection_returns_what_was_not_acknowledged(broker: BrokerProcess, version: int) -> None:
    publish(broker, 1, 5)
    consumer = consume(broker, version=version)
    found = receive(consumer, 5)
    assert numbers(found) == [1, 2, 3, 4, 5]
    acknowledge(consumer, [found[1], found[3]])
    consumer.close()
    other = consume(broker)
    again = receive(other, 3)
    assert numbers(again) == [1, 3, 5]
    assert [properties_of(message).get("redelivered") for message in again] == ["1"] * 3
    assert [properties_of(message).get("delivery-count") for message in again] == ["2"] * 3
    acknowledge(other, again)
    other.expect_nothing()


def test_a_negative_acknowledgement_returns_a_message_to_another_and_at_last_to_the_dead_letters(
    broker: BrokerProcess,
) -> None:
    first, second = consume(broker), consume(broker)
    publish(broker, 1, 1)
    counts: list[str] = []
    consumers = {first: 0, second: 0}
    while len(counts) < 3:
        for consumer in consumers:
            for message in [packet for packet in consumer.ping() if isinstance(packet, Publish)]:
                counts.append(properties_of(message).get("delivery-count", "1"))
                consumers[consumer] += 1
                acknowledge(consumer, [message], 0x83)
    assert counts == ["1", "2", "3"] and min(consumers.values()) == 1
    with RawClient(broker.port) as reader:
        reader.connect()
        start = Properties()
        start.user_properties = [("stream-offset", "earliest")]
        reader.subscribe("$stream/dead", options=1, properties=start)
        dead = reader.expect(Publish)
        assert (dead.topic, dead.payload) == ("jobs/a", b"1")
        found = properties_of(dead)
        assert found["dead-letter-reason"] == "refused: Implementation specific error (0x83)"
        assert (found["delivery-count"], found["dead-letter-queue"]) == ("3", "$queue/jobs")
    broker.wait_for_log(r"event=dead_letter queue=\$queue/jobs .*deliveries=3 dead_letter_stream=dead")
    first.expect_nothing()
    second.expect_nothing()
    broker.restart(kill=True)
    with consume(broker) as third:
        third.expect_nothing()


def test_the_end_of_a_lease_returns_a_message_and_a_late_acknowledgement_counts_not(broker: BrokerProcess) -> None:
    slow = consume(broker, topic_filter="$queue/hasty")
    publish(broker, 1, 1)
    held = slow.expect(Publish)
    other = consume(broker, topic_filter="$queue/hasty")
    again = other.expect(Publish)
    assert again.payload == b"1" and properties_of(again)["delivery-count"] == "2"
    acknowledge(slow, [held])
    broker.wait_for_log(r"event=dead_letter queue=\$queue/hasty .*dead_letter_stream=.*the lease ended")
    publish(broker, 2, 3)
    assert sorted(numbers([slow.expect(Publish), other.expect(Publish)])) == [2, 3]


def test_a_killed_broker_knows_what_was_done_and_how_often_it_was_tried(broker: BrokerProcess) -> None:
    consumer = consume(broker)
    publish(broker, 1, 4)
    found = receive(consumer, 4)
    acknowledge(consumer, found[1:3])
    publish(broker, 5, 5)
    broker.restart(kill=True)
    consumer = consume(broker)
    again = receive(consumer, 3)
    assert numbers(again) == [1, 4, 5]
    assert [properties_of(message).get("delivery-count") for message in again[:2]] == ["2", "2"]
    acknowledge(consumer, again)


def test_filters_are_queues_of_their_own(broker: BrokerProcess) -> None:
    publish(broker, 1, 2, "jobs/a/x")
    publish(broker, 3, 4, "jobs/b/x")
    with consume(broker, topic_filter="$queue/jobs/jobs/b/#") as consumer:
        assert numbers(receive(consumer, 2)) == [3, 4]
        consumer.expect_nothing()
    with consume(broker) as consumer:
        assert sorted(numbers(receive(consumer, 4))) == [1, 2, 3, 4]


def test_queues_that_there_are_not(broker: BrokerProcess) -> None:
    broker.wait_for_log("event=queue_without_stream queue=nowhere")
    with RawClient(broker.port) as client:
        client.connect()
        for topic_filter, reason in (("$queue/other", "there is no queue other"),
                                     ("$queue/nowhere", "queue nowhere has no stream none")):
            suback = client.subscribe(topic_filter, options=1)
            assert suback.reason_codes == [0x8F] and suback.properties.reason_string == reason
        assert client.publish("$queue/jobs", b"x", 1) >= 0x80


def test_qos_0_consumers_and_messages_need_no_acknowledgement(broker: BrokerProcess) -> None:
    publish(broker, 1, 2, qos=0)
    publish(broker, 3, 4, qos=1)
    with consume(broker, qos=0) as consumer:
        assert sorted(numbers(receive(consumer, 4))) == [1, 2, 3, 4]
        consumer.expect_nothing()
    with consume(broker) as consumer:
        consumer.expect_nothing()


def test_depth_and_age_stand_in_metrics_and_sys(broker: BrokerProcess) -> None:
    publish(broker, 1, 5)
    with consume(broker) as consumer:
        found = receive(consumer, 5)
        acknowledge(consumer, found[:1])
        acknowledge(consumer, found[1:2], 0x80)
        receive(consumer, 1)
        metrics = samples(broker.get("/metrics"))
        labels = "/jobs"
        assert metrics["mqttbroker_queue_depth" + labels] == 4 == metrics["mqttbroker_queue_in_flight" + labels]
        assert metrics["mqttbroker_queue_consumers" + labels] == 1
        assert metrics["mqttbroker_queue_redeliveries_total" + labels] == 1
        assert metrics["mqttbroker_queue_dead_letters_total" + labels] == 0
        while not samples(broker.get("/metrics"))["mqttbroker_queue_oldest_seconds" + labels]:
            pass
    with RawClient(broker.port) as operator:
        operator.connect()
        operator.subscribe("$SYS/broker/queues/jobs/#", options=0)
        wanted = {"depth": b"4", "consumers": b"0", "redeliveries": b"1", "dead_letters": b"0"}
        while wanted:
            message = operator.wait_for(Publish)
            name = message.topic.rpartition("/")[2]
            if wanted.get(name) == message.payload:
                del wanted[name]
