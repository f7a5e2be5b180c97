"""``mqttbroker cluster``: the nodes and shards of a cluster, as the asked node knows them, and moves of shards."""

from __future__ import annotations

import argparse
import time
from typing import Any

from mqttbroker.cli.broker_api import DONE, FAILED, BrokerApi, CommandError
from mqttbroker.cli.tables import print_json, print_table

POLL = 0.2  # seconds between looks whether a node is drained
WAIT = 120.0  # seconds until `drain` gives up
_NUMBERS = ("SHARD", "EPOCH", "LAG", "CLIENTS", "SESSIONS", "OWNS", "FOLLOWS")


def status(api: BrokerApi, options: argparse.Namespace) -> int:
    return _show(api, options, api.get("/cluster"))


def move(api: BrokerApi, options: argparse.Namespace) -> int:
    return _show(api, options, api.change("POST", "/cluster/move", {"shard": options.shard, "node": options.node}))


def drain(api: BrokerApi, options: argparse.Namespace) -> int:
    """Move all shards of the asked node away, and wait until it has none; with ``--undo`` let it have shards again."""
    answer = api.change("POST", "/cluster/drain", {"on": not options.undo})
    until = time.monotonic() + WAIT
    while not options.undo:
        with api.as_expected():
            own = sum(len(one["owns"]) for one in answer["nodes"] if one["node"] == answer["node"])
            if not own and not any(one["core"] and one["core"]["role"] == "owner" for one in answer["shards"]):
                break
            others = [one for one in answer["nodes"] if one["node"] != answer["node"] and not one["draining"]]
        if not others:
            raise CommandError("there is no other node to take its shards", FAILED)
        if time.monotonic() > until:
            raise CommandError(f"it still owns {own} shards after {WAIT:g} s", FAILED)
        time.sleep(POLL)
        answer = api.get("/cluster")
    return _show(api, options, answer)


def snapshot(api: BrokerApi, options: argparse.Namespace) -> int:
    """Have the shards of the asked node write snapshots, and wait until each has written one."""
    with api.as_expected():
        before = _snapshots(api.get("/cluster"))
    answer = api.change("POST", "/cluster/snapshot", {})
    until = time.monotonic() + WAIT
    while True:
        with api.as_expected():
            now = _snapshots(answer)
        late = [shard for shard, written in before.items() if now.get(shard, written + 1) <= written]
        if not late:
            return _show(api, options, answer)
        if time.monotonic() > until:
            raise CommandError(f"no snapshot of shard {late[0]} after {WAIT:g} s: see the log of the node", FAILED)
        time.sleep(POLL)
        answer = api.get("/cluster")


def _snapshots(answer: Any) -> dict[int, int]:
    """The snapshots that the asked node has written of each shard that it owns."""
    return {one["shard"]: one["core"]["snapshots"] for one in answer["shards"] if one["core"] and one["core"]["role"] == "owner"}


def _show(api: BrokerApi, options: argparse.Namespace, answer: Any) -> int:
    if options.json:
        print_json(answer)
        return DONE
    with api.as_expected():
        print_table(("NODE", "ADDRESS", "VERSION", "STATE", "OWNS", "FOLLOWS"), [
            (one["node"], one["address"], one["version"], "draining" if one["draining"] else "member", len(one["owns"]), len(one["follows"]))
            for one in answer["nodes"]
        ], _NUMBERS)  # fmt: skip
        print()
        # State and figures are those of the asked node's own processes.
        print_table(("SHARD", "OWNER", "STANDBYS", f"ON {answer['node'].upper()}", "EPOCH", "LAG", "CLIENTS", "SESSIONS"), [
            (one["shard"], one["owner"] or "-", ",".join(one["standbys"]), *_core(one["core"])) for one in answer["shards"]
        ], _NUMBERS)  # fmt: skip
        for problem in answer["problems"]:
            print(problem)
    return DONE


def _core(core: Any) -> tuple[object, ...]:
    if core is None:
        return ("", "", "", "", "")
    serves = core["role"] == "owner"
    return (core["state"], core["epoch"] if core["epoch"] >= 0 else "", core["lag"], core["clients"] if serves else "",
            core["sessions"] if serves else "")  # fmt: skip
