"""The schedule of a run, as decided by its seed.

Every actor draws a fixed number of values per step from its own generator, so the n-th step of each is the same in
every run with that seed.  Times are in seconds.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

# Ways to end a connection.
CUT, TAKEOVER, LEAVE = "cut", "takeover", "leave"
# The packet sent to a client that triggers a kill; "" for none.
TRIGGERS = ("", "", "Puback", "Pubrec", "Pubcomp", "Publish", "Pubrel")


class Life(NamedTuple):
    """One life of the broker: it is killed after ``messages`` of publishers and then ``count`` packets of the kind
    ``trigger``."""

    messages: int
    trigger: str
    count: int
    restart_kill_s: float  # killed again so long after the restart; 0 for not
    not_reading: frozenset[int]  # numbers of the clients that stop reading before the kill
    not_reading_s: float  # how long before it, if there is no trigger


class Stay(NamedTuple):
    """One connection of a client."""

    seconds: float
    ack_delay: float
    end: str
    away: float  # time until the next connection, except after a takeover
    half: bool  # ends in the middle of a PUBLISH
    receive_maximum: int


class Burst(NamedTuple):
    """Messages of a publisher, each as (topic number, QoS, retain, size), after a pause."""

    pause: float
    messages: list[tuple[int, int, bool, int]]


def lives(seed: str, kills: int, messages: int, clients: int) -> list[Life]:
    """A schedule of ``kills`` lives with about so many ``messages`` in total, with ``clients`` clients."""
    random = Random(f"{seed}:broker")
    weights = [random.expovariate(1) + 0.05 for _ in range(kills)]
    return [
        Life(
            round(messages * weight / sum(weights)),
            random.choice(TRIGGERS),
            random.randint(1, 40),
            random.choice((0.0,) * 6 + (random.uniform(0.05, 0.8),)),
            frozenset(random.sample(range(clients), random.randint(0, clients // 2))),
            random.uniform(0.0, 0.05),
        )
        for weight in weights
    ]


class Habits:
    """The connections of a client; ``stay`` and ``away`` are averages."""

    def __init__(self, seed: str, name: str, stay: float, away: float) -> None:
        self.random = Random(f"{seed}:{name}:stay")
        self.stay = stay
        self.away = away

    def next(self) -> Stay:
        random = self.random
        return Stay(
            random.expovariate(1 / self.stay),
            random.choice((0.0, 0.0, 0.005, 0.05, 0.3)),
            random.choice((CUT, CUT, TAKEOVER, TAKEOVER, LEAVE)),
            random.expovariate(1 / self.away),
            random.random() < 0.3,
            random.choice((1, 5, 20, 100, 65535)),
        )


class Load:
    """The messages of a publisher, to the topics 0 to ``topics`` - 1; ``pause`` is an average."""

    def __init__(self, seed: str, name: str, topics: int, pause: float) -> None:
        self.random = Random(f"{seed}:{name}:load")
        self.topics = topics
        self.pause = pause

    def next(self) -> Burst:
        random = self.random
        pause = random.expovariate(1 / self.pause)
        return Burst(pause, [self._message() for _ in range(random.randint(1, 25))])

    def _message(self) -> tuple[int, int, bool, int]:
        random = self.random
        size = random.choice((20, 60, 60, 200)) if random.random() < 0.97 else 20_000
        return random.randrange(self.topics), random.randint(1, 2), random.random() < 0.15, size
