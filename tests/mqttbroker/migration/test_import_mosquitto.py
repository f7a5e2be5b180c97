"""A real Mosquitto's configuration, users, rules, sessions and retained messages in this broker."""

from __future__ import annotations

import struct
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.broker_process import BrokerProcess
from support.mosquitto import NEEDS_MOSQUITTO, mosquitto
from support.properties import session_expiry
from support.raw_client import RawClient

from mqttbroker.codec.packets import Puback, Pubcomp, Publish, Pubrec, Pubrel
from mqttbroker.codec.properties import Properties
from mqttbroker.config.load import load_settings
from mqttbroker.config.settings import Limits
from mqttbroker.migration.mosquitto_configuration import ConfigurationError, convert
from mqttbroker.migration.mosquitto_database import (
    Client,
    ClientMessage,
    ClientSubscription,
    Database,
    DatabaseError,
    StoredMessage,
    decode_database,
)
from mqttbroker.migration.mosquitto_rows import Rows
from sessions.row_kinds import RETAINED, SESSIONS
from sessions.rows import received_key

PASSWORDS = "alice:$6$c2FsdHNhbHRzYWx0$" + b64encode(bytes(64)).decode() + "\n"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-P", "-m", "mqttbroker", "import-mosquitto", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def written(directory: Path, text: str, name: str = "mosquitto.conf") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def fill(port: int) -> None:
    """Sessions at every state of a delivery, and retained messages, by a Mosquitto's clients."""
    with RawClient(port, 5) as one, RawClient(port, 4) as old, RawClient(port, 5) as publisher:
        one.connect("one", clean_start=False, properties=session_expiry())
        identified = Properties()
        identified.subscription_identifiers = [7]
        one.subscribe("t/#", options=2, properties=identified)
        old.connect("old", clean_start=False)
        old.subscribe("t/1", options=1)
        publisher.connect("publisher", clean_start=False, properties=session_expiry())
        properties = Properties()
        properties.content_type = "text/plain"
        properties.user_properties = [("a", "b")]
        # QoS 1, sent and not acknowledged by "one"; QoS 2 to the states of PUBREC and PUBREL.
        publisher.publish("t/1", b"puback", 1, properties=properties)
        assert one.receive().packet_id == 1
        publisher.publish("t/2", b"pubrec", 2)
        assert one.receive().packet_id == 2
        publisher.publish("t/3", b"pubrel", 2)
        assert one.receive().packet_id == 3
        one.send(Pubrec(3))
        assert isinstance(one.receive(), Pubrel)
        one.close()
        old.close()
        for number in range(20):
            publisher.publish("t/1", b"queued %d" % number, 1)
        publisher.publish("r/1", b"kept", 1, retain=True, properties=properties)
        publisher.publish("r/0", b"zero", 0, retain=True)
        publisher.publish("r/gone", b"x", 1, retain=True)
        publisher.publish("r/gone", b"", 1, retain=True)
        # QoS 2, not released: Mosquitto has not published it yet.
        publisher.send(Publish("t/4", b"unreleased", 2, packet_id=500))
        publisher.wait_for(Pubrec)


@NEEDS_MOSQUITTO
def test_everything_that_a_mosquitto_kept_is_delivered(tmp_path: Path, start_broker: Callable[..., BrokerProcess]) -> None:
    theirs, ours = tmp_path / "mosquitto", tmp_path / "ours"
    theirs.mkdir()
    with mosquitto(theirs) as peer:
        fill(peer.port)
    configuration = theirs / "mosquitto.conf"
    result = run(configuration, "--to", ours)
    assert result.stderr.splitlines() == [f"{configuration}:3: user: set the user of the service or of the container"]
    assert result.returncode == 3
    assert "3 sessions, 2 subscriptions, 45 queued messages, 2 retained messages" in result.stdout, result.stdout
    assert (ours / "mqttbroker.toml").stat().st_mode & 0o077 == 0 and (ours / "data").stat().st_mode & 0o077 == 0
    broker = start_broker(data_dir=ours / "data", config=(ours / "mqttbroker.toml").read_text())
    with RawClient(broker.port, 5) as one, RawClient(broker.port, 4) as old, RawClient(broker.port, 5) as publisher:
        assert one.connect("one", clean_start=False, properties=session_expiry()).session_present
        again = [one.receive() for _ in range(3)]
        (pubrel,) = (each for each in again if isinstance(each, Pubrel))
        first, second = (each for each in again if isinstance(each, Publish))
        assert pubrel.packet_id == 3
        assert (first.payload, first.packet_id, first.dup, first.qos) == (b"puback", 1, True, 1)
        assert first.properties.content_type == "text/plain" and first.properties.user_properties == [("a", "b")]
        assert first.properties.subscription_identifiers == [7]
        assert (second.payload, second.packet_id, second.dup, second.qos) == (b"pubrec", 2, True, 2)
        one.send(Puback(1), Pubrec(2), Pubcomp(3))
        got = [one.wait_for(Publish) for _ in range(21)]
        assert [each.payload for each in got] == [b"queued %d" % number for number in range(20)] + [b"unreleased"]
        assert old.connect("old", clean_start=False).session_present
        assert [old.take().payload for _ in range(21)] == [b"puback", *(each.payload for each in got[:20])]
        assert publisher.connect("publisher", clean_start=False, properties=session_expiry()).session_present
        # Released once: the PUBREL of before completes the exchange, and the message is not published again.
        publisher.send(Pubrel(500))
        assert publisher.expect(Pubcomp).reason_code == 0
        publisher.subscribe("r/#", options=1)
        retained = sorted((each.topic, each.payload) for each in (publisher.take(), publisher.take()))
        assert retained == [("r/0", b"zero"), ("r/1", b"kept")]


