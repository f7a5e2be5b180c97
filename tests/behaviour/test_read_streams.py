"""Clients read streams: where they begin, what deliveries carry, how they are paced, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.patience import PATIENCE
from support.raw_client import RawClient

from mqttbroker.auth.passwords import hash_password
from mqttbroker.codec.packets import Disconnect, Puback, Publish, Suback
from mqttbroker.codec.properties import Properties

CONFIG = {
    "durability": "commit",
    "streams": {
        "sensors": {"filters": ["sensors/#"], "partitions": 1, "seal": False, "segment_bytes": "4KiB"},
        "spread": {"filters": ["spread/#"], "partitions": 3, "seal": False},
        "users": {"filters": ["users/#"], "key": "user-property:user", "partitions": 2, "seal": False},
    },
}


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(config=CONFIG) as started:
        publish(started, "sensors/a", 1, 20)
        publish(started, "sensors/b", 21, 40)
        yield started


def publish(broker: BrokerProcess, topic: str, first: int, last: int, qos: int = 1) -> None:
    with RawClient(broker.port) as publisher:
        publisher.connect()
        for number in range(first, last + 1):
            assert publisher.publish(topic, b"%d" % number, qos) in (0, 16)


def user_properties(**values: str) -> Properties:
    properties = Properties()
    properties.user_properties = [(name.replace("_", "-"), value) for name, value in values.items()]
    return properties


def read(client: RawClient, count: int) -> list[Publish]:
    return [client.take() for _ in range(count)]


def numbers(messages: list[Publish]) -> list[int]:
    return [int(message.payload) for message in messages]


def subscribe(client: RawClient, topic_filter: str, qos: int = 1, **values: str) -> Suback:
    return client.subscribe(topic_filter, options=qos, properties=user_properties(**values))


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_from_the_beginning_and_then_live(broker: BrokerProcess, qos: int) -> None:
    with RawClient(broker.port) as client:
        client.connect()
        assert subscribe(client, "$stream/spread", qos, stream_offset="latest").reason_codes == [qos]
        publish(broker, "spread/x", 1, 5, 2)
        live = read(client, 5)
        assert numbers(live) == [1, 2, 3, 4, 5]
        assert {message.qos for message in live} == {qos}
        assert {message.topic for message in live} == {"spread/x"} and not any(message.retain for message in live)


def test_the_past_of_a_stream(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        client.connect()
        assert subscribe(client, "$stream/sensors", 1, stream_offset="earliest").reason_codes == [1]
        messages = read(client, 40)
        assert numbers(messages) == list(range(1, 41))
        found = [dict(message.properties.user_properties) for message in messages]
        assert [each["offset"] for each in found] == [str(offset) for offset in range(40)]
        assert {each["partition"] for each in found} == {"0"}
        assert [each["key"] for each in found] == ["sensors/a"] * 20 + ["sensors/b"] * 20
        times = [int(each["ts"]) for each in found]
        assert times == sorted(times) and times[0] > 1_600_000_000_000_000
        client.expect_nothing()
        # From the time of a message on, and from an offset on.
        with RawClient(broker.port) as other:
            other.connect()
            subscribe(other, "$stream/sensors", 1, stream_offset=str(times[30]))
            assert numbers(read(other, 10)) == list(range(31, 41))
            subscribe(other, "$stream/sensors", 1, stream_offset="offset:38")
            assert numbers(read(other, 2)) == [39, 40]
            other.expect_nothing()


def test_a_filter_within_a_stream(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        client.connect()
        assert subscribe(client, "$stream/sensors/sensors/b", 0, stream_offset="earliest").reason_codes == [0]
        assert numbers(read(client, 20)) == list(range(21, 41))
        client.expect_nothing()


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("start", ["earliest", "0", "1h", "1d12h", "2020-01-01", "2020-01-01T00:00:00Z", "2020-01-01T00:00:00-05:00"])
def test_replays(broker: BrokerProcess, version: int, start: str) -> None:
    with RawClient(broker.port, version) as client:
        client.connect()
        assert client.subscribe(f"$replay/{start}/sensors/a", options=1).reason_codes == [1]
        assert numbers(read(client, 20)) == list(range(1, 21))
        client.expect_nothing()


def test_replay_of_a_whole_stream_by_its_name(broker: BrokerProcess) -> None:
    with RawClient(broker.port, 4) as client:
        client.connect()
        assert client.subscribe("$replay/earliest/sensors", options=0).reason_codes == [0]
        assert numbers(read(client, 40)) == list(range(1, 41))
        assert client.subscribe("$replay/latest/$stream/sensors/sensors/c", options=0).reason_codes == [0]
        client.expect_nothing()


def test_the_key_of_a_stream_by_user_property(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as publisher, RawClient(broker.port) as client:
        client.connect()
        publisher.connect()
        subscribe(client, "$stream/users", 1)
        for user in ("ann", "bob"):
            publisher.publish("users/x", user.encode(), 1, properties=user_properties(user=user))
        found = {}
        for message in read(client, 2):
            found[bytes(message.payload)] = dict(message.properties.user_properties)
        assert found[b"ann"]["key"] == "ann" and found[b"bob"]["key"] == "bob"
        assert found[b"ann"]["user"] == "ann", "the properties of the publisher stay"


def test_the_same_subscribe_again_continues_and_another_start_seeks(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        client.connect()
        subscribe(client, "$stream/sensors", 1, stream_offset="earliest")
        assert numbers(read(client, 40)) == list(range(1, 41))
        subscribe(client, "$stream/sensors", 1, stream_offset="earliest")
        client.expect_nothing()
        subscribe(client, "$stream/sensors", 1, stream_offset="offset:39")
        assert numbers(read(client, 1)) == [40]
        client.unsubscribe("$stream/sensors")
        subscribe(client, "$stream/sensors", 1, stream_offset="offset:39")
        assert numbers(read(client, 1)) == [40]


def test_receive_maximum_is_kept(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        properties = Properties()
        properties.receive_maximum = 3
        client.connect(properties=properties)
        subscribe(client, "$stream/sensors", 1, stream_offset="earliest")
        first = [client.wait_for(Publish) for _ in range(3)]
        client.expect_nothing()
        assert numbers(first) == [1, 2, 3]
        client.send(Puback(first[0].packet_id))
        assert numbers([client.wait_for(Publish)]) == [4]
        client.expect_nothing()


def test_subscription_identifier_and_large_records(broker: BrokerProcess) -> None:
    """A record that is larger than a chunk, in a batch with others."""
    with RawClient(broker.port) as publisher, RawClient(broker.port) as client:
        publisher.connect()
        client.connect()
        properties = user_properties(stream_offset="latest")
        properties.subscription_identifiers = [300]
        client.subscribe("$stream/spread", options=0, properties=properties)
        payloads = [b"x" * size for size in (10, 700_000, 3, 300_000)]
        publisher.send(*(Publish("spread/large", payload, 0) for payload in payloads))
        messages = read(client, 4)
        assert [message.payload for message in messages] == payloads
        assert messages[0].properties.subscription_identifiers == [300]


@pytest.mark.parametrize(
    "topic_filter, start, reason",
    [
        ("$stream/unknown", None, "there is no stream unknown"),
        ("$stream/sensors/other/#", None, "stream sensors keeps no topic of other/#"),
        ("$stream/sensors", "yesterday", "stream-offset is earliest"),
        ("$stream/sensors", "offset:x", "x is not an offset"),
        ("$stream/sensors", "offset:7=1", "has no partition 7"),
        ("$stream/spread", "offset:0=1,1=2", "no offset of partition 2"),
        ("$stream/+", None, "needs a name"),
        ("$replay/1y/sensors/#", None, "1y is not earliest"),
        ("$replay/1h/other/#", None, "no stream keeps all topics of other/#"),
        ("$replay/1h", None, "needs a filter or the name of a stream"),
    ],
)
def test_refusals_say_why(broker: BrokerProcess, topic_filter: str, start: str | None, reason: str) -> None:
    with RawClient(broker.port) as client:
        client.connect()
        suback = client.subscribe(topic_filter, options=1, properties=user_properties(stream_offset=start) if start else None)
        assert suback.reason_codes[0] in (0x83, 0x8F)
        assert reason in (suback.properties.reason_string or "")
    line = len(broker.lines)
    if start is None:
        with RawClient(broker.port, 4) as old:
            old.connect("old")
            assert old.subscribe(topic_filter, options=1).reason_codes == [0x80]
        assert reason.split()[-1] in broker.wait_for_log("event=stream_refused client=old.*", after=line)[0]


def test_offsets_out_of_the_log(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        client.connect()
        refused = subscribe(client, "$stream/sensors", 1, stream_offset="offset:999", stream_on_expired="refuse")
        assert refused.reason_codes == [0x83]
        assert "offset 999 is not among 0 to 40" in (refused.properties.reason_string or "")
        nearest = subscribe(client, "$stream/sensors", 1, stream_offset="offset:999")
        assert nearest.reason_codes == [1]
        assert ("stream-offset-expired", "$stream/sensors offset:0=40") in nearest.properties.user_properties


@pytest.mark.parametrize("root", ["$stream/sensors", "$queue/x", "$replay/1h/x"])
def test_publishing_to_a_root_is_refused(broker: BrokerProcess, root: str) -> None:
    with RawClient(broker.port) as client:
        client.connect()
        assert client.publish(root, b"x", 1) == 0x87


def test_a_persistent_session_continues_where_it_stood(broker: BrokerProcess) -> None:
    session: dict[str, Any] = {"clean_start": False}
    properties = Properties()
    properties.session_expiry_interval = 600
    properties.receive_maximum = 5
    with RawClient(broker.port) as client:
        client.connect("persistent", properties=properties, **session)
        subscribe(client, "$stream/sensors", 1, stream_offset="earliest")
        assert numbers(read(client, 10)) == list(range(1, 11))
        unacknowledged = [client.wait_for(Publish) for _ in range(5)]
        assert numbers(unacknowledged) == list(range(11, 16))
    with RawClient(broker.port) as client:
        assert client.connect("persistent", properties=properties, **session).session_present
        again = read(client, 5)
        assert numbers(again) == list(range(11, 16)) and all(message.dup for message in again)
        assert [message.packet_id for message in again] == [message.packet_id for message in unacknowledged]
        assert numbers(read(client, 25)) == list(range(16, 41))
        client.expect_nothing()


def test_rights(tmp_path: Path) -> None:
    acl = tmp_path / "acl"
    acl.write_text(
        "topic write sensors/#\n"
        "user a\ntopic read sensors/a\n"
        "user named\ntopic read $stream/sensors\n"
        "user part\ntopic read $stream/sensors/sensors/b\n"
        "user denied\ntopic read sensors/#\ntopic deny $stream/sensors\n"
        "user nothing\ntopic read other/#\n"
    )
    users = tmp_path / "users"
    lines = [f"{name}:{hash_password(b'secret')}" for name in ("a", "named", "part", "denied", "nothing")]
    users.write_text("\n".join(lines) + "\n")
    config = {**CONFIG, "acl_file": str(acl), "password_file": str(users), "allow_anonymous": True}
    with BrokerProcess(config=config) as broker:
        publish(broker, "sensors/a", 1, 3)
        publish(broker, "sensors/b", 4, 6)
        expected = {
            "a": (1, [1, 2, 3]),
            "named": (1, [1, 2, 3, 4, 5, 6]),
            "part": (1, [4, 5, 6]),
            "denied": (0x87, []),
            "nothing": (0x87, []),
        }
        for user, (code, seen) in expected.items():
            with RawClient(broker.port) as client:
                client.connect(user, username=user, password=b"secret")
                suback = subscribe(client, "$stream/sensors", 1, stream_offset="earliest")
                assert suback.reason_codes == [code], user
                assert numbers(read(client, len(seen))) == seen, user
                client.expect_nothing()


SEALED = {"streams": {"sensors": {"filters": ["sensors/#"], "partitions": 1, "segment_bytes": "4KiB", "seal": True}}}


def test_sealed_and_active_segments_are_read_alike() -> None:
    pytest.importorskip("pyarrow")
    with BrokerProcess(config=SEALED) as broker:
        with RawClient(broker.port) as publisher:
            publisher.connect()
            for number in range(1, 201):
                publisher.publish("sensors/a", b"%d " % number + b"x" * 100, 1, properties=user_properties(n=str(number)))
        broker.wait_for_log("event=segment_sealed", 4 * PATIENCE)
        publish(broker, "sensors/b", 201, 203)
        sealed = [segment["sealed"] for segment in manifest(broker)["partitions"][0]["segments"]]
        assert sealed[0] and not sealed[-1]
        for start in ("offset:100", "earliest"):
            with RawClient(broker.port) as client:
                client.connect()
                subscribe(client, "$stream/sensors", 1, stream_offset=start)
                first = 1 if start == "earliest" else 101
                messages = read(client, 204 - first)
                assert [int(message.payload.split()[0]) for message in messages] == list(range(first, 204))
                assert ("n", str(first)) in messages[0].properties.user_properties
                client.expect_nothing()
                if start == "earliest":
                    publish(broker, "sensors/c", 1, 1)
                    assert client.take().topic == "sensors/c"


def manifest(broker: BrokerProcess) -> Any:
    return json.loads(broker.get("/streams/sensors"))


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_damage_is_named_and_skipped_only_when_told(action: str) -> None:
    config = {"streams": {"sensors": {"filters": ["sensors/#"], "partitions": 1, "seal": False}}}
    with BrokerProcess(config=config) as broker:
        for number in range(1, 6):
            publish(broker, "sensors/a", number, number)
        (segment,) = (broker.data_dir / "streams" / "sensors" / "0").glob("*.seg")
        data = bytearray(segment.read_bytes())
        third = data.index(b"MQB1", data.index(b"MQB1", 4) + 4)
        data[third + 40] ^= 1
        segment.write_bytes(data)
        with RawClient(broker.port) as client:
            client.connect("reader")
            subscribe(client, "$stream/sensors", 1, stream_offset="earliest", stream_on_damage=action)
            assert numbers(read(client, 2)) == [1, 2]
            if action == "skip":
                assert numbers(read(client, 2)) == [4, 5]
                client.expect_nothing()
            else:
                (last,) = client.expect_closed()
                assert isinstance(last, Disconnect) and last.reason_code == 0x83
                assert "cannot read offset 2" in (last.properties.reason_string or "")
        line = broker.wait_for_log("event=stream_damaged.*")[0]
        assert f"action={action if action == 'stop' else 'skip'}" in line and segment.name in line


@pytest.mark.parametrize("names", [[f"none{number}" for number in range(4000)], ["n" * 60_000, "m" * 60_000]])
def test_a_suback_says_no_more_than_fits(start_broker: Callable[..., BrokerProcess], names: list[str]) -> None:
    broker = start_broker(config={"streams": {"s": {"filters": ["a/#"]}}})
    with RawClient(broker.port) as client:
        client.connect("many")
        suback = client.subscribe(*(f"$stream/{name}" for name in names))
        assert set(suback.reason_codes) == {0x8F} and len(suback.reason_codes) == len(names)
        assert suback.properties is None or len(suback.properties.reason_string or "") <= 32768
        client.ping()
    broker.wait_for_log("event=disconnected client=many")
    assert broker.log.count("event=stream_refused") <= 200  # 100 a second
