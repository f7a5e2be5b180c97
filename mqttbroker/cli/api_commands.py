"""Commands on a running broker over its HTTP API: ``mqttbroker clients list``, ``users add``, ``config`` and others.

Results go to stdout as tables, or as JSON with ``--json``; a failure is one line on stderr. `EXIT_STATUSES` has the
exit statuses.
"""

from __future__ import annotations

import argparse
import base64
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mqttbroker.cli import broker_api, cluster_commands, stream_commands
from mqttbroker.cli.broker_api import DONE, EXIT_STATUSES, FAILED, WRONG_CALL, BrokerApi, CommandError, in_path
from mqttbroker.cli.new_password import ask_password
from mqttbroker.cli.tables import brief, cell, duration, print_fields, print_json, print_table
from mqttbroker.config.settings import LOG_AREAS, LOG_LEVELS

SORTS = ("client_id", "connected_at", "disconnected_at", "subscriptions", "queued_messages")
_CLIENT_COLUMNS = ("CLIENT", "USER", "VERSION", "STATE", "SINCE", "ADDRESS", "SUBSCRIPTIONS", "QUEUED", "IN FLIGHT")
_NUMBERS = (
    "SUBSCRIPTIONS", "QUEUED", "IN FLIGHT", "QOS", "BYTES", "AGE", "LEFT", "PARTITION", "START", "END", "SEGMENTS",
    "CLIENTS", "SINCE", "ENDED", "OUT", "IN",
)  # fmt: skip


class Argument(NamedTuple):
    """An argument of a command, as for `argparse.ArgumentParser.add_argument`."""

    names: Sequence[str]
    more: Mapping[str, Any]


class Command(NamedTuple):
    """One command; ``action`` "" = the group is the command itself, ``run`` returns the exit status."""

    group: str
    action: str
    text: str
    run: Callable[[BrokerApi, argparse.Namespace], int]
    arguments: Sequence[Argument] = ()
    more: str = ""  # a sentence for its own help


def _argument(*names: str, **more: Any) -> Argument:
    return Argument(names, more)


def _filters(required: bool) -> Argument:
    return _argument(
        "--filter",
        metavar="FILTER",
        dest="filters",
        action="append",
        required=required,
        help="a topic filter whose messages it stores; repeat it for several",
    )


_LIMIT = _argument("--limit", metavar="N", type=int, default=100, help="how many at most; 0 = all (default: 100)")
_CLIENT = _argument("client_id", metavar="CLIENT", help="a client id")
_USER = _argument("username", metavar="USER")
_FILE = _argument("--file", metavar="FILE", help="one of the broker's files, if it has several")
_STREAM = _argument("name", metavar="STREAM", help="the name of a stream")
_SET = _argument(
    "--set",
    metavar="SETTING=VALUE",
    dest="settings",
    action="append",
    default=[],
    help="a setting of [streams.NAME], such as retention_age=7d; repeat it for several",
)
_PROTOCOL = _argument("--protocol", choices=("mqtt", "http"), help="of MQTT clients (default) or HTTP senders")
_BANNED = (
    _argument("--address", metavar="ADDRESS", help="an address or network"),
    _argument("--user", metavar="USER", dest="username"),
    _argument("--client", metavar="CLIENT", dest="client_id"),
)
_RULE = (
    _argument("access", metavar="ACCESS", choices=("read", "write", "readwrite", "deny"), help="read, write, readwrite or deny"),
    _argument("filter", metavar="FILTER", help="the topic filter"),
    _argument("--user", metavar="USER", dest="username", help="of this user; else of anonymous clients"),
    _argument("--pattern", action="store_true", help="for all clients; %%c is the client id, %%u the user name"),
    _FILE,
)


def show(options: argparse.Namespace, headings: Sequence[str], items: list[Any], more: bool, row: Callable[[Any], Sequence[object]]) -> int:
    """Print a list."""
    if options.json:
        print_json(items)
    else:
        print_table(headings, [row(item) for item in items], _NUMBERS)
    if more:
        print(f"mqttbroker {options.command}: there are more: --limit 0 shows all", file=sys.stderr)
    return DONE


