"""Messages of the broker itself and of operators."""

from __future__ import annotations

from mqttbroker.admin.control.slices import ControlError, Slices, wake
from mqttbroker.codec.reason_codes import MQTTError
from mqttbroker.core.client.outbox import Outbound
from mqttbroker.core.commits import Commits
from mqttbroker.core.delivery.broker_messages import BrokerMessage, BrokerMessages
from mqttbroker.core.delivery.publisher import Publisher
from mqttbroker.core.routing.route import is_reserved
from mqttbroker.core.routing.router import Router
from mqttbroker.core.terms.terms import BrokerTerms
from sessions.journal import Gate
from sessions.message import Message
from topic_matcher.filters import is_valid_topic

MAX_WAITING = 1000  # messages of operators and wills that wait to be published
COMMIT_WAIT = 0.002  # seconds between looks whether a message is on disk


class MessageControl:
    """Publishes messages in the name of one broker."""

    def __init__(
        self, messages: BrokerMessages, publisher: Publisher, router: Router, terms: BrokerTerms, commits: Commits, outbound: Outbound
    ) -> None:
        self._messages = messages
        self._publisher = publisher
        self._router = router
        self._terms = terms
        self._commits = commits
        self._outbound = outbound

    def publish(
        self,
        topic: str,
        payload: bytes,
        qos: int = 0,
        retain: bool = False,
        properties: bytes = b"",
        expiry: int | None = None,
    ) -> Slices[int]:
        """Publish a message in the name of the broker; it expires after ``expiry`` seconds.

        Returns how many subscriptions and streams it went to, at QoS 1 and 2 after it is on disk where it has to be.
        An empty retained one deletes the retained message.
        """
        gate = Gate()
        published = self._publish(topic, payload, qos, retain, properties, expiry, gate if qos or retain else None)
        while published.recipients < 0 or gate.pending:
            yield COMMIT_WAIT
        if gate.failed:
            raise ControlError(f"the message could not be stored: {self._commits.error or 'the disk failed'}")
        return published.recipients

    def set_retained(self, topic: str, payload: bytes, qos: int = 1, properties: bytes = b"") -> None:
        """Publish a retained message in the name of the broker: subscribers get it, too."""
        if not payload:
            raise ControlError("a retained message has a payload")
        self._publish(topic, payload, qos, True, properties, None, None)

    def _publish(
        self,
        topic: str,
        payload: bytes,
        qos: int,
        retain: bool,
        properties: bytes,
        expiry: int | None,
        gate: Gate | None,
    ) -> BrokerMessage:
        if not is_valid_topic(topic):
            raise ControlError(f"not a topic name: {topic!r}")
        if retain and not self._terms.retain_available:
            raise ControlError("this broker retains no messages")
        now = self._outbound.clock.now
        message = Message(topic, payload, qos, retain, properties, "", now, 0 if expiry is None else now + expiry * 1_000_000)
        if retain and payload and self._publisher.retained_full(topic, message.size):
            raise ControlError("no room for one more retained message")
        try:
            self._router.topic_of(topic.encode("utf-8"))
        except MQTTError as error:
            raise ControlError(error.detail) from None
        if is_reserved(topic) and self._router.queue_topic(topic) is None:
            raise ControlError(f"{topic!r} is reserved for the broker")
        if self._messages.waiting > MAX_WAITING:
            raise ControlError("too many messages wait for their subscribers")
        published = self._messages.publish(message, gate)
        wake(self._outbound)
        return published

    @property
    def publishing(self) -> bool:
        """Whether messages of the broker wait to be published, because they have very many subscribers."""
        return self._messages.waiting > 0

    @property
    def waiting(self) -> int:
        """The number of messages of the broker, of operators and of wills that wait to be published."""
        return self._messages.waiting

    def publish_own(self, topic: str, payload: bytes, retain: bool = True) -> None:
        """Publish a message of the broker itself (``$SYS``); a retained one is not stored."""
        self._messages.publish_status(topic, payload, retain)
