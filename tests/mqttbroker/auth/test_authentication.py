"""Authentication with passwords: the authenticator alone, and a broker with its files from start to SIGHUP."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.patience import PATIENCE
from support.raw_client import RawClient
from support.tools import needs

from mqttbroker.auth.authentication import NICENESS, PasswordAuthenticator
from mqttbroker.auth.passwords import Hash, Passwords, parse_hash
from mqttbroker.codec.packets import Disconnect
from mqttbroker.codec.reason_codes import (
    BAD_USER_NAME_OR_PASSWORD,
    BANNED,
    CLIENT_IDENTIFIER_NOT_VALID,
    NOT_AUTHORIZED,
    QUOTA_EXCEEDED,
    SERVER_BUSY,
)
from mqttbroker.core.access.bans import Bans, BanTerms
from mqttbroker.core.access.policy import Identity

# alice: secret, bob: pass word, as mosquitto_passwd wrote them
ALICE = "alice:$7$101$4bi5AyfE2xaqoXIs$RBrASIHOe9NGPzbq836FnJwkFoplgoeGYZDN44qtbvUPuOXvQOwn6INOjOQWl5+oPdMpDZzc0INzO0+xFwXmMw==\n"
BOB = "bob:$7$101$AT420tgGLNbsjtaZ$ls40kCv9uh9EtWdEv7b6aKM1LdobLHc0BPnwFEXZSORL0tGphm1TwQrpfqfr6OnTGdwGH8FrTT8PFXyTxqLN6w==\n"
# alice: changed
ALICE_CHANGED = "alice:$6$7hTeO4IYYf6eW/M6$4VgZ0s7tczxpwmI/uzPTdwJ0dq3vxQbPTUgo5C6bwLPa5NTV2JCKo52rmpXRxeO8oVygfs7/OblFUXhozly5QA==\n"
CHANGED = "c3"

# --- the authenticator alone --------------------------------------------------------------------------------------


class FakeRequest:
    """An authentication request that records its answer: True, or the reason code of the refusal."""

    def __init__(self, username: str, password: bytes, host: str = "10.0.0.1", bans: Bans | None = None) -> None:
        self.client_id = f"client-of-{username}"
        self.peer = f"{host}:1234"
        self.username = username
        self.password = password
        self.size = len(password)
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.gone = False
        self.bans = bans

    @property
    def waiting(self) -> bool:
        return not self.gone

    def accept(self, identity: Identity) -> None:
        assert identity.username == self.username
        self.answer.set_result(True)

    def reject(self, reason_code: int, detail: str) -> None:
        self.answer.set_result(reason_code)

    def fail(self, reason_code: int, detail: str) -> None:
        if self.bans is not None:
            self.bans.failed(self.peer, self.username, asyncio.get_running_loop().time())
        self.answer.set_result(reason_code)


def ban_terms(**fields: Any) -> BanTerms:
    terms = BanTerms()
    for name, value in {"window": 600.0, "first": 60.0, "longest": 60.0, "max_entries": 1000, **fields}.items():
        setattr(terms, name, value)
    return terms


class SlowHash:
    """A stored password whose check waits for a permit."""

    def __init__(self, password: bytes) -> None:
        self.password = password
        self.permits = threading.Semaphore(0)
        self.checked: list[bytes] = []

    def verify(self, password: bytes) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        self.permits.acquire()
        self.checked.append(password)
        return password == self.password


def users(**hashes: Hash) -> Passwords:
    return Passwords(hashes, {name: str(id(stored)) for name, stored in hashes.items()})


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., PasswordAuthenticator]]:
    """``start(...)`` starts an authenticator; the arguments are those of `PasswordAuthenticator`."""
    started: list[PasswordAuthenticator] = []

    def begin(passwords: Passwords, timeout: float = 30.0, **fields: Any) -> PasswordAuthenticator:
        authenticator = PasswordAuthenticator(passwords, timeout, **fields)
        authenticator.start(asyncio.get_running_loop(), lambda: None)
        started.append(authenticator)
        return authenticator

    yield begin
    for authenticator in started:
        authenticator.stop()
        for stored in authenticator.passwords.hashes.values():
            if isinstance(stored, SlowHash):
                stored.permits.release(1000)


async def test_passwords_are_accepted_or_rejected(start: Callable[..., PasswordAuthenticator]) -> None:
    authenticator = start(users(alice=parse_hash(ALICE.split(":")[1].strip())))
    cases = [("alice", b"secret", True), ("alice", b"no", BAD_USER_NAME_OR_PASSWORD)]
    cases += [("eve", b"secret", BAD_USER_NAME_OR_PASSWORD), ("", b"", BAD_USER_NAME_OR_PASSWORD)]
    for username, password, expected in cases:
        asked = FakeRequest(username, password)
        authenticator.submit(asked)
        assert await asked.answer == expected


async def test_a_known_password_is_accepted_at_once_until_the_file_changes(
    start: Callable[..., PasswordAuthenticator],
) -> None:
    slow = SlowHash(b"right")
    slow.permits.release(2)
    authenticator = start(users(alice=slow))
    for password, expected, checks in ((b"right", True, 1), (b"right", True, 1), (b"wrong", 0x86, 2), (b"right", True, 2)):
        asked = FakeRequest("alice", password)
        authenticator.submit(asked)
        assert await asked.answer == expected
        assert len(slow.checked) == checks
    new = SlowHash(b"new")
    new.permits.release(1)
    assert authenticator.replace(users(alice=new)) == {"alice"}
    asked = FakeRequest("alice", b"right")
    authenticator.submit(asked)
    assert await asked.answer == BAD_USER_NAME_OR_PASSWORD


class NicenessHash(SlowHash):
    """A stored password that is the niceness of the checking thread."""

    def verify(self, password: bytes) -> bool:
        return password == b"%d" % os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
async def test_worker_threads_have_a_lower_priority_than_the_loop(start: Callable[..., PasswordAuthenticator]) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    asked = FakeRequest("alice", b"%d" % min(19, max(mine, NICENESS)))
    start(users(alice=NicenessHash(b""))).submit(asked)
    assert await asked.answer is True
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


async def test_a_password_changed_during_its_check_is_rejected(start: Callable[..., PasswordAuthenticator]) -> None:
    slow = SlowHash(b"right")
    authenticator = start(users(alice=slow))
    asked = FakeRequest("alice", b"right")
    authenticator.submit(asked)
    authenticator.replace(users(alice=SlowHash(b"new")))
    slow.permits.release(1)
    assert await asked.answer == BAD_USER_NAME_OR_PASSWORD


async def test_addresses_take_turns(start: Callable[..., PasswordAuthenticator]) -> None:
    slow = SlowHash(b"right")
    authenticator = start(users(alice=slow), workers=1)
    guesses = [FakeRequest("alice", b"guess %d" % number) for number in range(20)]
    honest = [FakeRequest("alice", b"honest %d" % number, f"10.0.0.{number + 2}") for number in range(2)]
    for asked in guesses + honest:
        authenticator.submit(asked)
    slow.permits.release(22)
    await asyncio.gather(*(asked.answer for asked in guesses + honest))
    assert slow.checked[0] == b"guess 0" and set(slow.checked[1:4]) == {b"guess 1", b"honest 0", b"honest 1"}


async def test_a_new_address_does_not_wait_for_all_others(start: Callable[..., PasswordAuthenticator]) -> None:
    slow = SlowHash(b"right")
    authenticator = start(users(alice=slow), workers=1)
    others = [FakeRequest("alice", b"guess %d" % number, f"10.0.1.{number}") for number in range(200)]
    for asked in others:
        authenticator.submit(asked)
    honest = FakeRequest("alice", b"right")
    authenticator.submit(honest)
    slow.permits.release(201)
    assert await honest.answer is True
    await asyncio.gather(*(asked.answer for asked in others))
    assert slow.checked.index(b"right") <= 2
    assert slow.checked.index(b"guess 1") <= 4  # the oldest have turns, too


async def test_a_full_queue_refuses_the_address_with_the_most_logins(start: Callable[..., PasswordAuthenticator]) -> None:
    slow = SlowHash(b"right")
    authenticator = start(users(alice=slow), workers=1, capacity=3)
    guesses = [FakeRequest("alice", b"guess") for _ in range(5)]
    for asked in guesses:
        authenticator.submit(asked)
    honest = FakeRequest("alice", b"right", "10.0.0.2")
    authenticator.submit(honest)
    assert authenticator.waiting == 3
    busy = [asked for asked in guesses if asked.answer.done()]
    assert [asked.answer.result() for asked in busy] == [SERVER_BUSY] * 2
    slow.permits.release(4)
    assert await honest.answer is True


async def test_long_connects_in_the_queue_are_bounded(start: Callable[..., PasswordAuthenticator]) -> None:
    slow = SlowHash(b"right")
    authenticator = start(users(alice=slow), workers=1, max_bytes=20_000)
    asked = [FakeRequest("alice", b"x" * 8000) for _ in range(4)]  # the first one is checked, and two wait
    short = FakeRequest("alice", b"right")
    for request in [*asked, short]:
        authenticator.submit(request)
    assert [request.answer.done() for request in asked] == [False, False, False, True]
    assert asked[3].answer.result() == QUOTA_EXCEEDED
    assert authenticator.waiting == 3 and authenticator._queue.size == 16_000
    slow.permits.release(4)
    assert await short.answer is True
    assert authenticator._queue.size == 0


async def test_logins_are_refused_while_every_check_hangs(start: Callable[..., PasswordAuthenticator]) -> None:
    slow = SlowHash(b"right")
    authenticator = start(users(alice=slow), timeout=0.05, workers=1)
    running, queued = FakeRequest("alice", b"right"), FakeRequest("alice", b"right")
    authenticator.submit(running)
    authenticator.submit(queued)
    assert await running.answer == await queued.answer == SERVER_BUSY
    assert authenticator.waiting == 0
    late = FakeRequest("alice", b"right")
    authenticator.submit(late)
    assert await late.answer == SERVER_BUSY
    slow.permits.release(2)
    while authenticator._stuck:
        await asyncio.sleep(0.001)
    authenticator.timeout = PATIENCE
    again = FakeRequest("alice", b"right")
    authenticator.submit(again)
    assert await again.answer is True


async def test_logins_wait_longer_than_the_timeout_of_a_check(
    start: Callable[..., PasswordAuthenticator], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    slow = SlowHash(b"right")
    authenticator = start(users(**{f"user{number}": slow for number in range(20)}), timeout=1.0, workers=1)
    logins = [FakeRequest(f"user{number}", b"right") for number in range(20)]
    for asked in logins:
        authenticator.submit(asked)
    for number in range(20):
        now += 0.6
        slow.permits.release()
        while sum(asked.answer.done() for asked in logins) <= number:
            await asyncio.sleep(0)
    assert await asyncio.gather(*(asked.answer for asked in logins)) == [True] * 20


async def test_a_first_right_login_goes_before_the_guesses(start: Callable[..., PasswordAuthenticator]) -> None:
    slow = SlowHash(b"right")
    bans = Bans(ban_terms(failures=100, address_failures=100))
    authenticator = start(users(alice=slow), workers=2, bans=bans)
    first = [FakeRequest("alice", b"guess 1", f"10.0.1.{number}", bans) for number in range(200)]
    for asked in first:
        authenticator.submit(asked)
    slow.permits.release(200)
    await asyncio.gather(*(asked.answer for asked in first))
    for asked in [FakeRequest("alice", b"guess 2", f"10.0.1.{number}") for number in range(200)]:
        authenticator.submit(asked)
    assert authenticator.waiting == 199  # one thread is kept for others
    honest = FakeRequest("alice", b"right")
    authenticator.submit(honest)
    slow.permits.release(2)
    assert await honest.answer is True
    assert slow.checked.count(b"guess 2") <= 1


async def test_suspects_are_not_starved(start: Callable[..., PasswordAuthenticator]) -> None:
    slow = SlowHash(b"right")
    bans = Bans(ban_terms(failures=100, address_failures=100))
    authenticator = start(users(alice=slow), workers=1, bans=bans)
    bans.failed("10.0.9.9:1", "alice", asyncio.get_running_loop().time())
    logins = [FakeRequest("alice", b"fleet %d" % number, f"10.0.1.{number}") for number in range(20)]
    suspect = FakeRequest("alice", b"suspect", "10.0.9.9")
    for asked in [*logins, suspect]:
        authenticator.submit(asked)
    slow.permits.release(21)
    await suspect.answer
    assert slow.checked.index(b"suspect") < 10


async def test_waiting_guesses_of_a_banned_client_are_refused_without_a_hash(
    start: Callable[..., PasswordAuthenticator],
) -> None:
    slow = SlowHash(b"right")
    bans = Bans(ban_terms(failures=3, address_failures=0))
    authenticator = start(users(alice=slow), workers=1, bans=bans)
    guesses = [FakeRequest("alice", b"guess", bans=bans) for _ in range(200)]
    for asked in guesses:
        authenticator.submit(asked)
    slow.permits.release(200)
    answers = [await asked.answer for asked in guesses]
    assert answers == [BAD_USER_NAME_OR_PASSWORD] * 3 + [BANNED] * 197
    assert len(slow.checked) == 3


async def test_a_client_that_leaves_during_the_check_has_failed_too(start: Callable[..., PasswordAuthenticator]) -> None:
    slow = SlowHash(b"right")
    bans = Bans(ban_terms(failures=1, address_failures=0))
    authenticator = start(users(alice=slow), workers=1, bans=bans)
    asked = FakeRequest("alice", b"guess", bans=bans)
    authenticator.submit(asked)
    asked.gone = True
    slow.permits.release(1)
    await asked.answer
    assert bans.active(asyncio.get_running_loop().time()) == 1


async def test_logins_of_disconnected_clients_are_skipped(start: Callable[..., PasswordAuthenticator]) -> None:
    slow = SlowHash(b"right")
    authenticator = start(users(alice=slow), workers=1)
    first, gone, last = (FakeRequest("alice", word) for word in (b"first", b"gone", b"last"))
    for asked in (first, gone, last):
        authenticator.submit(asked)
    gone.gone = True
    slow.permits.release(3)
    await asyncio.gather(first.answer, last.answer)
    assert slow.checked == [b"first", b"last"] and not gone.answer.done()


# --- brokers ------------------------------------------------------------------------------------------------------


class PasswordBroker:
    """A broker with a password file and an ACL file in ``directory``."""

    def __init__(self, directory: Path, config: str = "") -> None:
        self.password_file = directory / "users"
        self.acl_file = directory / "rules"
        self.password_file.write_text(ALICE + BOB)
        self.acl_file.write_text("topic read public/#\nuser alice\ntopic #\nuser bob\ntopic read #\n")
        files = f'password_file = "{self.password_file}"\nacl_file = "{self.acl_file}"\n'
        exempt = "" if "[bans]" in config else 'bans.exempt = ["127.0.0.1"]\n'
        self.process = BrokerProcess(config=files + exempt + config)

    def open(self, version: int = 5) -> RawClient:
        return RawClient(self.process.port, version)

    def connect(self, user: str | None, password: bytes | None, version: int = 5, **fields: Any) -> RawClient:
        client = self.open(version)
        connack = client.connect(fields.pop("client_id", f"c-{user}"), username=user, password=password, **fields)
        assert connack.reason_code == 0
        return client

    def reload(self) -> None:
        """Send SIGHUP and wait until the files are reloaded."""
        after = len(self.process.lines)
        os.kill(self.process.pid, signal.SIGHUP)
        self.process.wait_for_log("event=(acl_reloaded|reload_failed reason=.*/rules)", after=after)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PasswordBroker]:
    guarded = PasswordBroker(tmp_path_factory.mktemp("guarded"))
    with guarded.process:
        yield guarded


@pytest.mark.parametrize(
    "username, password, v5, v4",
    [
        ("alice", b"secret", 0, 0),
        ("bob", b"pass word", 0, 0),
        ("alice", b"Secret", BAD_USER_NAME_OR_PASSWORD, 5),
        ("alice", b"", BAD_USER_NAME_OR_PASSWORD, 5),
        ("alice", None, BAD_USER_NAME_OR_PASSWORD, 5),
        ("eve", b"secret", BAD_USER_NAME_OR_PASSWORD, 5),
        ("", b"secret", BAD_USER_NAME_OR_PASSWORD, 5),
        ("", b"", 0, 0),
        (None, b"token", BAD_USER_NAME_OR_PASSWORD, None),
        (None, None, 0, 0),
    ],
)
def test_connect_with_user_name_and_password(
    guarded: PasswordBroker, username: str | None, password: bytes | None, v5: int, v4: int
) -> None:
    for version, expected in ((5, v5), (4, v4)):
        if expected is None:
            continue
        with guarded.open(version) as client:
            assert client.connect("who", username=username, password=password).reason_code == expected
            if expected:
                client.expect_closed()


def test_packets_sent_with_the_connect_are_handled_after_it(guarded: PasswordBroker) -> None:
    from mqttbroker.codec.packets import Connack, Connect, Pingreq, Pingresp

    with guarded.open() as client:
        client.send(Connect("eager", 5, True, 60, username="alice", password=b"secret"), Pingreq())
        assert client.expect(Connack).reason_code == 0
        client.expect(Pingresp)


def test_another_user_does_not_take_a_session(guarded: PasswordBroker) -> None:
    with guarded.connect("alice", b"secret", 4, client_id="owned", clean_start=False) as alice:
        alice.subscribe("own/#", options=1)
        for version, code in ((5, CLIENT_IDENTIFIER_NOT_VALID), (4, 2)):
            for user, password in (("bob", b"pass word"), (None, None)):
                with guarded.open(version) as thief:
                    connack = thief.connect("owned", username=user, password=password, clean_start=True)
                    assert connack.reason_code == code
                    thief.expect_closed()
        assert alice.publish("own/1", b"mine", 1) == 0
        assert alice.take().payload == b"mine"
    guarded.process.wait_for_log("event=refused client=owned .*the session belongs to another user")


def test_no_secret_is_logged(guarded: PasswordBroker) -> None:
    with guarded.open() as client:
        client.connect("leaky", username="alice", password=b"hunter2hunter2")
    guarded.process.wait_for_log("event=refused client=leaky")
    assert "hunter2" not in guarded.process.log and "$7$" not in guarded.process.log


def test_anonymous_clients_beside_a_password_file(tmp_path: Path) -> None:
    guarded = PasswordBroker(tmp_path, "allow_anonymous = false\n")
    with guarded.process:
        with guarded.open() as client:
            assert client.connect("nobody").reason_code == NOT_AUTHORIZED
        with guarded.open(4) as client:
            assert client.connect("nobody").reason_code == 5
        guarded.connect("alice", b"secret").close()


def test_empty_credentials_are_none(tmp_path: Path) -> None:
    for allowed, expected in (("true", 0), ("false", NOT_AUTHORIZED)):
        guarded = PasswordBroker(tmp_path, f"allow_anonymous = {allowed}\n")
        with guarded.process:
            for username, password, code in (("", b"", expected), ("", b"x", 0x86), ("alice", b"", 0x86)):
                with guarded.open() as client:
                    assert client.connect("empty", username=username, password=password).reason_code == code
            assert not [line for line in guarded.process.lines if "event=connected" in line and 'user=""' not in line]


def test_a_listener_overrides_allow_anonymous(tmp_path: Path) -> None:
    more = "[[listeners]]\n[[listeners]]\nport = 0\nallow_anonymous = false\n"
    guarded = PasswordBroker(tmp_path, more)
    with guarded.process as process:
        process.wait_for_log("event=started")
        port = [int(line.rpartition("port=")[2]) for line in process.lines if "event=listening type=tcp" in line][1]
        for username, password, expected in (
            (None, None, NOT_AUTHORIZED),
            ("alice", b"secret", 0),
            ("alice", b"x", 0x86),
        ):
            with RawClient(port) as client:
                assert client.connect("second", username=username, password=password).reason_code == expected


def test_without_a_password_file_every_client_is_anonymous(tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("topic write open\nuser alice\ntopic #\n")
    with BrokerProcess(config={"acl_file": str(rules)}) as process:
        process.wait_for_log("event=acl_without_users")
        with RawClient(process.port) as client:
            assert client.connect("claims", username="alice", password=b"anything").reason_code == 0
            assert client.publish("open", b"", 1) == 0x10
            assert client.publish("other", b"", 1) == NOT_AUTHORIZED


def test_paho_gets_the_reason_of_a_refusal(guarded: PasswordBroker) -> None:
    for version, expected in ((paho.MQTTv5, "Bad user name or password"), (paho.MQTTv311, "Not authorized")):
        answers: list[str] = []
        client = paho.Client(paho.CallbackAPIVersion.VERSION2, "paho", protocol=version)
        client.on_connect = lambda client, data, flags, code, properties: answers.append(str(code))
        client.username_pw_set("alice", "wrong")
        client.connect("127.0.0.1", guarded.process.port)
        while not answers and client.loop(1.0) == paho.MQTT_ERR_SUCCESS:
            pass
        assert answers == [expected]


@needs("mosquitto-clients")
@pytest.mark.parametrize("command", ["mosquitto_sub", "mosquitto_pub"])
def test_mosquitto_clients_connect(guarded: PasswordBroker, command: str) -> None:
    tail = ["-C", "1", "-W", "5"] if command == "mosquitto_sub" else ["-m", "hello", "-q", "1"]
    with guarded.connect("alice", b"secret") as alice:
        alice.publish("public/motd", b"hello", 1, True)
        for password, status in (("secret", 0), ("wrong", None)):
            done = subprocess.run(
                [command, "-p", str(guarded.process.port), "-u", "alice", "-P", password, "-t", "public/motd", *tail],
                capture_output=True, timeout=PATIENCE, check=False,
            )  # fmt: skip
            assert (done.returncode == 0) is (status == 0)


def test_guessed_passwords_do_not_slow_connected_clients(guarded: PasswordBroker) -> None:
    with ExitStack() as stack:
        alice = stack.enter_context(guarded.connect("alice", b"secret"))
        guessers = [stack.enter_context(guarded.open()) for _ in range(50)]
        from mqttbroker.codec.packets import Connack, Connect

        for number, guesser in enumerate(guessers):
            guesser.send(Connect(f"guess-{number}", 5, True, 60, username="alice", password=b"%d" % number))
        assert alice.ping() == []
        assert {guesser.expect(Connack).reason_code for guesser in guessers} == {BAD_USER_NAME_OR_PASSWORD}


# --- SIGHUP -------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Iterator[PasswordBroker]:
    guarded = PasswordBroker(tmp_path)
    with guarded.process:
        yield guarded


def test_sighup_reloads_the_rules(own: PasswordBroker) -> None:
    alice, bob = own.connect("alice", b"secret"), own.connect("bob", b"pass word")
    bob.subscribe("#")
    assert alice.publish("a", b"1", 1) == 0 and bob.publish("a", b"", 1) == NOT_AUTHORIZED
    own.acl_file.write_text("user alice\ntopic write b\nuser bob\ntopic b\n")
    own.reload()
    assert alice.publish("a", b"2", 1) == NOT_AUTHORIZED and alice.publish("b", b"3", 1) == 0
    assert bob.publish("b", b"4", 1) == 0
    assert [bob.take().payload for _ in range(3)] == [b"1", b"3", b"4"]


def test_sighup_disconnects_users_with_a_changed_password(own: PasswordBroker) -> None:
    alice, bob = own.connect("alice", b"secret"), own.connect("bob", b"pass word")
    own.password_file.write_text(ALICE_CHANGED + BOB)
    own.reload()
    assert alice.expect(Disconnect).reason_code == NOT_AUTHORIZED
    alice.expect_closed()
    assert bob.ping() == []
    with own.open() as client:
        assert client.connect("old", username="alice", password=b"secret").reason_code == BAD_USER_NAME_OR_PASSWORD
    own.connect("alice", CHANGED.encode()).close()
    own.password_file.write_text(ALICE_CHANGED)
    own.reload()
    assert bob.expect(Disconnect).reason_code == NOT_AUTHORIZED


def test_sighup_with_invalid_files_changes_nothing(own: PasswordBroker) -> None:
    alice = own.connect("alice", b"secret")
    own.password_file.write_text("alice:secret\n")
    own.acl_file.write_text("user alice\ntopic rw a\n")
    own.reload()
    own.process.wait_for_log("event=reload_failed reason=.*/users:1: the password is not hashed")
    own.process.wait_for_log("event=reload_failed reason=.*/rules:2: access must be")
    assert alice.publish("a", b"", 1) == 0x10
    own.connect("bob", b"pass word").close()
    own.password_file.unlink()
    own.acl_file.unlink()
    own.reload()
    own.process.wait_for_log("event=reload_failed reason=.*/users: cannot be read: No such file")
    assert alice.publish("a", b"", 1) == 0x10


def test_sighup_sets_the_log_level(own: PasswordBroker) -> None:
    text = own.process.config.read_text()
    own.process.config.write_text(text + '\nlog.level = "nonsense"\n')
    own.reload()
    own.process.wait_for_log("event=reload_failed reason=.*log.level")
    own.process.config.write_text(text + '\nlog.level = "warning"\n')
    os.kill(own.process.pid, signal.SIGHUP)
    quiet = own.connect("alice", b"secret")
    own.acl_file.write_text("")
    wait_until(lambda: _reloaded(own, quiet))
    assert "client=c-alice" not in "".join(line for line in own.process.lines if "disconnected" in line)


def _reloaded(own: PasswordBroker, client: RawClient) -> bool:
    """Whether the rules that deny everything apply; all other files were reloaded before them."""
    os.kill(own.process.pid, signal.SIGHUP)
    return client.publish("a", b"", 1) == NOT_AUTHORIZED


# --- invalid files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, content, reason",
    [
        ("password_file", b"alice:$7$x\n", r"users:1: unknown kind of hash"),
        ("password_file", b"# fine\nalice:\xff\n", r"users:2: not UTF-8"),
        ("password_file", None, r"users: cannot be read: No such file or directory"),
        ("acl_file", b"topic a\nuser\n", r"users:2: user without a name"),
        ("acl_file", None, r"users: cannot be read"),
    ],
)
@pytest.mark.parametrize("command", [["serve", "--config"], ["check-config"]])
def test_invalid_files_are_one_line_and_status_2(tmp_path: Path, command: list[str], key: str, content: bytes | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "users").write_bytes(content)
    (tmp_path / "broker.toml").write_text(f'{key} = "{tmp_path}/users"\n')
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mqttbroker", *command, "broker.toml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and reason in done.stderr
    assert not (tmp_path / "data").exists()