def show_one(options: argparse.Namespace, item: dict[str, Any]) -> int:
    """Print one thing."""
    print_json(item) if options.json else print_fields(list(item.items()))
    return DONE


def _ago(at: float | None) -> str:
    return "" if not at else duration(time.time() - at)


# --- clients ----------------------------------------------------------------------------------------------------------


def clients_list(api: BrokerApi, options: argparse.Namespace) -> int:
    items, more = api.items(
        "/clients", options.limit, prefix=options.prefix, contains=options.contains, username=options.username,
        connected=options.connected, listener=options.listener, address=options.address, sort=options.sort,
        order="desc" if options.desc else None,
    )  # fmt: skip
    with api.as_expected():
        return show(options, _CLIENT_COLUMNS, items, more, lambda item: (
            item["client_id"], item["username"], item["protocol"], "connected" if item["connected"] else "away",
            _ago(item["connected_at"] or item["disconnected_at"]), item["address"], item["subscriptions"],
            item["queued_messages"], item["in_flight"],
        ))  # fmt: skip


def clients_show(api: BrokerApi, options: argparse.Namespace) -> int:
    return show_one(options, api.get(f"/clients/{in_path(options.client_id)}"))


def clients_subscriptions(api: BrokerApi, options: argparse.Namespace) -> int:
    items, more = api.items(f"/clients/{in_path(options.client_id)}/subscriptions", options.limit)
    return _subscriptions(api, options, items, more)


def clients_disconnect(api: BrokerApi, options: argparse.Namespace) -> int:
    api.change("POST", f"/clients/{in_path(options.client_id)}/disconnect")
    return DONE


def clients_delete(api: BrokerApi, options: argparse.Namespace) -> int:
    api.change("DELETE", f"/clients/{in_path(options.client_id)}")
    return DONE


# --- subscriptions ----------------------------------------------------------------------------------------------------


def subscriptions_list(api: BrokerApi, options: argparse.Namespace) -> int:
    return _subscriptions(api, options, *api.items("/subscriptions", options.limit, filter=options.filter))


def subscriptions_receivers(api: BrokerApi, options: argparse.Namespace) -> int:
    return _subscriptions(api, options, *api.items("/receivers", options.limit, topic=options.topic))


def _subscriptions(api: BrokerApi, options: argparse.Namespace, items: list[Any], more: bool) -> int:
    with api.as_expected():
        return show(options, ("CLIENT", "FILTER", "QOS", "STATE"), items, more, lambda item: (
            item["client_id"], item["topic_filter"], item["qos"], "connected" if item["connected"] else "away",
        ))  # fmt: skip


# --- retained messages ------------------------------------------------------------------------------------------------


def retained_list(api: BrokerApi, options: argparse.Namespace) -> int:
    items, more = api.items("/retained", options.limit, filter=options.filter)
    with api.as_expected():
        return show(options, ("TOPIC", "QOS", "BYTES", "AGE", "PAYLOAD"), items, more, lambda item: (
            item["topic"], item["qos"], len(_payload(item)), _ago(item["timestamp_us"] / 1e6),
            _payload(item)[:60].decode(errors="replace"),
        ))  # fmt: skip


def retained_get(api: BrokerApi, options: argparse.Namespace) -> int:
    message = api.get("/retained/message", topic=options.topic)
    if options.json:
        print_json(message)
        return DONE
    with api.as_expected():
        payload = _payload(message)
    sys.stdout.buffer.write(payload + (b"\n" if sys.stdout.isatty() else b""))
    return DONE


def _payload(message: Any) -> bytes:
    return base64.b64decode(message["payload_base64"])


def retained_set(api: BrokerApi, options: argparse.Namespace) -> int:
    payload = sys.stdin.buffer.read() if options.payload == "-" else os.fsencode(options.payload)
    body = {"payload_base64": base64.b64encode(payload).decode(), "qos": options.qos}
    api.change("PUT", "/retained/message", body, topic=options.topic)
    return DONE


