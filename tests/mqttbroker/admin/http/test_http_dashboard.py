"""The files of the dashboard: served from the package with ETag and security headers, without credentials."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from support.api_client import ACCESS
from support.broker_process import BrokerProcess

import mqttbroker.admin
from mqttbroker.admin.http.dashboard import PATH, dashboard_routes

pytestmark = pytest.mark.one_build
FILES = Path(mqttbroker.admin.__file__).with_name("dashboard")
PLACES = [route.path for route in dashboard_routes()]
Start = Callable[..., BrokerProcess]


def fetch(broker: BrokerProcess, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(broker.url + path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    except urllib.error.HTTPError as error:
        return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()


def test_files_need_no_token_and_what_they_show_does(start_broker: Start) -> None:
    broker = start_broker(config={"http": {"access": ACCESS}})
    for path in PLACES:
        name = "index.html" if path == "/" else path.removeprefix(PATH)
        status, headers, body = fetch(broker, path)
        assert (status, body) == (200, (FILES / name).read_bytes())
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-cache"
        assert fetch(broker, path, If_None_Match=headers["etag"])[::2] == (304, b"")
        assert fetch(broker, path, If_None_Match='"another"')[0] == 200
    for path in ("/dashboard/no.js", "/dashboard/..%2fhttp.py", "/dashboard/../http.py", "/api/v1/status"):
        assert fetch(broker, path)[0] == 401
    status, headers, _ = fetch(broker, "/api/v1/status", Authorization="Bearer t-viewer")
    assert status == 200 and headers["x-content-type-options"] == "nosniff"
    headers = fetch(broker, "/")[1]
    policy = dict(each.strip().partition(" ")[::2] for each in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'" and policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'" and policy["require-trusted-types-for"] == "'script'"
    assert headers["content-type"] == "text/html; charset=utf-8" and headers["referrer-policy"] == "no-referrer"


def test_page_names_no_outside_resource() -> None:
    for path in FILES.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|[\"'(]//\w|@import|\burl\(", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path.name


def test_imports_name_files_that_are_served() -> None:
    for path in FILES.glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', path.read_text(encoding="utf-8")):
            assert PATH + name in PLACES, f"{path.name} imports {name}"


def test_dashboard_can_be_turned_off(start_broker: Start) -> None:
    broker = start_broker(config={"http": {"dashboard": False}})
    assert fetch(broker, "/")[0] == fetch(broker, "/dashboard/main.js")[0] == 404
