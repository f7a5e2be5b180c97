"""Settings: defaults, file, environment and flags, and one line for each problem."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.config_files import problems, write
from support.paths import ROOT

from mqttbroker.config.files import INCLUDE
from mqttbroker.config.load import FLAGS, ConfigError, load_settings
from mqttbroker.config.printed import printed
from mqttbroker.config.settings import (
    Alarms,
    Bans,
    Bridge,
    BridgeTopic,
    Consumers,
    Crl,
    Http,
    HttpAccess,
    HttpCallback,
    Limits,
    Listener,
    Log,
    Logins,
    Plugin,
    Queue,
    Redirect,
    Settings,
    Stream,
)

CONF = ROOT / "conf" / "mqttbroker.toml"


# --- the documented file ------------------------------------------------------------------------------------------


def documented() -> str:
    """conf/mqttbroker.toml with its example stream uncommented."""
    uncommented = r"^#(?=\[streams|\[queues|\[\[http\.access|\[\[bridges|[a-z_]+ = )"
    return re.sub(uncommented, "", CONF.read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_the_documented_file_has_the_defaults() -> None:
    assert load_settings(CONF) == Settings()


def test_the_documented_file_has_every_key() -> None:
    tables = tomllib.loads(documented())
    expected = {
        "": Settings,
        "log": Log,
        "http": Http,
        "http.access": HttpAccess,
        "limits": Limits,
        "logins": Logins,
        "http_callback": HttpCallback,
        "plugin": Plugin,
        "bans": Bans,
        "crl": Crl,
        "alarms": Alarms,
        "redirect": Redirect,
        "consumers": Consumers,
        "listeners": Listener,
        "streams": Stream,
        "queues": Queue,
        "bridges": Bridge,
        "bridges.topics": BridgeTopic,
    }
    for name, section in expected.items():
        table: Any = tables
        if name == "listeners":
            table = tables["listeners"][0]
        elif name == "streams":
            table = tables["streams"]["sensors"]
        elif name == "queues":
            table = tables["queues"]["jobs"]
        elif name == "bridges":
            table = tables["bridges"][0]
        elif name == "bridges.topics":
            table = tables["bridges"][0]["topics"][0]
        elif name == "http.access":
            table = tables["http"]["access"][0]
        elif name:
            table = tables[name]
        keys = {field.name for field in dataclasses.fields(section)} - {Stream: {"name"}, Queue: {"name"}, Settings: {"sources"}}.get(
            section, set()
        )
        assert set(table) == keys | ({INCLUDE} if section is Settings else set()), f"[{name}]"


def test_the_example_stream_has_the_defaults(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, documented()))
    assert settings.streams == (Stream(name="sensors", filters=("sensors/#",)),)


def test_the_example_bridge_has_the_defaults(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, documented()))
    topics = (BridgeTopic(filter="plant/#"),)
    assert settings.bridges == (Bridge("cloud", ("mqtts://broker.example.com:8883",), topics=topics),)


@pytest.mark.parametrize(("text", "problem"), [
    ('name = "a b"', "bridges.0.name: must be the name of a bridge"),
    ('addresses = ["http://h"]', "bridges.0.addresses: must begin with mqtt://, mqtts://, ws:// or wss://"),
    ('addresses = ["mqtt://h:0"]', "bridges.0.addresses: must have a host, and a port of 1–65535"),
    ('addresses = ["mqtt://u:p@h"]', "bridges.0.addresses: must not have a user name or password"),
    ("addresses = []", "bridges.0.addresses: must not be empty"),
    ('certfile = "c"', "bridges.0.keyfile: is required with certfile"),
    ('notification_topic = "t"', 'bridges.0.notification_topic: needs notifications "both"'),
    ('topics = []', "bridges.0.topics: is required: [[bridges.topics]]"),
    ('topics = [{}]', "bridges.0.topics.0.filter: is required, or local and remote"),
    ('topics = [{filter = "a/#/b"}]', "bridges.0.topics.0.filter: the local topic filter is invalid: 'a/#/b'"),
    ('topics = [{local = "a/{x}", remote = "b/{y}"}]', "bridges.0.topics.0.local: local and remote must have the same"),
    ('topics = [{local = "a"}]', "bridges.0.topics.0.remote: is required with local"),
    ('version = "3.1.1"\ntry_private = false\ntopics = [{filter = "a/#", direction = "both"}]',
     "bridges.0.topics: messages that go out would come back by a/#"),
])  # fmt: skip
def test_a_bad_bridge_is_one_line(tmp_path: Path, text: str, problem: str) -> None:
    given = {line.partition(" ")[0] for line in text.split("\n")}
    rest = {"name": 'name = "b"', "addresses": 'addresses = ["mqtt://h"]', "topics": 'topics = [{filter = "a"}]'}
    lines = [text, *(line for name, line in rest.items() if name not in given)]
    [found] = problems(write(tmp_path, "[[bridges]]\n" + "\n".join(lines)))
    assert problem in found


def test_names_of_bridges_are_different(tmp_path: Path) -> None:
    one = '[[bridges]]\nname = "b"\naddresses = ["h:1"]\ntopics = [{filter = "a"}]\n'
    [found] = problems(write(tmp_path, one + one))
    assert "bridges.1.name: b is taken by an earlier bridge" in found


# --- precedence ---------------------------------------------------------------------------------------------------


def test_without_sources_settings_have_their_defaults() -> None:
    settings = load_settings(None, {}, {})
    assert settings == Settings()
    assert (settings.listeners[0].host, settings.listeners[0].port) == ("127.0.0.1", 1883)
    assert (settings.data_dir, settings.allow_anonymous) == (Path("data"), "loopback")


def test_flags_override_environment_overrides_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'durability = "off"\nlog.level = "error"\n[[listeners]]\nport = 1\nhost = "::1"\n')
    environ = {"MQTTBROKER_LISTENERS__0__PORT": "2", "MQTTBROKER_DURABILITY": "interval", "HOME": "x"}
    settings = load_settings(path, environ, {"--port": "3"})
    assert settings.listeners == (Listener(host="::1", port=3),)
    assert (settings.durability, settings.log.level) == ("interval", "error")


def test_every_flag_reaches_its_key() -> None:
    values = {
        "--host": "0.0.0.0", "--port": "0", "--http-port": "off", "--data-dir": "d",
        "--durability": "off", "--allow-anonymous": "true", "--workers": "3", "--log-level": "debug",
    }  # fmt: skip
    assert set(values) == set(FLAGS)
    settings = load_settings(None, {}, values)
    assert settings.listeners == (Listener("0.0.0.0", 0),) and settings.worker_count == 3
    assert (settings.http.port, settings.data_dir, settings.durability) == (None, Path("d"), "off")
    assert (settings.allow_anonymous, settings.log.level) == (True, "debug")


def test_environment_adds_listeners_and_changes_streams(tmp_path: Path) -> None:
    path = write(tmp_path, '[streams.Sensors]\nfilters = ["a/#"]\n')
    environ = {
        "MQTTBROKER_LISTENERS__1__PORT": "1884",
        "MQTTBROKER_STREAMS__SENSORS__PARTITIONS": "9",
        "MQTTBROKER_STREAMS__SENSORS__FILTERS": "a/+, b/#",
        "MQTTBROKER_STREAMS__SENSORS__RETENTION_AGE": "7d",
        "MQTTBROKER_LIMITS__RETAIN_AVAILABLE": "false",
    }
    settings = load_settings(path, environ)
    assert [listener.port for listener in settings.listeners] == [1883, 1884]
    assert settings.streams == (Stream("Sensors", ("a/+", "b/#"), partitions=9, retention_age=604800.0),)
    assert settings.limits.retain_available is False


def test_environment_adds_access_to_http(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hunter2")
    prefix = "MQTTBROKER_HTTP__ACCESS__"
    environ = {
        f"{prefix}0__NAME": "grafana", f"{prefix}0__ROLE": "viewer", f"{prefix}0__TOKEN_FILE": str(tmp_path / "token"),
        f"{prefix}1__NAME": "root", f"{prefix}1__ROLE": "admin", f"{prefix}1__TOKEN": "other",
    }  # fmt: skip
    access = load_settings(None, environ).http.access
    assert [(each.name, each.role, each.token) for each in access] == [
        ("grafana", "viewer", "hunter2"), ("root", "admin", "other")
    ]  # fmt: skip
    assert "hunter2" not in repr(access)
    environ[f"{prefix}1__ROLE"] = "owner"
    assert problems(None, environ) == [
        f'{prefix}1__ROLE: http.access.1.role: must be "viewer", "operator", "admin" or "reader", got "owner"'
    ]


def test_variables_of_kubernetes_and_of_the_build_are_not_settings() -> None:
    environ = {
        "MQTTBROKER_SERVICE_HOST": "10.0.0.1",
        "MQTTBROKER_SERVICE_PORT": "1883",
        "MQTTBROKER_SERVICE_PORT_MQTT": "1883",
        "MQTTBROKER_PORT": "tcp://10.0.0.1:1883",
        "MQTTBROKER_PORT_1883_TCP": "tcp://10.0.0.1:1883",
        "MQTTBROKER_PORT_1883_TCP_ADDR": "10.0.0.1",
        "MQTTBROKER_COMPILE": "1",
    }
    assert load_settings(None, environ) == Settings()


# --- values -------------------------------------------------------------------------------------------------------

GOOD = [
    ('durability_interval = "250ms"', "durability_interval", 0.25),
    ('sys_interval = "1.5m"', "sys_interval", 90.0),
    ("allow_anonymous = false", "allow_anonymous", False),
    ('password_file = "p"', "password_file", Path("p")),
    ("authentication = []", "authentication", ()),
    ('authentication = "auto"', "authentication", None),
    ('http.token = "secret"', "http.token", "secret"),
    ('http.port = "off"', "http.port", None),
    ('response_information = "r/%c/%u/"', "response_information", "r/%c/%u/"),
    ('limits.max_packet_size = "64KiB"', "limits.max_packet_size", 65536),
    ('limits.max_packet_size = "1.5 MiB"', "limits.max_packet_size", 1572864),
    ('limits.max_session_expiry = "2d"', "limits.max_session_expiry", 172800.0),
    ('limits.max_session_expiry = "never"', "limits.max_session_expiry", None),
]


@pytest.mark.parametrize(("text", "path", "value"), GOOD)
def test_valid_values(tmp_path: Path, text: str, path: str, value: object) -> None:
    found: Any = load_settings(write(tmp_path, text))
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value and type(found) is type(value)


BAD = [
    ("listeners = []", "listeners: must be one or more [[listeners]] tables"),
    ("[[listeners]]\nport = 99999", "listeners.0.port: must be 0–65535, got 99999"),
    ('[[listeners]]\nport = "1883"', 'listeners.0.port: must be a whole number, got "1883"'),
    ("[[listeners]]\nport = true", "listeners.0.port: must be a whole number, got true"),
    ("[[listeners]]\nhost = 5", "listeners.0.host: must be a string"),
    ("[[listeners]]\n[[listeners]]", "listeners.1.port: 127.0.0.1:1883 is taken by an earlier listener"),
    ("[[listeners]]\nprot = 1", "listeners.0.prot: unknown key, did you mean port?"),
    ("port = 1884", "port: unknown key, did you mean listeners.0.port?"),
    ("max_inflight = 5", "max_inflight: unknown key, did you mean limits.max_inflight?"),
    ("server_reference = 'x'", "server_reference: unknown key, did you mean redirect.server_reference?"),
    ("zzz = 1", "zzz: unknown key"),
    ("log = 3", "log: must be a table of keys, got 3"),
    ("log.level = 'loud'", 'log.level: must be "debug", "info", "warning" or "error", got "loud"'),
    ("workers = true", 'workers: must be a whole number, or "auto", got true'),
    ("workers = 1.5", 'workers: must be a whole number, or "auto", got 1.5'),
    ("workers = 257", 'workers: must be 0–256, or "auto", got 257'),
    ("streams.s = {filters = ['a'], seal = 1}", 'streams.s.seal: must be true, false or "auto", got 1'),
    ("limits.max_memory = true",
     'limits.max_memory: must be "auto", a share like "50%" or a size like "2GiB", or "unlimited", got true'),
    ("durability = 1", 'durability: must be "commit", "interval" or "off", got 1'),
    ("durability_interval = 5", 'durability_interval: must be a duration like "500ms", "10s", "5m", "12h" or "7d", got 5'),
    ("durability_interval = '2h'", "durability_interval: must be 1ms–1h, got 2h"),
    ('authentication = ["kerberos"]', 'authentication: must be "certificate", "jwt", "password_file", "http_callback" or "plugin", or "auto", got "kerberos"'),
    ('authentication = ["certificate", "certificate"]', 'authentication: "certificate" stands there twice'),
    ('authentication = ["jwt"]', 'authentication: "jwt" is not configured for listener 127.0.0.1:1883'),
    ('authentication = ["password_file"]',
     'authentication: "password_file" is not configured for listener 127.0.0.1:1883'),
    ('password_file = "p"\n[[listeners]]\npassword_file = ""\nauthentication = ["password_file"]',
     'listeners.0.authentication: "password_file" is not configured for listener 127.0.0.1:1883'),
    ("allow_anonymous = 'yes'", 'allow_anonymous: must be true, false or "loopback", got "yes"'),
    ("response_information = 'r/+'", 'response_information: must be a topic name, got "r/+"'),
    ("response_information = 'r/x%c'", 'response_information: %c and %u must be a whole level, not part of "x%c"'),
    ("http.port = 70000", 'http.port: must be 0–65535, or "off", got 70000'),
    ("limits.max_packet_size = '1MB'",
     'limits.max_packet_size: must be a size like "512B", "64KiB", "10MiB" or "1GiB", got "1MB"'),
    ("limits.max_packet_size = '1GiB'", "limits.max_packet_size: must be 128B–256MiB, got 1GiB"),
    ("limits.max_session_expiry = 'ever'",
     'limits.max_session_expiry: must be a duration like "500ms", "10s", "5m", "12h" or "7d", or "never", got "ever"'),
    ("limits.retain_available = 1", "limits.retain_available: must be true or false, got 1"),
    ("streams = 1", "streams: must be [streams.NAME] tables"),
    ("[streams.s]", "streams.s.filters: is required"),
    ("[streams.s]\nfilters = []", "streams.s.filters: must be a list of one or more topic filters, got a list"),
    ("bans.exempt = ['10.0.0.1/8']", 'bans.exempt: "10.0.0.1/8" is not an address or network: 10.0.0.1/8 has host bits set'),
    ("bans.first = '1h'", "bans.longest: must not be shorter than first"),
    ("[[listeners]]\nclient_id_from = 'a*b'",
     'listeners.0.client_id_from: must be "username", "certificate" or a client id like "%u-*", with a * only at its end,'
     ' got "a*b"'),
    ("[[listeners]]\nclient_id_from = '%U-*'",
     'listeners.0.client_id_from: must have no % other than %u and %i, got "%U-*"'),
    ("[streams.s]\nfilters = ['a/#/b']", 'streams.s.filters: "a/#/b" is not a topic filter that a stream can keep'),
    ("[streams.s]\nfilters = ['$share/g/a']",
     'streams.s.filters: "$share/g/a" is not a topic filter that a stream can keep'),
    ("[streams.s]\nfilters = ['a']\nkey = 'user-property:'",
     'streams.s.key: must be "topic", "client" or "user-property:NAME", got "user-property:"'),
    ("[streams.s]\nfilters = ['a']\nvacuum = true", "streams.s.vacuum: unknown key"),
    ("[streams.'a/b']\nfilters = ['a']",
     "streams.a/b: a stream's name must be 1–64 of A–Z a–z 0–9 _ -, first a letter or digit"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "problem"), BAD)
def test_invalid_values_are_reported_in_one_line(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, text)
    assert problems(path) == [f"{path}: {problem}"]


def test_all_problems_are_reported_with_their_source(tmp_path: Path) -> None:
    path = write(tmp_path, 'durability = "x"\n[limits]\nmax_inflight = 0\n')
    found = problems(path, {"MQTTBROKER_LISTENERS__0__PORT": "70000"}, {"--log-level": "loud"})
    assert sorted(line.split(": ")[0] for line in found) == sorted([str(path), str(path), "MQTTBROKER_LISTENERS__0__PORT", "--log-level"])


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("MQTTBROKER_LOG", "debug", "log: must be a table of keys, got a string"),
        ("MQTTBROKER_LISTENERS", "x", "listeners: must be one or more [[listeners]] tables"),
        ("MQTTBROKER_LISTENERS__7__PORT", "1", "listeners.7: must be a number from 0 to 1 here"),
        (
            "MQTTBROKER_LIMITS__MAX_PAKET_SIZE",
            "1B",
            "limits.max_paket_size: unknown key, did you mean max_packet_size?",
        ),
        ("MQTTBROKER_PORT", "1884", "port: unknown key, did you mean listeners.0.port?"),
    ],
)
def test_invalid_variables_are_named(name: str, text: str, problem: str) -> None:
    assert problems(None, {name: text}) == [f"{name}: {problem}"]


# --- secrets ------------------------------------------------------------------------------------------------------


def sections(section: type[Any] = Settings) -> Iterator[type[Any]]:
    """All classes of settings."""
    yield section
    for field in dataclasses.fields(section):
        if "section" in field.metadata:
            yield from sections(field.metadata["section"])
        elif "tables" in field.metadata:
            yield from sections(field.metadata["tables"])


def test_every_secret_may_be_in_a_file() -> None:
    for section in (*sections(), Listener, Stream):
        fields = {field.name: field for field in dataclasses.fields(section)}
        for name in [name for name, field in fields.items() if not field.repr]:
            assert fields[f"{name}_file"].metadata["file_of"] == name


def test_a_secret_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"hunter2\r\n")
    path = write(tmp_path, f'http.token_file = "{file}"')
    assert load_settings(path).http.token == "hunter2"
    assert "hunter2" not in repr(load_settings(path))
    assert load_settings(None, {"MQTTBROKER_HTTP__TOKEN_FILE": str(file)}).http.token == "hunter2"
    both = {"MQTTBROKER_HTTP__TOKEN": "other", "MQTTBROKER_HTTP__TOKEN_FILE": str(file)}
    assert problems(None, both) == ["MQTTBROKER_HTTP__TOKEN_FILE: http.token_file: token is set, too"]


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (None, "No such file or directory"),
        (b"\n", "is empty"),
        (b"hunter2 hunter2", "must be a string of printable ASCII characters without spaces"),
        (b"hunter2\xff", "not UTF-8 at byte 7"),
        (b"hunter2" * 10_000, "more than 65535 bytes"),
    ],
)
def test_a_bad_file_of_a_secret(tmp_path: Path, contents: bytes | None, reason: str) -> None:
    file = tmp_path / "token"
    if contents is not None:
        file.write_bytes(contents)
    path = write(tmp_path, f'http.host = ""\nhttp.token_file = "{file}"')
    assert problems(path) == [f"{path}: http.token_file: {file}: {reason}"]


@pytest.mark.parametrize("value", ['["hunter2"]', '"hunter2 with space"', '"hunter2é"', "{ hunter2 = 1 }"])
def test_a_token_is_never_shown(tmp_path: Path, value: str) -> None:
    assert "hunter2" not in "\n".join(problems(write(tmp_path, f"http.token = {value}")))


# --- files --------------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert problems(missing) == [f"{missing}: cannot be read: No such file or directory"]
    assert problems(tmp_path) == [f"{tmp_path}: cannot be read: Is a directory"]
    broken = write(tmp_path, "a = = 1")
    (line,) = problems(broken)
    assert re.fullmatch(r".*broker\.toml: not TOML: .*line 1.*", line)
    broken.write_bytes(b"a = '\xff'")
    assert problems(broken) == [f"{broken}: not UTF-8"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a = " + "[" * 1000, "not TOML: lists or tables are nested too deeply"),
        ("a = " + "9" * 5000, "not TOML: Exceeds the limit"),
    ],
)
def test_files_beyond_limits_of_the_parser(tmp_path: Path, text: str, reason: str) -> None:
    path = write(tmp_path, text)
    (line,) = problems(path)
    assert line.startswith(f"{path}: {reason}")


def test_a_missing_key_names_the_variable_of_its_section() -> None:
    variables = {"MQTTBROKER_STREAMS__S__PARTITIONS": "2", "MQTTBROKER_LOG__LEVEL": "info"}
    assert problems(None, variables) == ["MQTTBROKER_STREAMS__S__PARTITIONS: streams.s.filters: is required"]


def test_keys_with_line_breaks_stay_on_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, '"a\\nb" = 1')
    assert problems(path) == [f'{path}: "a\\nb": unknown key']


@given(st.dictionaries(st.text(st.sampled_from("ABCLOGHTPSREAMI_0"), max_size=12), st.text(max_size=8), max_size=4))
def test_any_environment_gives_settings_or_problems(variables: dict[str, str]) -> None:
    try:
        load_settings(None, {f"MQTTBROKER_{name}": text for name, text in variables.items()})
    except ConfigError as error:
        assert error.problems and all("\n" not in line for line in error.problems)


def test_settings_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().log.level = "debug"  # type: ignore[misc]


# --- former names of keys -----------------------------------------------------------------------------------------

FORMER_NAMES = [
    ("max_inflight_unkept", "max_inflight_unpersisted", "7", 7),
    ("crowded_queue_messages", "queue_high_watermark_messages", "8", 8),
    ("crowded_queue_bytes", "queue_high_watermark_bytes", "9KiB", 9216),
    ("crowded_queue_wait", "backpressure_wait", "90ms", 0.09),
]


@pytest.mark.parametrize(("former", "name", "text", "value"), FORMER_NAMES)
def test_a_former_name_in_the_file_is_read_with_a_warning(tmp_path: Path, former: str, name: str, text: str, value: float) -> None:
    path = write(tmp_path, f"limits.{former} = {text if text.isdigit() else repr(text)}")
    warnings: list[str] = []
    assert getattr(load_settings(path, warn=warnings.append).limits, name) == value
    assert warnings == [f"{path}:1: limits.{former}: is called limits.{name} now"]


@pytest.mark.parametrize(("former", "name", "text", "value"), FORMER_NAMES)
def test_a_former_name_in_the_environment_overrides_the_file_with_a_warning(
    tmp_path: Path, former: str, name: str, text: str, value: float
) -> None:
    path = write(tmp_path, f"limits.{name} = {'1' if text.isdigit() else repr('10' + text.lstrip('90'))}")
    warnings: list[str] = []
    variable = f"MQTTBROKER_LIMITS__{former.upper()}"
    assert getattr(load_settings(path, {variable: text}, warn=warnings.append).limits, name) == value
    assert warnings == [f"{variable}: limits.{former} is called limits.{name} now"]


def test_a_variable_overrides_a_former_name_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "limits.crowded_queue_messages = 5")
    environ = {"MQTTBROKER_LIMITS__QUEUE_HIGH_WATERMARK_MESSAGES": "6"}
    assert load_settings(path, environ, warn=[].append).limits.queue_high_watermark_messages == 6


def test_a_former_name_beside_the_present_one_is_a_problem(tmp_path: Path) -> None:
    path = write(tmp_path, "[limits]\ncrowded_queue_messages = 5\nqueue_high_watermark_messages = 5")
    reason = "is the former name of limits.queue_high_watermark_messages, which is set too"
    assert problems(path) == [f"{path}: limits.crowded_queue_messages: {reason}"]
    former, name = "MQTTBROKER_LIMITS__CROWDED_QUEUE_WAIT", "MQTTBROKER_LIMITS__BACKPRESSURE_WAIT"
    assert problems(environ={former: "1s", name: "1s"}) == [f"{former}: sets limits.backpressure_wait, as {name} does"]


def test_a_bad_value_is_reported_under_the_name_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "limits.crowded_queue_wait = '1h'")
    assert problems(path) == [f"{path}: limits.crowded_queue_wait: must be 10ms–10s, got 1h"]


def test_the_broker_logs_a_former_name_at_its_start(tmp_path: Path) -> None:
    path = write(tmp_path, "limits.crowded_queue_wait = '90ms'\n[[listeners]]\nport = 0\n[http]\nport = 'off'\n")
    command = [sys.executable, "-m", "mqttbroker", "serve", "--config", str(path), "--data-dir", str(tmp_path / "d")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.terminate()
    assert "warning event=setting_renamed" in line and "limits.backpressure_wait" in line
    checked = subprocess.run([sys.executable, "-m", "mqttbroker", "check-config", str(path)], capture_output=True, text=True, check=True)
    assert checked.stderr == f"warning: {path}:1: limits.crowded_queue_wait: is called limits.backpressure_wait now\n"


def test_bridges_are_printed_as_they_are_read(tmp_path: Path) -> None:
    text = documented()
    text = text[text.index("\n[[bridges]]\n") : text.index("# A stream keeps")]
    settings = load_settings(write(tmp_path, text))
    again = load_settings(write(tmp_path, printed(settings)))
    assert again.bridges == settings.bridges
    line = text[: text.index('filter = "plant/#"')].count("\n") + 1
    assert settings.sources["bridges.0.topics.0.filter"].endswith(f"broker.toml:{line}")


KAFKA = '[cluster]\nengine = "kafka"\nbootstrap_servers = ["kafka:9092"]\n'


@pytest.mark.parametrize(
    "text, problem",
    [
        ('[cluster]\nnode = "one"\n', 'cluster.engine: must be "kafka"'),
        ('[cluster]\nengine = "kafka"\n', "cluster.bootstrap_servers: is required"),
        (KAFKA.replace("kafka:9092", "kafka"), "cluster.bootstrap_servers: must be a list of HOST:PORT, got kafka"),
        (KAFKA + 'link_host = "10.0.0.1"\n', "cluster.link_cafile: is required when links can be reached at 10.0.0.1"),
        (KAFKA + 'link_host = ""\n', "cluster.link_address: is required"),
        (KAFKA + "replication = 1\n", "cluster.min_insync_replicas: must not be greater than replication, 1"),
        (KAFKA + 'security_protocol = "SASL_SSL"\n', "cluster.sasl_username: is required"),
        (KAFKA + 'certfile = "c.pem"\n', "cluster.keyfile: is required with certfile"),
        (KAFKA + "link_port = 65530\n", "cluster.link_port: must leave room for the ports of 8 shards behind it"),
        (KAFKA + 'node = "a b"\n', "cluster.node: must be"),
        (KAFKA + '[[bridges]]\nname="b"\naddresses=["h"]\n[[bridges.topics]]\nfilter = "#"\ndirection = "out"\n',
         "bridges: not available in a cluster"),
        (KAFKA + '[streams.a]\nfilters = ["#"]\ndedup = true\n', "streams.a.dedup: not available in a cluster"),
        (KAFKA + '[streams.a]\nfilters = ["#"]\nseal = true\n', "streams.a.seal: not available in a cluster"),
    ],
)  # fmt: skip
def test_a_wrong_cluster_section_is_one_line(tmp_path: Path, text: str, problem: str) -> None:
    assert any(problem in line for line in problems(write(tmp_path, text)))


def test_targets_of_the_log_that_are_no_more_name_what_to_write_instead(tmp_path: Path) -> None:
    for text, word in (('"syslog"', "syslog"), ('["file", "journald"]', "journald")):
        [line] = problems(write(tmp_path, f'log.to = {text}\nlog.file = "x"'))
        assert line.startswith(f'{tmp_path}/broker.toml: log.to: "{word}" is no more: write "stderr", which ')


def test_keys_without_an_effect_load_with_a_warning(tmp_path: Path) -> None:
    path = write(tmp_path, '[log]\nsyslog_address = "/dev/log"\nlevel = "error"')
    warnings: list[str] = []
    settings = load_settings(path, {"MQTTBROKER_LOG__SYSLOG_FACILITY": "daemon"}, warn=warnings.append)
    assert settings.log.level == "error"
    reason = "the broker writes to no syslog itself: leave it out (docs/upgrade.md)"
    assert warnings == [f"{path}:2: log.syslog_address: {reason}", f"MQTTBROKER_LOG__SYSLOG_FACILITY: log.syslog_facility: {reason}"]
