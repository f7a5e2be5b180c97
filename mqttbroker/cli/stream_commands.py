"""``mqttbroker streams``: list, show, create, alter, delete and tail the streams of a running broker, over its HTTP API."""

from __future__ import annotations

import argparse
from typing import Any

from mqttbroker.cli.broker_api import DONE, WRONG_CALL, BrokerApi, CommandError, in_path
from mqttbroker.cli.tables import print_fields, print_json, print_table

_NUMBERS = ("PARTITION", "START", "END", "SEGMENTS", "BYTES")


def list_streams(api: BrokerApi, options: argparse.Namespace) -> int:
    answer = api.get("/streams")
    with api.as_expected():
        if options.json:
            print_json(answer["items"])
            return DONE
        rows = [
            (
                stream["name"],
                part["partition"],
                part["log_start_offset"],
                part["high_watermark"],
                part["segments"],
                part["bytes"],
                stream["source"],
                stream["filters"],
            )
            for stream in answer["items"]
            for part in stream["partitions"]
        ]
    print_table(("STREAM", "PARTITION", "START", "END", "SEGMENTS", "BYTES", "SOURCE", "FILTERS"), rows, _NUMBERS)
    return DONE


def show(api: BrokerApi, options: argparse.Namespace) -> int:
    return _show(api, options, api.get(f"/streams/{in_path(options.name)}"))


def create(api: BrokerApi, options: argparse.Namespace) -> int:
    body = {"name": options.name, "filters": options.filters, **_settings(options.settings)}
    return _show(api, options, api.change("POST", "/streams", body))


def alter(api: BrokerApi, options: argparse.Namespace) -> int:
    body = _settings(options.settings)
    if options.filters:
        body["filters"] = options.filters
    if not body:
        raise CommandError("there is no setting to change", WRONG_CALL)
    return _show(api, options, api.change("PATCH", f"/streams/{in_path(options.name)}", body))


def delete(api: BrokerApi, options: argparse.Namespace) -> int:
    api.change("DELETE", f"/streams/{in_path(options.name)}", confirm=options.confirm)
    return DONE


def _show(api: BrokerApi, options: argparse.Namespace, stream: Any) -> int:
    if options.json:
        print_json(stream)
        return DONE
    with api.as_expected():
        fields = {"name": stream["name"], "source": stream["source"], "filters": stream["filters"]}
        if stream["past_filters"]:
            fields["past_filters"] = stream["past_filters"]
        fields |= {name: value for name, value in stream["settings"].items() if name != "filters"}
        rows = [
            (part["partition"], part["log_start_offset"], part["high_watermark"], part["segments"], part["bytes"])
            for part in stream["partitions"]
        ]
    print_fields(list(fields.items()))
    print_table(("PARTITION", "START", "END", "SEGMENTS", "BYTES"), rows, _NUMBERS)
    return DONE


def _settings(pairs: list[str]) -> dict[str, object]:
    """The settings of arguments such as ``retention_age=7d``, as JSON."""
    found: dict[str, object] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise CommandError(f"{pair!r} is not SETTING=VALUE", WRONG_CALL)
        if name == "filters":
            raise CommandError("give filters with --filter", WRONG_CALL)
        if text in ("true", "false"):
            found[name] = text == "true"
        else:
            found[name] = int(text) if text.isascii() and text.isdigit() else text
    return found


def tail(api: BrokerApi, options: argparse.Namespace) -> int:
    from mqttbroker.cli import stream_tail  # loads what reads segments

    return stream_tail.tail(api, options)
