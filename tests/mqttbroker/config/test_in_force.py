"""The settings in force as they are listed: values, sources, and no secrets."""

from __future__ import annotations

import pytest

from mqttbroker.config.in_force import settings_in_force
from mqttbroker.config.setting_kinds import shown_url
from mqttbroker.config.settings import Http, HttpAccess, HttpCallback, Jwt, Settings


@pytest.mark.parametrize(("url", "shown"), [
    ("https://id.example.org:8443/certs", "https://id.example.org:8443/certs"),
    ("https://h/certs?key=s3cr3t&tenant=a", "https://h/certs?***"),
    ("https://alice:s3cr3t@h/?key=s3cr3t#s3cr3t", "https://h/?***"),
    ("http://[::1]:80/a", "http://[::1]:80/a"),
])  # fmt: skip
def test_url_is_shown_without_user_and_query(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_each_table_of_a_list_has_keys_of_its_own() -> None:
    http = Http(access=(HttpAccess("a", "viewer", token="s3cr3t"), HttpAccess("b", "reader", streams=("s",))))
    listed = settings_in_force(Settings(http=http, sources={"http.access.1.role": "broker.toml:7"}))
    found = {item["key"]: (item["value"], item["source"]) for item in listed}
    assert found["http.access.0.token"] == ("***", "default") and found["http.access.1.streams"] == (["s"], "default")
    assert found["http.access.1.role"] == ("reader", "broker.toml:7") and "http.access" not in found
    assert {item["key"]: item["value"] for item in settings_in_force(Settings())}["http.access"] == []


def test_listing_shows_no_query_of_a_url() -> None:
    url = "https://h/a?key=s3cr3t"
    listed = settings_in_force(Settings(jwt=Jwt(jwks_url=url), http_callback=HttpCallback(url=url)))
    values = {item["key"]: item["value"] for item in listed}
    assert values["jwt.jwks_url"] == values["http_callback.url"] == "https://h/a?***"
    assert "s3cr3t" not in str(listed)
    defaults = {item["key"]: item["value"] for item in settings_in_force(Settings())}
    assert defaults["jwt.jwks_url"] is None and defaults["http_callback.url"] is None
