"""``mqttbroker consumers``: the progress of the consumers of a running broker's streams, over HTTP.

Exit status: 0 if no consumer is at risk, 1 if one is or the request failed, 2 if the call was wrong.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mqttbroker.cli.broker_api import WRONG_CALL, BrokerApi, CommandError, add_options, broker_api, in_path
from mqttbroker.cli.tables import cell, duration, print_json, print_table

GROUP_PREFIX = "$share/"
COLUMNS = ("STREAM", "CONSUMER", "PARTITION", "OFFSET", "LAG", "BEHIND", "REPORTED", "RETENTION")


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``mqttbroker``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "consumers", help="say how far the readers of streams have come", allow_abbrev=False
    )
    parser.add_argument("stream", metavar="STREAM", nargs="?", help="of this stream only")
    parser.add_argument("--forget", metavar="CONSUMER", help="forget this consumer of STREAM")
    parser.add_argument("--reset", metavar="GROUP", help="have this group of STREAM continue at --to")
    parser.add_argument("--to", metavar="WHERE", help="earliest, latest, offset:N, offset:P=N,…, a Unix or ISO 8601 time, or 1h (back)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command; raises ConfigError if the settings cannot be read."""
    try:
        if (options.forget is not None or options.reset is not None) and options.stream is None:
            raise CommandError("--forget and --reset need the name of a STREAM", WRONG_CALL)
        if (options.reset is None) != (options.to is None):
            raise CommandError("--reset and --to go together", WRONG_CALL)
        api = broker_api(options)
        try:
            return _run(api, options)
        finally:
            api.close()
    except CommandError as error:
        print(f"mqttbroker consumers: {cell(str(error))}", file=sys.stderr)
        return 2 if error.status == WRONG_CALL else 1


def _run(api: BrokerApi, options: argparse.Namespace) -> int:
    if options.reset is not None:
        path = f"{_groups(options.stream)}/{_group(options.reset)}/reset"
        found = api.change("POST", path, {"to": options.to})["offsets"]
        print_table(("PARTITION", "OFFSET"), [(each["partition"], each["offset"]) for each in found], ("PARTITION", "OFFSET"))
        return 0
    if options.forget is not None and options.forget.startswith(GROUP_PREFIX):
        api.change("DELETE", f"{_groups(options.stream)}/{_group(options.forget)}")
        return 0
    if options.forget is not None:
        path = f"/streams/{in_path(options.stream)}/consumers/{in_path(options.forget)}"
        api.request("DELETE", path, None, {})
        return 0
    with api.as_expected():
        names = [options.stream] if options.stream else api.request("GET", "/streams", None, {})["streams"]
        paths = {name: f"/streams/{in_path(name)}/consumers" for name in names}
        found = {name: api.request("GET", path, None, {})["consumers"] for name, path in paths.items()}
        rows = [row for name, consumers in found.items() for row in _rows(name, consumers)]
    if options.json:
        print_json([{"stream": name, **consumer} for name, consumers in found.items() for consumer in consumers])
    else:
        print_table(COLUMNS, rows, COLUMNS[2:7])
    return 1 if any(row[-1] for row in rows) else 0


def _groups(stream: str) -> str:
    return f"/streams/{in_path(stream)}/groups"


def _group(name: str) -> str:
    return in_path(name.removeprefix(GROUP_PREFIX))


def _rows(stream: str, consumers: list[Any]) -> list[tuple[str, ...]]:
    return [
        (
            stream,
            consumer["consumer"],
            str(place["partition"]),
            str(place["offset"]),
            str(place["lag"]),
            duration(place["lag_seconds"]),
            duration(consumer["report_age_seconds"]) + " ago",
            _retention(place),
        )
        for consumer in consumers
        for place in consumer["partitions"]
    ]


def _retention(place: dict[str, Any]) -> str:
    """The offsets lost to retention, or the time or bytes left until some are; "" without risk."""
    if place["lost"]:
        return f"{place['lost']} lost"
    if not place["at_risk"]:
        return ""
    seconds, size = place["seconds_left"], place["bytes_left"]
    left = [duration(seconds)] if seconds is not None else []
    left += [f"{size} B"] if size is not None else []
    return f"{' or '.join(left)} left"
