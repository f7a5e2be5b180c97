"""What a client may read of a stream.

Access to the stream by name grants all of it; otherwise the rules of each message's topic decide. A rule for topics
below the name of the stream, such as ``$stream/sensors/room1/#``, grants those topics of the stream only.
"""

from __future__ import annotations

from mqttbroker.core.access.policy import Rules
from sessions.session import Session
from topic_matcher.filters import matches


class StreamRights:
    """The rights of one session in one stream; ``root`` is ``$stream`` or ``$queue``.

    ``filters`` are those of the stream, or the one of the subscription.
    """

    def __init__(self, rules: Rules, session: Session, root: str, stream: str, filters: list[str]) -> None:
        self.rules = rules
        self.session = session
        self.filters = filters
        self._name = f"{root}/{stream}"
        self._whole = False
        self.changed()

    def changed(self) -> None:
        """The rules may answer differently from now on."""
        self._whole = not self.rules.restrictive or self.rules.may_read(self.session, self._name)

    @property
    def may_subscribe(self) -> bool:
        """Whether the client may subscribe; `may_read` decides on each message."""
        rules = self.rules
        session = self.session
        if rules.denies(session, self._name):
            return False
        if self._whole:
            return True
        for topic_filter in self.filters:
            if rules.may_subscribe(session, topic_filter) and rules.may_read_some(session, topic_filter):
                return True
            if rules.may_read_some(session, f"{self._name}/{topic_filter}"):
                return True
        return False

    def may_read(self, topic: str) -> bool:
        """Whether the client may read the stream's messages of a topic."""
        if self._whole:
            return True
        return self.rules.may_read(self.session, topic) or self.rules.may_read(self.session, f"{self._name}/{topic}")


def matches_any(filters: list[str], topic: str) -> bool:
    """Whether a topic matches one of the filters."""
    for topic_filter in filters:
        if matches(topic_filter, topic):
            return True
    return False
