"""The state of remotes that a bridge keeps beside its session: a small file in the data directory."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger("mqttbroker.bridges")


class BridgeState:
    """``identity`` names the bridge at remotes. ``remote`` was the last one, "" = none yet.

    By remote, ``filters`` are those subscribed to, and ``left_behind`` the packet ids of QoS 2 messages that it may
    hold since another remote took its place.
    """

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.remote = ""
        self.filters: dict[str, list[str]] = {}
        self.left_behind: dict[str, list[int]] = {}


def read_state(path: Path, identity: str) -> BridgeState:
    """The state in a file; a new one, with this identity, if there is no file, or none that can be read."""
    state = BridgeState(identity)
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        known, remote = str(found["identity"]), str(found["remote"])
        filters = {str(key): [str(each) for each in value] for key, value in found["filters"].items()}
        left_behind = {str(key): [int(each) for each in value] for key, value in found["left_behind"].items()}
    except FileNotFoundError:
        return state
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("event=bridge_state_unreadable file=%s reason=%s", path, str(error) or type(error).__name__)
        return state
    state.identity, state.remote, state.filters, state.left_behind = known, remote, filters, left_behind
    return state


def encode_state(state: BridgeState) -> bytes:
    """The text of a file that `read_state` reads."""
    return json.dumps(vars(state), indent=1).encode("utf-8")
