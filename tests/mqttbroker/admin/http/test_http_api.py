"""The administration API: what each operation answers and does, pages, errors, and the roles that it needs."""

from __future__ import annotations

import base64
import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.api_client import ACCESS, ROLES, Api
from support.broker_process import BrokerProcess
from support.raw_client import RawClient

from mqttbroker.codec.packets import Publish
from mqttbroker.codec.properties import Properties

pytestmark = pytest.mark.one_build
Start = Callable[..., BrokerProcess]
READER = [{"name": "reader", "role": "reader", "streams": ["plant"], "token": "t-reader"}]
STREAMS = {"plant": {"filters": ["plant/#"], "partitions": 2}, "lab": {"filters": ["lab/#"], "partitions": 1}}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    backups = tmp_path_factory.mktemp("backups")
    access = {"access": ACCESS + READER, "backup_dir": str(backups)}
    with BrokerProcess(config={"http": access, "streams": STREAMS}) as process:
        yield process


@pytest.fixture
def api(broker: BrokerProcess) -> Api:
    return Api(broker)


# --- clients ------------------------------------------------------------------------------------------------------


def test_clients_are_listed_filtered_and_sorted(api: Api, connect: Callable[..., RawClient]) -> None:
    persistent = Properties()
    persistent.session_expiry_interval = 600
    clients = {name: connect(f"list-{name}", properties=persistent) for name in ("a", "b", "c", "d")}
    clients["b"].subscribe("x/1", "x/2", "x/3")
    clients["c"].subscribe("x/1")
    clients["d"].disconnect()

    def ids(**query: Any) -> list[str]:
        return [item["client_id"] for item in api.pages("/clients", 2, prefix="list-", **query)]

    assert ids() == ["list-a", "list-b", "list-c", "list-d"]
    assert ids(connected="false") == ["list-d"] and ids(contains="t-c") == ["list-c"]
    assert ids(address="127.0.0.0/8") == ["list-a", "list-b", "list-c"] and ids(address="::1") == []
    assert ids(username="nobody") == [] == ids(listener="127.0.0.1:1")
    listener = api.get("/listeners")["items"][0]["address"]
    assert ids(listener=listener) == ["list-a", "list-b", "list-c"]
    assert ids(sort="subscriptions", order="desc") == ["list-b", "list-c", "list-d", "list-a"]
    assert ids(sort="subscriptions") == ["list-a", "list-d", "list-c", "list-b"]
    assert ids(sort="connected_at") == ["list-d", "list-a", "list-b", "list-c"]
    assert ids(order="desc") == ["list-d", "list-c", "list-b", "list-a"]
    item = api.get("/clients", prefix="list-b")["items"][0]
    assert item["protocol"] == "5.0" and item["persistent"] and item["address"].startswith("127.0.0.1:")
    gone = api.get("/clients", prefix="list-d")["items"][0]
    assert (gone["address"], gone["connected_at"], gone["listener"]) == (None, None, None)
    assert gone["disconnected_at"] > item["connected_at"] > 1_700_000_000


def test_very_long_client_ids_are_listed_and_banned(api: Api, connect: Callable[..., RawClient]) -> None:
    names = [f"long-{letter * length}" for letter, length in (("a", 1600), ("b", 60_000), ("é", 30_000))] + ["long-z"]
    for name in names:
        connect(name)
    for order in ({"order": "asc"}, {"order": "desc"}, {"sort": "connected_at"}):
        assert {item["client_id"] for item in api.pages("/clients", 1, prefix="long-", **order)} == set(names)
    assert api.ask("POST", "/bans", {"client_id": names[1], "seconds": 60}) == (200, {"disconnected": 1})
    digest = api.get("/bans")["items"][0]["client_id"]
    assert api.ask("DELETE", "/bans", client_id=digest)[0] == 204
    api.refused(404, "cursor", "GET", "/clients", cursor="0" * 64)


