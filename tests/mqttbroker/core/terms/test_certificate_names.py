"""Names in certificates, and client ids bound to them."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from mqttbroker.core.terms.certificate_names import certificate_name
from mqttbroker.core.terms.terms import ListenerTerms

PUMP = {
    "subject": ((("countryName", "DE"),), (("organizationName", "Acme, Inc."),), (("commonName", "pump-7"),)),
    "subjectAltName": (
        ("DNS", "pump-7.example.org"),
        ("DNS", "second.example.org"),
        ("email", "pump@example.org"),
        ("URI", "spiffe://example.org/pump/7"),
    ),
}


@pytest.mark.parametrize(
    ("kinds", "name"),
    [
        ("cn", "pump-7"),
        ("san_dns", "pump-7.example.org"),
        ("san_uri", "spiffe://example.org/pump/7"),
        ("san_email", "pump@example.org"),
        ("subject", "CN=pump-7,O=Acme\\, Inc.,C=DE"),
        ("san_uri cn", "spiffe://example.org/pump/7"),
    ],
)
def test_each_kind(kinds: str, name: str) -> None:
    assert certificate_name(PUMP, tuple(kinds.split())) == name


@pytest.mark.parametrize("kind", ["cn", "san_dns", "san_uri", "san_email", "subject"])
def test_a_certificate_without_the_name(kind: str) -> None:
    assert certificate_name({}, (kind,)) is None
    assert certificate_name({"subject": (), "subjectAltName": (("IP Address", "10.0.0.1"),)}, (kind,)) is None
    assert certificate_name(PUMP, ()) is None


def test_the_first_that_the_certificate_has() -> None:
    assert certificate_name({"subject": ((("commonName", "pump"),),)}, ("san_uri", "cn")) == "pump"


def test_the_last_of_several_common_names() -> None:
    subject = ((("organizationName", "Acme"),), (("commonName", "plant"), ("commonName", "pump-7")))
    assert certificate_name({"subject": subject}, ("cn",)) == "pump-7"


@pytest.mark.parametrize("name", ["pump\0.evil", "pump\n", "\x7f", "a" * 65_536, "\udc80"])
def test_a_name_that_is_no_user_name_is_not_replaced_by_the_next_kind(name: str) -> None:
    certificate = {"subject": ((("commonName", name),),), "subjectAltName": (("DNS", "pump"),)}
    assert certificate_name(certificate, ("cn", "san_dns")) is None


@given(st.lists(st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=20), min_size=1, max_size=4))
def test_subjects_are_written_as_rfc_4514_says(values: list[str]) -> None:
    subject = tuple((("organizationalUnitName", value),) for value in values)
    oid = x509.NameOID.ORGANIZATIONAL_UNIT_NAME
    expected = x509.Name([x509.NameAttribute(oid, value) for value in values]).rfc4514_string()
    assert certificate_name({"subject": subject}, ("subject",)) == expected


@pytest.mark.parametrize(
    ("pattern", "client_id", "username", "certificate", "allowed"),
    [
        ("%i", "pump-7", None, PUMP, True),
        ("%i", "pump-8", None, PUMP, False),
        ("%i", "pump-7", None, None, False),
        ("%i", "pump-7", "pump-7", {}, False),
        ("%i", "", None, {}, False),
        ("%i-*", "pump-7-a", None, PUMP, True),
        ("%u/%i", "alice/pump-7", "alice", PUMP, True),
        ("%u/%i", "alice/pump-7", None, PUMP, False),
        ("%i", "%u", "alice", {"subject": ((("commonName", "%u"),),)}, True),
        ("%u", "%i", "%i", PUMP, True),
    ],
)
def test_client_ids_bound_to_certificates(pattern: str, client_id: str, username: str | None, certificate: Any, allowed: bool) -> None:
    terms = ListenerTerms()
    terms.client_id_pattern, terms.certificate_identity = pattern, ("cn",)
    found = terms.allowed_client_id(client_id, False, username, certificate)
    assert found == (client_id if allowed else None)


def test_an_assigned_client_id_is_the_name_in_the_certificate() -> None:
    terms = ListenerTerms()
    terms.client_id_pattern, terms.certificate_identity = "%i", ("san_uri", "cn")
    assert terms.allowed_client_id("auto-1", True, None, PUMP) == "spiffe://example.org/pump/7"
