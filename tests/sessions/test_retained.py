"""Retained messages in memory, and their journal operations."""

from __future__ import annotations

from support.journal import close_batch

from sessions.journal import Gate, Journal
from sessions.message import Message
from sessions.retained import Retained
from sessions.row_kinds import RETAINED


def message(topic: str, payload: bytes = b"x", expires_at: int = 0) -> Message:
    return Message(topic, payload, 1, True, b"", "p", 1, expires_at)


def topics_of(retained: Retained, topic_filter: str, now: int = 0, limit: int = 100) -> list[str]:
    scan = retained.scan(topic_filter)
    found = []
    while not scan.done:
        found += [one.topic for one in scan.read(limit, now)]
    return sorted(found)


def test_the_last_message_of_each_topic_is_retained() -> None:
    retained = Retained(Journal(True))
    sizes = 0
    for topic, payload in (("a", b"1"), ("a/b", b"22"), ("a", b"333"), ("$x", b"4")):
        retained.set(message(topic, payload), False, None)
    assert len(retained) == 3
    for topic in ("a", "a/b", "$x"):
        one = retained.get(topic)
        assert one is not None
        sizes += one.size
    assert retained.size == sizes
    assert topics_of(retained, "#") == ["a", "a/b"]
    assert topics_of(retained, "a/#", limit=1) == ["a", "a/b"]
    assert topics_of(retained, "$x") == ["$x"]
    retained.set(message("a", b""), False, None)
    assert retained.get("a") is None and topics_of(retained, "#") == ["a/b"]


def test_gates_wait_for_the_write() -> None:
    journal = Journal(True)
    retained = Retained(journal)
    gates = [Gate() for _ in range(4)]
    retained.set(message("a"), False, gates[0])
    retained.set(message("b", b""), False, gates[1])
    retained.set(message("$SYS/x"), True, gates[2])
    assert [gate.pending for gate in gates] == [1, 0, 0, 0]
    retained.set(message("a", b""), False, None)
    close_batch(journal)
    retained.set(message("a", b""), False, gates[3])
    assert gates[3].pending == 1
    journal.committed()
    assert [gate.pending for gate in gates] == [0, 0, 0, 0]


def test_volatile_messages_are_not_written() -> None:
    journal = Journal(True)
    retained = Retained(journal)
    retained.set(message("$SYS/x"), True, None)
    retained.set(message("$SYS/x", b""), True, None)
    assert not journal.has_pending and len(retained) == 0 and retained.size == 0


def test_loaded_messages_are_not_written_again() -> None:
    journal = Journal(True)
    retained = Retained(journal)
    retained.load(message("a"))
    assert topics_of(retained, "#") == ["a"] and not journal.has_pending


def test_expired_messages_are_skipped_and_deleted() -> None:
    journal = Journal(True)
    retained = Retained(journal)
    retained.load(message("old", expires_at=100))
    retained.load(message("new", expires_at=101))
    assert topics_of(retained, "#", now=99) == ["new", "old"]
    assert topics_of(retained, "#", now=100) == ["new"]
    one = retained.get("new")
    assert one is not None and retained.size == one.size
    assert close_batch(journal).removed(RETAINED) == ["old"]


def test_a_sorted_scan_continues_behind_any_topic() -> None:
    retained = Retained(Journal(True))
    retained.keep_sorted()
    topics = ["a", "a!", "a/", "a/b", "a/b/c", "a/c", "ab", "b", "b/b"]
    retained.load(message("a/c"))
    for topic in (*reversed(topics), "$SYS/x", "a/gone", "a/gone"):
        retained.set(message(topic), topic == "$SYS/x", None)
    retained.set(message("a/gone", b""), False, None)
    retained.set(message("a/old", expires_at=5), False, None)
    for topic_filter, expected in {
        "#": topics,
        "a/#": ["a", "a/", "a/b", "a/b/c", "a/c"],
        "+/b": ["a/b", "b/b"],
        "+": ["a", "a!", "ab", "b"],
        "a/b": ["a/b"],
        "a/old": [],
    }.items():
        for after in ("", *topics):
            found: list[str] = []
            position = after
            while True:
                scan = retained.sorted_scan(topic_filter, position)  # as another process would
                found += [one.topic for one in scan.read(2, 5)]
                position = scan.after
                if scan.done:
                    break
            assert found == [topic for topic in expected if topic > after], (topic_filter, after)
    assert retained.get("a/old") is None and retained.expiring == 0
