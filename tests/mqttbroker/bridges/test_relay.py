"""The relay of a bridge, without sockets: what goes in on one side, and what comes out on the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import properties_of

from mqttbroker.bridges.frames import Frames
from mqttbroker.bridges.link import MAX_UNREAD, Link
from mqttbroker.bridges.loop_tag import TAG
from mqttbroker.bridges.packet_output import PacketOutput
from mqttbroker.bridges.relay import PACKETS_AT_ONCE, RELEASING, RUNNING, SUBSCRIBING, Relay
from mqttbroker.bridges.relay_terms import Counts, LocalState, RelayError, RelayTerms, RemoteHistory
from mqttbroker.codec.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    decode,
)
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import MQTTError
from topic_matcher.remapping import prefix_rule

RULES = [prefix_rule("out/#", "out", 2, "", "r/"), prefix_rule("in/#", "in", 2, "l/", "")]


class Side:
    """The packets of one side that have not been looked at."""

    def __init__(self, version: int) -> None:
        self.version = version

    def decode(self, output: PacketOutput) -> list[Packet]:
        data = output.drain()
        packets: list[Packet] = []
        position = 0
        while position < len(data):
            packet, position = decode(data, self.version, position)
            assert packet is not None
            packets.append(packet)
        return packets


class Harness:
    """A relay whose two brokers are the test."""

    def __init__(self, version: int = 5, received: Sequence[int] = (), used: Sequence[int] = (), **options: Any) -> None:
        terms = RelayTerms("remote-id", "$bridge/b", options.pop("rules", RULES))
        terms.version = version
        for name in ("identity", "clean_start", "transient", "keep_alive", "private", "outgoing_retain", "notification"):
            if name in options:
                setattr(terms, name, options.pop(name))
        self.counts = Counts()
        self.first_ids = 0

        def free(count: int) -> list[int]:
            return [each for each in range(65535, 0, -1) if each not in used][:count]

        def before_first_id() -> None:
            self.first_ids += 1

        filters = options.pop("local_filters", ())
        history = RemoteHistory(**options)
        self.relay = Relay(terms, self.counts, lambda: LocalState(received, filters, free), before_first_id, history)
        self.remote = Side(version)
        self.local = Side(5)
        self.version = version
        self.relay.start(0.0)

    def from_remote(self, *packets: Packet) -> None:
        self.relay.remote_received(b"".join(each.encode(self.version) for each in packets), 0.0)

    def from_local(self, *packets: Packet) -> None:
        self.relay.local_received(b"".join(each.encode(5) for each in packets))

    def to_remote(self) -> list[Any]:
        return self.remote.decode(self.relay.to_remote)

    def to_local(self) -> list[Any]:
        return self.local.decode(self.relay.to_local)

    def connect(self, present: bool = True, properties: Properties | None = None) -> list[Any]:
        """Up to the subscriptions; returns the packets to the remote after CONNECT."""
        self.to_remote()
        self.from_remote(Connack(present, 0, properties))
        [connect] = self.to_local()
        assert isinstance(connect, Connect)
        self.from_local(Connack(True, 0))
        return self.to_remote()

    def run(self, present: bool = True, properties: Properties | None = None) -> Harness:
        """Up to the state in which messages pass."""
        for packet in self.connect(present, properties):
            if isinstance(packet, Subscribe):
                self.from_remote(Suback(packet.packet_id, [each.qos for each in packet.subscriptions]))
            elif isinstance(packet, Unsubscribe):
                self.from_remote(Unsuback(packet.packet_id, [0] * len(packet.topic_filters)))
        assert self.relay.state == RUNNING
        self.to_local()
        return self


def publish(topic: str, qos: int = 0, packet_id: int = 0, **options: Any) -> Publish:
    return Publish(topic, options.pop("payload", b"p"), qos, packet_id=packet_id, **options)


@pytest.mark.normative("3.1.1", "MQTT-7.0.0-1")
@pytest.mark.parametrize("version", [4, 5])
def test_a_qos_2_message_keeps_its_packet_id_in_each_direction(version: int) -> None:
    bridge = Harness(version).run()
    bridge.from_local(publish("out/t", 2, 7))
    [sent] = bridge.to_remote()
    assert (sent.topic, sent.qos, sent.packet_id, sent.payload) == ("r/out/t", 2, 7, b"p")
    for answer in (Pubrec(7), Pubcomp(7)):
        bridge.from_remote(answer)
        [passed] = bridge.to_local()
        assert (type(passed), passed.packet_id) == (type(answer), 7)
        if isinstance(answer, Pubrec):
            bridge.from_local(Pubrel(7))
            [release] = bridge.to_remote()
            assert isinstance(release, Pubrel) and release.packet_id == 7
    bridge.from_remote(publish("in/t", 2, 9))
    [got] = bridge.to_local()
    assert (got.topic, got.qos, got.packet_id) == ("l/in/t", 2, 9)
    assert bridge.to_remote() == []  # nothing is acknowledged before the local broker does
    bridge.from_local(Pubrec(9))
    assert [type(each) for each in bridge.to_remote()] == [Pubrec]
    bridge.from_remote(Pubrel(9))
    assert [type(each) for each in bridge.to_local()] == [Pubrel]
    bridge.from_local(Pubcomp(9))
    assert [type(each) for each in bridge.to_remote()] == [Pubcomp]


def test_the_remotes_connect_comes_first_and_its_limits_bound_the_local_client() -> None:
    bridge = Harness()
    [connect] = bridge.to_remote()
    assert (connect.client_id, connect.clean_start, connect.properties.session_expiry_interval) == ("remote-id", False, 0xFFFFFFFF)
    bridge.from_remote(Connack(True, 0, properties_of(receive_maximum=3)))
    [local] = bridge.to_local()
    assert (local.client_id, local.properties.receive_maximum) == ("$bridge/b", 3)
    assert not bridge.relay.reads_remote
    bridge.from_remote(publish("in/t"))
    assert bridge.to_local() == []
    bridge.from_local(Connack(True, 0))
    kinds = [type(each) for each in bridge.to_local()]
    assert kinds == [Subscribe, Publish]


def test_subscriptions_ask_for_no_local_and_retain_as_published() -> None:
    bridge = Harness(local_filters=["old/#"], stale_filters=["gone/#"])
    subscribe, unsubscribe = bridge.connect()
    assert [(each.topic_filter, each.options) for each in subscribe.subscriptions] == [("in/#", 2 | 4 | 8 | 0x10)]
    assert unsubscribe.topic_filters == ["gone/#"]
    local, removed = bridge.to_local()
    assert [(each.topic_filter, each.options) for each in local.subscriptions] == [("out/#", 2 | 4 | 8 | 0x10)]
    assert removed.topic_filters == ["old/#"]


def test_a_new_session_gets_all_retained_messages() -> None:
    bridge = Harness(clean_start=True)
    bridge.connect(present=False)
    [local] = bridge.to_local()
    assert local.subscriptions[0].retain_handling == 0


def test_local_packets_wait_until_the_remote_has_answered() -> None:
    bridge = Harness()
    [subscribe] = bridge.connect()
    bridge.to_local()
    assert bridge.relay.state == SUBSCRIBING and bridge.relay.pauses_local
    bridge.from_local(publish("out/t", 1, 1))
    bridge.from_remote(publish("in/t", 0))
    assert bridge.to_remote() == []
    assert [each.topic for each in bridge.to_local()] == ["l/in/t"]
    bridge.from_remote(Suback(subscribe.packet_id, [2]))
    assert [each.topic for each in bridge.to_remote()] == ["r/out/t"]


def test_the_packet_id_of_a_subscribe_is_not_in_use() -> None:
    [subscribe] = Harness(used=[65535, 65534]).connect()
    assert subscribe.packet_id == 65533


@pytest.mark.parametrize(("present", "elsewhere"), [(False, False), (True, True)])
def test_ids_received_from_an_ended_session_are_released_before_the_remote_is_read(present: bool, elsewhere: bool) -> None:
    bridge = Harness(received=[3, 4], ids_elsewhere=elsewhere)
    assert bridge.connect(present) == []
    assert [(type(each), each.packet_id) for each in bridge.to_local()] == [(Pubrel, 3), (Pubrel, 4)]
    assert bridge.relay.state == RELEASING and bridge.first_ids == 0
    bridge.from_remote(publish("in/new", 2, 3))
    bridge.from_local(publish("out/first", 1, 1), Pubcomp(3), Pubcomp(4))
    assert bridge.first_ids == 1
    [subscribe] = bridge.to_remote()
    subscription, new = bridge.to_local()
    assert (new.topic, new.packet_id) == ("l/in/new", 3)
    bridge.from_remote(Suback(subscribe.packet_id, [2]))
    assert [each.topic for each in bridge.to_remote()] == ["r/out/first"]


def test_ids_left_behind_at_a_remote_are_released_there_first() -> None:
    bridge = Harness(left_behind=[5])
    release, subscribe = bridge.connect()
    assert isinstance(release, Pubrel) and release.packet_id == 5
    bridge.to_local()
    bridge.from_local(publish("out/t", 2, 5))
    bridge.from_remote(Suback(subscribe.packet_id, [2]))
    assert bridge.to_remote() == []
    bridge.from_remote(Pubcomp(5, 0x92))
    assert [(each.topic, each.packet_id) for each in bridge.to_remote()] == [("r/out/t", 5)]
    assert bridge.to_local() == []


def test_an_old_session_of_version_4_is_ended_first() -> None:
    bridge = Harness(4, clean_start=True)
    assert bridge.to_remote()[0].clean_start
    with pytest.raises(RelayError) as caught:
        bridge.from_remote(Connack(False, 0))
    assert caught.value.ended_session
    assert [type(each) for each in bridge.to_remote()] == [Disconnect]


def test_dup_is_kept_for_a_session_that_the_remote_has_and_not_for_a_new_one() -> None:
    for present in (True, False):
        bridge = Harness().run(present)
        bridge.from_local(publish("out/t", 1, 1, dup=True))
        assert bridge.to_remote()[0].dup is present


@pytest.mark.parametrize("maximum", [0, 1])
def test_a_remote_with_a_lower_qos_gets_messages_at_that_qos(maximum: int) -> None:
    bridge = Harness().run(properties=properties_of(maximum_qos=maximum))
    bridge.from_local(publish("out/t", 2, 8))
    [sent] = bridge.to_remote()
    assert sent.qos == maximum
    if maximum:
        assert bridge.to_local() == []
        bridge.from_remote(Puback(8))
    assert [(type(each), each.packet_id) for each in bridge.to_local()] == [(Pubrec, 8)]
    bridge.from_local(Pubrel(8))
    assert [(type(each), each.packet_id) for each in bridge.to_local()] == [(Pubcomp, 8)]
    assert bridge.to_remote() == []


def test_properties_pass_and_a_packet_that_is_too_large_is_counted() -> None:
    bridge = Harness().run(properties=properties_of(maximum_packet_size=60))
    properties = Properties()
    properties.content_type = "text/plain"
    bridge.from_local(publish("out/t", properties=properties), publish("out/u", 1, 1, payload=bytes(60)))
    [sent] = bridge.to_remote()
    assert sent.properties.content_type == "text/plain"
    assert [type(each) for each in bridge.to_local()] == [Puback]
    assert bridge.counts.dropped["too_large"] == 1 and bridge.counts.messages_out == 1


def test_topic_aliases_of_the_remote_are_used() -> None:
    bridge = Harness().run(properties=properties_of(topic_alias_maximum=1))
    bridge.from_local(publish("out/a"), publish("out/a"), publish("out/b"))
    sent = bridge.to_remote()
    assert [(each.topic, each.properties.topic_alias) for each in sent] == [("r/out/a", 1), ("", 1), ("r/out/b", -1)]


def test_a_message_that_has_passed_the_bridge_is_not_passed_again() -> None:
    bridge = Harness(identity="here/b").run()
    bridge.from_local(publish("out/t", 2, 1))
    [sent] = bridge.to_remote()
    assert sent.properties.user_properties == [(TAG, "here/b")]
    other = Properties()
    other.user_properties = [(TAG, "elsewhere/b")]
    bridge.from_remote(publish("in/t", 1, 1, properties=other))
    assert [each.topic for each in bridge.to_local()] == ["l/in/t"]
    bridge.from_remote(publish("in/t", 2, 2, properties=sent.properties), Pubrel(2))
    assert bridge.to_local() == []
    assert [type(each) for each in bridge.to_remote()] == [Pubrec, Pubcomp]
    bridge.from_local(publish("out/t", 2, 3, properties=sent.properties))
    assert bridge.to_remote() == []
    assert bridge.counts.dropped["loop"] == 2


def test_topics_without_a_rule_are_acknowledged_and_counted() -> None:
    bridge = Harness().run()
    bridge.from_local(publish("other", 2, 4), Pubrel(4), publish("other", 1, 5))
    assert [type(each) for each in bridge.to_local()] == [Pubrec, Pubcomp, Puback]
    bridge.from_remote(publish("other", 1, 6))
    assert [type(each) for each in bridge.to_remote()] == [Puback]
    assert bridge.counts.dropped["unmapped"] == 3


def test_a_message_that_the_other_side_may_take_later_stays() -> None:
    with pytest.raises(RelayError, match="the remote refuses a message: Quota exceeded"):
        Harness().run().from_remote(Puback(1, 0x97))
    with pytest.raises(RelayError, match="the local broker does not store a message: no room"):
        Harness().run().from_local(Pubrec(1, 0x97))


def test_a_message_that_is_never_taken_is_counted() -> None:
    bridge = Harness().run()
    bridge.from_remote(Pubrec(1, 0x87))
    assert [each.reason_code for each in bridge.to_local()] == [0x87]
    bridge.from_local(Puback(2, 0x90))
    assert [each.reason_code for each in bridge.to_remote()] == [0x90]
    assert bridge.counts.dropped["refused"] == 2


@pytest.mark.parametrize(("packet", "reason"), [
    (Connack(False, 0x86), "the remote refuses: Bad User Name or Password"),
    (Pingresp(), "answers CONNECT with packet type 13"),
])  # fmt: skip
def test_refusals_say_why(packet: Packet, reason: str) -> None:
    with pytest.raises(RelayError, match=reason):
        Harness().from_remote(packet)


def test_a_version_that_the_remote_does_not_know_is_told_apart() -> None:
    for version, code in ((4, 1), (5, 0x84)):
        with pytest.raises(RelayError) as caught:
            Harness(version, private=True).from_remote(Connack(False, code))
        assert caught.value.unsupported_version


def test_a_refused_subscription_is_noted() -> None:
    bridge = Harness()
    [subscribe] = bridge.connect()
    bridge.from_remote(Suback(subscribe.packet_id, [0x87]))
    assert bridge.relay.setup.refused_filters == [("in/#", 0x87)] and bridge.relay.state == RUNNING


def test_the_end_of_either_broker_has_a_reason() -> None:
    with pytest.raises(RelayError, match="the remote disconnects: Server shutting down"):
        Harness().run().from_remote(Disconnect(0x8B))
    with pytest.raises(RelayError, match="the local broker disconnects: Session taken over"):
        Harness().run().from_local(Disconnect(0x8E))


def test_the_keep_alive() -> None:
    bridge = Harness(keep_alive=10).run()
    bridge.relay.tick(7.0)
    assert not bridge.relay.to_remote
    bridge.relay.tick(8.0)
    assert bridge.relay.to_remote.drain() == b"\xc0\x00"
    bridge.relay.remote_written(8.0)
    with pytest.raises(RelayError, match="no answer to PINGREQ"):
        bridge.relay.tick(16.0)


def test_the_answer_to_a_ping_may_be_unread_after_the_process_was_stopped() -> None:
    bridge = Harness(keep_alive=10).run()
    bridge.relay.tick(8.0)
    assert bridge.relay.to_remote.drain() == b"\xc0\x00"
    bridge.relay.remote_written(8.0)
    bridge.relay.stopped(100.0)
    bridge.relay.tick(109.0)  # a PINGREQ is due at once: the remote has heard nothing
    assert bridge.relay.to_remote.drain() == b"\xc0\x00"
    bridge.relay.remote_received(b"\xd0\x00", 109.1)
    bridge.relay.tick(115.0)


def test_the_state_is_published_at_the_remote() -> None:
    bridge = Harness(notification="state")
    [connect] = bridge.to_remote()
    assert (connect.will.topic, connect.will.payload, connect.will.retain) == ("state", b"0", True)
    bridge.run()
    bridge.relay.close()
    publication, goodbye = bridge.to_remote()
    assert (publication.payload, publication.retain) == (b"0", True) and isinstance(goodbye, Disconnect)


def test_retain_flags_pass_unless_told_otherwise() -> None:
    for outgoing_retain in (True, False):
        bridge = Harness(outgoing_retain=outgoing_retain).run()
        bridge.from_local(publish("out/t", retain=True))
        assert bridge.to_remote()[0].retain is outgoing_retain
        bridge.from_remote(publish("in/t", retain=True))
        assert bridge.to_local()[0].retain


@given(st.lists(st.binary(max_size=300), max_size=20), st.data())
def test_frames_are_the_packets_however_they_are_split(payloads: list[bytes], data: st.DataObject) -> None:
    packets = [publish("t", payload=each).encode(5) for each in payloads]
    stream = b"".join(packets)
    frames = Frames(1000)
    found = []
    position = 0
    while position < len(stream):
        size = data.draw(st.integers(1, 400))
        frames.feed(stream[position : position + size])
        position += size
        while (frame := frames.next()) is not None:
            found.append(frame)
    assert frames.held == 0
    assert [first for first, _ in found] == [0x30] * len(packets)
    assert all(packet.endswith(body) and len(packet) - len(body) <= 3 for packet, (_, body) in zip(packets, found))


@pytest.mark.parametrize("data", [b"\x30\xff\xff\xff\xff\x01", b"\x30\xff\xff\x03"])
def test_frames_that_are_malformed_or_too_large_are_refused(data: bytes) -> None:
    frames = Frames(1000)
    frames.feed(data)
    with pytest.raises(MQTTError):
        frames.next()


@given(st.binary(max_size=200))
def test_no_bytes_of_a_remote_break_the_relay(data: bytes) -> None:
    for bridge in (Harness(), Harness().run()):
        try:
            bridge.relay.remote_received(data, 0.0)
        except RelayError as error:
            assert "\n" not in str(error)


@given(st.integers(0x30, 0x3F), st.binary(max_size=60), st.sampled_from([4, 5]))
def test_no_publish_of_a_remote_breaks_the_relay(first: int, body: bytes, version: int) -> None:
    bridge = Harness(version).run()
    try:
        bridge.relay.remote_received(bytes((first, len(body))) + body, 0.0)
    except RelayError:
        pass


def test_packets_of_the_remote_are_handled_in_parts() -> None:
    bridge = Harness().run()
    count = 2 * PACKETS_AT_ONCE + 1
    bridge.from_remote(*(publish(f"in/{number}") for number in range(count)))
    found = bridge.to_local()
    assert len(found) == PACKETS_AT_ONCE and bridge.relay.unfinished
    while bridge.relay.unfinished:
        bridge.relay.proceed()
    found += bridge.to_local()
    assert [packet.topic for packet in found] == [f"l/in/{number}" for number in range(count)]


class Socket:
    """A socket of a link that the remote does not read."""

    def __init__(self) -> None:
        self.written = 0
        self.reading = True

    def set_write_buffer_limits(self, high: int) -> None:
        """The test says when it is full."""

    def write(self, data: bytes) -> None:
        self.written += len(data)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        """The test looks no further."""


async def test_a_remote_that_reads_no_answers_is_not_read() -> None:
    """The messages match no rule, so that the bridge acknowledges them itself."""
    remote = Socket()
    loop = asyncio.get_running_loop()
    endpoint: Any = None  # of a local client, which nothing is for
    link = Link(loop, Harness().run().relay, endpoint, "bridge:b", 10.0, lambda: None)
    link.connection_made(remote)
    link.pause_writing()
    flood = b"".join(publish("other", 1, packet_id + 1).encode(5) for packet_id in range(PACKETS_AT_ONCE))
    sent = 0
    while remote.reading:
        link.data_received(flood)
        await asyncio.sleep(0)  # a link handles the rest of what it has read in another iteration
        sent += 1
        assert remote.written <= MAX_UNREAD + 10_000
    assert remote.written > MAX_UNREAD
    link.resume_writing()
    assert remote.reading
    link.fail(RelayError("the test ends"))