def test_one_client_in_detail(api: Api, connect: Callable[..., RawClient]) -> None:
    client_id = "detail/1 ü"
    connect(client_id, keep_alive=30).subscribe("detail/+", options=1)
    path = f"/clients/{quote(client_id, safe='')}"
    detail = api.get(path)
    expected = {"client_id": client_id, "keep_alive": 30.0, "expiry_interval": 0, "in_flight": 0, "has_will": False}
    assert expected.items() <= detail.items()
    assert api.get(f"{path}/subscriptions")["items"] == [{
        "client_id": client_id, "topic_filter": "detail/+", "qos": 1, "no_local": False,
        "retain_as_published": False, "identifier": None, "connected": True,
    }]  # fmt: skip
    assert "no session 'nobody'" in api.refused(404, "client_id", "GET", "/clients/nobody")
    api.refused(404, "client_id", "GET", "/clients/nobody/subscriptions")


def test_client_is_disconnected_and_its_session_deleted(api: Api, connect: Callable[..., RawClient]) -> None:
    persistent = Properties()
    persistent.session_expiry_interval = 600
    client = connect("doomed", properties=persistent)
    operator = Api(api.broker, "operator")
    assert operator.ask("POST", "/clients/doomed/disconnect") == (204, None)
    assert [getattr(packet, "reason_code", None) for packet in client.expect_closed()] == [0x98]
    assert api.get("/clients/doomed")["connected"] is False
    operator.refused(404, "client_id", "POST", "/clients/doomed/disconnect")
    assert operator.ask("DELETE", "/clients/doomed") == (204, None)
    operator.refused(404, "client_id", "DELETE", "/clients/doomed")


def test_subscriptions_by_filter_and_by_topic(api: Api, connect: Callable[..., RawClient]) -> None:
    connect("sub-a").subscribe("subs/+/t", "subs/#")
    connect("sub-b").subscribe("$share/g/subs/#", "subs/1/t")

    def found(path: str, **query: Any) -> set[tuple[str, str]]:
        return {(item["client_id"], item["topic_filter"]) for item in api.pages(path, 1, **query)}

    assert found("/subscriptions", filter="subs/#") == {("sub-a", "subs/#")}
    assert found("/subscriptions", filter="$share/g/subs/#") == {("sub-b", "$share/g/subs/#")}
    assert found("/subscriptions", filter="subs/none") == set()
    assert found("/receivers", topic="subs/2/t") == {
        ("sub-a", "subs/+/t"), ("sub-a", "subs/#"), ("sub-b", "$share/g/subs/#")
    }  # fmt: skip
    api.refused(400, "filter", "GET", "/subscriptions")
    api.refused(400, "topic", "GET", "/receivers", topic="a/#")


# --- messages -----------------------------------------------------------------------------------------------------


def test_message_of_a_client_keeps_all_its_properties(api: Api, connect: Callable[..., RawClient]) -> None:
    properties = Properties()
    properties.content_type, properties.response_topic = "text/plain", "answers"
    properties.correlation_data, properties.payload_format_indicator = b"\x00\xff", 1
    properties.message_expiry_interval = 1000
    properties.user_properties = [("k", "1"), ("k", "2")]
    connect("keeper").publish("kept/all", b"21.5", 1, True, properties)
    message = api.get("/retained/message", topic="kept/all")
    assert 999_000_000 <= message.pop("expires_at_us") - message.pop("timestamp_us") <= 1_000_000_000
    assert message == {
        "topic": "kept/all", "payload_base64": base64.b64encode(b"21.5").decode(), "qos": 1, "client_id": "keeper",
        "payload_format_indicator": 1, "content_type": "text/plain", "response_topic": "answers",
        "correlation_data_base64": "AP8=", "user_properties": [["k", "1"], ["k", "2"]],
    }  # fmt: skip


