"""Bans after failed logins: limits, backoff, credit for right logins, networks, bounds, and a core that refuses."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.core import Core, believe_user_names

from mqttbroker.admin.control.slices import ControlError
from mqttbroker.codec.reason_codes import BANNED
from mqttbroker.config.settings import Bans as BanSettings
from mqttbroker.config.settings import Settings
from mqttbroker.core.access.bans import Bans, BanTerms

PEER = "10.0.0.1:1234"


def bans(exempt: Sequence[str] = (), **fields: Any) -> Bans:
    terms = BanTerms()
    defaults: dict[str, Any] = {"failures": 3, "address_failures": 6, "window": 60.0, "first": 10.0, "longest": 40.0}
    defaults |= {"reconnect_window": 60.0}
    for name, value in {**defaults, "max_entries": 1000, **fields}.items():
        setattr(terms, name, value)
    terms.exempt = [ipaddress.ip_network(text) for text in exempt]
    return Bans(terms)


def fail(bans: Bans, times: int, now: float = 0.0, peer: str = PEER, user: str = "alice") -> None:
    for _ in range(times):
        bans.failed(peer, user, now)


def test_a_user_name_is_banned_at_its_address_only() -> None:
    found = bans()
    fail(found, 2)
    assert not found.refuses(PEER, "alice", 0.0)
    fail(found, 1)
    assert found.refuses("10.0.0.1:99", "alice", 0.0)
    assert not found.refuses(PEER, "bob", 0.0) and not found.refuses(PEER, None, 0.0)
    assert not found.refuses("10.0.0.2:1234", "alice", 0.0)
    assert (found.started["failed_logins"], found.failed_logins, found.refused_logins) == (1, 3, 1)
    assert not found.refuses(PEER, "alice", 10.0)


def test_an_address_is_banned_for_all_users() -> None:
    found = bans()
    for number in range(6):
        fail(found, 1, user=f"user {number}")
    assert found.refuses(PEER, "bob", 9.9) and found.refuses(PEER, None, 9.9)
    assert not found.refuses(PEER, None, 10.0)


def test_each_ban_is_twice_as_long_up_to_the_longest() -> None:
    found = bans(address_failures=0)
    now, lengths = 0.0, []
    fail(found, 2)
    for _ in range(5):
        fail(found, 1, now)
        lengths.append(found.banned(now)[0].until - now)
        now += lengths[-1]
        assert found.active(now) == 0
    assert lengths == [10.0, 20.0, 40.0, 40.0, 40.0]
    now += 60.0 + 40.0 + 1.0
    fail(found, 3, now)
    assert found.banned(now)[0].until - now == 10.0


def test_failures_are_forgotten_with_time() -> None:
    found = bans()
    for number in range(100):
        fail(found, 1, number * 21.0)
    assert found.started["failed_logins"] == 0


def test_failures_of_a_login_that_began_before_the_ban_do_not_extend_it() -> None:
    found = bans()
    fail(found, 5)
    assert [record.until for record in found.banned(0.0)] == [10.0]


def test_right_logins_of_many_users_raise_the_limit_of_their_address() -> None:
    """95 of 100 devices behind one NAT are right, and the other five never give up."""
    found = bans(failures=5, address_failures=30, window=600.0, longest=900.0)
    for number in range(95):
        found.succeeded(PEER, f"device {number}")
    for second in range(0, 3600, 5):
        for number in range(5):
            user = f"wrong {number}"
            if not found.refuses(PEER, user, float(second)):
                fail(found, 1, float(second), user=user)
    assert not found.refuses(PEER, "device 1", 3600.0)
    assert {ban.key[1] for ban in found.banned(3600.0)} <= {f"wrong {number}" for number in range(5)}


def test_one_account_raises_the_limit_of_its_address_once() -> None:
    found = bans(failures=0)
    for number in range(100):
        found.succeeded(PEER, "mine")
        fail(found, 1, user=f"user {number}")
    assert found.refuses(PEER, "mine", 0.0)


def test_right_logins_of_a_shared_user_name_raise_its_limit() -> None:
    found = bans(address_failures=0)
    for _ in range(11):
        found.succeeded(PEER, "fleet")
    fail(found, 12, user="fleet")
    assert not found.refuses(PEER, "fleet", 0.0)
    fail(found, 1, user="fleet")
    assert found.refuses(PEER, "fleet", 0.0)


def test_suspects_are_addresses_and_users_with_more_failures_than_right_logins() -> None:
    found = bans(failures=10, address_failures=10)
    fail(found, 1)
    assert found.suspects(PEER, "bob", 0.0) and not found.suspects("10.0.0.2:1", "alice", 0.0)
    assert not found.suspects(PEER, "bob", 60.0)
    for number in range(3):
        found.succeeded(PEER, f"device {number}")
    fail(found, 1, 60.0)
    assert found.suspects(PEER, "alice", 60.0) and not found.suspects(PEER, "bob", 60.0)


@pytest.mark.parametrize(
    "peer, network",
    [
        ("10.0.0.1:1883", "10.0.0.1"),
        ("::ffff:10.0.0.1:1883", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6:1883", "2001:db8:1:2::/64"),
        ("fe80::1%eth0:1883", "fe80::/64"),
        ("local", ""),
        ("192.0.2.7:1", ""),
        ("::ffff:192.0.2.7:1", ""),
        ("2001:db8:ffff::1:1", ""),
    ],
)
def test_networks(peer: str, network: str) -> None:
    assert bans(exempt=["192.0.2.0/24", "2001:db8:ffff::/48"]).network(peer) == network
    if network:
        assert bans().network(peer) == network


def test_the_addresses_of_one_ipv6_network_count_together() -> None:
    found = bans()
    for number in range(6):
        fail(found, 1, peer=f"2001:db8::{number}:1", user=f"user {number}")
    assert found.refuses("2001:db8::99:1", None, 0.0) and not found.refuses("2001:db8:0:1::1:1", None, 0.0)


@pytest.mark.parametrize("peer, exempt", [("local", ()), ("192.0.2.7:1", ("192.0.2.7",))])
def test_exempt_clients_are_never_banned(peer: str, exempt: tuple[str, ...]) -> None:
    found = bans(exempt)
    fail(found, 100, peer=peer)
    assert not found.refuses(peer, "alice", 0.0) and found.active(0.0) == 0 and found.failed_logins == 100


def test_limits_of_zero_ban_nobody() -> None:
    found = bans(failures=0, address_failures=0)
    fail(found, 100)
    found.succeeded(PEER, "alice")
    assert found.active(0.0) == 0 and not found.suspects(PEER, "alice", 0.0)


def test_the_memory_is_bounded() -> None:
    found = bans(max_entries=10, failures=1, address_failures=1)
    for number in range(1000):
        fail(found, 1, float(number) / 1000, f"10.0.{number // 256}.{number % 256}:1", "x" * 60_000)
        found.succeeded(f"10.1.{number // 256}.{number % 256}:1", "y" * 60_000)
    assert found.active(1.0) == 10 and all(len(offences) <= 10 for offences in found._counts)
    assert max(len(ban.key[1]) for ban in found.banned(1.0)) == 64
    assert found.active(100.0) == 0 and all(len(offences) <= 10 for offences in found._counts)
    assert not found._list._ends and not found._list._prefixes


def test_a_lifted_ban_is_over() -> None:
    found = bans()
    fail(found, 3)
    assert not found.lift("10.0.0.1", None) and found.lift("10.0.0.1", "alice") and not found.lift("10.0.0.1", "alice")
    assert not found.refuses(PEER, "alice", 0.0)
    fail(found, 2)
    assert not found.refuses(PEER, "alice", 0.0)


def test_a_changed_password_ends_the_bans_of_its_user() -> None:
    found = bans()
    fail(found, 3)
    fail(found, 3, user="bob")
    assert found.refuses(PEER, None, 0.0)
    found.passwords_changed({"alice", "carol"})
    assert not found.refuses(PEER, "alice", 0.0) and found.refuses(PEER, "bob", 0.0)


def test_defaults_are_those_of_the_settings() -> None:
    settings = Settings().bans
    assert (settings.failures, settings.address_failures, settings.window) == (5, 30, 600.0)
    assert (settings.first, settings.longest, settings.exempt) == (10.0, 900.0, ())


# --- a broker -----------------------------------------------------------------------------------------------------


class BannedCore(Core):
    """A core whose clients have an address."""

    def client(self, version: int = 5) -> Any:
        client = super().client(version)
        client.connection.peer = PEER
        return client


def test_a_banned_client_is_refused_at_connect(tmp_path: Path) -> None:
    with BannedCore(tmp_path, others={"allow_anonymous": True}) as core:
        fail(core.broker.bans, 5, core.seconds)
        for version, code in ((5, BANNED), (4, 5), (3, 5)):
            client = core.client(version)
            assert client.connect("c", username="alice", password=b"x").reason_code == code and client.closed
            assert core.client(version).connect("c", username="bob", password=b"x").reason_code == 0
        control = core.control
        cursor = control.bans.open()
        page = control.bans.page(cursor)
        assert [tuple(ban) for ban in page.bans] == [("10.0.0.1", "alice", "", "failed_logins", "", 1, 10.0)]
        assert page.cursor == 0
        status = control.status()
        assert (status.bans, status.bans_started["failed_logins"]) == (1, 1)
        assert (status.logins_failed, status.logins_banned) == (5, 3)
        assert control.bans.lift("10.0.0.1", "alice") and not control.bans.lift("10.0.0.1")
        core.connect("c", username="alice", password=b"x")


def test_bans_are_listed_in_pages(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        for number in range(25):
            fail(core.broker.bans, 5, core.seconds, f"10.0.0.{number}:1")
        cursor, listed = core.control.bans.open(), []
        assert core.control.bans.lift("10.0.0.3", "alice")
        while cursor:
            page = core.control.bans.page(cursor, 10)
            listed += [ban.address for ban in page.bans]
            cursor = page.cursor
        assert sorted(listed) == sorted(f"10.0.0.{number}" for number in range(25) if number != 3)


# --- other causes -----------------------------------------------------------------------------------------------------


def test_protocol_errors_ban_their_address() -> None:
    found = bans(protocol_errors=3)
    for _ in range(3):
        found.protocol_error(PEER, 0.0)
    assert found.refuses(PEER, None, 9.9) and not found.refuses("10.0.0.2:1", None, 9.9)
    assert not found.refuses(PEER, None, 10.0)
    assert found.started["protocol_errors"] == 1
    off = bans()
    for _ in range(100):
        off.protocol_error(PEER, 0.0)
        off.connected(PEER, "alice", "c", 0.0)
    assert off.active(0.0) == 0


def test_reconnects_ban_a_client_id_of_one_user_at_one_address() -> None:
    found = bans(reconnects=5)
    for number in range(5):
        found.connected(PEER, "alice", "c", float(number))
    assert found.refuses(PEER, "alice", 5.0, "c")
    assert not found.refuses(PEER, "alice", 5.0, "d") and not found.refuses(PEER, "alice", 5.0)
    assert not found.refuses(PEER, "bob", 5.0, "c") and not found.refuses("10.0.0.2:1", "alice", 5.0, "c")


def test_slow_reconnects_are_no_offence() -> None:
    found = bans(reconnects=5)
    for number in range(1000):
        found.connected(PEER, None, "c", number * 12.5)
    assert found.active(12_500.0) == 0


def test_a_ban_for_one_cause_does_not_shorten_that_for_another() -> None:
    found = bans(protocol_errors=1, address_failures=1, failures=0)
    fail(found, 1)
    fail(found, 1, 10.0)  # the second ban of 20 seconds
    found.protocol_error(PEER, 10.0)
    ends = {ban.cause: ban.until for ban in found.banned(10.0)}
    assert ends == {"failed_logins": 30.0, "protocol_errors": 20.0}
    assert found.refuses(PEER, None, 29.0) and found.active(20.0) == 1 and found.active(30.0) == 0


@pytest.mark.parametrize("version, code", [(5, BANNED), (4, 5), (3, 5)])
def test_a_flapping_client_is_banned_by_the_broker(tmp_path: Path, version: int, code: int) -> None:
    with BannedCore(tmp_path, others={"allow_anonymous": True, "bans": BanSettings(reconnects=10)}) as core:
        for _ in range(10):
            core.connect("c", version)
        assert core.client(version).connect("c").reason_code == code
        core.connect("other", version)
        core.advance(10.0)
        core.connect("c", version)
        assert core.client(version).connect("c").reason_code == code
        core.advance(19.0)
        assert core.client(version).connect("c").reason_code == code
        assert core.control.status().bans_started["reconnects"] == 2


def test_a_client_that_violates_the_protocol_is_banned_by_the_broker(tmp_path: Path) -> None:
    with BannedCore(tmp_path, others={"allow_anonymous": True, "bans": BanSettings(protocol_errors=4)}) as core:
        for number in range(4):
            client = core.connect(f"c{number}", 5 - number % 2)
            client.send(b"\xf8\x00" if number else b"\x30\xff\xff\xff\xff\xff")
            assert client.closed
        assert core.client().connect("c").reason_code == BANNED


# --- operators --------------------------------------------------------------------------------------------------------

OPERATORS_BANS: list[dict[str, Any]] = [
    {"address": "10.0.0.1"},
    {"address": "10.0.0.0/24"},
    {"username": "alice"},
    {"client_id": "c"},
    {"client_id": "c", "username": "alice", "address": "10.0.0.0/8"},
    {"client_id": "c", "seconds": 60.0, "reason": "lost"},
]


def finish(slices: Any) -> Any:
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("ban", OPERATORS_BANS, ids=str)
@pytest.mark.parametrize("version, code", [(5, BANNED), (4, 5)])
def test_an_operator_bans_and_lifts(tmp_path: Path, ban: dict[str, Any], version: int, code: int) -> None:
    with BannedCore(tmp_path, others={"allow_anonymous": True}) as core:
        believe_user_names(core)
        victim, other = core.connect("c", version, username="alice"), core.connect("d", version, username="bob")
        other.connection.peer = "11.0.0.1:1"
        assert finish(core.control.bans.ban(**ban)) == 1
        assert victim.closed and not other.closed
        assert core.client(version).connect("c", username="alice").reason_code == code
        listed = core.control.bans.page(core.control.bans.open()).bans
        assert [(ban.cause, ban.reason, ban.seconds_left) for ban in listed] == [("operator", ban.get("reason", ""), ban.get("seconds"))]
        key = {name: value for name, value in ban.items() if name not in ("seconds", "reason")}
        assert core.control.bans.lift(**key) and not core.control.bans.lift(**key)
        core.connect("c", version, username="alice")


def test_an_operator_learns_what_is_wrong(tmp_path: Path) -> None:
    with Core(tmp_path, others={"bans": BanSettings(max_entries=1)}) as core:
        for fields, reason in (
            ({}, "needs an address, a user name or a client id"),
            ({"address": "10.0.0.1/8"}, "not an address or network: 10.0.0.1/8 has host bits set"),
            ({"address": "host"}, "not an address or network"),
            ({"client_id": "c", "seconds": 0.0}, "a ban lasts up to"),
        ):
            with pytest.raises(ControlError, match=reason):
                finish(core.control.bans.ban(**fields))
        finish(core.control.bans.ban(client_id="c"))
        with pytest.raises(ControlError, match="too many bans: bans.max_entries is 1"):
            finish(core.control.bans.ban(client_id="d"))


def test_an_operator_bans_exempt_clients_too() -> None:
    found = bans(["10.0.0.0/8"])
    found.ban(("10.0.0.1", "", ""), 60.0, "", 0.0)
    assert found.refuses(PEER, None, 59.0) and not found.refuses(PEER, None, 60.0)