def retained_delete(api: BrokerApi, options: argparse.Namespace) -> int:
    answer = api.change("DELETE", "/retained", filter=options.filter)
    with api.as_expected():
        deleted = answer["deleted"]
    print_json(answer) if options.json else print(f"{deleted} deleted")
    return DONE if deleted else FAILED


# --- users, rules, bans -----------------------------------------------------------------------------------------------


def users_list(api: BrokerApi, options: argparse.Namespace) -> int:
    items, more = api.items("/users", options.limit, prefix=options.prefix, file=options.file)
    with api.as_expected():
        return show(options, ("USER", "HASH", "FILE"), items, more, lambda item: (item["username"], item["hash"], item["file"]))


def users_add(api: BrokerApi, options: argparse.Namespace) -> int:
    body = {"username": options.username, "password": _password(options), "scram": options.scram}
    api.change("POST", "/users", body, file=options.file)
    return DONE


def users_password(api: BrokerApi, options: argparse.Namespace) -> int:
    body = {"password": _password(options), "scram": options.scram}
    api.change("PUT", f"/users/{in_path(options.username)}/password", body, file=options.file)
    return DONE


def _password(options: argparse.Namespace) -> str:
    try:
        return ask_password(options.username).decode()
    except ValueError as error:
        raise CommandError(str(error), WRONG_CALL) from None


def users_delete(api: BrokerApi, options: argparse.Namespace) -> int:
    api.change("DELETE", f"/users/{in_path(options.username)}", file=options.file)
    return DONE


def acl_list(api: BrokerApi, options: argparse.Namespace) -> int:
    items, more = api.items(
        "/acl/rules", options.limit, username=options.username, file=options.file, pattern=True if options.pattern else None
    )
    with api.as_expected():
        return show(
            options, ("OF", "ACCESS", "FILTER", "FILE"), items, more, lambda item: (_of(item), item["access"], item["filter"], item["file"])
        )


def _of(rule: Any) -> str:
    if rule["pattern"]:
        return "pattern"
    return "anonymous" if rule["username"] is None else f"user {rule['username']}"


def acl_add(api: BrokerApi, options: argparse.Namespace) -> int:
    body = {"username": options.username, "pattern": options.pattern, "access": options.access, "filter": options.filter}
    api.change("POST", "/acl/rules", body, file=options.file)
    return DONE


def acl_remove(api: BrokerApi, options: argparse.Namespace) -> int:
    api.change(
        "DELETE",
        "/acl/rules",
        username=options.username,
        pattern=options.pattern,
        access=options.access,
        filter=options.filter,
        file=options.file,
    )
    return DONE


def acl_text(api: BrokerApi, options: argparse.Namespace) -> int:
    answer = api.get("/acl/file", file=options.file)
    with api.as_expected():
        print_json(answer) if options.json else print(answer["text"], end="")
    return DONE


def acl_edit(api: BrokerApi, options: argparse.Namespace) -> int:
    """Edit the rules with $EDITOR; the broker refuses them if the file has changed meanwhile."""
    answer = api.get("/acl/file", file=options.file)
    with api.as_expected():
        text, version = answer["text"], answer["version"]
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "rules.acl"
        copy.write_text(text, encoding="utf-8")
        editor = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
        while True:
            if subprocess.run([*editor, str(copy)], check=False).returncode:
                raise CommandError(f"{editor[0]} failed; nothing was changed", FAILED)
            changed = copy.read_text(encoding="utf-8")
            if changed == text:
                print("nothing was changed", file=sys.stderr)
                return DONE
            try:
                api.change("PUT", "/acl/file", {"text": changed, "version": version}, file=options.file)
                return DONE
            except CommandError as error:
                print(f"mqttbroker acl: {error}", file=sys.stderr)
                if not sys.stdin.isatty() or input("Edit again? [Y/n] ").lower().startswith("n"):
                    return error.status


