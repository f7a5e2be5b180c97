"""What happens when: everything that a seed decides.

Rule: every actor draws from a generator of its own, a fixed number of values per step, so that the n-th step of each
is the same in every run with that seed, however fast the machine is. Times are in seconds.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

# Ways to end a connection.
CUT, TAKEOVER, LEAVE = "cut", "takeover", "leave"
# What a kill of the broker waits for: a packet that one of the clients has just been sent.
MOMENTS = ("", "", "Puback", "Pubrec", "Pubcomp", "Publish", "Pubrel")


class Life(NamedTuple):
    """One life of the broker: so long, then until the clients have seen so many packets of a kind ("": at once)."""

    seconds: float
    moment: str
    count: int
    stillborn: float  # killed once more so soon after it is started again; 0 = not
    deaf: frozenset[int]  # the clients, by number, that hear nothing of its last moments,
    deafness: float  # which last so long, unless it is a packet that is waited for


class Stay(NamedTuple):
    """One connection of a client."""

    seconds: float
    laziness: float  # how long answers wait
    end: str
    away: float  # after it, unless it ends by a takeover
    half: bool  # it ends in the middle of a PUBLISH
    receive_maximum: int


class Burst(NamedTuple):
    """Messages of a publisher: for each the number of its topic, QoS, whether it is retained, and its size."""

    pause: float
    messages: list[tuple[int, int, bool, int]]


def lives(seed: str, kills: int, seconds: float, clients: int) -> list[Life]:
    """So many lives, so many seconds together, among so many clients."""
    random = Random(f"{seed}:broker")
    weights = [random.expovariate(1) + 0.05 for _ in range(kills)]
    return [
        Life(
            seconds * weight / sum(weights),
            random.choice(MOMENTS),
            random.randint(1, 40),
            random.choice((0.0,) * 6 + (random.uniform(0.05, 0.8),)),
            frozenset(random.sample(range(clients), random.randint(0, clients // 2))),
            random.uniform(0.0, 0.05),
        )
        for weight in weights
    ]


class Habits:
    """How a client comes and goes: it stays and is away for so long on average."""

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
    """What a publisher publishes, to topics 0 to ``topics`` - 1."""

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
