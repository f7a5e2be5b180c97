"""Connections to the Kafka brokers, and which of them leads each partition of a topic.

A broker that does not answer delays nothing that another one can do: each has connections of its own, and all of them are asked
for metadata at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any, Final, TypeVar

from aiokafka.conn import AIOKafkaConnection, CloseReason, create_conn
from aiokafka.errors import KafkaConnectionError, KafkaError, NodeNotReadyError, RequestTimedOutError, for_code
from aiokafka.protocol.metadata import MetadataRequest

log = logging.getLogger("mqttbroker.cluster")

CONNECT_TIMEOUT: Final = 1.0  # seconds for a connection with TLS and SASL
ASK_TIMEOUT: Final = 1.0  # seconds for an answer that a Kafka broker has at once
OTHERS_WAIT: Final = 0.05  # seconds in which more brokers may answer, so that one that is behind is outvoted
IDLE: Final = 540.0  # seconds without a request after which a connection is closed, before the Kafka broker does it
LONGEST_REQUEST: Final = 3600.0  # seconds; each request has its own limit
ASKS: Final = "ask"  # the purpose of a connection whose requests are answered at once
CLIENT_ID: Final = "mqttbroker"

Address = tuple[str, int]
T = TypeVar("T")


class KafkaBrokers:
    """All of them, for ``topic``. All methods are for one event loop.

    ``connection`` are the arguments of aiokafka's clients for the bootstrap servers and their security. A Kafka broker answers the
    requests of a connection one after the other, so those that may take long have connections of their own: ``purpose``.
    """

    def __init__(self, connection: dict[str, Any], topic: str) -> None:
        self.topic = topic
        self.partitions = 0  # of the topic; 0 = not known
        self.problem = ""  # why nothing is known of the topic, as of the last `refresh`
        self._security = {name: value for name, value in connection.items() if name != "bootstrap_servers"}
        self._bootstrap = [_address(server) for server in connection.get("bootstrap_servers", ())]
        self._addresses: dict[int, Address] = {}  # by the number of the broker
        self._known: dict[int, Address] = {}  # the same, also of brokers that have left
        self._leaders: dict[int, int] = {}  # by partition; those that are known
        self._connections: dict[tuple[Address, str], AIOKafkaConnection] = {}
        self._opening: dict[tuple[Address, str], asyncio.Task[AIOKafkaConnection]] = {}
        self._refreshing: asyncio.Task[bool] | None = None
        self._asking: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def close(self) -> None:
        """Close all connections; requests under way fail."""
        self._closed = True
        tasks: list[asyncio.Task[Any]] = [*self._opening.values(), *self._asking]
        if self._refreshing is not None:
            tasks.append(self._refreshing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        closing = [connection.close(reason=CloseReason.SHUTDOWN) for connection in self._connections.values()]
        self._connections.clear()
        await asyncio.gather(*(one for one in closing if one is not None))

    # -- metadata -----------------------------------------------------------------

    def leader(self, partition: int) -> int | None:
        """The broker that leads a partition, as of the last metadata; None if there is none."""
        return self._leaders.get(partition)

    async def refresh(self) -> bool:
        """Ask all brokers at once; whether one has answered. Calls at one time share the answer."""
        if self._closed:
            return False
        task = self._refreshing
        if task is None or task.done():
            task = self._refreshing = asyncio.get_running_loop().create_task(self._refresh())
        return await _shared(task)

    def refresh_soon(self) -> None:
        """`refresh`, without waiting for it."""
        if not self._closed and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())

    async def _refresh(self) -> bool:
        waiting = {asyncio.create_task(self._metadata(address)) for address in {*self._addresses.values(), *self._bootstrap}}
        for task in waiting:  # those that are late go on, so that the connection of a broker that is gone is closed
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        answers: list[Any] = []
        reasons: list[str] = []
        while waiting:
            timeout = OTHERS_WAIT if answers else None
            done, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if isinstance(found := task.result(), Exception):
                    reasons.append(_text(found))
                else:
                    answers.append(found)
            if answers and not done:
                break
        if answers:
            self._use(answers)
        else:
            self.problem = f"no Kafka broker answers: {'; '.join(sorted(reasons))}"
        return bool(answers)

    async def _metadata(self, address: Address) -> Any:
        """The answer of a broker, or the error in its place."""
        try:
            answer = await self._ask(address, ASKS, MetadataRequest([self.topic], False), ASK_TIMEOUT)
        except (KafkaError, OSError) as error:
            return error
        except Exception as error:
            log.exception("event=defect in=metadata address=%s", f"{address[0]}:{address[1]}")
            return error  # the others may answer
        return answer if answer.brokers else KafkaConnectionError(f"{address[0]}:{address[1]}: knows no Kafka broker")

    def _use(self, answers: list[Any]) -> None:
        """Of brokers that differ, most are right: one that is cut off from the others is behind."""
        self._addresses = {number: (host, port) for answer in answers for number, host, port, *_ in answer.brokers}
        self._known.update(self._addresses)
        votes: dict[int, Counter[int]] = {}
        problems = []
        for answer in answers:
            for code, topic, _, partitions in answer.topics:
                if topic != self.topic:
                    continue
                if code:
                    problems.append(for_code(code).__name__)
                for _, partition, leader, *_ in partitions:
                    votes.setdefault(partition, Counter())[leader] += 1
        self.problem = problems[0] if problems and not votes else ""
        self.partitions = len(votes) or self.partitions
        found = {partition: counted.most_common(1)[0][0] for partition, counted in votes.items()}
        self._leaders = {partition: leader for partition, leader in found.items() if leader in self._addresses}

    # -- requests -------------------------------------------------------------------

    async def connect(self, broker: int, purpose: str) -> None:
        """Connect to a broker for requests of this purpose. Raises `KafkaError` or `OSError`."""
        await self._connection(self._address(broker), purpose)

    async def send(self, broker: int, purpose: str, request: Any, timeout: float) -> Any:
        """The answer to a request. Raises `NodeNotReadyError` if nothing was sent, and other errors if that is not certain.

        A connection that has not answered within ``timeout`` seconds is closed.
        """
        return await self._ask(self._address(broker), purpose, request, timeout)

    def give_up(self, broker: int, purpose: str) -> None:
        """Close the connection to a broker, which may have left: requests under way fail."""
        address = self._known.get(broker)
        connection = None if address is None else self._connections.pop((address, purpose), None)
        if connection is not None:
            connection.close(reason=CloseReason.CONNECTION_TIMEOUT)

    def _address(self, broker: int) -> Address:
        address = self._addresses.get(broker)
        if address is None:
            raise NodeNotReadyError(f"broker {broker} is not known")
        return address

    async def _ask(self, address: Address, purpose: str, request: Any, timeout: float) -> Any:
        try:
            connection = await self._connection(address, purpose)
        except (KafkaError, OSError) as error:
            raise NodeNotReadyError(f"{address[0]}:{address[1]}: {error!r}") from None
        try:
            async with asyncio.timeout(timeout):
                return await connection.send(request)
        except TimeoutError:
            if self._connections.get((address, purpose)) is connection:
                del self._connections[address, purpose]
            connection.close(reason=CloseReason.CONNECTION_TIMEOUT)
            raise RequestTimedOutError(f"{address[0]}:{address[1]}: no answer in {timeout:g} s") from None

    async def _connection(self, address: Address, purpose: str) -> AIOKafkaConnection:
        key = address, purpose
        connection = self._connections.get(key)
        if connection is not None and connection.connected():
            return connection
        if self._closed:
            raise KafkaConnectionError("closed")
        task = self._opening.get(key)
        if task is None:
            task = self._opening[key] = asyncio.get_running_loop().create_task(self._open(key))
            task.add_done_callback(lambda done: self._opened(key, done))
        return await _shared(task)

    async def _open(self, key: tuple[Address, str]) -> AIOKafkaConnection:
        (host, port), _ = key
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                return await create_conn(
                    host, port, client_id=CLIENT_ID, request_timeout_ms=int(LONGEST_REQUEST * 1000), max_idle_ms=int(IDLE * 1000),
                    **self._security,
                )  # fmt: skip
        except TimeoutError:
            raise KafkaConnectionError(f"{host}:{port}: not connected in {CONNECT_TIMEOUT:g} s") from None

    def _opened(self, key: tuple[Address, str], task: asyncio.Task[AIOKafkaConnection]) -> None:
        del self._opening[key]
        if task.cancelled() or task.exception() is not None:
            return
        if self._closed:
            task.result().close(reason=CloseReason.SHUTDOWN)
        else:
            self._connections[key] = task.result()


def _text(error: Exception) -> str:
    """The text of an error, which has the address; those of aiokafka begin with the name of their class."""
    return str(error.args[0]) if isinstance(error, KafkaError) and error.args else repr(error)


async def why_unreachable(connection: dict[str, Any]) -> str:
    """Why no bootstrap server answers, for an error of aiokafka's clients, which do not say it; "" if one answers now."""
    brokers = KafkaBrokers(connection, "")
    try:
        return "" if await brokers.refresh() else brokers.problem
    finally:
        await brokers.close()


async def _shared(task: asyncio.Task[T]) -> T:
    """The result of a task that others wait for, too."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if task.cancelled() and current is not None and not current.cancelling():
            raise KafkaConnectionError("closed") from None
        raise


def _address(server: str) -> Address:
    host, _, port = server.rpartition(":")
    return host.strip("[]"), int(port)
