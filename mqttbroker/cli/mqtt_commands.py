"""``mqttbroker pub`` and ``sub``: publish and subscribe with the options of mosquitto_pub and mosquitto_sub.

Exit status: 0 = done, 1 = failed, 2 = wrong call, 27 = ``-W`` seconds are over before ``-C`` messages came; a refused
connection gives the reason code of the CONNACK, as Mosquitto's commands do.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from mqttbroker.cli.message_format import check_format, formatted
from mqttbroker.cli.mqtt_options import VERSIONS, OptionError, add_options, apply_url, place
from mqttbroker.cli.paho_client import MQTT5, connect, make_client, properties
from topic_matcher.filters import is_valid_filter, is_valid_topic, matches

FAILED, WRONG_CALL, TIMED_OUT = 1, 2, 27
MAX_WAITING = 1000  # messages that `pub` has handed to the client and that are not acknowledged
CONNECT_TIMEOUT = 30.0  # seconds until the CONNACK


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(WRONG_CALL, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser(command: str, text: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"mqttbroker {command}",
        description=text,
        add_help=False,
        allow_abbrev=False,
        epilog=("exit status: 0 done; 1 failed; 2 wrong call; 27 -W is over; the reason code of a CONNACK that refuses"),
    )
    add_options(parser)
    return parser


def pub_parser() -> argparse.ArgumentParser:
    """The options of ``mqttbroker pub``."""
    parser = _parser("pub", "Publish messages with MQTT.")
    add = parser.add_argument
    add("-t", "--topic", metavar="TOPIC")
    add("-m", "--message", metavar="TEXT", help="the payload")
    add("-f", "--file", metavar="FILE", help="a file with the payload")
    add("-l", "--stdin-line", action="store_true", help="a message per line of standard input")
    add("-s", "--stdin-file", action="store_true", help="standard input is one payload")
    add("-n", "--null-message", action="store_true", help="an empty payload")
    add("-r", "--retain", action="store_true")
    add("--repeat", type=int, default=1, metavar="N", help="send -m, -f, -n or -s so often")
    add("--repeat-delay", type=float, default=0.0, metavar="SECONDS", help="between these")
    return parser


def sub_parser() -> argparse.ArgumentParser:
    """The options of ``mqttbroker sub``."""
    parser = _parser("sub", "Subscribe with MQTT and print the messages.")
    add = parser.add_argument
    add("-t", "--topic", action="append", default=[], metavar="FILTER", help="may be given several times")
    add("-T", "--filter-out", action="append", default=[], metavar="FILTER", help="do not print these topics")
    add("-U", "--unsubscribe", action="append", default=[], metavar="FILTER", help="unsubscribe from this")
    add("-C", type=int, dest="count", metavar="N", help="end after so many messages")
    add("-W", type=float, dest="timeout", metavar="SECONDS", help="end after so many seconds")
    add("-E", action="store_true", dest="subscribe_only", help="end when the subscriptions are acknowledged")
    add("-v", "--verbose", action="store_true", help="print the topic before the payload")
    add("-F", "--output-format", metavar="FORMAT", help="as of mosquitto_sub: %%t %%p %%x %%q %%r %%l %%j %%I @H:@M …")
    add("-N", "--no-end-of-line", action="store_true", help="print no line break after a payload")
    add("-R", "--no-retained", action="store_true", help="do not print retained messages")
    add("--retained-only", action="store_true", help="end with the first message that is not retained")
    add("--remove-retained", action="store_true", help="delete retained messages as they come")
    add("--retain-as-published", action="store_true", help="with -V mqttv5")
    return parser


class _Session:
    """A connection from CONNECT on; ``ended`` is set when the command is to end, with ``status``.

    One that is lost ends the command, unless there was a CONNACK and it ``reconnects``.
    """

    def __init__(self, name: str, options: argparse.Namespace, reconnects: bool) -> None:
        apply_url(options)
        self.name = name
        self.options = options
        self.status = 0
        self.reconnects = reconnects
        self.lost_at: float | None = None  # monotonic time since which there is no connection
        self.connected = threading.Event()
        self.ended = threading.Event()
        where = place(options)
        self.broker = options.unix or f"{options.host}:{where.port}"  # for messages
        self._where = where
        self.client: Client = make_client(options, where, reconnects)
        self.client.on_connect = self._on_connect
        self.client.on_disconnect = self._on_disconnect
        if options.debug:
            self.client.on_log = lambda client, data, level, text: print(text, file=sys.stderr)

    def open(self) -> None:
        """Connect in the background. Raises OSError and OptionError."""
        connect(self.client, self.options, self._where)
        self.client.loop_start()

    def end(self, status: int, reason: str = "") -> None:
        """Have the command end; the first reason counts."""
        if not self.ended.is_set():
            self.status = status
            if reason:
                self.say(reason)
            self.ended.set()
            self.connected.set()

    def say(self, text: str) -> None:
        """Print a problem."""
        if not self.options.quiet:
            print(f"mqttbroker {self.name}: {text}", file=sys.stderr)

    def close(self) -> None:
        self.ended.set()
        self.client.disconnect(properties=properties(self.options, "disconnect"))
        self.client.loop_stop()

    def _on_connect(self, client: Client, data: Any, flags: Any, reason: ReasonCode, given: Any) -> None:
        if reason.is_failure:
            # paho names the codes of 3.1.1 as those of 5.0; these are the return codes of section 3.2.2.3.
            codes = {132: 1, 133: 2, 136: 3, 134: 4, 135: 5}
            version5 = VERSIONS[self.options.protocol_version] == MQTT5
            code = reason.value if version5 else codes.get(reason.value, reason.value)
            self.end(code, f"connection refused: {reason}")
        else:
            self.lost_at = None
            self.opened()
            self.connected.set()

    def _on_disconnect(self, client: Client, data: Any, flags: Any, reason: ReasonCode, given: Any) -> None:
        if flags.is_disconnect_packet_from_server:
            self.end(FAILED, f"disconnected: {reason}")
        elif self.ended.is_set():
            return
        elif not self.connected.is_set():
            self.end(FAILED, f"{self.broker}: the connection was closed before a CONNACK came")
        elif self.reconnects:
            self.lost_at = time.monotonic()
            self.say(f"{self.broker}: connection lost; connecting again")
        else:
            self.end(FAILED, f"{self.broker}: connection lost{self.unfinished()}")

    def opened(self) -> None:
        """Called on the client's thread after each CONNACK."""

    def unfinished(self) -> str:
        """What a lost connection leaves undone, as the end of a message."""
        return ""