def test_a_configuration_becomes_settings(tmp_path: Path) -> None:
    written(tmp_path, PASSWORDS, "users")
    written(tmp_path, "user alice\ntopic readwrite #\n", "rules")
    included = tmp_path / "conf.d"
    included.mkdir()
    written(included, "sys_interval 30\nlistener 0 /run/mqtt.sock\n", "b.conf")
    written(included, "max_queued_messages 0\nmax_inflight_messages 40\n", "A.conf")
    path = written(
        tmp_path,
        f"""# comment
per_listener_settings false
password_file {tmp_path}/users
acl_file {tmp_path}/rules
persistence true
persistence_location {tmp_path}/
persistent_client_expiration 2w
max_keepalive 600
log_type error
log_type warning
log_dest stdout
log_dest syslog
log_dest file /var/log/mosquitto.log
log_facility 5
autosave_interval 10
listener 1883 0.0.0.0
max_connections -1
listener 9001
protocol websockets
certfile /c.pem
keyfile /k.pem
cafile /ca.pem
require_certificate true
use_subject_as_username true
use_username_as_clientid true
tls_version tlsv1.3
mount_point house/
include_dir {included}
connection cloud
address example.org
topic # out
flavour vanilla
""",
    )
    result = run(path, "--to", tmp_path / "ours")
    assert result.stderr.splitlines() == [
        f"{path}:12: log_dest syslog: the log goes to stderr, which systemd, the engine of a container or logger(1) passes on",
        f"{path}:13: log_dest file: set log.to and log.file; the default is stderr",
        f"{path}:14: log_facility: see log_dest syslog",
        f"{path}:27: mount_point: topics are the same at all listeners",
        f"{path}:32: flavour: unknown",
    ]
    assert result.returncode == 3 and "no database" in result.stdout
    settings = load_settings(tmp_path / "ours" / "mqttbroker.toml")
    assert settings.durability == "commit" and settings.allow_anonymous is False
    assert settings.password_file == tmp_path / "ours" / "password_file"
    assert settings.acl_file == tmp_path / "ours" / "acl_file"
    assert (settings.limits.max_inflight, settings.limits.max_queued_messages) == (40, Limits().max_queued_messages)
    assert (settings.limits.max_session_expiry, settings.limits.max_keep_alive) == (14 * 86400, 600)
    assert (settings.sys_interval, settings.log.level) == (30, "warning")
    assert settings.log.to == ("stderr",)
    [cloud] = settings.bridges
    assert (cloud.name, cloud.addresses, cloud.version) == ("cloud", ("mqtt://example.org:1883",), "3.1.1")
    assert [(topic.filter, topic.direction, topic.qos) for topic in cloud.topics] == [("#", "out", 0)]
    assert (cloud.reconnect_first, cloud.reconnect_longest, cloud.notifications) == (5.0, 30.0, "both")
    plain, secure, unix = settings.listeners
    assert (plain.host, plain.port, plain.type) == ("0.0.0.0", 1883, "tcp")
    assert (secure.host, secure.port, secure.type, secure.tls_version) == ("", 9001, "wss", "1.3")
    assert (secure.client_certificate, secure.client_id_from) == ("required", "%u")
    assert (secure.use_identity_as_username, list(secure.certificate_identity)) == (True, ["subject"])
    assert (unix.type, str(unix.path)) == ("unix", "/run/mqtt.sock")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", [("127.0.0.1", 1883, True)]),
        ("port 1884\n", [("", 1884, False)]),
        ("listener 1885\nallow_anonymous true\n", [("", 1885, True)]),
    ],
)
def test_a_configuration_without_a_listener_serves_its_own_machine(
    tmp_path: Path, text: str, expected: list[tuple[str, int, bool]]
) -> None:
    found = convert(written(tmp_path, text))
    anonymous = found.settings["allow_anonymous"]
    assert [(each["host"], each["port"], anonymous) for each in found.listeners] == expected


