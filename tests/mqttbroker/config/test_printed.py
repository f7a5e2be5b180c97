"""The printed configuration: it can be read back, says where each setting comes from, and has no secrets."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import run
from support.config_files import write

from mqttbroker.config.load import ConfigError, load_settings
from mqttbroker.config.printed import printed, toml
from mqttbroker.config.setting_kinds import Duration, FirstOf, MemorySize, Options, OrNone, Size
from mqttbroker.config.settings import Settings

EVERY_KIND = """
data_mode = "0640"
authentication = ["password_file"]
password_file = "users \\u007f \\"x\\""
workers = "auto"
response_information = "replies/%c"
[log]
audit_file = "/var/log/audit"
[http]
port = "off"
[limits]
max_memory = "50%"
max_receive_rate = "1500B"
connect_timeout = "1500ms"
max_session_expiry = "90d"
[jwt]
algorithms = ["ES256"]
jwks_url = "https://example.org/keys"
claims = {device = "%c", "a b" = "c"}
[http_callback.body]
login = "${username}"
[bans]
exempt = ["10.0.0.0/8"]
[[listeners]]
port = 1
certificate_identity = ["san_dns", "cn"]
max_publish_rate = 0
acl_file = ""
allow_anonymous = false
[[listeners]]
type = "unix"
path = "/run/mqtt"
mode = "0600"
[streams.sensors]
filters = ["sensors/#"]
key = "user-property:device"
retention_age = "36h"
retention_bytes = "10GiB"
seal = false
"""


def test_the_defaults_can_be_read_back(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, printed(Settings()))) == Settings()


def test_settings_of_every_kind_can_be_read_back(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, EVERY_KIND))
    text = printed(settings)
    assert load_settings(write(tmp_path, text)) == settings
    assert 'connect_timeout = "1500ms"' in text and 'retention_age = "36h"' in text and 'max_receive_rate = "1500B"' in text


@given(st.integers(0, 10**11))
def test_every_duration_and_size_is_read_back_as_written(number: int) -> None:
    duration, size = Duration("0s", "36500d"), Size("0B", "1024TiB")
    seconds = duration.read(f"{number / 1000:.3f}s")
    assert duration.read(duration.written(seconds)) == seconds
    assert size.read(size.written(number)) == number
    assert OrNone(size, "none").written(None) == "none" and MemorySize("1B", "1TiB").written(1 << 30) == "1GiB"


def test_special_values_are_written_as_in_a_file() -> None:
    assert FirstOf("a", "b").written(("a",)) == "a" and Options().written(None) == {}
    assert (Duration("0s", "1d").written(0.0), Size("0B", "1KiB").written(0)) == ("0s", "0B")
    assert Duration("0s", "1d").written(0.000001) == "0.001ms"


@given(
    st.recursive(
        st.text() | st.integers(-(2**63), 2**63 - 1) | st.booleans(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=5,
    )
)
def test_any_value_is_toml(value: object) -> None:
    assert tomllib.loads(f"x = {toml(value)}")["x"] == value


def test_each_setting_names_its_source(tmp_path: Path) -> None:
    path = write(tmp_path, "limits.max_sessions = 5\n")
    settings = load_settings(path, {"MQTTBROKER_LIMITS__MAX_INFLIGHT": "7"}, {"--port": "9"})
    sources = dict(line.split("  # ") for line in printed(settings).splitlines() if "  # " in line)
    stripped = {line.strip(): source for line, source in sources.items()}
    assert stripped["max_sessions = 5"] == f"{path}:1"
    assert stripped["max_inflight = 7"] == "MQTTBROKER_LIMITS__MAX_INFLIGHT"
    assert stripped["port = 9"] == "--port" and stripped['durability = "commit"'] == "default"


SECRETS = """
[http]
token = "s3cr3t-1"
[[http.access]]
name = "grafana"
role = "viewer"
token = "s3cr3t-2"
[jwt]
algorithms = ["HS256"]
secret = "s3cr3t-3-s3cr3t-3-s3cr3t-3-s3cr3t"
[http_callback]
url = "https://example.org/login?key=s3cr3t-4"
authorization = "s3cr3t-5"
headers = {X-Key = "s3cr3t-6"}
[plugin]
options = {key = "s3cr3t-7"}
"""


def test_secrets_are_comments(tmp_path: Path) -> None:
    path = write(tmp_path, SECRETS)
    text = printed(load_settings(path))
    assert "s3cr3t" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("#secret =")]
    assert line.split() == ["#secret", "=", '"***"', "#", f"{path}:10"]
    with pytest.raises(ConfigError, match="http.access.0.token_file: is required"):
        load_settings(write(tmp_path, text))


def test_a_secret_in_a_file_is_read_back_from_it(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cr3t\n")
    settings = load_settings(write(tmp_path, f'[http]\ntoken_file = "{tmp_path}/token"\n'))
    text = printed(settings)
    assert "s3cr3t" not in text and load_settings(write(tmp_path, text)).http.token == "s3cr3t"


def test_commands_print_the_configuration(tmp_path: Path) -> None:
    path = write(tmp_path, f'data_dir = "{tmp_path}"\nlimits.max_sessions = 5\n')
    checked = run("check-config", str(path), "--print-config", cwd=tmp_path)
    assert (checked.returncode, checked.stderr) == (0, "")
    served = run("serve", "--config", str(path), "--port", "77", "--print-config", cwd=tmp_path)
    assert (served.returncode, served.stderr) == (0, "")
    again = load_settings(write(tmp_path, served.stdout))
    assert (again.listeners[0].port, again.limits.max_sessions, again.data_dir) == (77, 5, tmp_path)
    path = write(tmp_path, "limits.max_sessions = 0\n")
    refused = run("check-config", str(path), "--print-config", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "") and "max_sessions" in refused.stderr