def bans_list(api: BrokerApi, options: argparse.Namespace) -> int:
    items, more = api.items("/bans", options.limit, protocol=options.protocol)
    with api.as_expected():
        return show(options, ("ADDRESS", "USER", "CLIENT", "CAUSE", "LEFT", "REASON"), items, more, lambda item: (
            item["address"], item["username"], item["client_id"], item["cause"],
            "forever" if item["seconds_left"] is None else duration(item["seconds_left"]), item["reason"],
        ))  # fmt: skip


def bans_add(api: BrokerApi, options: argparse.Namespace) -> int:
    body = {
        "address": options.address,
        "username": options.username,
        "client_id": options.client_id,
        "seconds": options.seconds,
        "reason": options.reason,
    }
    answer = api.change("POST", "/bans", body)
    with api.as_expected():
        print_json(answer) if options.json else print(f"{answer['disconnected']} disconnected")
    return DONE


def bans_lift(api: BrokerApi, options: argparse.Namespace) -> int:
    api.change(
        "DELETE", "/bans", address=options.address, username=options.username, client_id=options.client_id, protocol=options.protocol
    )
    return DONE


# --- alarms -----------------------------------------------------------------------------------------------------------


def alarms_list(api: BrokerApi, options: argparse.Namespace) -> int:
    answer = api.get("/alarms")
    with api.as_expected():
        items = answer["cleared" if options.ended else "active"]
        return show(options, ("ALARM", "SINCE", "ENDED", "ACKNOWLEDGED", "REASON"), items, False, lambda item: (
            item["name"], _ago(item["since"]), _ago(item["cleared"]), item["acknowledged_by"], item["reason"],
        ))  # fmt: skip


def alarms_acknowledge(api: BrokerApi, options: argparse.Namespace) -> int:
    answer = api.change("POST", f"/alarms/{in_path(options.name)}/acknowledge")
    if options.json:
        print_json(answer)
    return DONE


# --- the broker -------------------------------------------------------------------------------------------------------


def status(api: BrokerApi, options: argparse.Namespace) -> int:
    answer = api.get("/status")
    with api.as_expected():
        print_json(answer) if options.json else print_fields(list(_flat(answer)))
    return DONE


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{name}.")
        elif isinstance(item, list):
            for part in item:
                yield f"{prefix}{name}", " ".join(cell(each) for each in part.values() if each != "")
        else:
            yield prefix + name, item


def listeners(api: BrokerApi, options: argparse.Namespace) -> int:
    answer = api.get("/listeners")
    with api.as_expected():
        return show(
            options,
            ("TYPE", "ADDRESS", "PORTS", "CLIENTS"),
            answer["items"],
            False,
            lambda item: (item["type"], item["address"], item["ports"], item["clients"]),
        )


def config(api: BrokerApi, options: argparse.Namespace) -> int:
    answer = api.get("/configuration", prefix=options.prefix)
    with api.as_expected():
        items = [item for item in answer["items"] if not options.changed or item["source"] != "default"]
        return show(options, ("KEY", "VALUE", "SOURCE"), items, False, lambda item: (item["key"], brief(item["value"]), item["source"]))


def log_level(api: BrokerApi, options: argparse.Namespace) -> int:
    if options.level is None:
        answer = api.get("/log/level")
    else:
        body = {"level": options.level, "area": options.area, "seconds": options.seconds}
        answer = api.change("PUT", "/log/level", body)
    with api.as_expected():
        rows = [{"area": "all", **answer}, *answer["areas"]]
        if options.json:
            print_json(answer)
        else:
            print_table(("AREA", "LEVEL", "LEFT", "CONFIGURED"), [
                (row["area"], row["level"], "" if row["seconds_left"] is None else duration(row["seconds_left"]),
                 row["configured"])
                for row in rows if options.area in (None, row["area"])
            ], _NUMBERS)  # fmt: skip
    return DONE


def reload(api: BrokerApi, options: argparse.Namespace) -> int:
    answer = api.change("POST", "/reload")
    with api.as_expected():
        problems = answer["problems"]
        if options.json:
            print_json(answer)
        else:
            for key in answer["applied"]:
                print(f"changed         {cell(key)}")
            for key in answer["restart_needed"]:
                print(f"restart needed  {cell(key)}")
            if not (answer["applied"] or answer["restart_needed"] or problems):
                print("no setting has changed")
            for problem in problems:
                print(cell(problem), file=sys.stderr)
    return FAILED if problems else DONE


