"""The sessions of a bridge at its remotes, as far as later links must know them.

They are in a small file in the data directory. Packet ids of the local session belong to the remote that was connected
last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

from mqttbroker.auth.replace_file import replace_file
from mqttbroker.bridges.relay_terms import LocalState, RelayError, RemoteHistory
from mqttbroker.bridges.state_file import BridgeState, encode_state, read_state
from mqttbroker.config.remote_address import Address
from sessions.delivery import Delivery
from sessions.session import Session

SHARED: Final = "*"
"""Stands for all remotes of a bridge if they share sessions."""


class RemoteSessions:
    """The state in the file ``path``. ``filters`` are those that the bridge subscribes to at each remote.

    A method that changes the file raises RelayError if it cannot be written.
    """

    def __init__(self, path: Path, new_identity: str, filters: set[str], shared: bool) -> None:
        self._path = path
        self._state = read_state(path, new_identity)
        self._filters = filters
        self._shared = shared
        self._ended: set[str] = set()  # remotes that have ended the session of an earlier bridge

    @property
    def identity(self) -> str:
        """The identity of the bridge at its remotes."""
        return self._state.identity

    def is_new(self, address: Address) -> bool:
        """Whether the remote may hold a session of an earlier bridge with the same client id."""
        key = self._key(address)
        return key not in self._state.filters and key not in self._ended

    def ended(self, address: Address) -> None:
        """The remote has ended such a session."""
        self._ended.add(self._key(address))

    def history(self, address: Address, new_filters: Sequence[str]) -> RemoteHistory:
        """``new_filters`` are local ones, subscribed to since the last link."""
        key, state = self._key(address), self._state
        return RemoteHistory(self._ids_elsewhere(key), state.left_behind.get(key, ()), state.filters.get(key, ()), new_filters)

    def join(self, address: Address, session: Session) -> LocalState:
        """The state of the local session. Its ids in flight are noted if they belong to another remote."""
        state = self._state
        in_flight = _in_flight(session)
        if self._ids_elsewhere(self._key(address)):
            known = state.left_behind.get(state.remote, [])
            left = sorted({*known, *(each for each, qos in in_flight.items() if qos == 2)})
            if left != known:
                state.left_behind[state.remote] = left
                self.save()
        return LocalState(
            [cast(int, each) for each in session.received],
            list(session.subscriptions),
            lambda count: _free_ids(in_flight, int(session.deliveries.window.last_packet_id), count),
        )

    def assign_ids(self, address: Address) -> None:
        """From now on the session's packet ids belong to this remote, which is asked for the filters."""
        key, state = self._key(address), self._state
        filters = sorted({*self._filters, *state.filters.get(key, ())})
        if state.remote != key or state.filters.get(key) != filters:
            state.remote = key
            state.filters[key] = filters
            self.save()

    def confirm(self, address: Address) -> None:
        """The remote has answered: it holds no ids left behind, and has no subscriptions but to the filters."""
        key, state = self._key(address), self._state
        filters = sorted(self._filters)
        if key in state.left_behind or state.filters.get(key) != filters:
            state.left_behind.pop(key, None)
            state.filters[key] = filters
            self.save()

    def reset(self) -> None:
        """Forget all remotes, because the local session that had their packet ids is gone. Call `save` then."""
        self._state = BridgeState(self._state.identity)

    def save(self) -> None:
        problem = replace_file(self._path, [encode_state(self._state)], True)
        if problem:
            raise RelayError(f"{self._path}: {problem}")

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _key(self, address: Address) -> str:
        """The remote's name in the file."""
        return SHARED if self._shared else str(address)

    def _ids_elsewhere(self, key: str) -> bool:
        return self._state.remote not in ("", key)


def _in_flight(session: Session) -> dict[int, int]:
    """The QoS of the messages in flight by packet id."""
    found: dict[int, int] = {}
    for key, message in session.deliveries.window.in_flight.items():
        found[cast(int, key)] = message.qos if isinstance(message, Delivery) else 2
    for entry in session.deliveries.queue.entries:
        if entry.packet_id:
            found[entry.packet_id] = entry.qos
    return found


def _free_ids(used: dict[int, int], last: int, count: int) -> list[int]:
    """Packet ids that are not used, as far as possible from those that the session uses next."""
    found: list[int] = []
    packet_id = last
    while len(found) < count:
        if packet_id < 1:
            packet_id = 65535
        if packet_id not in used:
            found.append(packet_id)
        packet_id -= 1
    return found
