"""What one commit writes and the pages it reads back: plain values in plain lists.

The rule kept here: a write set belongs to one side at a time.  The event loop
fills it and hands it over; from then on only the writer touches it, until it
is handed back through the store's ``done``.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple

from sessions.message import Message


class PageRequest:
    """Asks for the stored queue entries of a session with ``seq > after_seq``.

    At most ``limit`` rows come.  With ``limit_bytes`` the page also ends once
    its topics, payloads and properties reach that many bytes, though never
    before its first row; 0 sets no such bound.  ``with_received`` asks for the
    QoS 2 packet ids that wait for their PUBREL as well.
    """

    def __init__(
        self,
        session_id: int,
        after_seq: int,
        limit: int,
        with_received: bool,
        limit_bytes: int = 0,
    ) -> None:
        self.session_id = session_id
        self.after_seq = after_seq
        self.limit = limit
        self.with_received = with_received
        self.limit_bytes = limit_bytes


class Page:
    """The answer to a `PageRequest`, as of the commit it came with.

    ``rows`` in order of seq: (seq, qos, retain, subscription_ids, packet_id,
    state, message_id, shared, topic, payload, message_qos, message_retain,
    properties, publisher, timestamp_us, expires_at_us, size).  ``received`` is
    empty unless it was asked for.  ``error`` tells why a page could not be read; the
    commit before it stands all the same.
    """

    def __init__(
        self,
        session_id: int,
        rows: List[Tuple[object, ...]],
        received: List[int],
        error: Optional[Exception] = None,
    ) -> None:
        self.session_id = session_id
        self.rows = rows
        self.received = received
        self.error = error


class EntryQuery:
    """Asks for stored entries that were never sent, at most ``limit``.

    Of a session (``session_id`` not 0) those with ``seq > after_seq``, in their
    order; else of all sessions those that expire until ``until`` (µs since the
    Unix epoch), the first to expire first.  ``rows``, filled by the writer:
    (expires_at, session_id, seq, message_id, shared, size).  ``next_expiry`` is
    when the first of all the others expires; 0 if none does.
    """

    def __init__(self, limit: int, session_id: int, after_seq: int, until: int) -> None:
        self.limit = limit
        self.session_id = session_id
        self.after_seq = after_seq
        self.until = until
        # Where to go on among those that expire.
        self.after: Tuple[int, int, int] = (0, 0, 0)
        self.rows: List[List[int]] = []
        self.next_expiry = 0

    def answered(self) -> None:
        """The rows are here; called on the event loop's side."""


class WriteSet:
    """One transaction's worth of changes, applied in the order of the attributes.

    A key stands at most once in a list.  A session id is never used again once
    it stood in ``ended``, and nothing else of that session stands beside it.
    Columns:

    ========================  =====================================================
    ended                     session_id: goes with all that belongs to it
    sessions (upsert)         session_id, client_id, version, expiry_interval,
                              disconnected_at or None (Unix s), will or None,
                              will_due or None (Unix s),
                              username or None, rules or None
    subscriptions (upsert)    session_id, topic_filter, qos, options,
                              subscription_id (0 = none)
    unsubscriptions           session_id, topic_filter
    messages (insert)         id, topic, payload, qos, retain, properties,
                              publisher, timestamp_us, expires_at_us
    entries (insert)          session_id, seq, message_id, shared, qos, retain,
                              subscription_ids, packet_id (0 = not sent), state,
                              size (`Message.size`), expires_at_us
    updates                   packet_id, state, session_id, seq of stored entries
    deletes                   session_id, seq of entries that are done
    sole_messages             message ids whose only entry was deleted
    shared_messages           message ids to delete once no entry refers to them
    received (insert)         session_id, packet_id of QoS 2 messages
    released                  session_id, packet_id
    retained (upsert)         topic, payload, qos, properties, publisher,
                              timestamp_us, expires_at_us
    unretained                topic
    stream_messages           (stream, partition) -> records in their order
    pages, listings           read after the commit
    probe                     true: commit a page even if the lists are empty
    ========================  =====================================================

    ``shared`` is true for every entry of a message that more than one entry
    refers to, or may ever refer to.
    """

    def __init__(self) -> None:
        self.ended: List[int] = []
        self.sessions: List[Tuple[object, ...]] = []
        self.subscriptions: List[Tuple[object, ...]] = []
        self.unsubscriptions: List[Tuple[int, str]] = []
        self.messages: List[Tuple[object, ...]] = []
        self.entries: List[Tuple[object, ...]] = []
        self.updates: List[Tuple[int, int, int, int]] = []
        self.deletes: List[Tuple[int, int]] = []
        self.sole_messages: List[int] = []
        self.shared_messages: List[int] = []
        self.received: List[Tuple[int, int]] = []
        self.released: List[Tuple[int, int]] = []
        self.retained: List[Tuple[object, ...]] = []
        self.unretained: List[str] = []
        self.stream_messages: Dict[Tuple[str, int], List[Message]] = {}
        self.pages: List[PageRequest] = []
        self.listings: List[EntryQuery] = []
        self.probe = False

    def has_changes(self) -> bool:
        """Whether there is anything to commit, beside what is to be read."""
        return bool(
            self.ended
            or self.sessions
            or self.subscriptions
            or self.unsubscriptions
            or self.messages
            or self.entries
            or self.updates
            or self.deletes
            or self.sole_messages
            or self.shared_messages
            or self.received
            or self.released
            or self.retained
            or self.unretained
            or self.stream_messages
            or self.probe
        )
