"""Which node owns each shard and which ones follow it: a function of what the nodes have now.

It is sticky: a node that joins or leaves moves only the shards that it takes or had, and those that even the loads then. A shard moves from a living owner only to a
node that already follows it; until then that node is one of its standbys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

__all__ = ["Member", "ShardNodes", "assign"]


class Member(NamedTuple):
    """A node as it describes itself.

    ``owned`` has the epoch of each shard that it owns; ``follows`` the shards that it follows, ``warm`` those of them that it has read to
    the end, so that it can take them over at once. ``failed`` has the shards whose core failed there lately: they go back there only if their
    owner is to get rid of them, or dead. A node with ``draining`` is to get rid of its shards.
    """

    node: str
    owned: Mapping[int, int] = {}
    follows: frozenset[int] = frozenset()
    warm: frozenset[int] = frozenset()
    draining: bool = False
    failed: frozenset[int] = frozenset()

    def takes(self, shard: int, owner: Member) -> bool:
        """Whether a shard may move here now from its living owner."""
        return shard in self.warm and (owner.draining or shard not in self.failed)


class ShardNodes(NamedTuple):
    """The nodes of a shard: ``owner`` should own it, and is None if no node can; ``standbys`` should follow it."""

    owner: str | None
    standbys: list[str]


def assign(shards: int, members: Sequence[Member], standbys: int = 1, pins: Mapping[int, str] = {}) -> list[ShardNodes]:
    """The place of each shard. The order of ``members`` does not matter; ``pins`` names the node that an operator chose for a shard."""
    by_name = {member.node: member for member in sorted(members)}
    able = [name for name, member in by_name.items() if not member.draining]
    current = [_owner(shard, by_name) for shard in range(shards)]
    targets = _targets(shards, by_name, able, current, pins)
    owners = [
        target if target is not None and (now is None or target == now or by_name[target].takes(shard, by_name[now])) else now
        for shard, (target, now) in enumerate(zip(targets, current))
    ]
    # The node that is to own a shard later begins as its standby.
    following = [[target] if target is not None and target != owner else [] for target, owner in zip(targets, owners)]
    _follow(following, owners, by_name, able, standbys)
    return [ShardNodes(owner, nodes) for owner, nodes in zip(owners, following)]


def _owner(shard: int, members: Mapping[str, Member]) -> str | None:
    """The node that owns the shard now: of several that believe so the one with the last takeover."""
    owners = [(member.owned[shard], name) for name, member in members.items() if shard in member.owned]
    return max(owners)[1] if owners else None


def _rank(shard: int, node: str) -> bytes:
    """Spreads shards over nodes that are equal otherwise."""
    return sha256(f"{shard}/{node}".encode()).digest()


def _targets(
    shards: int,
    members: Mapping[str, Member],
    able: Sequence[str],
    current: Sequence[str | None],
    pins: Mapping[int, str],
) -> list[str | None]:
    """The nodes that should own the shards in the end, with loads that differ by one at most, but for ``pins``."""
    targets: list[str | None] = [None] * shards
    if not able:
        return targets
    loads = dict.fromkeys(able, 0)
    fixed = set()  # shards that stay where they are put at first

    def put(shard: int, node: str) -> None:
        targets[shard] = node
        loads[node] += 1

    for shard in range(shards):
        node = pins.get(shard)
        if node in loads and node is not None:
            put(shard, node)
            fixed.add(shard)
        elif current[shard] in loads:
            put(shard, current[shard] or "")
    lacking = [shard for shard in range(shards) if targets[shard] is None]
    failed_over = False
    # Shards without an owner go to a node that can serve them at once, even if that has more than its share.
    for shard in sorted(lacking, key=lambda one: current[one] is not None):
        warm = [node for node in able if shard in members[node].warm]
        if warm and current[shard] is None:
            put(shard, min(warm, key=lambda node: (shard in members[node].failed, loads[node], _rank(shard, node))))
            failed_over = True
    for shard in lacking:
        if targets[shard] is None:
            put(shard, min(able, key=lambda node: (
                loads[node], shard in members[node].failed, shard not in members[node].follows, _rank(shard, node)
            )))  # fmt: skip
    if failed_over:
        return targets  # the shards of a dead node first, and the loads when these are served
    while True:
        most = max(able, key=lambda node: (loads[node], node))
        least = min(able, key=lambda node: (loads[node], node))
        movable = [shard for shard in range(shards) if targets[shard] == most and shard not in fixed]
        if loads[most] - loads[least] <= 1 or not movable:
            heavy = [node for node in able if loads[node] - loads[least] > 1]
            movable = [shard for shard in range(shards) if targets[shard] in heavy and shard not in fixed]
            if not movable:
                return targets
        # Of those, one that the node with the least load follows already.
        ready = members[least]
        shard = min(movable, key=lambda one: (one in ready.failed, one not in ready.warm, one not in ready.follows, _rank(one, least)))
        loads[targets[shard] or ""] -= 1
        put(shard, least)


def _follow(
    following: list[list[str]],
    owners: Sequence[str | None],
    members: Mapping[str, Member],
    able: Sequence[str],
    standbys: int,
) -> None:
    """Add standbys to each shard until it has ``standbys``, as far as there are nodes: those that follow it already, then those with
    the fewest; none gets more than one above its share."""
    loads = dict.fromkeys(able, 0)
    for nodes in following:
        for node in nodes:
            loads[node] += 1
    wanted = [min(standbys, sum(node != owner for node in able)) for owner in owners]
    share = -(-sum(wanted) // len(able)) if able else 0
    for keep in (True, False):
        for shard, nodes in enumerate(following):
            free = [node for node in able if node not in nodes and node != owners[shard]]
            if keep:
                free = [node for node in free if shard in members[node].follows or shard in members[node].owned]
            for _ in range(wanted[shard] - len(nodes)):
                fits = [node for node in free if loads[node] < share] if keep else free
                if not fits:
                    break
                node = min(fits, key=lambda one: (shard not in members[one].warm if keep else 0, loads[one], _rank(shard, one)))
                free.remove(node)
                nodes.append(node)
                loads[node] += 1
