"""Networks of addresses, as limits and bans count them."""

from __future__ import annotations

import pytest

from mqttbroker.core.terms.networks import Networks


@pytest.mark.parametrize(
    ("peer", "network", "wide"),
    [
        ("192.0.2.7:5000", "192.0.2.7", "192.0.2.0/24"),
        ("::ffff:192.0.2.7:5000", "192.0.2.7", "192.0.2.0/24"),
        ("2001:db8:1:2:3:4:5:6:5000", "2001:db8:1:2::/64", "2001:db8:1::/48"),
        ("fe80::1%lo:5000", "fe80::/64", "fe80::/48"),
        ("local", "", ""),
        ("/run/socket", "", ""),
        ("/run/a:b", "", ""),
        ("/run/1:b", "", ""),
        ("memory", "", ""),
    ],
)
def test_networks_of_peers(peer: str, network: str, wide: str) -> None:
    assert Networks().of(peer) == network
    assert Networks(24, 48).of(peer) == wide


def test_a_prefix_of_a_whole_address_is_left_out() -> None:
    assert Networks(32, 128).of("2001:db8::1:5000") == "2001:db8::1"
