"""Bans of addresses, networks, user names, client ids and combinations, against a plain list of them."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqttbroker.core.access.ban_list import FOREVER, OPERATOR, Ban, BanList, Key

ADDRESSES = ["10.0.0.1", "10.0.0.2", "10.1.0.1", "2001:db8::1", "2001:db8:0:1::1"]
NETWORKS = ["", *ADDRESSES[:3], "10.0.0.0/24", "10.0.0.0/8", "2001:db8::/64", "2001:db8::/32"]
NAMES = ["", "a", "b"]
KEYS = st.tuples(*map(st.sampled_from, (NETWORKS, NAMES, NAMES))).filter(any)


def applies(key: Key, address: str, username: str | None, client_id: str) -> bool:
    network, name, identifier = key
    inside = not network or ipaddress.ip_address(address) in ipaddress.ip_network(network)
    return inside and name in ("", username) and identifier in ("", client_id)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(KEYS, st.sampled_from([OPERATOR, "x", "y"]), st.sampled_from([1.0, 2.0, 3.0, FOREVER]))),
    st.lists(st.integers(0, 9)),
    st.sampled_from([0.0, 1.0, 2.5, 9.0]),
    st.sampled_from(ADDRESSES), st.sampled_from([None, "a", "b"]), st.sampled_from(NAMES), st.booleans(),
)  # fmt: skip
def test_a_ban_is_found_if_one_applies(
    added: list[tuple[Key, str, float]], removed: list[int], now: float,
    address: str, username: str | None, client_id: str, exempt: bool,
) -> None:  # fmt: skip
    bans = BanList(1000)
    model: dict[tuple[Key, str], Ban] = {}
    for key, cause, until in added:
        ban = Ban(key, cause, until, 1)
        assert bans.add(ban)
        model[key, cause] = ban
    for index in removed:
        if index < len(model):
            bans.remove(model.pop(list(model)[index]))
    ended = bans.expire(now)
    assert {id(ban) for ban in ended} == {id(ban) for ban in model.values() if ban.until <= now}
    model = {key: ban for key, ban in model.items() if ban.until > now}
    assert len(bans) == len(model) == len(bans.all())
    found = bans.find(f"{address}:5", username, client_id, exempt)
    expected = [
        ban for (key, cause), ban in model.items()
        if applies(key, address, username, client_id) and (cause == OPERATOR or not exempt)
    ]  # fmt: skip
    assert found in expected if expected else found is None


def test_the_list_is_bounded() -> None:
    bans = BanList(3)
    for number in range(10):
        bans.add(Ban((f"10.0.0.{number}", "", ""), "x", float(number), 1))
        assert bans.add(Ban(("", "", f"c{number}"), OPERATOR, FOREVER, 1)) == (number < 3)
    assert [ban.key[0] or ban.key[2] for ban in bans.all()] == ["c0", "c1", "c2", "10.0.0.7", "10.0.0.8", "10.0.0.9"]
    assert bans.add(Ban(("", "", "c1"), OPERATOR, 5.0, 1)) and len(bans) == 6
    for _ in range(5000):
        bans.add(Ban(("10.0.0.9", "", ""), "x", 100.0, 1))
    assert len(bans._ends) < 2000


@pytest.mark.parametrize("peer", ["local", "/run/socket", "memory"])
def test_clients_without_an_address_are_banned_by_name(peer: str) -> None:
    bans = BanList(3)
    bans.add(Ban(("10.0.0.0/8", "", ""), OPERATOR, FOREVER, 1))
    assert bans.find(peer, "a", "c") is None
    bans.add(Ban(("", "a", ""), OPERATOR, FOREVER, 1))
    assert bans.find(peer, "a", "c") is not None and bans.find(peer, "b", "a") is None
