"""``mqttbroker consumers``: the progress of the consumers of a running broker's streams, over HTTP.

Exit status: 0 if no consumer is at risk, 1 if one is or the request failed, 2 if the call was wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, Optional
from urllib.parse import quote, urlsplit

from mqttbroker.config.load import load_settings, secret_in

COLUMNS = ("STREAM", "CONSUMER", "PARTITION", "OFFSET", "LAG", "BEHIND", "REPORTED", "RETENTION")
_ANY_ADDRESS = ("", "*", "::", "0.0.0.0")


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``mqttbroker``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "consumers", help="say how far the readers of streams have come", allow_abbrev=False)
    parser.add_argument("stream", metavar="STREAM", nargs="?", help="of this stream only")
    parser.add_argument("--url", metavar="URL", help="the broker's HTTP address; else that of its configuration")
    parser.add_argument("--token-file", metavar="FILE", type=Path,
                        help="file of the bearer token; else that of the configuration")
    parser.add_argument("--token", metavar="TOKEN",
                        help="the token itself, which other users of this machine can see in the list of processes")
    parser.add_argument("--ca-file", metavar="FILE", help="authorities that sign the broker's certificate")
    parser.add_argument("--config", metavar="FILE", type=Path, help="the broker's TOML file")
    parser.add_argument("--forget", metavar="CONSUMER", help="forget this consumer of STREAM")


def run(options: argparse.Namespace) -> int:
    """Run the command; raises ConfigError if the settings cannot be read."""
    from bridge_spark.source.http_client import HttpClient, HttpError

    http = load_settings(options.config, os.environ).http
    url = options.url
    if url is None:
        host = "localhost" if http.host in _ANY_ADDRESS else http.host
        url = f"{'http' if http.certfile is None else 'https'}://{f'[{host}]' if ':' in host else host}:{http.port}"
    if urlsplit(url).scheme not in ("http", "https") or (options.url is None and not http.port):
        return _fail("--url must be the broker's HTTP address, like http://localhost:18083", 2)
    if options.forget is not None and options.stream is None:
        return _fail("--forget needs the name of a STREAM", 2)
    if urlsplit(url).username is not None:
        return _fail("--url must not carry a name or password: give --token-file", 2)
    if options.token is not None and options.token_file is not None:
        return _fail("give --token or --token-file, not both", 2)
    try:
        token = options.token or (http.command_token if options.token_file is None else secret_in(options.token_file))
    except ValueError as error:
        return _fail(f"--token-file: {options.token_file}: {error}", 2)
    client = HttpClient(url, token, options.ca_file, retries=1)
    try:
        if options.forget is not None:
            stream, consumer = quote(options.stream, safe=""), quote(options.forget, safe="")
            client.send("DELETE", f"/streams/{stream}/consumers/{consumer}")
            return 0
        streams = [options.stream] if options.stream is not None else client.get_json("/streams")["streams"]
        rows = [row for stream in streams for row in _rows(client, stream)]
    except HttpError as error:
        return _fail(str(error), 1)
    except (KeyError, TypeError) as error:
        return _fail(f"{url} did not answer as a broker of this version does ({error!r})", 1)
    finally:
        client.close()
    _print_table([COLUMNS, *rows])
    return 1 if any(row[-1] for row in rows) else 0


def _fail(reason: str, status: int) -> int:
    print(f"mqttbroker consumers: {reason}", file=sys.stderr)
    return status


def _rows(client: Any, stream: str) -> list[tuple[str, ...]]:
    document = client.get_json(f"/streams/{quote(stream, safe='')}/consumers")
    return [
        (stream, consumer["consumer"], str(place["partition"]), str(place["offset"]), str(place["lag"]),
         _seconds(place["lag_seconds"]), _seconds(consumer["report_age_seconds"]) + " ago", _retention(place))
        for consumer in document["consumers"] for place in consumer["partitions"]
    ]


def _retention(place: dict[str, Any]) -> str:
    """The offsets lost to retention, or the time or bytes left until some are; "" without risk."""
    if place["lost"]:
        return f"{place['lost']} lost"
    if not place["at_risk"]:
        return ""
    seconds, size = place["seconds_left"], place["bytes_left"]
    left = [_seconds(seconds)] if seconds is not None else []
    left += [f"{size} B"] if size is not None else []
    return f"{' or '.join(left)} left"


def _seconds(seconds: Optional[float]) -> str:
    """A duration in the form of the configuration: "0s", "90s", "12m", "30h", "9d"."""
    value = float(seconds or 0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if value >= 2 * size:
            return f"{int(value // size)}{unit}"
    return f"{int(value)}s"


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        cells = [cell.rjust(width) if 2 <= column <= 6 else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())
