"""``mqttbroker bench``: a bounded load on a running broker, with its latencies and a count of what is missing.

Exit status: 0 = each message came as its QoS promises, 1 = one did not, 2 = wrong call, or no connection.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from mqttbroker.cli.broker_processes import BrokerCpu, UnknownCpu, broker_of
from mqttbroker.cli.load import MAX_MESSAGES, MIN_SIZE, TIMER, Account, Load, Opener, Plan
from mqttbroker.cli.load_client import Connection, LoadError
from mqttbroker.cli.mqtt_options import (
    VERSIONS,
    BrokerAddress,
    OptionError,
    add_connection_options,
    apply_url,
    password,
    place,
    tls_context,
)
from mqttbroker.cli.tables import cell, print_json, print_table
from topic_matcher.filters import is_valid_topic

DONE, MISSING, WRONG_CALL = range(3)
MAX_SIZE = 16 << 20  # bytes of a payload
_OTHER_FILES = 64  # open files beside the connections
_BUSY = 0.9  # of a core: above it the command itself bounds the rate
_SHOWN = 5  # lost connections
_NAMES = {3: "3.1", 4: "3.1.1", 5: "5.0"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_CALL, f"{self.prog}: {message} (see {self.prog} --help)\n")


def bench_parser() -> argparse.ArgumentParser:
    """The options of ``mqttbroker bench``."""
    parser = _Parser(
        prog="mqttbroker bench",
        add_help=False,
        allow_abbrev=False,
        description="Publish to a running broker at a rate, or as fast as it acknowledges, and measure latencies.",
        epilog="Publisher i publishes to PREFIX/ID/i, with a random ID. Without options: 10 publishers, each with a subscriber, 1000 "
        "messages/s at QoS 1 for 8 s. Ctrl-C ends the sending and prints the result, pressed again without waiting for "
        "what is on its way. Nothing is retained, and all sessions are removed. exit status: 0 each message came as its "
        "QoS promises; 1 a message is missing, refused, out of order, or there twice at QoS 0 or 2; 2 wrong call, or the "
        "broker cannot be reached or refuses a connection or subscription",
    )
    add_connection_options(parser)
    load = parser.add_argument_group("load")
    add = load.add_argument
    add("--publishers", type=int, default=10, metavar="N", help="default: 10")
    add("--subscribers", type=int, metavar="N", help="0 = none; default: as many as publishers, or --fan-out if that is more")
    add(
        "--fan-out",
        type=int,
        metavar="N",
        help="subscribers that get each message; default: so many that each subscriber gets the messages of a publisher",
    )
    add("-q", "--qos", type=int, choices=(0, 1, 2), default=1, help="of messages and subscriptions; default: 1")
    add("--size", type=int, default=64, metavar="BYTES", help=f"of a payload, {MIN_SIZE} or more; default: 64")
    add(
        "--rate",
        default="1000",
        metavar="RATE",
        help='messages/s of all publishers together, or "max": as fast as is acknowledged; default: 1000',
    )
    add(
        "--window",
        type=int,
        default=100,
        metavar="N",
        help="messages of a publisher that may be unacknowledged, at QoS 0 with --rate max undelivered; default: 100",
    )
    add("--duration", type=float, default=8.0, metavar="SECONDS", help="of sending; default: 8")
    add("--count", type=int, default=1_000_000, metavar="N", help="messages after which the sending ends, too; default: 1000000")
    add("--drain", type=float, default=5.0, metavar="SECONDS", help="wait so long without progress for what is on its way; default: 5")
    add("--persistent", action="store_true", help="with persistent sessions of the subscribers")
    add("-t", "--topic", default="bench", metavar="PREFIX", help="of the topics; default: bench")
    add("-I", "--id-prefix", default="bench", metavar="PREFIX", help="of the client ids; default: bench")
    add("--broker-pid", type=int, metavar="PID", help="the broker's process, if the command does not find it")
    add("--interval", type=float, default=1.0, metavar="SECONDS", help="between two lines of progress on stderr; default: 1")
    add("--quiet", action="store_true", help="print no progress")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def main(words: list[str]) -> int:
    """Run ``mqttbroker bench``; returns its exit status."""
    options = bench_parser().parse_args(words)
    try:
        apply_url(options)
        where = place(options)
        plan = _plan(options)
        secret = password(options)
        account = Account(
            VERSIONS[options.protocol_version], options.keepalive, options.username, None if secret is None else secret.encode()
        )
        _check_files(plan)
        load = _Run(options, where, plan, account)
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(load.run())
    except (OptionError, LoadError) as error:
        print(f"mqttbroker bench: {cell(str(error))}", file=sys.stderr)
    except OSError as error:
        broker = options.unix or f"{options.host}:{where.port}"
        reason = error.strerror or str(error) or "the connection was closed while it was made"
        print(f"mqttbroker bench: {broker}: {cell(reason)}", file=sys.stderr)
    return WRONG_CALL


def _plan(options: argparse.Namespace) -> Plan:
    """The plan of the options. Raises OptionError."""
    bounds: tuple[tuple[str, float, float | None, float], ...] = (
        ("--publishers", 1, options.publishers, math.inf), ("--subscribers", 0, options.subscribers, math.inf),
        ("--fan-out", 1, options.fan_out, math.inf), ("--size", MIN_SIZE, options.size, MAX_SIZE),
        ("--window", 1, options.window, 65535), ("--duration", 0.1, options.duration, math.inf),
        ("--count", 1, options.count, MAX_MESSAGES), ("--drain", 0, options.drain, math.inf),
        ("--interval", 0.1, options.interval, math.inf), ("-k", 0, options.keepalive, 65535),
    )  # fmt: skip
    for name, least, value, most in bounds:
        if value is not None and not value >= least:
            raise OptionError(f"{name} must be {least:g} or more")
        if value is not None and value > most:
            raise OptionError(f"{name} must be {most:.0f} or less")
    try:
        rate = 0.0 if options.rate == "max" else float(options.rate)
    except ValueError:
        rate = -1.0
    if rate < 0 or not math.isfinite(rate) or (rate == 0 and options.rate != "max"):
        raise OptionError('--rate must be a number above 0, or "max"')
    subscribers = options.subscribers
    if subscribers is None:
        subscribers = max(options.publishers, options.fan_out or 1)
    fan_out = options.fan_out or max(1, -(-subscribers // options.publishers))
    if subscribers and not fan_out <= subscribers <= fan_out * options.publishers:
        few = subscribers < fan_out
        raise OptionError(
            f"--subscribers must be {fan_out} or more, as --fan-out is"
            if few
            else f"--subscribers must be {fan_out * options.publishers} or less: others would get nothing"
        )
    run = secrets.token_hex(4)
    topics = f"{options.topic}/{run}"
    if not is_valid_topic(topics) or options.topic.startswith("$"):
        raise OptionError("-t must be the beginning of a topic name, and not begin with $")
    return Plan(
        options.publishers,
        subscribers,
        fan_out,
        options.qos,
        options.size,
        rate,
        options.window,
        options.duration,
        options.count,
        options.drain,
        options.persistent,
        topics,
        f"{options.id_prefix}-{run}",
    )


def _check_files(plan: Plan) -> None:
    """Raise the limit of open files as far as the connections need. Raises OptionError."""
    needed = plan.publishers + plan.subscribers + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise OptionError(f"so many connections need {needed} open files, and the hard limit (ulimit -Hn) is {hard}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _Run:
    """One run of the command: the load, its progress, and its result."""

    def __init__(self, options: argparse.Namespace, where: BrokerAddress, plan: Plan, account: Account) -> None:
        self._options = options
        self._where = where
        self._account = account
        self._plan = plan
        self._own_cpu = 0.0
        self._cpu: BrokerCpu | None = None
        self._cpu_used = 0.0
        self._cpu_unknown = ""

    async def run(self) -> int:
        """Run the load and print its result; returns the exit status. Raises LoadError, OptionError or OSError."""
        load = Load(self._plan, self._account, _opener(self._where, self._options))
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        stop: Callable[[], Any] = task.cancel
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: stop())
        try:
            await load.connect()
            self._find_broker(load.publishers[0])
            stop = load.stop
            progress = asyncio.ensure_future(self._progress(load))
            before, self._own_cpu = self._cpu_seconds(), time.process_time()
            try:
                await load.measure()
            finally:
                progress.cancel()
            self._own_cpu = time.process_time() - self._own_cpu
            self._cpu_used = self._cpu_seconds() - before
            self._say("")
        except asyncio.CancelledError:
            print("mqttbroker bench: interrupted before the first message", file=sys.stderr)
            return MISSING
        finally:
            await load.close()
        result = self._result(load)
        print_json(result) if self._options.json else self._print(result)
        return DONE if load.ok else MISSING

    # --- the CPU time of the broker -----------------------------------------------------------------------------------

    def _find_broker(self, connection: Connection) -> None:
        try:
            pid = self._options.broker_pid
            self._cpu = broker_of(connection.extra("socket")) if pid is None else BrokerCpu(pid)
        except UnknownCpu as error:
            self._cpu_unknown = str(error)

    def _cpu_seconds(self) -> float:
        try:
            return 0.0 if self._cpu is None else self._cpu.seconds()
        except UnknownCpu as error:
            self._cpu, self._cpu_unknown = None, str(error)
            return 0.0

    # --- progress -----------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """Show a line of progress, on a terminal in the place of the last one; "" removes it there."""
        if self._options.quiet:
            return
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif text:
            print(text, file=sys.stderr, flush=True)

    async def _progress(self, load: Load) -> None:
        sent = delivered = 0
        before = time.monotonic()
        while True:
            await asyncio.sleep(self._options.interval)
            now = time.monotonic()
            rates = [(value - old) / (now - before) for value, old in ((load.sent, sent), (load.delivered, delivered))]
            sent, delivered, before = load.sent, load.delivered, now
            latency = load.delivery if load.delivery.count else load.acknowledgement
            self._say(
                f"{load.elapsed():5.1f} s  sent {sent} ({rates[0]:.0f}/s)  acknowledged {load.acknowledged}  "
                f"delivered {delivered} ({rates[1]:.0f}/s)  p50 {latency.percentile(50):.2f} ms  p99 {latency.percentile(99):.2f} ms"
            )

    # --- the result ---------------------------------------------------------------------------------------------------

    def _result(self, load: Load) -> dict[str, Any]:
        plan, after = self._plan, max(load.finished_after, 1e-9)
        messages = load.delivered or load.sent
        known = self._cpu is not None and messages > 0
        return {
            "plan": {"publishers": plan.publishers, "subscribers": plan.subscribers, "fan_out": plan.fan_out if plan.subscribers else 0,
                     "qos": plan.qos, "size": plan.size, "rate": plan.rate or "max", "window": plan.window,
                     "version": _NAMES[self._account.version], "persistent": plan.persistent, "topics": plan.topics},
            "seconds": round(load.seconds, 3),
            "sent": load.sent, "unsent": load.unsent, "acknowledged": load.acknowledged, "refused": load.refused,
            "unacknowledged": load.unacknowledged, "delivered": load.delivered, "lost": load.lost, "duplicated": load.duplicated,
            "out_of_order": load.out_of_order, "unexpected": load.unexpected,
            "sent_per_s": round(load.sent / max(load.seconds, 1e-9), 1), "delivered_per_s": round(load.delivered / after, 1),
            "delivery_ms": load.delivery.summary(), "acknowledgement_ms": load.acknowledgement.summary(),
            "sent_late": load.late.count, "sent_late_ms": load.late.summary(),
            "broker_cpu_us_per_message": round(self._cpu_used / messages * 1e6, 2) if known else None,
            "broker_process": f"{self._cpu.name}, pid {self._cpu.pids[0]}" if known and self._cpu is not None else None,
            "broker_cpu_unknown": None if known else self._cpu_unknown or "no messages",
            "client_cpu_percent": round(100 * self._own_cpu / max(load.seconds, after), 1),
            "disconnected": load.disconnected, "sessions_left": load.sessions_left,
            "interrupted": load.interrupted, "ok": load.ok,
        }  # fmt: skip

    def _print(self, result: dict[str, Any]) -> None:
        plan = result["plan"]
        rate = "as fast as acknowledged" if plan["rate"] == "max" else f"{plan['rate']:g} messages/s"
        sessions = ", persistent sessions" if plan["persistent"] else ""
        print(
            f"publishers {plan['publishers']}, subscribers {plan['subscribers']}, fan-out {plan['fan_out']}; QoS {plan['qos']}, "
            f"{plan['size']} bytes, MQTT {plan['version']}{sessions}; {rate} for {result['seconds']:.1f} s"
        )
        if result["interrupted"]:
            print("interrupted: the result so far")
        acknowledged = f"acknowledged {result['acknowledged']}, " if plan["qos"] else ""
        print(
            f"sent {result['sent']} ({result['sent_per_s']:.0f}/s), {acknowledged}"
            f"delivered {result['delivered']} ({result['delivered_per_s']:.0f}/s)"
        )
        print(f"lost {result['lost']}, duplicated {result['duplicated']}, out of order {result['out_of_order']}")
        for name, text in (
            ("unsent", "due and not sent"),
            ("unacknowledged", "not acknowledged"),
            ("refused", "refused by the broker"),
            ("unexpected", "unexpected messages"),
        ):
            if result[name]:
                print(f"{text}: {result[name]}")
        rows = [
            (name, *(f"{value:.2f}" for value in result[key].values()))
            for name, key in (("delivery", "delivery_ms"), ("acknowledgement", "acknowledgement_ms"))
            if result[key]
        ]
        if rows:
            headings = ("LATENCY, MS", "P50", "P95", "P99", "MAX")
            print_table(headings, rows, headings[1:])
        if result["broker_cpu_us_per_message"] is None:
            print(f"broker's CPU: unknown: {cell(result['broker_cpu_unknown'])}")
        else:
            per = "delivered" if result["delivered"] else "sent"
            print(f"broker's CPU: {result['broker_cpu_us_per_message']} µs per {per} message ({cell(result['broker_process'])})")
        print(f"this command's CPU: {result['client_cpu_percent']:.0f} % of a core")
        for text in self._notes(result):
            print(f"note: {cell(text)}")

    def _notes(self, result: dict[str, Any]) -> list[str]:
        found = [f"lost connection: {text}" for text in result["disconnected"][:_SHOWN]]
        if len(result["disconnected"]) > _SHOWN:
            found.append(f"and {len(result['disconnected']) - _SHOWN} more lost connections")
        if result["client_cpu_percent"] > 100 * _BUSY:
            found.append("this command used most of a core: it may be the command that bounds the rate")
        if result["sent_late"]:
            found.append(
                f"{result['sent_late']} messages were sent more than {TIMER / 1e6:g} ms after they were due, up to "
                f"{result['sent_late_ms']['max']:.1f} ms; their latency includes that"
            )
        if result["sessions_left"]:
            found.append(f"{len(result['sessions_left'])} sessions could not be removed: {', '.join(result['sessions_left'][:_SHOWN])} …")
        return found


def _opener(where: BrokerAddress, options: argparse.Namespace) -> Opener:
    """Opens connections to a place. Raises OptionError."""
    context = tls_context(options) if where.tls else None

    async def opened(connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        protocol: asyncio.Protocol = connection
        if where.transport == "websockets":
            from mqttbroker.cli.load_websocket import WebSocket

            host = f"[{where.host}]" if ":" in where.host else where.host
            protocol = WebSocket(f"{'wss' if where.tls else 'ws'}://{host}:{where.port}{where.path}", connection)
        if where.transport == "unix":
            await loop.create_unix_connection(lambda: protocol, where.host)
        else:
            await loop.create_connection(lambda: protocol, where.host, where.port, ssl=context)

    return opened
