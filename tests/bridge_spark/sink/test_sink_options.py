"""bridge_spark.sink.options: what is accepted, and the line for each bad option."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge_spark.sink.errors import SinkError
from bridge_spark.sink.options import are_for_writing, parse_options

pytestmark = pytest.mark.one_build

URL = {"url": "mqtt://broker"}

REFUSED: list[tuple[dict[str, str], str]] = [
    ({}, "option 'url': missing: give the broker's address, mqtt://HOST:PORT or mqtts://HOST:PORT"),
    ({"url": "http://broker:18083"},
     "option 'url': 'http://broker:18083' is an HTTP address, which is for reading: to write, give mqtt://HOST:PORT"),
    ({"url": "broker:1883"}, "option 'url': 'broker:1883' is not an address like mqtt://HOST:PORT or mqtts://HOST:PORT"),
    ({"url": "mqtt://broker:x"}, "option 'url': 'mqtt://broker:x': Port could not be cast to integer value as 'x'"),
    ({"url": "mqtt://me:secret@broker"}, "option 'url': must not carry a name or password: give 'user' and 'password'"),
    ({**URL, "host": "broker"}, "option 'host': cannot be given together with 'url'"),
    ({"host": "broker", "port": "0"}, "option 'port': 0 is not a number from 1 to 65535"),
    ({**URL, "caFile": "ca.pem"}, "option 'caFile': is for a 'url' that begins with mqtts://"),
    ({"url": "mqtts://broker", "keyFile": "k"}, "option 'keyFile': needs 'certFile', the certificate of that key"),
    ({**URL, "protocolVersion": "3.1"}, "option 'protocolVersion': '3.1' is neither 5 nor 3.1.1"),
    ({**URL, "qos": "3"}, "option 'qos': 3 is not a number from 0 to 2"),
    ({**URL, "qos": "one"}, "option 'qos': 'one' is not a whole number from 0 on"),
    ({**URL, "topic": "a/#"}, "option 'topic': 'a/#' is not a topic name that can be published to"),
    ({**URL, "maxInFlight": "0"}, "option 'maxInFlight': 0 is not a number from 1 to 10000"),
    ({**URL, "retain": "yes"}, "option 'retain': 'yes' is neither true nor false"),
    ({**URL, "delivery.timeoutMs": "soon"},
     "option 'delivery.timeoutMs': 'soon' is not a duration like 500ms, 30s, 15m or 1h"),
    ({**URL, "password": "p"}, "option 'password': needs 'user', the user name"),
    ({**URL, "user": "u", "password": "p", "token": "t"}, "option 'token': cannot be given together with 'password'"),
    ({**URL, "user": "u", "passwordFile": "/none"}, "option 'passwordFile': /none: No such file or directory"),
    ({**URL, "token": "t", "protocolVersion": "3.1.1"}, "option 'token': needs 'user', the user name"),
    ({**URL, "protocolVersion": "3.1.1", "producerId": "p"},
     "option 'producerId': needs user properties, which MQTT 3.1.1 does not have: set 'protocolVersion' to 5"),
    ({**URL, "deduplicate": "false", "producerId": "p"},
     "option 'producerId': is for 'deduplicate', which is false"),
    ({**URL, "clientIdPrefix": "a\nb"},
     r"option 'clientIdPrefix': 'a\nb' is not a text of 1 to 100 bytes without control characters"),
    ({**URL, "stream": "s"}, "option 'stream': unknown; the options of the sink are url, host, "),
    ({**URL, "retian": "true"}, "option 'retian': unknown, did you mean 'retain'?"),
    ({**URL, "username": "u"}, "option 'username': unknown: the closest option of this sink is 'user'"),
    ({"kafka.bootstrap.servers": "b:9092"},
     "option 'kafka.bootstrap.servers': unknown: the closest option of this sink is 'url'"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_bad_option_is_one_line(number: int) -> None:
    options, line = REFUSED[number]
    with pytest.raises(SinkError) as caught:
        parse_options(options)
    assert str(caught.value).startswith(f"mqtt sink: {line}") and "\n" not in str(caught.value)


def test_options_have_defaults_and_any_case(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("p4ss\n")
    found = parse_options({"URL": "mqtts://[::1]", "User": "u", "passwordfile": str(secret), "checkpointLocation": "c"})
    assert (found.host, found.port, found.secure, found.address) == ("::1", 8883, True, "mqtts://[::1]:8883")
    assert (found.user, found.password, found.version, found.qos, found.deduplicate) == ("u", b"p4ss", 5, 1, True)
    plain = parse_options({"host": "broker", "protocolVersion": "3.1.1"})
    assert (plain.port, plain.version, plain.deduplicate) == (1883, 4, False)
    assert parse_options({"url": "mqtt://b", "token": "t"}).password == b"t"


def test_options_of_a_sink_are_told_from_those_of_a_source() -> None:
    assert are_for_writing({"Host": "b"}) and are_for_writing({"url": "MQTTS://b"})
    assert are_for_writing({"checkpointLocation": "c"})
    assert not are_for_writing({"url": "http://b", "stream": "s"})
