"""Messages that no PUBLISH packet carries: wills, the broker's own ``$SYS`` messages, and those of operators.

They are published at once if that is little work. Otherwise they wait, in their order, and are published in parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from mqttbroker.codec.reason_codes import MQTTError
from mqttbroker.core.client.outgoing import NO_BYTES, Outgoing
from mqttbroker.core.delivery.fan_out import TARGETS_PER_WORK, deliver
from mqttbroker.core.delivery.publisher import Publisher
from mqttbroker.core.delivery.turns import LongWork, Turns
from mqttbroker.core.routing.router import WORK_LIMIT
from sessions.context import SessionContext
from sessions.journal import Gate
from sessions.message import Message
from sessions.session import Session

MESSAGE_WORK: Final = 10  # of one message, beside that of its route and its targets


class BrokerMessage:
    """A message; a will is published in the name of its ``session``, and ``own`` messages are those of ``$SYS``.

    ``gate`` opens when all that stores it is committed. ``recipients`` counts the subscriptions, groups and streams that
    it went to, and is -1 until then.
    """

    def __init__(self, message: Message, session: Session | None, own: bool, gate: Gate | None = None) -> None:
        self.message = message
        self.session = session
        self.own = own
        self.gate = gate
        self.recipients = -1


class BrokerMessages(LongWork):
    """Publishes messages of the broker; `SessionContext.will_bytes` counts wills until they are published."""

    def __init__(self, context: SessionContext, publisher: Publisher, turns: Turns) -> None:
        self._context = context
        self._publisher = publisher
        self._turns = turns
        self._queue: deque[BrokerMessage] = deque()
        self._iteration = 0  # of `Turns`, in which messages were published at once
        self._work = 0  # of these messages
        self.on_will_published: Callable[[Session], None] | None = None  # called for a will that had to wait

    @property
    def waiting(self) -> int:
        """The number of messages that wait."""
        return len(self._queue)

    @property
    def done(self) -> bool:
        return not self._queue

    def publish_status(self, topic: str, payload: bytes, retain: bool) -> None:
        """Publish a message of the broker itself at QoS 0; a retained one is not stored."""
        message = Message(topic, payload, 0, retain, NO_BYTES, "", self._context.clock.now, 0)
        if retain:
            self._publisher.retained.set(message, True, None)
        self._submit(BrokerMessage(message, None, True))

    def publish_will(self, message: Message, session: Session) -> bool:
        """Publish a will in the name of its session, if the session may publish to the topic; false if it waits."""
        return self._submit(BrokerMessage(message, session, False))

    def publish(self, message: Message, gate: Gate | None = None) -> BrokerMessage:
        """Publish a message of an operator, now or later."""
        waiting = BrokerMessage(message, None, False, gate)
        self._submit(waiting)
        return waiting

    def _submit(self, waiting: BrokerMessage) -> bool:
        turns = self._turns
        if self._iteration != turns.iteration:
            self._iteration = turns.iteration
            self._work = 0
        if not self._queue and self._work < WORK_LIMIT:
            router = self._publisher.router
            before: int = router.work
            if self._publish(waiting):
                self._work += MESSAGE_WORK + router.work - before
                return True
        if waiting.session is not None:
            self._context.will_bytes += waiting.message.size
        self._queue.append(waiting)
        turns.add(self)
        return False

    def step(self, budget: int) -> int:
        router = self._publisher.router
        cost: int = 0
        while self._queue and cost < budget:
            waiting = self._queue[0]
            router.work = 0
            published = self._publish(waiting)
            cost += router.work
            if not published:
                break
            cost += MESSAGE_WORK
            self._queue.popleft()
            if waiting.session is not None:
                self._context.will_bytes -= waiting.message.size
                if self.on_will_published is not None:
                    self.on_will_published(waiting.session)
        return cost

    def _publish(self, waiting: BrokerMessage) -> bool:
        """Publish a message, or drop it if that is not allowed.

        False if its route takes longer to build, or has very many targets while another message is being delivered to
        as many.
        """
        publisher = self._publisher
        router = publisher.router
        message = waiting.message
        session = waiting.session
        try:
            route = router.route_in_parts(message.topic.encode("utf-8"), self)
        except MQTTError:  # a stored will whose topic exceeds a limit that was lowered since
            publisher.outbound.counters.away.not_authorized += 1
            waiting.recipients = 0
            return True
        if route is None or (route.large and not publisher.fan_out.done):
            return False
        router.work += len(route.targets) // TARGETS_PER_WORK
        if route.to_queue:
            message.topic = route.message_topic
        outgoing = Outgoing(route.topic_bytes, message, self._context.clock.now)
        if waiting.own:
            if route.large:
                publisher.fan_out.begin(outgoing, route.targets, None, None)
                return True
            for target in route.targets:
                deliver(target, outgoing, None, None)
            return True
        if session is not None:
            outbound = publisher.outbound
            if route.reserved or not publisher.rules.may_publish(session, route.topic):
                outbound.counters.away.not_authorized += 1
                outbound.denials.log("will", route.topic, session.client_id, "", session.username, "")
                return True
            if message.retain and message.payload and not route.to_queue and publisher.retained_full(route.topic, message.size):
                outbound.counters.away.retained_full += 1
                message.retain = False
        waiting.recipients = len(route.targets) + len(route.groups) + len(route.streams)
        publisher.publish(outgoing, route, session, waiting.gate)
        return True
