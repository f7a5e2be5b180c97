"""The state of a bridge for lists, and the log lines of its links."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from mqttbroker.codec.reason_codes import name as name_of_code
from mqttbroker.config.remote_address import Address

log = logging.getLogger("mqttbroker.bridges")

# States of a bridge, as listed.
DISABLED: Final = "disabled"
CONNECTING: Final = "connecting"
CONNECTED: Final = "connected"
WAITING: Final = "waiting"  # until the next attempt

_MAX_REASON: Final = 500  # characters
_MAX_LOGGED: Final = 20  # problems that are logged until `forget_problems`


class BridgeProgress:
    """The state of the bridge of a name, its last address and reason, and counts. Times are Unix times in seconds.

    A problem of an address that is repeated is logged once, and so is the link after it.
    """

    def __init__(self, name: str, address: Address) -> None:
        self.state = DISABLED
        self.since = time.time()  # when the state began
        self.address = address
        self.reason = ""
        self.failures = 0  # attempts that failed and links that ended
        self.connects = 0
        self.refused_filters: Sequence[str] = ()
        self._down_since = self.since
        self._name = name
        self._logged: set[str] = set()  # problems, with their addresses
        self._logs_link = True
        self._failures_before_link = 0

    @property
    def down_since(self) -> float:
        """When the last link ended, or the bridge began; 0.0 if connected or disabled."""
        return self._down_since if self.state in (CONNECTING, WAITING) else 0.0

    def enter(self, state: str) -> bool:
        """Begin a state; returns whether a link is there now and was not before, or the reverse."""
        before, self.state = self.state, state
        if before == state:
            return False
        self.since = time.time()
        if before == CONNECTED:
            self._down_since = self.since
        return CONNECTED in (before, state)

    def forget_problems(self) -> None:
        """Log each problem again."""
        self._logged.clear()

    def failed(self, reason: str) -> None:
        reason = reason[:_MAX_REASON]
        self.reason = reason
        self.failures += 1
        self._failures_before_link += 1
        if self._is_new(reason):
            self._logs_link = True
            log.warning("event=bridge_disconnected bridge=%s address=%s reason=%s", self._name, self.address, reason)

    def connected(self, client_id: str, session_present: bool, refused: Sequence[tuple[str, int]]) -> None:
        """There is a link. ``refused`` are remote filters and the reason codes of their refusal."""
        self.connects += 1
        self.refused_filters = [topic_filter for topic_filter, _ in refused]
        for topic_filter, code in refused:
            if self._is_new(f"{topic_filter} {code}"):
                log.warning(
                    "event=bridge_filter_refused bridge=%s address=%s filter=%s reason=%s",
                    self._name,
                    self.address,
                    topic_filter,
                    name_of_code(code),
                )
        log.log(
            logging.INFO if self._logs_link else logging.DEBUG,
            "event=bridge_connected bridge=%s address=%s client=%s session_present=%s failures=%d",
            self._name,
            self.address,
            client_id,
            session_present,
            self._failures_before_link,
        )
        self._failures_before_link = 0
        self._logs_link = False

    def _is_new(self, problem: str) -> bool:
        """Whether to log a problem of this address. Their number is bounded, because a remote may vary its reason."""
        known = len(self._logged)
        if known < _MAX_LOGGED:
            self._logged.add(f"{self.address} {problem}")
        return len(self._logged) > known
