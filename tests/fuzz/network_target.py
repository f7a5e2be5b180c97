"""A broker process under invalid input, over TCP and WebSocket.

Nothing in the log reports a defect, the process does not grow, the standard allows every answer, and two valid clients
(the bystanders) are not affected.
"""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

from support.broker_process import BrokerProcess
from support.core import wait_until
from support.raw_client import RawClient
from support.stream_client import PATH, StreamClient, WebSocketStream, tcp_socket
from websockets.frames import Frame, Opcode

from fuzz.generator import Conversation, Generator
from fuzz.verdict import Finding, judge, offence, shown
from mqttbroker.codec.packets import Publish

CLIENTS = 48  # concurrent connections
CLOSE_SECONDS = 20.0  # for the broker to close a connection
CONFIG = """
allow_anonymous = true
sys_interval = "1s"
[limits]
max_session_expiry = "1s"
max_packet_size = "80000B"
receive_maximum = 10
max_subscriptions_per_client = 6
max_retained_messages = 30
max_queued_messages = 50
max_outbox_bytes = "100000B"
route_cache_size = 100
[[listeners]]
[[listeners]]
type = "ws"
port = 0
"""
REQUEST = (
    f"GET {PATH} HTTP/1.1\r\nHost: broker\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Protocol: mqtt\r\n\r\n"
).encode()
# The garbage collector first runs after about 1500 connections; until then it frees no reference cycles.
WARM_UP = 2000  # connections
GROWTH = 8 << 20  # bytes by which caches and the allocator may still grow after the warm-up
DEFECT = re.compile(r"event=defect|Traceback|Fatal error|never retrieved|^\S+ (error|critical) ")


class Bystanders(threading.Thread):
    """A publisher over TCP and a subscriber over WebSocket that follow the standard, until `stop`."""

    def __init__(self, port: int, websocket_port: int) -> None:
        super().__init__(daemon=True)
        self.publisher = RawClient(port, 4)
        self.subscriber = StreamClient(WebSocketStream(tcp_socket(websocket_port)), 5)
        self.publisher.connect("bystander-publisher")
        self.subscriber.connect("bystander-subscriber")
        self.subscriber.subscribe("bystander/+", options=2)
        self.messages = 0
        self.error: BaseException | None = None
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            while not self._stopping.wait(0.02):
                self._beat()
        except BaseException as error:
            self.error = error

    def _beat(self) -> None:
        self.messages += 1
        payload, qos = str(self.messages).encode(), self.messages % 3
        if self.publisher.publish("bystander/beat", payload, qos):
            raise Finding(f"message {self.messages} of the bystander was not acknowledged")
        message = self.subscriber.take(CLOSE_SECONDS)
        if (message.payload, message.qos) != (payload, qos):
            raise Finding(f"the bystander got {message.payload!r} for message {self.messages}")
        if self.publisher.ping() or any(isinstance(packet, Publish) for packet in self.subscriber.ping()):
            raise Finding(f"the bystanders got more than message {self.messages}")

    def stop(self) -> None:
        self._stopping.set()
        self.join(60)
        self.publisher.close()
        self.subscriber.close()