def test_retained_messages_are_set_listed_and_deleted(api: Api, connect: Callable[..., RawClient]) -> None:
    subscriber = connect("retained-sub")
    subscriber.subscribe("set/#")
    for number in range(7):
        body = {"payload": f"ü{number}", "content_type": "text/plain", "user_properties": [["a", "b"]], "qos": 1}
        assert api.ask("PUT", "/retained/message", body, topic=f"set/{number}") == (200, {"recipients": 1})
        message = subscriber.take()
        assert (message.topic, message.payload) == (f"set/{number}", f"ü{number}".encode())
        assert message.properties is not None and message.properties.user_properties == [("a", "b")]
    assert api.ask("PUT", "/retained/message", {"payload_base64": "AP8="}, topic="set/bytes")[0] == 200
    assert api.get("/retained/message", topic="set/bytes")["payload_base64"] == "AP8="
    topics = {item["topic"] for item in api.pages("/retained", 3, filter="set/+")}
    assert topics == {*(f"set/{number}" for number in range(7)), "set/bytes"}
    assert api.ask("DELETE", "/retained/message", topic="set/bytes") == (204, None)
    api.refused(404, "topic", "DELETE", "/retained/message", topic="set/bytes")
    api.refused(404, "topic", "GET", "/retained/message", topic="set/bytes")
    assert api.ask("DELETE", "/retained", filter="set/#") == (200, {"deleted": 7})
    assert api.pages("/retained", 3, filter="set/#") == []
    api.refused(400, "filter", "DELETE", "/retained")  # nothing is deleted by omission
    api.refused(400, "payload", "PUT", "/retained/message", {}, topic="set/1")
    api.refused(400, "payload", "PUT", "/retained/message", {"payload": ""}, topic="set/1")
    api.refused(409, None, "PUT", "/retained/message", {"payload": "x"}, topic="$SYS/broker/uptime")


def test_tree_of_retained_topics_is_listed_level_by_level(api: Api, connect: Callable[..., RawClient]) -> None:
    client = connect("tree")
    for topic in ("tree/a", "tree/a/1", "tree/b/1/x", "tree/b/2", "tree/c", "tree//1"):
        client.publish(topic, topic.encode() * 50, 1, True)

    def levels(parent: str) -> dict[str, tuple[bool, bool]]:
        found = api.pages("/retained/levels", 2, parent=parent)
        assert all(item["topic"] == f"{parent}/{item['level']}" for item in found)
        return {item["level"]: (item["payload_base64"] is not None, item["below"]) for item in found}

    assert levels("tree") == {"a": (True, True), "b": (False, True), "c": (True, False), "": (False, True)}
    assert levels("tree/b") == {"1": (False, True), "2": (True, False)} and levels("tree/b/1") == {"x": (True, False)}
    assert levels("tree/") == {"1": (True, False)} and levels("tree/c") == levels("tree/none") == {}
    roots = {item["level"]: item["below"] for item in api.pages("/retained/levels", 1)}
    assert roots["tree"] is True and roots["$SYS"] is True
    item = next(each for each in api.pages("/retained/levels", 10, parent="tree") if each["level"] == "c")
    assert base64.b64decode(item["payload_base64"]) == (b"tree/c" * 50)[:256] and item["payload_bytes"] == 300


