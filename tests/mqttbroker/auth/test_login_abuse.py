"""Logins of many clients: a fleet after a restart, bans on every kind of listener, and right logins beside guesses."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.metric_samples import samples
from support.patience import PATIENCE
from support.raw_client import RawClient
from support.tokens import public_pem, token

from mqttbroker.auth.passwords import hash_password, scram_password
from mqttbroker.auth.proven_passwords import MAGIC, PROOF_BYTES, RECORD_BYTES, find_key_file
from mqttbroker.auth.scram import METHOD
from mqttbroker.codec.packets import Auth, Connack, Connect
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import (
    BAD_USER_NAME_OR_PASSWORD,
    BANNED,
    CLIENT_IDENTIFIER_NOT_VALID,
    CONTINUE_AUTHENTICATION,
    NOT_AUTHORIZED,
)

PASSWORD = b"secret"
LINE = hash_password(PASSWORD)
USERS = 10


@pytest.fixture
def users(tmp_path: Path) -> Path:
    path = tmp_path / "users"
    path.write_text("".join(f"{name}:{LINE}\n" for name in ["alice", "bob"] + [f"device{n}" for n in range(USERS)]))
    return path


Start = Callable[..., BrokerProcess]


def configured(start_broker: Start, users: Path, data_dir: Path | None = None, **sections: Any) -> BrokerProcess:
    """A broker on which a hash may take any time, and a ban outlasts the test."""
    sections["bans"] = {"first": "1h", "longest": "1h", **sections.get("bans", {})}
    limits = {"connect_timeout": "1h"}
    return start_broker(data_dir=data_dir, config={"password_file": str(users), "allow_anonymous": False, "limits": limits, **sections})


def client(broker: BrokerProcess, host: str = "127.0.0.1", version: int = 5) -> RawClient:
    """A client whose address is ``host``."""
    raw = RawClient(broker.port, version)
    if host != "127.0.0.1":
        raw.socket.close()
        raw.socket = socket.create_connection(("127.0.0.1", broker.port), PATIENCE, (host, 0))
    return raw


def login(broker: BrokerProcess, user: str, password: bytes = PASSWORD, host: str = "127.0.0.1", version: int = 5) -> int:
    with client(broker, host, version) as raw:
        raw.send(Connect(f"c-{user}", version, True, 60, username=user, password=password))
        return raw.expect(Connack).reason_code


# --- a fleet ------------------------------------------------------------------------------------------------------


async def fleet(port: int, devices: int) -> list[int]:
    """All devices log in at once; their reason codes."""

    async def one(number: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(Connect(f"d-{number}", 5, True, 60, username=f"device{number % USERS}", password=PASSWORD).encode(5))
        code = (await reader.readexactly(4))[3]
        writer.close()
        return code

    return list(await asyncio.gather(*map(one, range(devices))))


def hash_threads(broker: BrokerProcess) -> int:
    """The threads that have computed hashes: a thread starts with the first one, at a lower priority."""
    usual = os.getpriority(os.PRIO_PROCESS, broker.pid)
    return sum(os.getpriority(os.PRIO_PROCESS, int(thread)) > usual for thread in os.listdir(f"/proc/{broker.pid}/task"))


@pytest.mark.parametrize("kill", [False, True])
def test_a_fleet_logs_in_without_hashes_after_a_restart(start_broker: Start, users: Path, kill: bool) -> None:
    broker = configured(start_broker, users)
    assert asyncio.run(fleet(broker.port, USERS)) == [0] * USERS
    assert hash_threads(broker) > 0
    if kill:
        file = broker.data_dir / "proven_passwords"
        complete = len(MAGIC) + PROOF_BYTES + USERS * RECORD_BYTES
        wait_until(lambda: file.exists() and file.stat().st_size == complete)
    broker.restart(kill)
    assert asyncio.run(fleet(broker.port, 500)) == [0] * 500
    assert hash_threads(broker) == 0
    assert f"event=proven_passwords_loaded records={USERS}" in broker.log
    assert login(broker, "device1", b"wrong") == BAD_USER_NAME_OR_PASSWORD
    assert hash_threads(broker) > 0


def test_a_password_changed_while_the_broker_is_down_is_wrong_after_it(start_broker: Start, users: Path) -> None:
    broker = configured(start_broker, users)
    assert login(broker, "alice") == 0
    broker.terminate()
    users.write_text(f"alice:{hash_password(b'new')}\n")
    broker.start()
    assert "event=proven_passwords_loaded records=1" in broker.log
    assert login(broker, "alice") == BAD_USER_NAME_OR_PASSWORD and login(broker, "alice", b"new") == 0


@pytest.mark.parametrize("remember", ["memory", "off"])
def test_nothing_is_kept_if_the_operator_says_so(start_broker: Start, users: Path, remember: str) -> None:
    broker = configured(start_broker, users, logins={"remember": remember})
    assert login(broker, "alice") == login(broker, "alice") == 0
    broker.terminate()
    assert not (broker.data_dir / "proven_passwords").exists() and not find_key_file(broker.data_dir).exists()


def test_a_key_file_on_the_same_disk_is_refused_with_a_warning(start_broker: Start, users: Path, path_on_disk: Path) -> None:
    data_dir, key = path_on_disk / "data", path_on_disk / "key"
    broker = configured(start_broker, users, data_dir=data_dir, logins={"key_file": str(key)})
    broker.wait_for_log("event=passwords_remembered_in_memory reason=.*same disk")
    assert login(broker, "alice") == 0


def test_clients_that_leave_the_queue_cost_no_hash(start_broker: Start, users: Path) -> None:
    broker = configured(start_broker, users, bans={"failures": 0, "address_failures": 0})
    leaving = [client(broker) for _ in range(300)]
    with broker.stopped():
        for number, raw in enumerate(leaving):
            raw.send(Connect(f"c{number}", 5, True, 60, username="alice", password=b"%d" % number))
            raw.close()
    assert login(broker, "bob") == 0
    assert samples(broker.get("/metrics"))["mqttbroker_logins_failed_total"] < 100


# --- bans ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version, code", [(5, BANNED), (4, 5)])
def test_guesses_lead_to_a_ban(start_broker: Start, users: Path, version: int, code: int) -> None:
    broker = configured(start_broker, users, bans={"failures": 3})
    wrong = BAD_USER_NAME_OR_PASSWORD if version == 5 else 5
    assert [login(broker, "alice", b"x", version=version) for _ in range(3)] == [wrong] * 3
    broker.wait_for_log("event=banned address=127.0.0.1 user=alice .*cause=failed_logins seconds=3600 offences=3")
    assert login(broker, "alice", version=version) == code  # with the right password
    assert login(broker, "bob", version=version) == login(broker, "alice", host="127.0.0.2", version=version) == 0
    found = samples(broker.get("/metrics"))
    assert found["mqttbroker_bans"] == found["mqttbroker_bans_started_total/failed_logins"] == 1
    assert found["mqttbroker_logins_banned_total"] == 1
    assert found["mqttbroker_logins_failed_total"] == 3
    broker.wait_for_log("event=refused client=c-alice .*a ban is in force.* user=alice ")


def test_a_ban_ends(start_broker: Start, users: Path) -> None:
    broker = configured(start_broker, users, bans={"failures": 3, "first": "1s"})
    assert [login(broker, "alice", b"x") for _ in range(3)] == [BAD_USER_NAME_OR_PASSWORD] * 3
    broker.wait_for_log("event=banned address=127.0.0.1 user=alice .* seconds=1 ")
    wait_until(lambda: login(broker, "alice") == 0)
    assert broker.log.count("event=banned") == 1


def test_an_address_that_tries_many_names_is_banned(start_broker: Start, users: Path) -> None:
    broker = configured(start_broker, users, bans={"address_failures": 5})
    codes = [login(broker, f"nobody{number}", b"x", "127.0.0.7") for number in range(7)]
    assert codes == [BAD_USER_NAME_OR_PASSWORD] * 5 + [BANNED] * 2
    broker.wait_for_log('event=banned address=127.0.0.7 user="" client="" cause=failed_logins seconds=3600 offences=5')
    assert login(broker, "alice") == 0


def test_a_token_raises_no_limit_of_the_user_name_that_is_claimed_with_it(start_broker: Start, users: Path, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_bytes(public_pem("RS256"))
    jwt = {"algorithms": ["RS256"], "public_key_file": str(key)}
    broker = configured(start_broker, users, jwt=jwt, bans={"failures": 2, "address_failures": 3})
    own = token().encode()
    codes = []
    for number in range(4):
        claimed = ["alice", "alice", f"nobody{number}"]
        assert [login(broker, name, own) for name in claimed] == [0 if len(codes) < 2 or name != "alice" else BANNED
                                                                   for name in claimed]  # fmt: skip
        codes.append(login(broker, "alice", b"x"))
    assert codes == [BAD_USER_NAME_OR_PASSWORD] * 2 + [BANNED] * 2


def test_exempt_addresses_are_not_banned(start_broker: Start, users: Path) -> None:
    broker = configured(start_broker, users, bans={"failures": 1, "address_failures": 1, "exempt": ["127.0.0.0/24"]})
    assert [login(broker, "alice", b"x") for _ in range(3)] == [BAD_USER_NAME_OR_PASSWORD] * 3
    assert [login(broker, "alice", b"x", "127.0.1.1") for _ in range(2)] == [BAD_USER_NAME_OR_PASSWORD, BANNED]


def test_changed_limits_of_bans_apply_after_sighup(start_broker: Start, users: Path) -> None:
    broker = configured(start_broker, users)
    broker.config.write_text(broker.config.read_text().replace('"first"', '"failures" = 1, "first"'))
    os.kill(broker.pid, signal.SIGHUP)
    broker.wait_for_log("event=setting_changed key=bans.failures")
    assert [login(broker, "alice", b"x") for _ in range(2)] == [BAD_USER_NAME_OR_PASSWORD, BANNED]


def test_wrong_proofs_of_scram_lead_to_a_ban(start_broker: Start, users: Path) -> None:
    users.write_text(f"alice:{scram_password(PASSWORD)}\n")
    broker = configured(start_broker, users, bans={"failures": 2})
    codes = []
    for _ in range(3):
        with client(broker) as raw:
            properties = Properties()
            properties.authentication_method = METHOD
            properties.authentication_data = b"n,,n=alice,r=nonce"
            raw.send(Connect("c", 5, True, 60, properties=properties))
            answer = raw.receive()
            if isinstance(answer, Auth):
                properties.authentication_data = b"c=biws,r=wrong,p=d3Jvbmc="
                raw.send(Auth(CONTINUE_AUTHENTICATION, properties))
                answer = raw.receive()
            assert isinstance(answer, Connack)
            codes.append(answer.reason_code)
    assert codes == [NOT_AUTHORIZED, NOT_AUTHORIZED, BANNED]


def test_a_new_password_file_ends_the_bans_of_its_changed_users(start_broker: Start, users: Path) -> None:
    broker = configured(start_broker, users, bans={"failures": 2})
    assert [login(broker, "alice", b"new") for _ in range(3)] == [BAD_USER_NAME_OR_PASSWORD] * 2 + [BANNED]
    users.write_text(f"alice:{hash_password(b'new')}\n")
    os.kill(broker.pid, signal.SIGHUP)
    broker.wait_for_log("event=passwords_reloaded")
    assert login(broker, "alice", b"new") == 0


def test_a_first_right_login_among_200_guessing_addresses(start_broker: Start, users: Path) -> None:
    """It waits for a few hashes, not for 200."""
    broker = configured(start_broker, users)
    with ExitStack() as stack:
        guessers = [stack.enter_context(client(broker, f"127.0.2.{number + 1}")) for number in range(200)]
        right = stack.enter_context(client(broker, "127.0.3.1"))
        with broker.stopped():
            for number, guesser in enumerate(guessers):
                guesser.send(Connect(f"g-{number}", 5, True, 60, username=f"device{number % USERS}", password=b"guess"))
            right.send(Connect("c-alice", 5, True, 60, username="alice", password=PASSWORD))
        assert right.expect(Connack).reason_code == 0
        answered = select.poll()
        for guesser in guessers:
            answered.register(guesser.socket, select.POLLIN)
        assert len(answered.poll(0)) < 100
    assert not re.search("reason=.*too many clients", broker.log)


def test_a_listener_binds_client_ids_to_users(start_broker: Start, users: Path) -> None:
    broker = configured(start_broker, users, listeners=[{"client_id_from": "c-%u"}])
    assert login(broker, "alice") == login(broker, "bob") == 0
    with client(broker) as raw:
        assert raw.connect("c-bob", username="alice", password=PASSWORD).reason_code == CLIENT_IDENTIFIER_NOT_VALID
    broker.wait_for_log("event=refused client=c-bob .*does not allow the client id")
