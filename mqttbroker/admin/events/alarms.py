"""Alarms: conditions of the broker that an operator has to end, raised and cleared.

Each is a retained message below ``$SYS/broker/alarms/``, a log line when it begins and ends, and an item of
``GET /api/v1/alarms``.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

log = logging.getLogger("mqttbroker")

TOPIC = "$SYS/broker/alarms/"
MAX_CLEARED = 100  # alarms that are remembered after their end


class Alarm(NamedTuple):
    """One alarm. Times are Unix times in seconds; ``cleared`` is 0.0 while it lasts. An operator who takes care of it
    acknowledges it."""

    name: str  # levels of a topic, "certificate/0.0.0.0:8883"
    reason: str  # as of the last look
    since: float
    cleared: float = 0.0
    acknowledged_by: str = ""  # the sender of the request; "" = nobody
    acknowledged_at: float = 0.0

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "active": self.cleared == 0.0,
            "reason": self.reason,
            "since": round(self.since, 3),
            "cleared": round(self.cleared, 3) if self.cleared else None,
            "acknowledged_by": self.acknowledged_by or None,
            "acknowledged_at": round(self.acknowledged_at, 3) if self.acknowledged_at else None,
        }


class Alarms:
    """The alarms of one broker; ``publish`` takes a topic and the payload of its retained message.

    To be used on the event loop's thread.
    """

    def __init__(self, publish: Callable[[str, bytes], None]) -> None:
        self._publish = publish
        self._active: dict[str, Alarm] = {}
        self._cleared: deque[Alarm] = deque(maxlen=MAX_CLEARED)
        self.raised = 0

    def update(self, conditions: Mapping[str, str], now: float) -> None:
        """Raise an alarm for each new condition, and clear those whose condition has ended.

        ``conditions`` has the reason for each name; ``now`` is the Unix time in seconds. A changed reason is kept for
        `listed`, and is no new alarm.
        """
        for name, reason in conditions.items():
            known = self._active.get(name)
            if known is not None:
                self._active[name] = known._replace(reason=reason)
                continue
            alarm = self._active[name] = Alarm(name, reason, now)
            self.raised += 1
            log.warning("event=alarm_raised alarm=%s reason=%s", name, reason)
            self._tell(alarm)
        for name in [name for name in self._active if name not in conditions]:
            alarm = self._active.pop(name)._replace(cleared=now)
            self._cleared.append(alarm)
            log.info("event=alarm_cleared alarm=%s seconds=%.1f", name, max(0.0, now - alarm.since))
            self._tell(alarm)

    def acknowledge(self, name: str, operator: str, now: float) -> Alarm | None:
        """Mark an active alarm until it ends; returns it as it is now, None if there is none. The first operator and time
        stay."""
        alarm = self._active.get(name)
        if alarm is not None and not alarm.acknowledged_at:
            alarm = self._active[name] = alarm._replace(acknowledged_by=operator, acknowledged_at=now)
            log.info("event=alarm_acknowledged alarm=%s user=%s", name, operator)
            self._tell(alarm)
        return alarm

    def _tell(self, alarm: Alarm) -> None:
        self._publish(TOPIC + alarm.name, json.dumps(alarm.to_json(), ensure_ascii=False).encode("utf-8"))

    @property
    def active(self) -> list[Alarm]:
        """The alarms that last, the oldest first."""
        return list(self._active.values())

    @property
    def cleared(self) -> list[Alarm]:
        """The last `MAX_CLEARED` that ended, the newest first."""
        return list(reversed(self._cleared))