def _run(session: _Session, work: Any) -> int:
    """Connect, do the work, and disconnect; returns the exit status."""
    try:
        session.open()
    except OSError as error:
        session.say(f"{session.broker}: {error.strerror or error}")
        return FAILED
    signal.signal(signal.SIGTERM, lambda number, frame: session.end(0))
    try:
        if not session.connected.wait(session.options.timeout or CONNECT_TIMEOUT):
            session.end(TIMED_OUT if session.options.timeout else FAILED, f"{session.broker}: no CONNACK came")
        if not session.ended.is_set():
            work()
    except KeyboardInterrupt:
        session.end(0)
    finally:
        session.close()
    return session.status


# --- pub --------------------------------------------------------------------------------------------------------------


class _Publisher(_Session):
    """Publishes messages, `MAX_WAITING` of which may wait for their acknowledgement.

    With ``-l`` and QoS 1 or 2 it connects again, and sends again what was not acknowledged.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__("pub", options, bool(options.stdin_line and options.qos))
        self._waiting = 0  # messages that are not acknowledged, or at QoS 0 not sent
        self._lock = threading.Lock()  # for `_waiting`
        self._properties = properties(options, "publish")
        self._room = threading.Semaphore(MAX_WAITING)
        self.client.on_publish = self._on_publish
        self.options.timeout = None

    def work(self) -> None:
        for payload in _payloads(self.options, self.ended):
            if not self._take_room():
                return
            with self._lock:
                self._waiting += 1
            options = self.options
            self.client.publish(options.topic, payload, options.qos, options.retain, self._properties)
        for _ in range(MAX_WAITING):
            if not self._take_room(CONNECT_TIMEOUT):
                return

    def _take_room(self, longest: float = math.inf) -> bool:
        """Wait until a message more may wait, ``longest`` seconds without a connection; false if the command ends."""
        while not self._room.acquire(timeout=0.2):
            lost_at = self.lost_at
            if lost_at is not None and time.monotonic() - lost_at > longest:
                self.end(FAILED, f"{self.broker}: not connected for {longest:g} s{self.unfinished()}")
            if self.ended.is_set():
                return False
        return not self.ended.is_set()

    def unfinished(self) -> str:
        if not self.options.qos:
            return "; messages at QoS 0 may be lost"
        with self._lock:
            return f"; not acknowledged: {self._waiting}"

    def _on_publish(self, client: Client, data: Any, mid: int, reason: ReasonCode, given: Any) -> None:
        with self._lock:
            self._waiting -= 1
        self._room.release()
        if reason.is_failure:
            self.say(f"publication {mid} was refused: {reason}")
            self.status = FAILED


def _payloads(options: argparse.Namespace, ended: threading.Event) -> Iterator[bytes]:
    if options.stdin_line:
        for line in sys.stdin.buffer:
            yield line.rstrip(b"\n")
        return
    if options.file is not None:
        with open(options.file, "rb") as file:
            payload = file.read()
    elif options.stdin_file:
        payload = sys.stdin.buffer.read()
    else:
        payload = (options.message or "").encode(errors="surrogateescape")
    for number in range(options.repeat):
        if number and options.repeat_delay:
            ended.wait(options.repeat_delay)
        yield payload


def pub(words: list[str]) -> int:
    """Run ``mqttbroker pub``; returns its exit status."""
    parser = pub_parser()
    options = parser.parse_args(words)
    try:
        kinds = [options.message is not None, options.file is not None, options.stdin_line, options.stdin_file, options.null_message]
        session = _Publisher(options)
        if options.topic is None or not is_valid_topic(options.topic):
            raise OptionError("-t must be a topic name" if options.topic else "-t is required")
        if sum(kinds) != 1:
            raise OptionError("give one of -m, -f, -l, -n and -s")
        return _run(session, session.work)
    except OptionError as error:
        print(f"mqttbroker pub: {error}", file=sys.stderr)
        return WRONG_CALL
    except OSError as error:  # of -f
        print(f"mqttbroker pub: {options.file}: {error.strerror or error}", file=sys.stderr)
        return FAILED


# --- sub --------------------------------------------------------------------------------------------------------------


class _Subscriber(_Session):
    """Subscribes after each CONNACK, and prints messages."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__("sub", options, True)
        self._properties = properties(options, "subscribe")
        self._remaining: int | None = options.count
        self._output = sys.stdout.buffer
        # Otherwise the client acknowledges a message after `_on_message`, and with -C the DISCONNECT may be sent before.
        self.client.manual_ack_set(True)
        self.client.on_message = self._on_message
        self.client.on_subscribe = self._on_subscribe

    def opened(self) -> None:
        options = self.options
        if options.unsubscribe:
            self.client.unsubscribe(options.unsubscribe, properties(options, "unsubscribe"))
        if VERSIONS[options.protocol_version] == MQTT5:
            as_published = options.retain_as_published or options.remove_retained
            how = SubscribeOptions(options.qos, retainAsPublished=as_published)
            self.client.subscribe([(each, how) for each in options.topic], properties=self._properties)
        else:
            self.client.subscribe([(each, options.qos) for each in options.topic])

    def work(self) -> None:
        if not self.ended.wait(self.options.timeout):
            self.end(TIMED_OUT)

    def _on_subscribe(self, client: Client, data: Any, mid: int, reasons: list[ReasonCode], given: Any) -> None:
        for topic_filter, reason in zip(self.options.topic, reasons):
            if reason.is_failure:
                self.say(f"subscription to {topic_filter} was refused: {reason}")
        if all(reason.is_failure for reason in reasons):
            self.end(FAILED)
        elif self.options.subscribe_only:
            self.end(0)

    def _on_message(self, client: Client, data: Any, message: MQTTMessage) -> None:
        if self.ended.is_set():
            return
        options = self.options
        if options.retained_only and not message.retain:
            self.end(0)
            return
        wanted = not (message.retain and options.no_retained)
        wanted = wanted and not any(matches(each, message.topic) for each in options.filter_out)
        if wanted:
            if message.retain and options.remove_retained:
                client.publish(message.topic, b"", 1, True)
            try:
                self._print(message)
            except BrokenPipeError:
                self.end(0)
                return
        client.ack(message.mid, message.qos)
        if wanted and self._remaining is not None:
            self._remaining -= 1
            if self._remaining <= 0:
                self.end(0)

    def _print(self, message: MQTTMessage) -> None:
        options = self.options
        ending = b"" if options.no_end_of_line else b"\n"
        if options.output_format is not None:
            line = formatted(options.output_format, message, datetime.now())
        elif options.verbose:
            line = message.topic.encode() + b" " + message.payload
        else:
            line = bytes(message.payload)
        self._output.write(line + ending)
        self._output.flush()


def sub(words: list[str]) -> int:
    """Run ``mqttbroker sub``; returns its exit status."""
    options = sub_parser().parse_args(words)
    try:
        session = _Subscriber(options)
        if not options.topic and not options.unsubscribe:
            raise OptionError("-t is required")
        for text in (*options.topic, *options.filter_out, *options.unsubscribe):
            if not is_valid_filter(text):
                raise OptionError(f"not a topic filter: {text!r}")
        if options.output_format is not None:
            try:
                check_format(options.output_format)
            except ValueError as error:
                raise OptionError(f"-F: {error}") from None
        if options.count is not None and options.count < 1:
            raise OptionError("-C must be 1 or more")
        return _run(session, session.work)
    except OptionError as error:
        print(f"mqttbroker sub: {error}", file=sys.stderr)
        return WRONG_CALL