def backup_now(api: BrokerApi, options: argparse.Namespace) -> int:
    answer = api.change("POST", "/backup", {"name": options.name})
    with api.as_expected():
        print_json(answer) if options.json else print(answer["summary"])
    return DONE


def bridges(api: BrokerApi, options: argparse.Namespace) -> int:
    items = api.get("/bridges")["items"]
    with api.as_expected():
        headings = ("BRIDGE", "STATE", "SINCE", "ADDRESS", "OUT", "IN", "QUEUED", "REASON")
        return show(options, headings, items, False, lambda item: (
            item["name"], item["state"], _ago(item["since"]), item["address"], item["messages_out"],
            item["messages_in"], item["queued_messages"],
            "" if item["state"] == "connected" else item["reason"] or "",
        ))  # fmt: skip


def trace(api: BrokerApi, options: argparse.Namespace) -> int:
    path: str | None = options.write
    kind = "text" if path is None else "pcap"
    pieces = api.stream(
        "/trace", options.seconds, client_id=options.client_id, address=options.address, topic=options.topic,
        seconds=options.seconds, max_bytes=options.max_bytes, payload=options.payload, format=kind,
    )  # fmt: skip
    try:
        first = next(pieces, b"")  # before a file is made
        with sys.stdout.buffer if path in (None, "-") else open(str(path), "wb") as target:
            target.write(first)
            target.flush()
            for piece in pieces:
                target.write(piece)
                target.flush()
    except KeyboardInterrupt:
        pass
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}", FAILED) from None
    return DONE


