"""`LogProof` finds what is wrong in crafted logs, and nothing in good ones."""

from __future__ import annotations

import pytest
from chaos.record import Record, Sent

from chaos_cluster.log_proof import LOG_ROWS, LOGGED, ONCE, OWNERS, VOID, LogProof
from mqttbroker.cluster.log.body import encode_body
from mqttbroker.cluster.log.records import CHANGES, CONTINUED, MORE, NO_EPOCH, RELEASE, TAKEOVER, Header, encode_record
from sessions.message import Message
from sessions.write_set import BusMessages, WriteSet

CLUSTER = b"clusterA"
ONE, TWO = b"owner--1", b"owner--2"
AT = 1_700_000_000_000  # ms, of the first record; each record is made a second after the one before
ACKNOWLEDGED_AT = AT / 1000 + 100


class Log:
    """The log of shard 0, written one record at a time."""

    def __init__(self) -> None:
        self.proof = LogProof(1)
        self.offset = 0

    def write(self, kind: int, owner: bytes, epoch: int, sequence: int, body: bytes = b"", flags: int = 0) -> int:
        """Append a record; returns its offset."""
        record = encode_record(Header(kind, 0, CLUSTER, owner, epoch, sequence, flags), body)
        self.proof.shards[0].read(self.offset, AT + 1000 * self.offset, record)
        self.offset += 1
        return self.offset - 1

    def take_over(self, owner: bytes, epoch: int) -> int:
        return self.write(TAKEOVER, owner, epoch, 0, b"\x93\xa0\xa0\xa0")

    def publish(self, owner: bytes, epoch: int, sequence: int, *messages: Sent) -> int:
        return self.write(CHANGES, owner, epoch, sequence, body(*messages))


def body(*messages: Sent) -> bytes:
    write_set = WriteSet()
    write_set.bus = BusMessages()
    write_set.bus.to_all = [Message(one.topic, one.payload, one.qos, one.retain, b"", one.publisher, 0, 0) for one in messages]
    return encode_body(write_set)


class Case:
    """A log, and the record of the clients."""

    def __init__(self) -> None:
        self.log = Log()
        self.record = Record(LOG_ROWS)

    def message(self, qos: int = 1, acknowledged: bool = True, size: int = 20) -> Sent:
        message = self.record.send("publisher", "topic", qos, not size, size)
        if acknowledged:
            self.record.acknowledge(message)
            self.record.acknowledged_at[message.number] = ACKNOWLEDGED_AT
        return message

    def faults(self, *wills: Sent) -> dict[str, list[str]]:
        self.log.proof.judge(self.record, wills)
        return {row: texts for row, texts in self.record.faults.items() if texts}


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_takeover_with_a_void_repetition_is_no_fault(case: Case) -> None:
    """A record of the old owner behind the takeover is void. The new owner writes the message again, and acknowledges it."""
    one, two, unsent = case.message(), case.message(2), case.message(2, False)
    log = case.log
    first = log.take_over(ONE, NO_EPOCH)
    log.publish(ONE, first, 1, one)
    second = log.take_over(TWO, first)
    log.publish(ONE, first, 2, two)
    log.publish(TWO, second, 1, two)
    log.take_over(ONE, first)
    log.publish(ONE, first, 2, unsent)
    assert not case.faults()
    assert case.record.checked[LOGGED] == 2 and case.record.checked[OWNERS] == 4
    assert log.proof.summary() == "logs: 4 valid records, 3 void, 2 epochs"


def test_a_body_in_parts_counts_once(case: Case) -> None:
    message = case.message(2)
    log = case.log
    epoch = log.take_over(ONE, NO_EPOCH)
    log.write(CHANGES, ONE, epoch, 1, body(message)[:30], MORE)
    log.write(CHANGES, ONE, epoch, 2, body(message)[30:], CONTINUED)
    assert not case.faults()


def test_an_acknowledged_message_in_no_record_is_found(case: Case) -> None:
    there, gone = case.message(), case.message()
    log = case.log
    log.publish(ONE, log.take_over(ONE, NO_EPOCH), 1, there)
    assert case.faults() == {LOGGED: [f"{gone} is in no record"]}