class Offender:
    """A connection and the conversation it sends; ``websocket`` puts it into frames of any kind."""

    def __init__(self, conversation: Conversation, random: Random, websocket: bool) -> None:
        self.conversation = conversation
        self.random = random
        self.websocket = websocket
        self.sent = b""
        self.received = bytearray()
        self.closed = False
        self.reset = False  # by the peer: its last packets may be lost
        self.framed_well = True

    async def talk(self, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reading = asyncio.create_task(self._read(reader))
        try:
            if self.websocket:
                writer.write(REQUEST)
            for piece in self.conversation.pieces:
                if reading.done():
                    break
                writer.write(self._frame(piece) if self.websocket else piece)
                self.sent += piece
                await writer.drain()
                if self.random.random() < 0.2:
                    await asyncio.sleep(0)
            if self.framed_well and offence(self.sent) is not None:
                await asyncio.wait((reading,), timeout=CLOSE_SECONDS)
            else:
                await asyncio.wait((reading,), timeout=self.random.choice((0, 0.01, 0.1)))
        except ConnectionError:
            self.reset = True
            await asyncio.wait((reading,), timeout=CLOSE_SECONDS)
        finally:
            self.closed = reading.done()
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(1 << 16):
                self.received += data
                if self.websocket and _unframed(bytes(self.received))[1]:
                    return
        except ConnectionError:
            self.reset = True

    def _frame(self, piece: bytes) -> bytes:
        random = self.random
        if random.random() < 0.003:
            self.framed_well = False
            return random.choice((piece, Frame(Opcode.TEXT, piece).serialize(mask=True), _masked(Opcode.CONT, piece)))
        if random.random() < 0.05:
            half = len(piece) // 2
            ping = Frame(Opcode.PING, b"?").serialize(mask=True) if random.random() < 0.5 else b""
            return _masked(Opcode.BINARY, piece[:half], False) + ping + _masked(Opcode.CONT, piece[half:])
        return _masked(Opcode.BINARY, piece)

    def judge(self) -> None:
        """Raises Finding unless the standard allows the broker's answers."""
        received = _unframed(bytes(self.received))[0] if self.websocket else bytes(self.received)
        whole = self.closed and not self.reset
        sent = self.sent if self.framed_well else b""
        try:
            if self.framed_well and not self.closed and offence(sent) is not None:
                raise Finding(f"the connection is open {CLOSE_SECONDS} s after a packet that the standard forbids")
            judge(sent, received, self.closed or not whole, whole)
        except Finding as finding:
            raise Finding(f"{finding}\n  sent {shown(self.sent)}\n  got {shown(received)}") from None


def _masked(opcode: Opcode, data: bytes, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


def _unframed(data: bytes) -> tuple[bytes, bool]:
    """The binary payloads that a server sent after the handshake, and whether it sent a Close frame."""
    head, _, rest = data.partition(b"\r\n\r\n")
    if head and not head.startswith(b"HTTP/1.1 101 "):
        raise Finding(f"answered a valid handshake with {head[:80]!r}")
    payload = b""
    while len(rest) >= 2:
        opcode, size, start = rest[0] & 15, rest[1], 2
        if size > 125:
            start = 4 if size == 126 else 10
            size = int.from_bytes(rest[2:start], "big")
        if opcode not in (Opcode.BINARY, Opcode.CLOSE, Opcode.PONG):
            raise Finding(f"sent a frame of opcode {opcode}")
        if opcode == Opcode.CLOSE:
            return payload, True
        if opcode == Opcode.BINARY:
            payload += rest[start : start + size]
        rest = rest[start + size :]
    return payload, False


class NetworkTarget:
    """A broker process and its bystanders; `round` sends the conversations of one seed."""

    def __init__(self) -> None:
        self._exits = ExitStack()
        self.process = self._exits.enter_context(BrokerProcess(config=CONFIG))
        self.process.wait_for_log("event=started")
        websockets = [line for line in self.process.lines if "event=listening type=ws " in line]
        self.websocket_port = int(websockets[0].rpartition("port=")[2])
        self.bystanders = Bystanders(self.process.port, self.websocket_port)
        self.bystanders.start()
        self.rounds = 0
        self.connections = 0
        self.sizes: list[int] = []  # resident memory after each round, in bytes
        self._settled = 0  # the largest during the warm-up
        self._lines = 0

    def close(self) -> None:
        self.bystanders.stop()
        self._exits.close()

    def round(self, seed: str) -> None:
        """Raises Finding if the broker fails during the round or after it."""
        generator = Generator(seed)
        offenders = [Offender(generator.conversation(), Random(f"{seed}/{number}"), number % 2 == 1) for number in range(CLIENTS)]
        asyncio.run(self._talk(offenders))
        for offender in offenders:
            offender.judge()
        self.rounds += 1
        self.connections += len(offenders)
        self._look()

    async def _talk(self, offenders: list[Offender]) -> None:
        ports = {False: self.process.port, True: self.websocket_port}
        await asyncio.gather(*(offender.talk(ports[offender.websocket]) for offender in offenders))

    def _look(self) -> None:
        """Check offenders, bystanders, log and memory."""
        if not self.process.running:
            raise Finding("the broker has ended")
        new, self._lines = self.process.lines[self._lines :], len(self.process.lines)
        defects = [line for line in new if DEFECT.search(line)]
        if defects:
            raise Finding("the log reports a defect:\n" + "\n".join(new))
        try:
            wait_until(lambda: self.metric("clients_connected") == 2)
        except AssertionError:
            raise Finding(f"{self.metric('clients_connected')} clients are connected") from None
        if self.bystanders.error is not None:
            raise Finding(f"a bystander failed: {self.bystanders.error!r}") from self.bystanders.error
        self.sizes.append(resident(self.process.pid))
        if self.connections <= WARM_UP:
            self._settled = max(self.sizes)
        elif self.sizes[-1] > self._settled + GROWTH:
            raise Finding(f"resident memory has grown: {[size >> 20 for size in self.sizes]} MiB")

    def expect_no_sessions(self) -> None:
        """Check that the sessions of the offenders end."""
        try:
            wait_until(lambda: self.metric("sessions") == 2)
        except AssertionError:
            raise Finding(f"{self.metric('sessions')} sessions are left") from None

    def metric(self, name: str) -> float:
        text = self.process.get("/metrics").decode()
        return float(text.partition(f"\nmqttbroker_{name} ")[2].split()[0])


def resident(pid: int) -> int:
    """A process's resident memory in bytes; 0 where the system does not report it."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0
