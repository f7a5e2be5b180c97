"""``mqttbroker top``: a running broker's rates and clients, live on a terminal, as ``top`` shows processes.

Rates are differences of two answers of the API. Exit status as of the other commands on a running broker.
"""

from __future__ import annotations

import argparse
import curses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from mqttbroker.cli import broker_api
from mqttbroker.cli.broker_api import AWAY, DONE, EXIT_STATUSES, WRONG_CALL, BrokerApi, CommandError, in_path
from mqttbroker.cli.tables import cell, duration, field_cell, print_json

HELP = "q quit  ↑↓ PgUp PgDn choose  s sort  r reverse  / search  Enter detail  d disconnect  p pause  + - interval"
SORTS = ("queued_messages", "connected_at", "subscriptions", "client_id")
MAX_CLIENTS = 500
_RATES = (
    ("publish_received", "msg/s in"), ("publish_sent", "msg/s out"), ("bytes_received", "B/s in"),
    ("bytes_sent", "B/s out"), ("connections", "conn/s"),
)  # fmt: skip
_COLUMNS = (
    ("CLIENT", 0, str.ljust),
    ("USER", 12, str.ljust),
    ("ADDRESS", 22, str.ljust),
    ("SINCE", 6, str.rjust),
    ("SUBS", 6, str.rjust),
    ("QUEUED", 9, str.rjust),
    ("IN FLIGHT", 9, str.rjust),
)  # width 0 = what is left
# Keys are code points, those of curses negative, because the two overlap.
_UP, _DOWN, _PAGE_UP, _PAGE_DOWN, _HOME, _END = (
    -curses.KEY_UP,
    -curses.KEY_DOWN,
    -curses.KEY_PPAGE,
    -curses.KEY_NPAGE,
    -curses.KEY_HOME,
    -curses.KEY_END,
)
_ENTER = (10, 13, -curses.KEY_ENTER)
_BACKSPACE = (8, 127, -curses.KEY_BACKSPACE)
_ESCAPE = 27


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_CALL, f"{self.prog}: {message} (see {self.prog} --help)\n")


def top_parser() -> argparse.ArgumentParser:
    """The options of ``mqttbroker top``."""
    parser = _Parser(prog="mqttbroker top", description=HELP, allow_abbrev=False, epilog=EXIT_STATUSES)
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between updates (default: 2)")
    parser.add_argument("--sort", choices=SORTS, default=SORTS[0], help=f"the order (default: {SORTS[0]})")
    parser.add_argument("--json", action="store_true", help="print one sample, with the rates of an interval, as JSON")
    broker_api.add_options(parser)
    return parser


class Sample(NamedTuple):
    """The status of a broker, and the time at which it was asked for, in monotonic seconds."""

    status: Mapping[str, Any]
    at: float


def take_sample(api: BrokerApi) -> Sample:
    """Ask for the status; raises CommandError."""
    status = api.get("/status")
    with api.as_expected():
        status["totals"]["publish_received"], status["clients_connected"]
    return Sample(status, time.monotonic())


def rates(before: Sample, after: Sample) -> dict[str, float]:
    """The counters of `_RATES` per second between two samples; 0 after a restart of the broker."""
    seconds = max(after.at - before.at, 1e-6)
    old, new = before.status["totals"], after.status["totals"]
    return {name: max(0.0, new[name] - old[name]) / seconds for name, _ in _RATES}


def number(value: float) -> str:
    """A number of up to 6 characters: 0.5, 999, 12.3k, 4.0M, 1.2G."""
    if value < 1000:
        return f"{value:.1f}" if 0 < value < 10 else f"{value:.0f}"
    for unit in "kMGT":
        value /= 1000
        if value < 1000 or unit == "T":
            return f"{value:.1f}{unit}"
    raise AssertionError


def summary(url: str, status: Mapping[str, Any], rate: Mapping[str, float]) -> list[str]:
    """The lines above the clients."""
    memory = status["memory"]
    limit = number(memory["maximum"]) if memory["maximum"] else "unlimited"
    drops = sum(status["drops"].values())
    return [
        f"mqttbroker {status['version']}  {url}  {time.strftime('%H:%M:%S')}",
        f"clients {status['clients_connected']} (max {status['clients_connected_maximum']})  "
        f"sessions {status['sessions']}  subscriptions {status['subscriptions']}  retained {status['retained_messages']}  bans {status['bans']}",
        "  ".join(f"{label} {number(rate[name])}" for name, label in _RATES),
        f"queued {number(status['queued_messages'])} ({number(status['queued_bytes'])}B)  dropped {number(drops)}  "
        f"waiting for the disk {number(status['store_pending_bytes'])}B  "
        f"memory {number(memory['used'])}B of {limit} ({memory['stage_name']})",
    ]


