"""Common names of certificates."""

from __future__ import annotations

from mqttbroker.auth.certificates import common_name


def test_common_names() -> None:
    subject = ((("organizationName", "Acme"),), (("commonName", "plant"), ("commonName", "pump-7")))
    assert common_name({"subject": subject}) == "pump-7"
    assert common_name({"subject": ((("commonName", ""),),)}) is None
    assert common_name({}) is None
