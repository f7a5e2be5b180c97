"""The tests that each third-party client runs against a real broker with default settings.

A test_*.py beside this derives from Suite, names its adapter in ``connect`` and adds tests for that client only.
"""

from __future__ import annotations

import itertools
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from client import Client, Connection, Message, closing
from support.broker_process import BrokerProcess

Open = Callable[..., Client]
NAMES = (f"interop-{n}" for n in itertools.count())
COUNT = 5


def qos_of(message: Message) -> int:
    return message.qos


class Suite(ABC):
    """QoS 0, 1 and 2 both ways, retained messages, wills and resumed sessions in 3.1.1 and 5.0; properties in 5.0."""

    USER: tuple[tuple[str, str], ...] = (("b", "1"), ("a", "Grüße"), ("b", "2"))
    """User properties in an order that the client keeps."""

    @abstractmethod
    def connect(self, connection: Connection) -> Client:
        """A connected client of the library under test."""

    def port(self, broker: BrokerProcess) -> int:
        return broker.port

    @pytest.fixture
    def base(self) -> str:
        """A topic, or a prefix of client ids, that no other test uses."""
        return next(NAMES)

    @pytest.fixture(params=[4, 5], ids=["3.1.1", "5.0"])
    def version(self, request: pytest.FixtureRequest) -> int:
        version: int = request.param
        return version

    @pytest.fixture
    def opened(self, broker: BrokerProcess) -> Iterator[Open]:
        """``opened(client_id, version, **fields of Connection)``; closed at the end."""
        with ExitStack() as stack:

            def opened(client_id: str, version: int, **fields: Any) -> Client:
                connection = Connection(broker.host, self.port(broker), client_id, version, **fields)
                return stack.enter_context(closing(self.connect(connection)))

            yield opened

    @pytest.mark.parametrize("qos", [0, 1, 2])
    def test_publish_and_receive(self, opened: Open, base: str, version: int, qos: int) -> None:
        subscriber, publisher = opened(f"{base}-s", version), opened(f"{base}-p", version)
        subscriber.subscribe(f"{base}/+", qos)
        sent = [Message(f"{base}/{n}", b"%d" % n, qos) for n in range(COUNT)]
        for message in sent:
            publisher.publish(message)
        assert [subscriber.receive() for _ in sent] == sent

    def test_each_qos_to_each_granted_qos(self, opened: Open, base: str, version: int) -> None:
        publisher = opened(f"{base}-p", version)
        subscribers = [opened(f"{base}-{qos}", version) for qos in range(3)]
        for qos, subscriber in enumerate(subscribers):
            subscriber.subscribe(base, qos)
        for qos in range(3):
            publisher.publish(Message(base, b"%d" % qos, qos))
        for granted, subscriber in enumerate(subscribers):
            assert sorted((m.payload, m.qos) for m in (subscriber.receive() for _ in range(3))) == [
                (b"%d" % qos, min(qos, granted)) for qos in range(3)
            ]

    def test_retained_messages(self, opened: Open, base: str, version: int) -> None:
        publisher = opened(f"{base}-p", version)
        kept = [Message(f"{base}/{qos}", b"kept", qos, True) for qos in range(3)]
        for message in kept:
            publisher.publish(message)
        early = opened(f"{base}-early", version)
        early.subscribe(f"{base}/#", 2)
        assert sorted((early.receive() for _ in kept), key=lambda message: message.topic) == kept
        publisher.publish(replace(kept[1], payload=b""))
        assert early.receive() == Message(f"{base}/1", b"", 1)
        late = opened(f"{base}-late", version)
        late.subscribe(f"{base}/#", 2)
        assert sorted((late.receive() for _ in range(2)), key=lambda message: message.topic) == [kept[0], kept[2]]

    def test_will_after_connection_loss_only(self, opened: Open, base: str, version: int) -> None:
        watcher = opened(f"{base}-watch", version)
        watcher.subscribe(f"{base}/#", 2)
        orderly = opened(f"{base}-orderly", version, will=Message(f"{base}/orderly", b"gone", 1))
        orderly.subscribe(f"{base}-own", 0)
        orderly.close()
        doomed = opened(f"{base}-doomed", version, will=Message(f"{base}/doomed", b"gone", 1))
        doomed.subscribe(f"{base}-own", 0)
        doomed.drop()
        assert watcher.receive() == Message(f"{base}/doomed", b"gone", 1)

    def test_session_resumes(self, opened: Open, base: str, version: int) -> None:
        publisher, session = opened(f"{base}-p", version), {"clean": False, "kept": True}
        first = opened(f"{base}-s", version, **session)
        assert not first.session_present
        first.subscribe(f"{base}/#", 2)
        first.close()
        sent = [Message(f"{base}/{n}", b"%d" % n, 1 + n % 2) for n in range(COUNT)]
        for message in sent:
            publisher.publish(message)
        second = opened(f"{base}-s", version, **session)
        assert second.session_present in (True, None)
        # A QoS 2 message may reach the application at PUBREL, so the order holds for each QoS.
        assert sorted((second.receive() for _ in sent), key=qos_of) == sorted(sent, key=qos_of)
        second.close()
        third = opened(f"{base}-s", version, clean=True)
        assert not third.session_present
        third.subscribe(f"{base}-own", 0)
        publisher.publish(Message(f"{base}/x", b"to nobody", 1))
        publisher.publish(Message(f"{base}-own", b"to me"))
        assert third.receive().payload == b"to me"

    @pytest.mark.parametrize("qos", [0, 1, 2])
    def test_properties_arrive_unchanged(self, opened: Open, base: str, qos: int) -> None:
        subscriber, publisher = opened(f"{base}-s", 5), opened(f"{base}-p", 5)
        subscriber.subscribe(f"{base}/+", qos, identifier=300)
        sent = Message(
            f"{base}/x",
            b"{}",
            qos,
            user=self.USER,
            response_topic=f"{base}/answers",
            correlation=b"c-1",
            content_type="application/json",
            expiry=600,
        )
        publisher.publish(sent)
        got = subscriber.receive()
        assert 590 <= got.expiry <= 600
        assert replace(got, expiry=600) == replace(sent, identifiers=(300,))

    def test_request_and_response(self, opened: Open, base: str) -> None:
        asker, responder = opened(f"{base}-a", 5), opened(f"{base}-r", 5)
        asker.subscribe(f"{base}/answers", 1)
        responder.subscribe(f"{base}/questions", 1)
        question = Message(f"{base}/questions", b"6 x 9", 1, response_topic=f"{base}/answers", correlation=b"q-1")
        asker.publish(question)
        asked = responder.receive()
        assert asked == question
        responder.publish(Message(asked.response_topic, b"42", 1, correlation=asked.correlation))
        assert asker.receive() == Message(f"{base}/answers", b"42", 1, correlation=b"q-1")

    def test_expired_message_is_not_delivered(self, opened: Open, base: str) -> None:
        publisher, session = opened(f"{base}-p", 5), {"clean": False, "kept": True}
        first = opened(f"{base}-s", 5, **session)
        first.subscribe(f"{base}/#", 1)
        first.close()
        publisher.publish(Message(f"{base}/short", b"short", 1, expiry=1))
        with pytest.raises(queue.Empty):  # until the message has expired
            publisher.messages.get(timeout=1.5)
        publisher.publish(Message(f"{base}/long", b"long", 1))
        assert opened(f"{base}-s", 5, **session).receive() == Message(f"{base}/long", b"long", 1)