COMMANDS = (
    Command("clients", "list", "list clients and their sessions", clients_list, (
        _argument("--prefix", metavar="TEXT", help="client ids that begin with this"),
        _argument("--contains", metavar="TEXT", help="client ids that contain this"),
        _argument("--user", metavar="USER", dest="username", help="of this user"),
        _argument("--connected", action="store_const", const=True, help="connected ones"),
        _argument("--away", dest="connected", action="store_const", const=False, help="those that are not connected"),
        _argument("--listener", metavar="ADDRESS", help="connected to this listener"),
        _argument("--address", metavar="ADDRESS", help="connected from this address or network"),
        _argument("--sort", choices=SORTS, help="the order"),
        _argument("--desc", action="store_true", help="the last ones first"),
        _LIMIT,
    )),
    Command("clients", "show", "one client and its session", clients_show, (_CLIENT,)),
    Command("clients", "subscriptions", "the subscriptions of a client", clients_subscriptions, (_CLIENT, _LIMIT)),
    Command("clients", "disconnect", "disconnect a client; its session stays", clients_disconnect, (_CLIENT,)),
    Command("clients", "delete", "disconnect a client and delete its session", clients_delete, (_CLIENT,)),
    Command("subscriptions", "list", "the subscriptions to exactly a filter", subscriptions_list,
            (_argument("filter", metavar="FILTER", help="a topic filter, with $share/NAME/ or not"), _LIMIT)),
    Command("subscriptions", "receivers", "the subscriptions that get a topic", subscriptions_receivers,
            (_argument("topic", metavar="TOPIC"), _LIMIT)),
    Command("retained", "list", "list retained messages", retained_list,
            (_argument("filter", metavar="FILTER", nargs="?", help="a topic filter (default: #)"), _LIMIT)),
    Command("retained", "get", "print the payload of a retained message", retained_get,
            (_argument("topic", metavar="TOPIC"),)),
    Command("retained", "set", "publish a retained message in the name of the broker", retained_set,
            (_argument("topic", metavar="TOPIC"), _argument("payload", metavar="PAYLOAD", help="- = standard input"),
             _argument("--qos", metavar="N", type=int, choices=(0, 1, 2), default=1, help="0, 1 or 2 (default: 1)"))),
    Command("retained", "delete", "delete the retained messages that match a filter", retained_delete,
            (_argument("filter", metavar="FILTER", help="a topic or topic filter"),)),
    Command("users", "list", "list the users of the password files", users_list,
            (_argument("--prefix", metavar="TEXT", help="names that begin with this"), _FILE, _LIMIT)),
    Command("users", "add", "add a user; asks for the password, or reads a line", users_add,
            (_USER, _argument("--scram", action="store_true", help="for SCRAM-SHA-256, too"), _FILE)),
    Command("users", "password", "set a user's password; asks, or reads a line", users_password,
            (_USER, _argument("--scram", action="store_true", help="for SCRAM-SHA-256, too"), _FILE)),
    Command("users", "delete", "delete a user; its clients are disconnected", users_delete, (_USER, _FILE)),
    Command("acl", "list", "list the access rules in force", acl_list,
            (_argument("--user", metavar="USER", dest="username", help="of this user"),
             _argument("--pattern", action="store_true", help="patterns only"), _FILE, _LIMIT),
            "A rule of user alice is removed with: mqttbroker acl remove write 'plant/1/#' --user alice"),
    Command("acl", "add", "add an access rule", acl_add, _RULE),
    Command("acl", "remove", "remove an access rule", acl_remove, _RULE),
    Command("acl", "text", "print the ACL file", acl_text, (_FILE,)),
    Command("acl", "edit", "edit the ACL file with $EDITOR", acl_edit, (_FILE,)),
    Command("bans", "list", "list the bans in force", bans_list,
            (_PROTOCOL, _LIMIT)),
    Command("bans", "add", "ban clients of MQTT", bans_add,
            (*_BANNED, _argument("--seconds", metavar="N", type=float, help="else until it is lifted"),
             _argument("--reason", metavar="TEXT", help="for lists and the log"))),
    Command("bans", "lift", "lift the bans of exactly these clients", bans_lift,
            (*_BANNED, _PROTOCOL)),
    Command("alarms", "list", "list the alarms that last", alarms_list,
            (_argument("--ended", action="store_true", help="those that ended"),)),
    Command("alarms", "acknowledge", "mark an alarm as known, until it ends", alarms_acknowledge,
            (_argument("name", metavar="NAME", help="the name of an alarm"),)),
    Command("streams", "list", "list streams and their partitions", stream_commands.list_streams),
    Command("streams", "show", "print the settings and partitions of a stream", stream_commands.show, (_STREAM,)),
    Command("streams", "create", "create a stream", stream_commands.create,
            (_STREAM, _filters(True), _SET)),
    Command("streams", "alter", "change settings of a stream, for what comes after", stream_commands.alter,
            (_STREAM, _filters(False), _SET)),
    Command("streams", "delete", "delete a stream with its records", stream_commands.delete,
            (_STREAM, _argument("confirm", metavar="NAME", help="the name once more"))),
    Command("streams", "tail", "print the last records of a stream", stream_commands.tail,
            (_STREAM, _argument("-n", dest="number", metavar="N", type=int, default=10, help="how many (default: 10)"),
             _argument("-f", "--follow", action="store_true", help="and those that come"),
             _argument("--partition", metavar="P", type=int, help="of this partition only"))),
    Command("status", "", "counters and gauges of a running broker", status),
    Command("listeners", "", "the listeners of a running broker", listeners),
    Command("bridges", "", "the bridges of a running broker to other brokers", bridges),
    Command("config", "", "the settings in force, with the place that set each", config,
            (_argument("prefix", metavar="KEY", nargs="?", help="keys that begin with this"),
             _argument("--changed", action="store_true", help="without defaults"))),
    Command("log-level", "", "print or set the levels of a running broker's log", log_level,
            (_argument("level", nargs="?", choices=LOG_LEVELS, help="the new level"),
             _argument("--area", choices=LOG_AREAS, help="of these lines only"),
             _argument("--seconds", metavar="N", type=float, help="how long; else until the next reload"))),
    Command("trace", "", "print or capture the packets of a client, an address or a topic", trace, (
        _argument("--client", metavar="CLIENT", dest="client_id", help="packets of this client"),
        _argument("--address", metavar="ADDRESS", help="packets of clients at this address or in this network"),
        _argument("--topic", metavar="FILTER", help="PUBLISH packets with such topics"),
        _argument("--seconds", metavar="N", type=int, default=60, help="how long (default: 60)"),
        _argument("--max-bytes", metavar="N", type=int, default=16 << 20, help="end after so many (default: 16 MiB)"),
        _argument("--write", metavar="FILE", help="a capture file for Wireshark; - = stdout"),
        _argument("--payload", action="store_const", const=True, help="with payloads"),
    )),
    Command("cluster", "status", "the nodes and shards of a cluster", cluster_commands.status),
    Command("cluster", "move", "have a node own a shard", cluster_commands.move,
            (_argument("shard", metavar="SHARD", type=int, help="its number"),
             _argument("node", metavar="NODE", help="the name of the node")),
            "The shard stays there while the node is in the cluster"),
    Command("cluster", "drain", "have other nodes take all shards of a node", cluster_commands.drain,
            (_argument("--undo", action="store_true", help="let it have shards again"),),
            "It returns when the node has none. SIGTERM does the same before a node ends"),
    Command("cluster", "snapshot", "write snapshots of a node's shards", cluster_commands.snapshot, (),
            "Each shard does so by itself as cluster.snapshot_bytes and cluster.snapshot_age say"),
    Command("reload", "", "have a running broker reload its configuration", reload),
    Command("backup-now", "", "have a running broker back up below its http.backup_dir", backup_now,
            (_argument("name", metavar="NAME", help="of the new directory"),)),
)  # fmt: skip
GROUPS = {
    "clients": "list, show, disconnect and delete clients",
    "subscriptions": "list subscriptions, and the receivers of a topic",
    "retained": "list, read, set and delete retained messages",
    "users": "list, add, change and delete users",
    "acl": "list and change access rules",
    "bans": "list, add and lift bans",
    "alarms": "list and acknowledge alarms",
    "streams": "list, show, create, alter, delete and tail streams",
    "cluster": "show nodes and shards of a cluster, move shards",
}
_DEFAULT_ACTIONS = {"cluster": "status"}  # of the other groups it is "list"
_NAMES = {command.group for command in COMMANDS}