def test_settings_of_listeners(tmp_path: Path) -> None:
    text = "per_listener_settings true\nlistener 1\nallow_anonymous true\nlistener 2\npassword_file /p\n"
    first, second = convert(written(tmp_path, text)).listeners
    assert (first["allow_anonymous"], first["password_file"]) == (True, "")
    assert (second["allow_anonymous"], second["password_file"]) == (False, "/p")


@pytest.mark.parametrize(
    "text, reason",
    [
        ("allow_anonymous perhaps\n", "1: allow_anonymous perhaps: not true or false"),
        ("\nlistener x\n", "2: listener x: invalid literal"),
        ("listener\n", "1: listener without a port"),
        ("persistent_client_expiration 5x\n", "1: persistent_client_expiration 5x: not a number with"),
        ("log_dest paper\n", "1: log_dest paper: not dlt, file, none, stderr, stdout, syslog, topic"),
        ("protocol mqttsn\n", "1: protocol mqttsn: not mqtt or websockets"),
        ("include_dir /nowhere\n", "1: /nowhere: not a directory"),
    ],
)
def test_a_line_that_mosquitto_refuses_is_named(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        convert(written(tmp_path, text))
    assert str(caught.value).startswith(f"{tmp_path / 'mosquitto.conf'}:{reason}")


def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, f"password_file {tmp_path}/users\nlistener 1883\n")
    ours = tmp_path / "ours"
    missing = run(path, "--to", ours)
    assert (missing.returncode, missing.stderr) == (1, f"mqttbroker import-mosquitto: {tmp_path}/users: No such file or directory\n")
    written(tmp_path, "alice:$9$x\n", "users")
    refused = run(path, "--to", ours)
    assert refused.returncode == 1 and f"{tmp_path}/users:1: " in refused.stderr
    no_database = run(path, "--to", ours, "--db", path)
    assert no_database.stderr == f"mqttbroker import-mosquitto: {path}: not a database of Mosquitto\n"
    assert not ours.exists()
    ours.mkdir()
    written(ours, "x", "something")
    written(tmp_path, PASSWORDS, "users")
    full = run(path, "--to", ours)
    assert full.stderr == f"mqttbroker import-mosquitto: {ours}: not empty\n"


HEADER = b"\x00\xb5\x00mosquitto db" + bytes(4)


def chunk(kind: int, data: bytes) -> bytes:
    return struct.pack(">II", kind, len(data)) + data


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"SQLite format 3", "not a database of Mosquitto"),
        (HEADER, "byte 19: the header is cut off"),
        (HEADER + struct.pack(">I", 4), "format 4, not one of 5 and 6"),
        (HEADER + struct.pack(">I", 6) + b"\0\0\0", "byte 23: a chunk is cut off"),
        (HEADER + struct.pack(">I", 6) + chunk(6, bytes(24))[:-1], "byte 23: a chunk is cut off"),
        (HEADER + struct.pack(">I", 6) + chunk(6, bytes(8)), "byte 23: a chunk of type 6 is damaged"),
        (HEADER + struct.pack(">I", 6) + chunk(2, struct.pack("<Qq", 1, 0) + b"\xff" * 16), "a chunk of type 2 is dam"),
        (HEADER + struct.pack(">I", 6) + chunk(1, bytes(9) + b"\4" + bytes(6)), "ids of 4 bytes are not supported"),
    ],
)
def test_a_damaged_database_is_named_with_its_place(data: bytes, reason: str) -> None:
    with pytest.raises(DatabaseError) as caught:
        decode_database(data)
    assert reason in str(caught.value)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    with suppress(DatabaseError):
        decode_database(HEADER + struct.pack(">I", 6) + data)


def test_format_5_has_no_user_names() -> None:
    client = struct.pack("<q", 0) + struct.pack(">IHH", 60, 0, 3) + b"one"
    found = decode_database(HEADER + struct.pack(">I", 5) + chunk(6, client))
    assert found.clients == [Client("one", "", 0, 60)]