def test_levels_have_no_topic_that_the_user_may_not_read(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("topic readwrite #\nuser bound\ntopic read plant/+/open\n")
    bound = {"name": "bound", "role": "viewer", "token": "t-bound", "user": "bound"}
    broker = start_broker(config={"acl_file": str(rules), "allow_anonymous": True, "http": {"access": [bound]}})
    with RawClient(broker.port) as client:
        client.connect("dev")
        for topic in ("plant/1/open", "plant/1/secret", "plant/2/secret", "plant/3", "secret/1", "plant/4/open/secret"):
            client.publish(topic, b"x", 1, True)
    api = Api(broker, "bound")
    found = {parent: {item["level"] for item in api.pages("/retained/levels", 1, parent=parent)}
             for parent in ("plant", "plant/1", "plant/4", "secret")}  # fmt: skip
    assert found == {"plant": {"1"}, "plant/1": {"open"}, "plant/4": set(), "secret": set()}
    assert [item["level"] for item in api.pages("/retained/levels", 10)] == ["plant"]


def test_publishing_reaches_subscribers_and_streams_and_is_stored(api: Api, connect: Callable[..., RawClient]) -> None:
    subscriber = connect("publish-sub")
    subscriber.subscribe("plant/#", options=1)
    body = {"topic": "plant/1", "payload": "21.5", "qos": 2, "message_expiry_interval": 60, "retain": False}
    assert api.ask("POST", "/publish", body) == (200, {"recipients": 2})  # one subscription and one stream
    message = subscriber.take()
    assert isinstance(message, Publish) and (message.payload, message.qos) == (b"21.5", 1)
    ends = [part["high_watermark"] for item in api.get("/streams")["items"] for part in item["partitions"]]
    assert sum(ends) == 1  # it is on disk when the answer comes


# --- bans, streams, the broker ------------------------------------------------------------------------------------


def test_bans_are_made_listed_and_lifted(api: Api, connect: Callable[..., RawClient]) -> None:
    client = connect("banned-1")
    body = {"client_id": "banned-1", "seconds": 600, "reason": "broken"}
    assert api.ask("POST", "/bans", body) == (200, {"disconnected": 1})
    client.expect_closed()
    (ban,) = (item for item in api.pages("/bans", 1) if item["client_id"] == "banned-1")
    assert (ban["cause"], ban["reason"], ban["protocol"]) == ("operator", "broken", "mqtt")
    assert 0 < ban["seconds_left"] <= 600
    assert api.ask("DELETE", "/bans", client_id="banned-1") == (204, None)
    api.refused(404, None, "DELETE", "/bans", client_id="banned-1")
    connect("banned-1")
    api.refused(400, "address", "POST", "/bans", {})
    api.refused(400, "address", "POST", "/bans", {"address": "300.1.1.1"})
    api.refused(400, "seconds", "POST", "/bans", {"address": "10.0.0.1", "seconds": 0})


def test_ban_of_an_http_sender_is_listed_and_lifted(start_broker: Start) -> None:
    bans = {"address_failures": 2, "first": "1h", "longest": "1h"}
    broker = start_broker(config={"http": {"access": ACCESS}, "bans": bans})
    api = Api(broker)

    def elsewhere(token: str, address: str = "127.0.0.2") -> int:
        connection = http.client.HTTPConnection(broker.host, broker.http_port, source_address=(address, 0))
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        try:
            return connection.getresponse().status
        finally:
            connection.close()

    assert api.get("/bans", protocol="http")["items"] == []
    assert [elsewhere("wrong") for _ in range(3)] == [401, 401, 429] and elsewhere("t-viewer") == 429
    (ban,) = api.get("/bans", protocol="http")["items"]
    assert (ban["address"], ban["cause"], ban["protocol"]) == ("127.0.0.2", "failed_logins", "http")
    assert api.get("/bans")["items"] == []
    assert api.ask("DELETE", "/bans", protocol="http", address="127.0.0.2") == (204, None)
    assert elsewhere("t-viewer") == 200
    api.refused(404, None, "DELETE", "/bans", protocol="http", address="127.0.0.2")
    senders = [f"127.0.0.{number}" for number in range(3, 8)]
    for address in senders:
        assert [elsewhere("wrong", address) for _ in range(3)] == [401, 401, 429]
    for limit in (1, 2, 5, 100):
        assert [ban["address"] for ban in api.pages("/bans", limit, protocol="http")] == senders
    api.refused(404, "cursor", "GET", "/bans", protocol="http", cursor="x")


def test_streams_and_their_consumers(api: Api) -> None:
    reader = Api(api.broker, "reader")
    assert [item["name"] for item in api.get("/streams")["items"]] == ["lab", "plant"]
    (stream,) = reader.get("/streams")["items"]
    assert stream["name"] == "plant" and stream["filters"] == ["plant/#"] and len(stream["partitions"]) == 2
    assert reader.get("/streams/plant/consumers") == {"items": []}
    reader.refused(403, None, "GET", "/streams/lab/consumers")
    api.refused(404, "name", "GET", "/streams/none/consumers")


def test_status_listeners_and_log_level(api: Api) -> None:
    status = api.get("/status")
    assert status["clients_connected"] >= 0 and status["totals"]["connections"] >= 0 and "memory" in status
    (listener,) = api.get("/listeners")["items"]
    assert (listener["type"], listener["ports"]) == ("tcp", [api.broker.port])


def test_levels_of_the_log(api: Api) -> None:
    before = api.get("/log/level")
    assert (before["level"], before["seconds_left"], {area["level"] for area in before["areas"]}) == ("info", None, {"info"})
    status, changed = api.ask("PUT", "/log/level", {"level": "debug"})
    assert status == 200 and {changed["level"], *(area["level"] for area in changed["areas"])} == {"debug"}
    assert {changed["configured"], *(area["configured"] for area in changed["areas"])} == {"info"}
    status, changed = api.ask("PUT", "/log/level", {"level": "error", "area": "http", "seconds": 900})
    (http,) = [area for area in changed["areas"] if area["area"] == "http"]
    assert http["level"] == "error" and 0 < http["seconds_left"] <= 900
    assert api.ask("POST", "/reload") == (200, {"problems": [], "applied": [], "restart_needed": []})
    assert api.get("/log/level") == before
    assert "level" in api.refused(400, "level", "PUT", "/log/level", {"level": "loud"})
    assert "area" in api.refused(400, "area", "PUT", "/log/level", {"level": "info", "area": "x"})


def test_a_level_of_the_log_ends(api: Api) -> None:
    api.ask("PUT", "/log/level", {"level": "debug", "area": "packets", "seconds": 0.1})
    api.broker.wait_for_log('event=log_level to=info area=packets reason="its time is over"')
    api.broker.wait_for_log(r'action=set_log_level target="seconds=0\.1 level=debug area=packets"')
    (packets,) = [area for area in api.get("/log/level")["areas"] if area["area"] == "packets"]
    assert packets == {"area": "packets", "level": "info", "seconds_left": None, "configured": "info"}


def test_configuration_names_the_source_of_each_value_and_no_secret(start_broker: Start) -> None:
    broker = start_broker(
        config={"http": {"access": ACCESS}, "limits": {"max_inflight": 7}, "streams": STREAMS},
        env={"MQTTBROKER_LIMITS__MAX_SESSIONS": "500", "MQTTBROKER_STREAMS__PLANT__KEY": "client"},
        arguments=["--durability", "interval"],
    )
    api = Api(broker)
    found = {item["key"]: (item["value"], item["source"]) for item in api.get("/configuration")["items"]}
    lines = broker.config.read_text().splitlines()
    places = {line.partition(" ")[0].strip('"'): f"{broker.config}:{number}" for number, line in enumerate(lines, 1)}
    assert found["limits.max_inflight"] == (7, places["limits"])
    assert found["limits.max_sessions"] == (500, "MQTTBROKER_LIMITS__MAX_SESSIONS")
    assert found["durability"] == ("interval", "--durability")
    assert found["sys_interval"] == (10.0, "default")
    assert found["streams.0.filters"] == (["plant/#"], places["streams"])
    assert found["streams.0.key"] == ("client", "MQTTBROKER_STREAMS__PLANT__KEY")
    assert [found[f"http.access.{index}.token"][0] for index in range(len(ACCESS))] == ["***"] * len(ACCESS)
    assert "t-admin" not in json.dumps(found)
    begins = {item["key"] for item in api.get("/configuration", prefix="bans.f")["items"]}
    assert begins == {"bans.failures", "bans.first"}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_connection_counts_its_bytes_and_messages(start_broker: Start, workers: int) -> None:
    broker = start_broker(config={"http": {"access": ACCESS}, "workers": workers})
    api = Api(broker)
    counted = ("bytes_received", "bytes_sent", "messages_received", "messages_sent")

    def counts(client_id: str) -> list[int]:
        detail = api.get(f"/clients/{client_id}")
        return [detail[name] for name in counted]

    with RawClient(broker.port) as sender, RawClient(broker.port) as receiver:
        for client, name in ((sender, "sender"), (receiver, "receiver")):
            client.connect(name)
        receiver.subscribe("c/#")
        before = counts("sender")
        packet = Publish("c/1", b"x" * 100, 0, False, False, 0, None).encode(5)
        sender.send(packet * 9 + packet[:50])  # the last one in two reads
        assert counts("sender")[2] in range(10)
        sender.send(packet[50:])
        sender.send(Publish("c/2", b"y" * 300_000, 0, False, False, 0, None).encode(5))
        assert [len(receiver.take().payload) for _ in range(11)] == 10 * [100] + [300_000]
        sender.ping()
        received, sent, published, delivered = counts("sender")
        large = len(Publish("c/2", b"y" * 300_000, 0, False, False, 0, None).encode(5))
        assert (received - before[0], published) == (10 * len(packet) + large + 2, 11)
        assert (sent - before[1], delivered) == (2, 0)
        receiver.ping()
        assert counts("receiver")[2:] == [0, 11] and counts("receiver")[1] > 10 * len(packet) + large
        receiver.publish("c/3", b"z", qos=2)
        assert counts("receiver")[2:] == [1, 12]


def test_backup_goes_below_its_directory(api: Api, tmp_path: Path, start_broker: Start) -> None:
    status, answer = api.ask("POST", "/backup", {"name": "monday"})
    assert status == 200, answer
    manifest = Path(answer["summary"].partition(": ")[0]) / "backup.json"
    assert json.loads(manifest.read_text())["format"] == 1
    assert "not an empty directory" in api.refused(409, "name", "POST", "/backup", {"name": "monday"})
    for name in ("../elsewhere", "/absolute", "a/b", ".hidden", ""):
        api.refused(400, "name", "POST", "/backup", {"name": name})
    without = Api(start_broker(config={"http": {"access": ACCESS}}))
    assert "http.backup_dir" in without.refused(409, None, "POST", "/backup", {"name": "monday"})


def test_acts_are_in_the_audit_log_with_their_target_and_without_content(api: Api) -> None:
    operator = Api(api.broker, "operator")
    after = len(api.broker.lines)
    operator.ask("POST", "/publish", {"topic": "audited/1", "payload": "s3cret", "user_properties": [["k", "s3cret"]]})
    operator.ask("DELETE", "/retained", filter="audited/#")
    operator.ask("POST", "/bans", {"username": "mallory", "seconds": 1, "reason": "guessing"})
    operator.ask("POST", "/backup", {"name": "denied"})
    for pattern in (
        r'action=publish target="topic=audited/1 retain=False" user=operator role=operator address=127\.0\.0\.1:\d+',
        r'action=delete_retained target="filter=audited/#" user=operator',
        r'action=ban target="username=mallory seconds=1\.0 reason=guessing" user=operator',
        r'event=denied action=POST target=/api/v1/backup .*reason="role admin is needed; operator has operator"',
    ):
        api.broker.wait_for_log(pattern, after=after)
    assert "s3cret" not in api.broker.log


# --- roles --------------------------------------------------------------------------------------------------------

NEEDS = [
    ("viewer", "GET", "/status"), ("viewer", "GET", "/clients"), ("viewer", "GET", "/retained"),
    ("viewer", "GET", "/bans"), ("viewer", "GET", "/configuration"), ("operator", "POST", "/clients/none/disconnect"),
    ("operator", "DELETE", "/clients/none"), ("operator", "POST", "/publish"), ("operator", "POST", "/bans"),
    ("operator", "DELETE", "/bans"), ("operator", "DELETE", "/retained"), ("operator", "PUT", "/retained/message"),
    ("operator", "DELETE", "/retained/message"), ("admin", "PUT", "/log/level"), ("admin", "POST", "/backup"),
    ("admin", "POST", "/reload"), ("viewer", "GET", "/users"), ("viewer", "GET", "/acl/rules"),
    ("viewer", "GET", "/acl/file"), ("admin", "POST", "/users"), ("admin", "DELETE", "/users/none"),
    ("admin", "PUT", "/users/none/password"), ("admin", "POST", "/acl/rules"), ("admin", "DELETE", "/acl/rules"),
    ("admin", "PUT", "/acl/file"), ("admin", "POST", "/streams"), ("admin", "PATCH", "/streams/none"),
    ("admin", "DELETE", "/streams/none"), ("operator", "DELETE", "/streams/none/groups/none"),
    ("operator", "POST", "/streams/none/groups/none/reset"), ("operator", "POST", "/alarms/none/acknowledge"),
]  # fmt: skip


@pytest.mark.parametrize(("needed", "method", "path"), NEEDS)
def test_operation_needs_its_role(api: Api, needed: str, method: str, path: str) -> None:
    for role in ("reader", *ROLES):
        status, answer = Api(api.broker, role).ask(method, path, b"?" if method in ("POST", "PUT", "PATCH") else None)
        allowed = role in ROLES and ROLES.index(role) >= ROLES.index(needed)
        assert (status != 403) is allowed, (role, answer)
        if not allowed:
            assert answer["detail"] == f"role {needed} is needed; {role} has {role}"


def test_every_change_is_in_this_table_and_needs_more_than_a_viewer(api: Api) -> None:
    paths = api.get("/openapi.json")["paths"]
    consumers = "/api/v1/streams/{name}/consumers/{consumer}"  # of the readers of a stream, whatever their role is
    changes = {
        (
            re.search(r"Needs role (\w+)", operation["description"])[1],
            method.upper(),  # type: ignore[index]
            re.sub(r"\{\w+\}", "none", path.removeprefix("/api/v1")),
        )
        for path, operations in paths.items()
        if path.startswith("/api/") and path != consumers
        for method, operation in operations.items()
        if method != "get"
    }
    assert changes == {need for need in NEEDS if need[1] != "GET"} and "viewer" not in {role for role, _, _ in changes}


def test_user_bounds_what_a_sender_reads_and_publishes(start_broker: Start, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("topic #\n\nuser ann\ntopic read open/#\ntopic write out/#\n")
    bound = {"name": "bound", "role": "operator", "token": "t-bound", "user": "ann"}
    broker = start_broker(config={"acl_file": str(rules), "http": {"access": [*ACCESS, bound]}})
    admin, api = Api(broker), Api(broker, "bound")
    for topic in ("open/1", "secret/1", "out/1"):
        assert admin.ask("PUT", "/retained/message", {"payload": "x"}, topic=topic)[0] == 200
    assert [item["topic"] for item in api.pages("/retained", 10, filter="+/1")] == ["open/1"]
    assert api.get("/retained/message", topic="open/1")
    api.refused(403, "topic", "GET", "/retained/message", topic="secret/1")
    assert api.ask("POST", "/publish", {"topic": "out/2"})[0] == 200
    api.refused(403, "topic", "POST", "/publish", {"topic": "open/2"})
    api.refused(403, "topic", "PUT", "/retained/message", {"payload": "x"}, topic="open/1")
    api.refused(403, "topic", "DELETE", "/retained/message", topic="secret/1")
    assert api.ask("DELETE", "/retained", filter="+/1") == (200, {"deleted": 1})
    assert {item["topic"] for item in admin.pages("/retained", 10, filter="+/1")} == {"open/1", "secret/1"}


def test_sender_without_credentials_changes_nothing(start_broker: Start) -> None:
    broker = start_broker()
    url = f"{broker.url}/api/v1"
    with urllib.request.urlopen(f"{url}/clients", timeout=30) as response:
        assert json.loads(response.read()) == {"items": [], "next_cursor": None}
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        urllib.request.urlopen(urllib.request.Request(f"{url}/publish", b"{}", method="POST"), timeout=30)
    assert "http.access" in json.loads(refused.value.read())["detail"]


# --- errors -------------------------------------------------------------------------------------------------------

WRONG = [
    ("GET", "/clients", None, {"limit": "0"}, "limit", "limit: must be 1–1000, got 0"),
    ("GET", "/clients", None, {"limit": "many"}, "limit", 'limit: must be a whole number, got "many"'),
    ("GET", "/clients", None, {"page": "2"}, "page", "page: unknown parameter; there are: prefix, "),
    ("GET", "/clients", None, {"connected": "maybe"}, "connected", "connected: must be true or false"),
    ("GET", "/clients", None, {"address": "here"}, "address", "address: must be an address or network"),
    ("GET", "/clients", None, {"sort": "age"}, "sort", "sort: must be "),
    ("GET", "/retained", None, {"filter": "a/#/b"}, "filter", "filter: must be a topic filter"),
    ("GET", "/retained", None, {"filter": "$share/g/a"}, "filter", "filter: must be a topic filter without $share"),
    ("POST", "/publish", b"{", {}, None, "the body is not JSON"),
    ("POST", "/publish", b"[]", {}, None, "the body must be a JSON object"),
    ("POST", "/publish", b"\xff", {}, None, "the body is not JSON"),
    ("POST", "/publish", {}, {}, "topic", "topic: is required"),
    ("POST", "/publish", {"topic": "a", "colour": 1}, {}, "colour", "colour: unknown parameter"),
    ("POST", "/publish", {"topic": "a", "qos": 3}, {}, "qos", "qos: must be 0–2, got 3"),
    ("POST", "/publish", {"topic": "a", "payload_base64": "?"}, {}, "payload_base64", "payload_base64: must be base64"),
    ("POST", "/publish", {"topic": "a", "payload": "", "payload_base64": ""}, {}, "payload_base64",
     "payload_base64: payload is set, too"),
    ("POST", "/publish", {"topic": "a", "user_properties": {"a": "b"}}, {}, "user_properties",
     "user_properties: must be a list of [name, value]"),
    ("POST", "/publish", {"topic": "\ud800"}, {}, "topic", "topic: "),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "query", "field", "detail"), WRONG)
def test_mistake_is_named(api: Api, method: str, path: str, body: Any, query: dict[str, str], field: str | None, detail: str) -> None:
    assert api.refused(400, field, method, path, body, **query).startswith(detail)


def test_page_past_the_end_is_named(api: Api, connect: Callable[..., RawClient]) -> None:
    connect("pages").publish("pages/1", b"x", 1, True)
    connect("pages-2").publish("pages/2", b"x", 1, True)
    cursor = api.get("/retained", filter="pages/#", limit=1)["next_cursor"]
    api.get("/retained", filter="pages/#", limit=1, cursor=cursor)
    assert "no cursor" in api.refused(404, "cursor", "GET", "/retained", filter="pages/#", limit=1, cursor=cursor)
    for wrong in ("x", "W10", "WyJhIl0", "é"):
        api.refused(404, "cursor", "GET", "/retained", cursor=wrong)


def test_unknown_paths_and_methods(api: Api) -> None:
    assert api.ask("GET", "/nowhere")[0] == 404
    assert api.ask("PATCH", "/clients")[0] == 405


def test_body_that_is_too_large(api: Api) -> None:
    assert api.ask("POST", "/publish", b'{"topic": "a", "payload": "' + b"x" * (17 << 20) + b'"}')[0] == 413


# --- the document -------------------------------------------------------------------------------------------------


def test_document_has_every_path_with_its_role(api: Api) -> None:
    document = api.get("/openapi.json")
    assert document["openapi"].startswith("3.1")
    operations = {f"{method.upper()} {path}": found for path, methods in document["paths"].items()
                  for method, found in methods.items()}  # fmt: skip
    for needed, method, path in NEEDS:
        template = path.replace("clients/none", "clients/{client_id}").replace("users/none", "users/{username}")
        template = template.replace("streams/none", "streams/{name}").replace("groups/none", "groups/{group}")
        template = template.replace("alarms/none", "alarms/{name}")
        assert f"role {needed} " in operations[f"{method} /api/v1{template}"]["description"]
    assert {"GET /metrics", "GET /streams/{name}/{partition}/{file}", "GET /livez"} <= operations.keys()
    assert operations["GET /livez"]["security"] == []
    identifiers = [found["operationId"] for found in operations.values()]
    assert len(identifiers) == len(set(identifiers)) > 30
    assert Api(api.broker, "reader").ask("GET", "/openapi.json")[0] == 200
