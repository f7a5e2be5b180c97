"""Paging: the stored entries of a persistent session are read in pages while its client is connected.

Pages arrive in the order of their requests. Live messages that arrive while a page is read stay in memory, if limits
allow, and follow the last page without another read.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

from sessions.context import SessionContext
from sessions.delivery import Delivery
from sessions.journal import GONE
from sessions.message_queue import MessageQueue
from sessions.write_set import PageRequest

PAGE_ENTRIES: Final = 1000  # entries per page at most


@mypyc_attr(acyclic=True)
class Paging:
    """The page being read for one session, and the live messages that arrived meanwhile."""

    def __init__(self, context: SessionContext, queue: MessageQueue) -> None:
        self.context = context
        self.queue = queue
        self.reading = False  # a page was requested for this connection and has not arrived
        self.arrived_while_paging: list[Delivery] = []
        self.arrived_bytes = 0  # sizes of all messages that arrived since the request, in memory or not
        self._overflowed = False  # the live messages exceeded a limit: later ones are only on disk
        self._abandoned = 0  # pages requested for earlier connections that have not arrived
        self._complete_to = 0  # newest seq at the time of the request

    def request(self, with_received: bool) -> None:
        """Request the entries after the newest one that was in memory, and the QoS 2 packet ids received."""
        context = self.context
        queue = self.queue
        limits = context.limits
        self.reading = True
        queue.oldest = None
        self._forget_arrived()
        self._complete_to = context.journal.next_seq - 1
        context.journal.request_page(
            PageRequest(
                queue.session_id,
                queue.loaded_seq,
                PAGE_ENTRIES,
                with_received,
                max(
                    1,
                    min(
                        limits.max_transient_queue_bytes - queue.memory_bytes,
                        limits.max_total_queue_memory_bytes - context.queue_memory,
                    ),
                ),
                self._complete_to,
            )
        )

    def add_arrived(self, entry: Delivery) -> None:
        """Add a live message; if limits allow, it stays in memory until the page is loaded."""
        limits = self.context.limits
        self.arrived_bytes += entry.message.size
        self.context.memory_bytes += entry.message.size
        if (
            self._overflowed
            or len(self.arrived_while_paging) >= limits.max_queue_memory_messages
            or self.arrived_bytes > limits.max_transient_queue_bytes // 2
        ):
            self._overflowed = True
            self.arrived_while_paging.clear()
            self.queue.stored_seq = entry.seq
        else:
            self.arrived_while_paging.append(entry)

    def page_arrived(self) -> bool:
        """Whether the page that arrived was requested for this connection."""
        if self._abandoned > 0:
            self._abandoned -= 1
            return False
        return self.reading

    def page_loaded(self, empty: bool) -> None:
        """The page's entries are in the queue. If it was the last one, the live messages follow them.

        Pages end by count or by size. The last one contains the newest entry of the queue, or is ``empty`` if the
        store refused that entry.
        """
        queue = self.queue
        if queue.stored_seq <= self._complete_to and (empty or queue.loaded_seq >= queue.stored_seq):
            queue.stored_seq = 0
            for entry in self.arrived_while_paging:
                if entry.seq > queue.loaded_seq and entry.disk != GONE:
                    queue.append(entry)
                    queue.loaded_seq = entry.seq
            self._forget_arrived()
        elif self.arrived_while_paging:
            self._leave_arrived_on_disk()

    def disconnected(self) -> None:
        """The connection is closed: discard its page when it arrives, and leave live messages on disk."""
        if self.arrived_while_paging:
            self._leave_arrived_on_disk()
        self._forget_arrived()
        if self.reading:
            self.reading = False
            self._abandoned += 1

    def _leave_arrived_on_disk(self) -> None:
        arrived = self.arrived_while_paging
        self.queue.stored_seq = max(self.queue.stored_seq, arrived[len(arrived) - 1].seq)
        self._forget_arrived()

    def _forget_arrived(self) -> None:
        self.arrived_while_paging.clear()
        self.context.memory_bytes -= self.arrived_bytes
        self.arrived_bytes = 0
        self._overflowed = False
