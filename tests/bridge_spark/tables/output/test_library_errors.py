"""Errors of packages: one line, without the values of credentials."""

from __future__ import annotations

import pytest

from bridge_spark.tables.output.library_errors import MAX_CHARACTERS, text_of

pytestmark = pytest.mark.one_build


@pytest.mark.parametrize(
    "text",
    [
        "secret_access_key=HIDDEN",
        "s3.secret-access-key: HIDDEN, region: x",
        "{'token': 'HIDDEN HIDDEN', 'region': 'x'}",
        '{"private_key": "-----BEGIN PRIVATE KEY-----\nHIDDEN"}',
        "AccountName=a;AccountKey=HIDDEN==;EndpointSuffix=x",
        "GET https://a.blob.core.windows.net/c?sv=2024&sig=HIDDEN%2B&se=x",
        "authorization: Bearer HIDDEN",
        "header.Authorization=Basic HIDDEN",
        "postgresql://user:HIDDEN@host/db",
        "X-Amz-Signature=HIDDEN&X-Amz-Date=x",
        "credential='client:HIDDEN'",
        "SharedKey: HIDDEN",
    ],
)
def test_values_of_credentials_are_not_shown(text: str) -> None:
    for found in (text_of(ValueError(text)), text_of(ValueError(f"before {text} after"))):
        assert "HIDDEN" not in found and "…" in found and "\n" not in found


@pytest.mark.parametrize(
    "text",
    [
        "no such bucket: lake",
        "the key 'n.t' is missing",
        "https://host:9000/lake/t is away",
        "partition key: design=5",
        "sigma=5",
    ],
)
def test_other_values_are_shown(text: str) -> None:
    assert text_of(ValueError(text)) == text


def test_long_texts_are_cut() -> None:
    assert len(text_of(ValueError("x" * 10_000))) == MAX_CHARACTERS + 1
    assert text_of(ValueError()) == "ValueError"
