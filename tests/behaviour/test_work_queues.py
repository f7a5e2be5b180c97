"""Work queues ($queue/<name>): one consumer for each message, redelivery, dead letters, and what survives a kill."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.api_client import ACCESS, Api
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.metric_samples import samples
from support.raw_client import RawClient

from mqttbroker.auth.passwords import hash_password
from mqttbroker.codec.packets import Puback, Publish, Will
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
        "hasty": {"stream": "jobs", "lease": "2s", "max_deliveries": 2},
        "nowhere": {"stream": "none"},
        "open": {"stream": "jobs", "allow_publish": True},
        "once": {"stream": "jobs", "max_deliveries": 1},
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


def consume(broker: BrokerProcess, window: int = 65535, topic_filter: str = "$queue/jobs", qos: int = 1, version: int = 5) -> RawClient:
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
    """Acknowledge, and wait until the broker knows it; packets that come before its answer stay in the inbox."""
    client.send(*(Puback(message.packet_id, reason_code) for message in messages))
    client.inbox = client.ping()


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
    slow = consume(broker, 1, "$queue/hasty")  # so that the other one gets it again
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
        for topic_filter, reason in (("$queue/other", "there is no queue other"), ("$queue/nowhere", "queue nowhere has no stream none")):
            suback = client.subscribe(topic_filter, options=1)
            assert suback.reason_codes == [0x8F] and suback.properties.reason_string == reason
        assert client.publish("$queue/jobs", b"x", 1) >= 0x80


def test_clients_publish_to_a_queue_that_permits_it(broker: BrokerProcess) -> None:
    published = [("$queue/open", "$queue/open"), ("$queue/open/jobs/a/x", "jobs/a/x"), ("$queue/open/jobs", "jobs")]
    with RawClient(broker.port) as client, RawClient(broker.port) as live:
        live.connect()
        live.subscribe("#", options=1)
        will = Will("$queue/open/jobs/will", b"3", 1, True)
        with RawClient(broker.port) as dying:
            dying.connect(will=will)
        client.connect()
        for number, (topic, _) in enumerate(published):
            assert client.publish(topic, b"%d" % number, 1, retain=True) == 0
        for topic in ("$queue/open/other", "$queue/open/", "$queue/open/$queue/open", "$queue/open/$SYS/x"):
            assert client.publish(topic, b"", 1) == 0x90
        broker.wait_for_log(r"event=denied action=publish .*stream jobs does not store the topic behind \$queue/open/")
        assert client.publish("$queue/jobs/jobs/a", b"", 1) == 0x87
        with consume(broker, topic_filter="$queue/open") as consumer:
            found = {message.topic: message.payload for message in receive(consumer, 4)}
            assert found == {**{topic: b"%d" % n for n, (_, topic) in enumerate(published)}, "jobs/will": b"3"}
            consumer.expect_nothing()
        with consume(broker, topic_filter="$queue/jobs/jobs/a/#") as consumer:
            assert receive(consumer, 1)[0].topic == "jobs/a/x"
        live.expect_nothing()
        client.subscribe("#", options=1)
        assert not [packet for packet in client.ping() if isinstance(packet, Publish)], "nothing is retained"


def test_the_access_rules_decide_on_publishing_to_a_queue(tmp_path: Path) -> None:
    rules = tmp_path / "acl"
    rules.write_text(
        "user name\ntopic write $queue/open\n"
        "user below\ntopic write $queue/open/jobs/a/#\n"
        "user topics\ntopic write jobs/a/#\n"
        "user denied\ntopic deny $queue/open\ntopic write jobs/#\n"
    )
    passwords = tmp_path / "passwords"
    users = ("name", "below", "topics", "denied", "none")
    passwords.write_text("".join(f"{user}:{hash_password(user.encode())}\n" for user in users))
    config = {**CONFIG, "acl_file": str(rules), "password_file": str(passwords)}
    permitted = {
        "name": (0, 0, 0),
        "below": (0x87, 0, 0x87),
        "topics": (0x87, 0, 0x87),
        "denied": (0x87, 0x87, 0x87),
        "none": (0x87, 0x87, 0x87),
    }
    with BrokerProcess(config=config) as broker:
        for user, codes in permitted.items():
            with RawClient(broker.port) as client:
                assert client.connect(username=user, password=user.encode()).reason_code == 0
                topics = ("$queue/open", "$queue/open/jobs/a/1", "$queue/open/jobs/b")
                assert tuple(client.publish(topic, b"", 1) for topic in topics) == codes, user


def test_a_stream_that_is_deleted_takes_no_message_of_its_queue(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(config={"http": {"access": ACCESS}, "queues": {"late": {"allow_publish": True}}})
    api = Api(broker)
    with RawClient(broker.port) as client:
        client.connect()
        assert client.publish("$queue/late", b"", 1) == 0x90
        assert api.ask("POST", "/streams", {"name": "late", "filters": ["late/#"]})[0] == 200
        assert client.publish("$queue/late", b"1", 1) == 0
        with consume(broker, topic_filter="$queue/late") as consumer:
            assert numbers(receive(consumer, 1)) == [1]
        assert api.ask("DELETE", "/streams/late", confirm="late")[0] == 204
        assert client.publish("$queue/late", b"", 1) == 0x90


def test_what_may_have_been_delivered_before_a_kill_is_no_dead_letter_for_that(broker: BrokerProcess) -> None:
    publish(broker, 1, 3)
    with consume(broker, topic_filter="$queue/once", window=1) as consumer:
        receive(consumer, 1)
        broker.kill()
    broker.restart()
    with consume(broker, topic_filter="$queue/once") as consumer:
        again = receive(consumer, 3)
        assert numbers(again) == [1, 2, 3] and properties_of(again[0])["redelivered"] == "1"
        acknowledge(consumer, again[:2])
    broker.wait_for_log(r"event=dead_letter queue=\$queue/once .*the consumer has left")
    assert len(re.findall("event=dead_letter queue=.queue/once", broker.log)) == 1


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
        wait_until(lambda: samples(broker.get("/metrics"))["mqttbroker_queue_oldest_seconds" + labels])
    with RawClient(broker.port) as operator:
        operator.connect()
        operator.subscribe("$SYS/broker/queues/jobs/#", options=0)
        wanted = {"depth": b"4", "consumers": b"0", "redeliveries": b"1", "dead_letters": b"0"}
        while wanted:
            message = operator.wait_for(Publish)
            name = message.topic.rpartition("/")[2]
            if wanted.get(name) == message.payload:
                del wanted[name]
