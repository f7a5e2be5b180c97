"""``mqttbroker pub`` and ``sub``, alone and beside Mosquitto's commands."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.patience import PATIENCE
from support.raw_client import RawClient
from support.tools import needs

from mqttbroker.auth.passwords import hash_password
from mqttbroker.codec.properties import Properties

pytestmark = pytest.mark.one_build

MOSQUITTO = {"pub": "mosquitto_pub", "sub": "mosquitto_sub"}
NEEDS_MOSQUITTO = needs("mosquitto-clients")


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess() as process:
        yield process


def command(name: str, words: Sequence[str], mosquitto: bool = False) -> list[str]:
    return [MOSQUITTO[name], *words] if mosquitto else [sys.executable, "-P", "-m", "mqttbroker", name, *words]


def run(name: str, *words: str, stdin: bytes = b"", mosquitto: bool = False) -> tuple[int, bytes, str]:
    """Exit status, output and errors."""
    done = subprocess.run(command(name, words, mosquitto), input=stdin, capture_output=True, timeout=40, check=False)
    return done.returncode, done.stdout, done.stderr.decode()


def test_each_way_to_give_a_payload(broker: BrokerProcess, tmp_path: Path) -> None:
    (tmp_path / "payload").write_bytes(b"\x00 file\n")
    to = ("-p", str(broker.port), "-t", "w/1", "-q", "1")
    with RawClient(broker.port) as client:
        client.connect("ways")
        client.subscribe("w/#")
        for words, stdin, payloads in (
            (("-m", "über"), b"", ["über".encode()]), (("-n",), b"", [b""]), (("-s",), b"all\nof it", [b"all\nof it"]),
            (("-f", str(tmp_path / "payload")), b"", [b"\x00 file\n"]), (("-l",), b"one\n\ntwo", [b"one", b"", b"two"]),
            (("-m", "x", "--repeat", "3", "-V", "5"), b"", 3 * [b"x"]), (("-m", "old", "-V", "31"), b"", [b"old"]),
        ):  # fmt: skip
            assert run("pub", *to, *words, stdin=stdin) == (0, b"", "")
            assert [client.take().payload for _ in payloads] == payloads
        assert run("pub", "-L", f"mqtt://127.0.0.1:{broker.port}/w/2", "-m", "r", "-r", "-q", "2")[0] == 0
        message = client.take()
        assert (message.topic, message.payload) == ("w/2", b"r")
        words = ("-V", "mqttv5", "-D", "publish", "content-type", "text/plain", "-D", "publish", "user-property", "a", "b c")
        assert run("pub", *to, *words, "-D", "publish", "message-expiry-interval", "60", "-m", "p")[0] == 0
        found = client.take().properties
        assert found is not None and found.content_type == "text/plain"
        assert found.user_properties == [("a", "b c")] and 0 < found.message_expiry_interval <= 60


def test_many_lines_are_all_published(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        client.connect("lines")
        client.subscribe("many", options=1)
        count = 3000  # more than may wait
        lines = b"".join(b"%d\n" % number for number in range(count))
        assert run("pub", "-p", str(broker.port), "-t", "many", "-q", "1", "-l", stdin=lines) == (0, b"", "")
        assert [client.take().payload for _ in range(count)] == lines.split()


FORMATS = ["%t %p %q %r %l %x %X %%", "%C|%R|%P|%D|%E|%F", "a\\tb @@ %p", "@Y-@m-@d %t"]


@NEEDS_MOSQUITTO
@pytest.mark.parametrize("mosquitto", [False, True], ids=["mqttbroker", "mosquitto"])
def test_sub_prints_what_mosquitto_sub_prints(broker: BrokerProcess, mosquitto: bool) -> None:
    properties = Properties()
    properties.content_type, properties.response_topic = "text/plain", "answers"
    properties.correlation_data, properties.user_properties = b"id", [("k", "v")]
    with RawClient(broker.port) as client:
        client.connect("printed")
        client.publish("f/1", b"21 \xc2\xb0C", 1, True, properties)
        client.publish("f/2", b"two", 1, True)
    expected = {
        ("-v",): b"f/1 21 \xc2\xb0C\nf/2 two\n", (): b"21 \xc2\xb0C\ntwo\n", ("-N",): b"21 \xc2\xb0Ctwo",
        ("-F", FORMATS[0]): b"f/1 21 \xc2\xb0C 1 1 6 323120c2b043 323120C2B043 %\nf/2 two 1 1 3 74776f 74776F %\n",
        ("-F", FORMATS[1]): b"text/plain|answers|k:v|id||\n|||||\n", ("-F", FORMATS[2]): b"a\tb @ 21 \xc2\xb0C\na\tb @ two\n",
        ("-T", "f/1"): b"two\n",
    }  # fmt: skip
    for words, output in expected.items():
        count = str(2 if output.count(b"\n") != 1 else 1)
        to = ("-p", str(broker.port), "-t", "f/#", "-q", "1", "-V", "mqttv5", "-C", count, "-W", "20")
        status, out, err = run("sub", *to, *words, mosquitto=mosquitto)
        assert (status, sorted(out.split(b"\n")), err) == (0, sorted(output.split(b"\n")), ""), words


@NEEDS_MOSQUITTO
@pytest.mark.parametrize("mosquitto", [False, True], ids=["mqttbroker", "mosquitto"])
def test_sub_prints_the_properties_in_json_as_mosquitto_sub_does(broker: BrokerProcess, mosquitto: bool) -> None:
    properties = Properties()
    properties.content_type, properties.response_topic, properties.payload_format_indicator = "text/plain", "answers", 1
    properties.correlation_data, properties.message_expiry_interval = b'i"d', 1000
    properties.user_properties = [("unit", "°C"), ('q"', "1"), ("site", "a"), ("site", "b")]
    with RawClient(broker.port) as client:
        client.connect("in-json")
        client.publish("j/1", b"21", 1, True, properties)
        client.publish("j/2", b"", 1)
        client.publish("j/3", b"x", 1, True)
    to = ("-p", str(broker.port), "-t", "j/#", "-V", "mqttv5", "-C", "2", "-W", "20", "-F", "%j")
    status, out, err = run("sub", *to, "-D", "subscribe", "subscription-identifier", "7", mosquitto=mosquitto)
    first, second = (json.loads(line, object_pairs_hook=list) for line in sorted(out.splitlines(), key=lambda line: b"j/3" in line))
    assert (status, err) == (0, "") and dict(first)["payload"] == "21"
    found = [(name, sorted(value) if name == "user-properties" else value) for name, value in dict(first)["properties"]]
    assert sorted((name, value if name != "message-expiry-interval" else 0) for name, value in found) == [
        ("content-type", "text/plain"), ("correlation-data", 'i"d'), ("message-expiry-interval", 0), ("payload-format-indicator", 1),
        ("response-topic", "answers"), ("subscription-identifier", 7), ("user-properties", sorted(properties.user_properties)),
    ]  # fmt: skip
    assert dict(second)["properties"] == [("subscription-identifier", 7)]
    status, out, _ = run("sub", *to[:-6], "-V", "311", "-C", "1", "-F", "%j", mosquitto=mosquitto)
    assert status == 0 and b"properties" not in out


def test_sub_ends_as_it_is_told(broker: BrokerProcess) -> None:
    to = ("-p", str(broker.port), "-t", "e/1")
    assert run("sub", *to, "-W", "1")[:2] == (27, b"")
    assert run("sub", *to, "-E") == (0, b"", "")
    assert run("pub", *to, "-m", "kept", "-r", "-q", "1")[0] == 0
    status, out, _ = run("sub", *to, "-F", "%j", "-C", "1")
    assert status == 0 and re.fullmatch(
        rb'\{"tst": "[^"]+", "topic": "e/1", "qos": 0, "retain": 1, "payloadlen": 4, "payload": "kept"\}\n', out
    )
    assert run("sub", *to, "--remove-retained", "-C", "1")[1] == b"kept\n"
    assert run("sub", *to, "-W", "1")[:2] == (27, b"")
    running = subprocess.Popen(command("sub", [*to, "-v", "-q", "1", "-i", "ended", "-d"]), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)  # fmt: skip
    assert running.stderr is not None and running.stdout is not None
    while b"SUBACK" not in running.stderr.readline():
        pass
    assert run("pub", *to, "-m", "live")[0] == 0
    assert running.stdout.readline() == b"e/1 live\n"
    running.terminate()
    assert running.wait(20) == 0
    running.stdout.close()
    running.stderr.close()


def test_a_session_is_kept_with_c_and_a_will_is_published(broker: BrokerProcess) -> None:
    to = ("-p", str(broker.port), "-q", "1")
    for version in ("311", "5"):
        own = (*to, "-t", f"k/{version}", "-i", f"kept-{version}", "-c", "-V", version)
        assert run("sub", *own, "-E")[0] == 0
        assert run("pub", *to, "-t", f"k/{version}", "-l", stdin=b"waited\nthen")[0] == 0
        status, out, log = run("sub", *own, "-C", "1", "-d")
        assert (status, out) == (0, b"waited\n")
        # Each message that was printed is acknowledged, and no other.
        assert re.findall("Sending (PUBACK|DISCONNECT)", log) == ["PUBACK", "DISCONNECT"]
    with RawClient(broker.port) as client:
        client.connect("heir")
        client.subscribe("will/+")
        words = [*to, "-t", "any", "--will-topic", "will/1", "--will-payload", "gone", "--will-qos", "1", "-d"]
        running = subprocess.Popen(command("sub", words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert running.stderr is not None
        while b"SUBACK" not in running.stderr.readline():
            pass
        running.kill()
        running.wait()
        running.stderr.close()
        assert client.take().payload == b"gone"


def test_tls_and_websocket(tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    listeners = [*files.config()["listeners"], {"type": "ws", "port": 0}]
    with BrokerProcess(config={"listeners": listeners}) as broker:
        ports = {kind: broker.wait_for_log(rf"type={kind} .*port=(\d+)")[1] for kind in ("tls", "ws")}
        with RawClient(broker.port) as client:
            client.connect("receiver")
            client.subscribe("#")
            assert run("pub", "-h", "localhost", "-p", ports["ws"], "--ws", "-t", "ws", "-m", "x")[0] == 0
            assert run("pub", "-L", f"ws://localhost:{ports['ws']}/ws", "-m", "x")[0] == 0
            secure = ("-h", "localhost", "-p", ports["tls"], "-t", "tls", "-m", "x")
            assert run("pub", *secure, "--cafile", str(files.cafile))[0] == 0
            status, _, err = run("pub", *secure, "--tls-use-os-certs")
            assert status == 1 and "certificate verify failed" in err and err.count("\n") == 1
            assert [client.take().topic for _ in range(3)] == ["ws", "ws", "tls"]


def start(name: str, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(name, words), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.mark.parametrize("qos", ["0", "1", "2"])
def test_pub_says_that_the_connection_is_lost(qos: str) -> None:
    with BrokerProcess() as broker, RawClient(broker.port) as client:
        client.connect("seen")
        client.subscribe("lost", options=0)
        to = ("-p", str(broker.port), "-t", "lost", "-q", qos)
        with start("pub", *to, "-m", "x", "--repeat", "1000", "--repeat-delay", "0.01") as running:
            assert client.take().payload == b"x"
            broker.kill()
            _, err = running.communicate(timeout=PATIENCE)
            assert running.returncode == 1
            what = r"messages at QoS 0 may be lost" if qos == "0" else r"not acknowledged: \d+"
            assert re.fullmatch(rf"mqttbroker pub: localhost:{broker.port}: connection lost; {what}\n", err.decode())


@pytest.mark.parametrize("name", ["pub", "sub"])
def test_a_connection_that_is_closed_before_the_connack_ends_the_command(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with start(name, "-p", str(port), "-t", "x", *(("-m", "x") if name == "pub" else ())) as running:
            taken, _ = server.accept()
            taken.recv(1)
            taken.close()
            _, err = running.communicate(timeout=PATIENCE)
    assert running.returncode == 1
    assert err.decode() == f"mqttbroker {name}: localhost:{port}: the connection was closed before a CONNACK came\n"


def test_lines_at_qos_1_and_sub_outlive_a_restart_of_the_broker() -> None:
    with BrokerProcess() as broker:
        to = ("-p", str(broker.port), "-t", "again", "-q", "1")
        assert run("sub", *to, "-c", "-i", "again", "-E")[0] == 0
        subscriber = subprocess.Popen(command("sub", [*to, "-c", "-i", "again"]), stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE)  # fmt: skip
        assert subscriber.stdout is not None and subscriber.stderr is not None
        with subscriber, start("pub", *to, "-l") as publisher:
            assert publisher.stdin is not None and publisher.stderr is not None
            publisher.stdin.write(b"before\n")
            publisher.stdin.flush()
            assert subscriber.stdout.readline() == b"before\n"
            broker.restart(kill=True)
            lost = f"localhost:{broker.port}: connection lost; connecting again\n"
            assert publisher.stderr.readline().decode() == f"mqttbroker pub: {lost}"
            assert subscriber.stderr.readline().decode() == f"mqttbroker sub: {lost}"
            publisher.stdin.write(b"after\n")
            publisher.stdin.close()
            while (line := subscriber.stdout.readline()) != b"after\n":
                assert line == b"before\n"  # whose PUBACK the broker has lost
            subscriber.terminate()
            assert (publisher.wait(20), subscriber.wait(20)) == (0, 0)


WRONG = [
    (("pub", "-m", "x"), "-t is required"), (("pub", "-t", "a/#", "-m", "x"), "-t must be a topic name"),
    (("pub", "-t", "a"), "give one of -m, -f, -l, -n and -s"), (("pub", "-t", "a", "-m", "x", "-n"), "give one of"),
    (("sub",), "-t is required"), (("sub", "-t", "a/#/b"), "not a topic filter"), (("sub", "-t", "a", "-c"), "-c needs -i"),
    (("sub", "-t", "a", "-F", "%y"), "-F: %y is unknown"), (("sub", "-t", "a", "-q", "3"), "invalid choice"),
    (("sub", "-t", "a", "-L", "ftp://h/t"), "-L must be mqtt://"), (("sub", "-t", "a", "-C", "0"), "-C must be"),
    (("pub", "-t", "a", "-n", "-D", "publish", "content-type", "x"), "-D needs -V mqttv5"),
    (("pub", "-t", "a", "-n", "-V", "5", "-D", "publish", "bogus", "x"), "-D publish bogus x"),
    (("pub", "-t", "a", "-n", "-V", "5", "-D", "puback", "x", "y"), "-D: puback must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "reason"), WRONG)
def test_a_wrong_call_is_one_line_and_status_2(words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    from mqttbroker.cli.main import main

    try:
        status = main(words)
    except SystemExit as end:
        status = int(str(end.code))
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"mqttbroker {words[0]}: ") and reason in err


def test_refusals_are_said_and_are_the_exit_status(tmp_path: Path) -> None:
    (tmp_path / "users").write_text(f"alice:{hash_password(b'a')}\n")
    (tmp_path / "rules").write_text("user alice\ntopic read #\ntopic deny none/#\n")
    (tmp_path / "secret").write_text("a\n")
    config = {"password_file": str(tmp_path / "users"), "acl_file": str(tmp_path / "rules"), "allow_anonymous": False}
    with BrokerProcess(config=config) as broker:
        to = ("-p", str(broker.port), "-t", "x")
        for words, code in ((("-V", "5"), 135), ((), 5)):
            status, _, err = run("pub", *to, *words, "-m", "x")
            assert status == code and err == "mqttbroker pub: connection refused: Not authorized\n"
        alice = ("-u", "alice", "--pw-file", str(tmp_path / "secret"))
        status, _, err = run("pub", *to, *alice, "-m", "x", "-q", "1", "-V", "5")
        assert status == 1 and err == "mqttbroker pub: publication 1 was refused: Not authorized\n"
        status, _, err = run("sub", "-p", str(broker.port), "-t", "none/#", *alice, "-P", "a")
        assert status == 1 and "subscription to none/# was refused" in err
        assert run("sub", *to, "-u", "alice", "-P", "a", "-E", "--quiet") == (0, b"", "")
        port = broker.port
    status, _, err = run("pub", "-p", str(port), "-t", "x", "-m", "x")
    assert status == 1 and err == f"mqttbroker pub: localhost:{port}: Connection refused\n"