def test_an_unreleased_message_goes_to_those_who_would_have_got_it() -> None:
    options = {"both": 2, "own": 2 | 4, "as_published": 1 | 8, "other": 2, "none": 0}
    filters = {"own": "a/b", "other": "b/#", "none": "a/b"}
    subscriptions = [ClientSubscription(name, filters.get(name, "a/#"), options[name], 3) for name in options]
    subscriptions.append(ClientSubscription("both", "a/+", 1, 0))
    subscriptions += [ClientSubscription(name, "$share/g/a/b", 1, 0) for name in ("first", "second")]
    names = [*options, "first", "second"]
    database = Database(
        [Client(name, "", 0, 60) for name in names],
        {9: StoredMessage("a/b", b"x", 2, True, "own", b"", 0), 8: StoredMessage("$SYS/x", b"x", 1, True, "", b"", 0)},
        [ClientMessage("own", 9, 4, 2, 7, True, True, 0), ClientMessage("own", 9, 0, 0, 11, False, False, 0)],
        [*subscriptions, ClientSubscription("both", "a/#/b", 1, 0), ClientSubscription("gone", "a", 1, 0)],
        [8, 77],
    )
    rows = Rows(database, 1000.0)
    (write_set,) = rows.write_sets()
    entries = {names[row[0] - 1]: (row[4], row[5], row[6], row[3]) for row in write_set.entries}
    assert entries == {"both": (2, 0, b"\x0b\3", 1), "as_published": (1, 1, b"\x0b\3", 1), "first": (1, 0, b"", 1)}
    assert write_set.received == [received_key(2, 4)]
    assert [(message.topic, message.payload) for message in write_set.saved(RETAINED)] == [("a/b", b"x")]
    assert rows.not_carried == [
        "client 'both': topic filter 'a/#/b'",
        "retained message '$SYS/x'",
        "retained message that the database lacks",
        "1 queued messages at QoS 0, or without a session or a message",
    ]
    assert {row.disconnected_at for row in write_set.saved(SESSIONS)} == {1000.0}


def test_a_large_database_is_stored_in_parts() -> None:
    clients = [Client(f"c{number}", "", 0, 60) for number in range(2500)]
    sets = list(Rows(Database(clients, {}, [], [], []), 0.0).write_sets())
    assert [len(each.saved(SESSIONS)) for each in sets] == [1000, 1000, 500]


def test_bridges_are_carried_over(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """listener 1883
connection up stairs
addresses one.example:8883 [::1]:8884
topic a/# both 2 l/ r/
topic "" in 1 here there
topic b
bridge_protocol_version mqttv50
bridge_cafile /ca.pem
bridge_insecure true
remote_clientid id
remote_username u
remote_password p
cleansession true
restart_timeout 2 60
keepalive_interval 30
notifications_local_only true
start_type lazy
bridge_psk x
connection round
address h
topic a/# both
try_private false
connection empty
address h
connection quiet
address h:1
notifications false
topic t out
listener 1884
""",
    )
    result = run(path, "--to", tmp_path / "ours")
    assert sorted(result.stderr.splitlines()) == sorted([
        f"{path}:17: start_type lazy: bridges connect at the start, and stay connected",
        f"{path}:18: bridge_psk: use certificates",
        f"{path}:19: bridge round: messages that go out would come back by a/#: give a prefix to one side",
        f"{path}:23: bridge empty: no topic",
    ])  # fmt: skip
    settings = load_settings(tmp_path / "ours" / "mqttbroker.toml")
    first, quiet = settings.bridges
    assert (first.name, first.addresses) == ("up-stairs", ("mqtts://one.example:8883", "mqtts://[::1]:8884"))
    assert (first.version, str(first.cafile), first.verify) == ("5.0", "/ca.pem", False)
    assert (first.client_id, first.username, first.password, first.clean_start) == ("id", "u", "p", True)
    assert (first.reconnect_first, first.reconnect_longest, first.keep_alive) == (2.0, 60.0, 30.0)
    assert (first.notifications, quiet.notifications, len(settings.listeners)) == ("local", "off", 2)
    rules = [(topic.direction, topic.qos, topic.rule().local.topic_filter, topic.rule().remote.topic_filter)
             for topic in first.topics]  # fmt: skip
    assert rules == [("both", 2, "l/a/#", "r/a/#"), ("in", 1, "here", "there"), ("out", 0, "b", "b")]


@pytest.mark.parametrize("line", ["topic", "topic a both 3", "topic a sideways", "topic a#", "try_private maybe"])
def test_a_line_of_a_bridge_that_mosquitto_refuses_is_an_error(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigurationError, match=r"mosquitto\.conf:3: "):
        convert(written(tmp_path, f"connection c\naddress h\n{line}\n"))