def client_row(item: Mapping[str, Any], now: float) -> list[str]:
    """The cells of a client."""
    since = item["connected_at"]
    return [cell(value) for value in (
        item["client_id"], item["username"], item["address"], "" if since is None else duration(now - since),
        item["subscriptions"], item["queued_messages"], item["in_flight"],
    )]  # fmt: skip


def aligned(cells: Sequence[str], width: int) -> str:
    """A line of `_COLUMNS` that fills a terminal of this width; long cells are cut."""
    free = max(10, width - sum(size + 1 for _, size, _ in _COLUMNS if size))
    parts = []
    for text, (_, size, align) in zip(cells, _COLUMNS):
        room = size or free
        parts.append(align(text if len(text) <= room else text[: room - 1] + "…", room))
    return " ".join(parts)[:width]


def detail_lines(detail: Mapping[str, Any], width: int) -> list[str]:
    """The fields of a client in two columns."""
    fields = [f"{name:20} {field_cell(name, value)}" for name, value in detail.items()]
    half, room = -(-len(fields) // 2), width // 2 - 1
    left, right = fields[:half], [*fields[half:], ""]
    return [f"{one[:room]:{room}}  {other}".rstrip() for one, other in zip(left, right)]


class Top:
    """The state of the display, and what keys do to it. ``draw`` shows it."""

    def __init__(self, api: BrokerApi, interval: float, sort: str) -> None:
        self._api = api
        self.interval = interval
        self.sort = sort
        self.descending = sort != "client_id"
        self.search = ""
        self.typing = False  # the search is being typed
        self.paused = False
        self.selected = 0
        self.message = ""  # shown instead of the help, until the next key
        self.asking = ""  # the client about whose disconnection the user is asked
        self.detail: Mapping[str, Any] | None = None
        self.clients: list[Mapping[str, Any]] = []
        self.sample: Sample | None = None
        self.rate: Mapping[str, float] = {name: 0.0 for name, _ in _RATES}

    def update(self) -> None:
        """Ask the broker; if it is away, say so and try again at the next update."""
        try:
            sample = take_sample(self._api)
            clients, _ = self._api.items(
                "/clients", MAX_CLIENTS, connected=True, sort=self.sort, order="desc" if self.descending else "asc",
                contains=self.search or None,
            )  # fmt: skip
            if self.detail is not None:
                self.detail = self._api.get(f"/clients/{in_path(self.detail['client_id'])}")
        except CommandError as error:
            self.message = str(error)
            if error.status != AWAY:
                self.detail = None
            return
        if self.sample is not None:
            self.rate = rates(self.sample, sample)
        self.sample, self.clients = sample, clients
        self.selected = max(0, min(self.selected, len(clients) - 1))

    def key(self, key: int) -> bool:
        """Handle a key; false = quit."""
        self.message = ""
        if self.asking:
            self._answered(key)
        elif self.typing:
            self._typed(key)
        elif key == ord("q"):
            return False
        elif key == _ESCAPE:
            self.detail, self.search = None, ""
        elif key in _ENTER and self.clients:
            self._show_detail()
        elif key == ord("d") and self.clients:
            self.asking = str(self.clients[self.selected]["client_id"])
        else:
            self._other_key(key)
        return True

    def _other_key(self, key: int) -> None:
        steps = {_UP: -1, _DOWN: 1, _PAGE_UP: -20, _PAGE_DOWN: 20, _HOME: -MAX_CLIENTS, _END: MAX_CLIENTS, ord("k"): -1, ord("j"): 1}
        changes: dict[int, Callable[[], None]] = {
            ord("s"): lambda: self._sort_by(SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]),
            ord("r"): lambda: setattr(self, "descending", not self.descending),
            ord("/"): lambda: setattr(self, "typing", True),
            ord("p"): lambda: setattr(self, "paused", not self.paused),
            ord("+"): lambda: setattr(self, "interval", min(60.0, self.interval * 2)),
            ord("-"): lambda: setattr(self, "interval", max(0.25, self.interval / 2)),
        }
        if key in steps:
            self.selected = max(0, min(len(self.clients) - 1, self.selected + steps[key]))
        elif key in changes:
            changes[key]()

    def _sort_by(self, sort: str) -> None:
        self.sort, self.descending = sort, sort != "client_id"

    def _typed(self, key: int) -> None:
        if key in _ENTER:
            self.typing = False
        elif key == _ESCAPE:
            self.typing, self.search = False, ""
        elif key in _BACKSPACE:
            self.search = self.search[:-1]
        elif key >= 0 and chr(key).isprintable():
            self.search += chr(key)

    def _answered(self, key: int) -> None:
        client_id, self.asking = self.asking, ""
        if key not in (ord("y"), ord("Y")):
            return
        try:
            self._api.change("POST", f"/clients/{in_path(client_id)}/disconnect")
            self.message = f"{client_id} was disconnected"
        except CommandError as error:
            self.message = str(error)

    def _show_detail(self) -> None:
        try:
            self.detail = self._api.get(f"/clients/{in_path(self.clients[self.selected]['client_id'])}")
        except CommandError as error:
            self.message = str(error)

    # --- what is shown ------------------------------------------------------------------------------------------------

    def lines(self, width: int, height: int) -> tuple[list[str], int, int]:
        """The lines of a screen, the number of the line with the headings, and that of the client chosen; -1 = none."""
        if self.sample is None:
            return [self.message or "asking the broker …"], -1, -1
        shown = summary(self._api.url, self.sample.status, self.rate)
        order = f"{self.sort} {'↓' if self.descending else '↑'}"
        paused = "  PAUSED" if self.paused else ""
        search = f"  search: {self.search}{'_' if self.typing else ''}" if self.search or self.typing else ""
        shown.append(f"order {order}  every {self.interval:g} s{paused}{search}")
        if self.detail is not None:
            shown = [*shown, "", *detail_lines(self.detail, width)][: height - 1]
            headings = chosen = -1
        else:
            headings = len(shown) + 1
            shown += ["", aligned([name for name, _, _ in _COLUMNS], width)]
            room = max(1, height - len(shown) - 1)
            first = max(0, self.selected - room + 1)
            now = time.time()
            shown += [aligned(client_row(item, now), width) for item in self.clients[first : first + room]]
            chosen = headings + 1 + self.selected - first if self.clients else -1
        shown += [""] * (height - 1 - len(shown))
        last = f"disconnect {cell(self.asking)}? y/n" if self.asking else cell(self.message) or HELP
        return [*(line[:width] for line in shown), last[:width]], headings, chosen

    def draw(self, screen: Any) -> None:
        height, width = screen.getmaxyx()
        shown, headings, chosen = self.lines(width - 1, height)
        screen.erase()
        for row, text in enumerate(shown[:height]):
            how = curses.A_REVERSE if row == chosen else curses.A_BOLD if row in (0, headings) else curses.A_NORMAL
            try:
                screen.addstr(row, 0, text, how)
            except curses.error:
                pass  # the terminal has become smaller meanwhile
        screen.refresh()

    def run(self, screen: Any) -> None:
        """Update and draw until the user quits."""
        curses.curs_set(0)
        screen.keypad(True)
        due = 0.0
        while True:
            now = time.monotonic()
            if now >= due:
                if not self.paused:
                    self.update()
                due = now + self.interval
            self.draw(screen)
            screen.timeout(max(1, int((due - time.monotonic()) * 1000)))
            try:
                pressed = screen.get_wch()
            except curses.error:
                # No key came; at once and for ever if the terminal is gone.
                if not sys.stdin.isatty():
                    return
                continue
            if not self.key(ord(pressed) if isinstance(pressed, str) else -pressed):
                return
            if not self.typing:
                due = min(due, time.monotonic() + 0.1)  # another order or search


def main(words: Sequence[str]) -> int:
    """Run ``mqttbroker top``; returns its exit status. Raises ConfigError if the settings cannot be read."""
    options = top_parser().parse_args(words)
    api: BrokerApi | None = None
    try:
        if options.interval <= 0:
            raise CommandError("--interval must be above 0", WRONG_CALL)
        api = broker_api.broker_api(options)
        before = take_sample(api)
        if options.json:
            time.sleep(options.interval)
            after = take_sample(api)
            print_json({"rates": rates(before, after), "status": after.status})
            return DONE
        if not sys.stdin.isatty() or not sys.stdout.isatty():
            raise CommandError("needs a terminal; --json prints one sample", WRONG_CALL)
        top = Top(api, options.interval, options.sort)
        top.sample = before
        curses.wrapper(top.run)
        return DONE
    except KeyboardInterrupt:
        return DONE
    except CommandError as error:
        print(f"mqttbroker top: {cell(str(error))}", file=sys.stderr)
        return error.status
    except curses.error as error:
        print(f"mqttbroker top: the terminal cannot be used: {error}", file=sys.stderr)
        return 1
    finally:
        if api is not None:
            api.close()