def test_an_unfinished_body_is_no_record_of_its_messages(case: Case) -> None:
    message = case.message()
    log = case.log
    log.write(CHANGES, ONE, log.take_over(ONE, NO_EPOCH), 1, body(message), MORE)
    log.take_over(TWO, 0)
    assert case.faults() == {LOGGED: [f"{message} is in no record"]}


def test_a_cleared_topic_is_counted(case: Case) -> None:
    empty, _ = case.message(size=0), case.message(size=0)
    log = case.log
    log.publish(ONE, log.take_over(ONE, NO_EPOCH), 1, empty)
    assert case.faults() == {LOGGED: ["topic was cleared 2 times, 1 of them in valid records"]}


@pytest.mark.parametrize("released", [False, True])
def test_an_acknowledgement_for_a_void_record_is_found(case: Case, released: bool) -> None:
    message = case.message()
    log = case.log
    first = log.take_over(ONE, NO_EPOCH)
    if released:
        log.write(RELEASE, ONE, first, 1)
    else:
        log.take_over(TWO, first)
    log.publish(ONE, first, 1 + released, message)
    assert case.faults() == {VOID: [f"{message} is only in void record 2 of shard 0"]}


def test_an_acknowledgement_before_the_valid_record_is_found(case: Case) -> None:
    """The deposed owner acknowledged it, and the new one wrote it a second later."""
    message = case.message()
    case.record.acknowledged_at[message.number] = AT / 1000 + 2.5
    log = case.log
    first = log.take_over(ONE, NO_EPOCH)
    second = log.take_over(TWO, first)
    log.publish(ONE, first, 1, message)
    log.publish(TWO, second, 1, message)
    text = f"{message} was acknowledged 500 ms before its valid record 3 of shard 0 was made"
    assert case.faults() == {VOID: [text]}


def test_a_message_in_two_valid_records_is_found_at_qos_2(case: Case) -> None:
    once, again = case.message(1), case.message(2)
    log = case.log
    epoch = log.take_over(ONE, NO_EPOCH)
    log.publish(ONE, epoch, 1, once, again)
    log.publish(ONE, epoch, 2, once, again)
    assert case.faults() == {ONCE: [f"{again} is in valid record 1 of shard 0, valid record 2 of shard 0"]}


def test_a_will_in_no_record_or_in_two_is_found_at_each_qos(case: Case) -> None:
    never, twice = case.message(1, False), case.message(1, False)
    log = case.log
    epoch = log.take_over(ONE, NO_EPOCH)
    log.publish(ONE, epoch, 1, twice)
    second = log.take_over(TWO, epoch)
    log.publish(TWO, second, 1, twice)
    assert case.faults(never, twice) == {
        LOGGED: [f"{never} is in no record"],
        ONCE: [f"{twice} is in valid record 1 of shard 0, valid record 3 of shard 0"],
    }


def test_two_owners_in_one_epoch_are_found(case: Case) -> None:
    """Each reader takes both records for valid, as the epoch and the sequence are right."""
    log = case.log
    epoch = log.take_over(ONE, NO_EPOCH)
    log.publish(ONE, epoch, 1, case.message())
    log.publish(TWO, epoch, 2, case.message())
    log.publish(ONE, epoch, 3, case.message())
    text = f"shard 0, offset 2: a record of the owner {TWO.hex()} in the epoch of {ONE.hex()}"
    assert case.faults() == {OWNERS: [text]}


def test_epochs_that_overlap_are_found(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule for readers that takes records of an ended epoch for valid is not taken on trust."""
    monkeypatch.setattr("chaos_cluster.log_proof.LogView.read", lambda view, offset, header: 0)
    log = case.log
    first = log.take_over(ONE, NO_EPOCH)
    log.publish(ONE, first, 1, case.message())
    second = log.take_over(TWO, first)
    log.publish(ONE, first, 2, case.message())
    log.publish(TWO, second, 2, case.message())
    log.take_over(ONE, first)
    assert case.faults() == {
        OWNERS: [
            "shard 0, offset 3: a record of the epoch 0 in that of 2",
            "shard 0, offset 4: record 2 of the epoch behind record 0",
            "shard 0, offset 5: a takeover that ends the epoch 0, in the epoch 2",
        ]
    }