def add_parsers(commands: Any) -> None:
    """Add the commands to the subparsers of ``mqttbroker``."""
    for group, text in GROUPS.items():
        parser = commands.add_parser(group, help=text, allow_abbrev=False, epilog=EXIT_STATUSES)
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        for command in COMMANDS:
            if command.group == group:
                _add(actions, command.action, command)
    for command in COMMANDS:
        if command.group not in GROUPS:
            _add(commands, command.group, command)


def _add(parsers: Any, name: str, command: Command) -> None:
    parser = parsers.add_parser(
        name, help=command.text, description=". ".join(filter(None, (command.text, command.more))), allow_abbrev=False, epilog=EXIT_STATUSES
    )
    for argument in command.arguments:
        parser.add_argument(*argument.names, **argument.more)
    parser.add_argument("--json", action="store_true", help="print JSON")
    broker_api.add_options(parser)
    parser.set_defaults(api_command=command.run)


def with_action(words: list[str]) -> list[str]:
    """The words of a call, with ``list`` or ``status`` where a group has no action."""
    if not words or words[0] not in GROUPS:
        return words
    has_action = len(words) > 1 and (not words[1].startswith("-") or words[1] in ("-h", "--help"))
    return words if has_action else [words[0], _DEFAULT_ACTIONS.get(words[0], "list"), *words[1:]]


def run(options: argparse.Namespace) -> int:
    """Run one of the commands; raises ConfigError if the settings cannot be read."""
    api: BrokerApi | None = None
    try:
        api = broker_api.broker_api(options)
        run: Callable[[BrokerApi, argparse.Namespace], int] = options.api_command
        return run(api, options)
    except CommandError as error:
        print(f"mqttbroker {options.command}: {cell(str(error))}", file=sys.stderr)
        return error.status
    finally:
        if api is not None:
            api.close()
