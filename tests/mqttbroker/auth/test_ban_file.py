"""Bans and counts of logins over a restart: what is kept, what is bounded, and lines that cannot be read."""

from __future__ import annotations

import asyncio
import json
import logging
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.raw_client import RawClient

from mqttbroker.auth import ban_file
from mqttbroker.auth.ban_file import MAX_RECORDS, BanFile
from mqttbroker.auth.passwords import hash_password
from mqttbroker.auth.security import ban_terms
from mqttbroker.codec.reason_codes import BAD_USER_NAME_OR_PASSWORD, BANNED
from mqttbroker.config.settings import Bans as BanSettings
from mqttbroker.config.settings import Settings
from mqttbroker.core.access.ban_list import BAN_FILE, FOREVER
from mqttbroker.core.access.bans import Bans

PEER = "10.0.0.1:1234"


def restarted(directory: Path, act: Callable[[Bans, float], Any], check: Callable[[Bans, float], Any]) -> None:
    """``act`` on the bans of one process and ``check`` those of the next."""

    async def life(use: Callable[[Bans, float], Any]) -> None:
        loop = asyncio.get_running_loop()
        bans = Bans(ban_terms(Settings(bans=BanSettings(reconnects=3, protocol_errors=3))))
        file = BanFile(bans)
        file.load(directory, loop)
        use(bans, loop.time())
        file.stop()

    asyncio.run(life(act))
    asyncio.run(life(check))


def test_each_kind_of_ban_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "mqttbroker")  # pytest-xdist cannot hand over a captured line with a lone surrogate

    def act(bans: Bans, now: float) -> None:
        for _ in range(5):
            bans.failed(PEER, "alice", now)
        for _ in range(3):
            bans.connected(PEER, "bob", "c" * 100, now)
            bans.protocol_error("[2001:db8::1]:1".replace("[", "").replace("]", ""), now)
        bans.ban(("10.0.0.0/8", "eve", ""), FOREVER, "a reason \udc80 \n", now)
        bans.ban(("", "", "d"), 100.0, "", now)
        bans.ban(("", "", "over"), 0.0, "", now)

    def check(bans: Bans, now: float) -> None:
        assert {(ban.key, ban.cause, ban.reason) for ban in bans.banned(now)} == {
            (("10.0.0.1", "alice", ""), "failed_logins", ""),
            (("2001:db8::/64", "", ""), "protocol_errors", ""),
            (("10.0.0.0/8", "eve", ""), "operator", "a reason \udc80 \n"),
            (("", "", "d"), "operator", ""),
            *((ban.key, "reconnects", "") for ban in bans.banned(now) if ban.key[1] == "bob"),
        }
        assert len(bans.banned(now)) == 5
        assert bans.refuses(PEER, "bob", now, "c" * 100) and bans.refuses("10.9.9.9:1", "eve", now)
        left = {ban.key[1]: ban.until - now for ban in bans.banned(now)}
        assert left["alice"] == pytest.approx(10.0, abs=2.0) and left["eve"] == FOREVER
        assert not bans.refuses(PEER, "alice", now + 10.0)
        bans.failed(PEER, "alice", now + 10.0)  # one more failure leads to a ban of twice the length
        assert bans.refuses(PEER, "alice", now + 29.0) and not bans.refuses(PEER, "alice", now + 31.0)

    restarted(tmp_path, act, check)
    assert stat.S_IMODE((tmp_path / BAN_FILE).stat().st_mode) == 0o600


def test_right_logins_still_raise_the_limits(tmp_path: Path) -> None:
    def act(bans: Bans, now: float) -> None:
        for number in range(40):
            bans.succeeded(PEER, f"device {number}")
            bans.succeeded(PEER, "shared")

    def check(bans: Bans, now: float) -> None:
        for number in range(70):
            assert not bans.refuses(PEER, None, now)
            bans.failed(PEER, f"wrong {number}", now)
        bans.succeeded(PEER, "device 3")  # it has raised the limit before the restart
        bans.failed(PEER, "wrong", now)
        assert bans.refuses(PEER, None, now) and not bans.refuses("10.0.0.2:1", None, now)

    restarted(tmp_path, act, check)


def test_the_file_is_bounded(tmp_path: Path) -> None:
    def act(bans: Bans, now: float) -> None:
        for number in range(MAX_RECORDS + 500):
            bans.succeeded(f"10.0.{number // 250}.{number % 250}:1", "x")

    restarted(tmp_path, act, lambda bans, now: None)
    rows = [json.loads(line) for line in (tmp_path / BAN_FILE).read_text().splitlines()]
    assert len(rows) == MAX_RECORDS and rows[-1]["address"] == f"10.0.{(MAX_RECORDS + 499) // 250}.249"


GOOD = {"cause": "operator", "banned": True, "until": None, "bans": 1, "client_id": "good"}
BAD_LINES = [
    ("{", "Expecting property name"),
    ("7", "not a JSON object"),
    (json.dumps(GOOD | {"bans": float("inf")}), "infinity"),
    ("[" * 100_000, "recursion"),
    (json.dumps(GOOD | {"cause": "x"}), "no ban of this broker"),
    (json.dumps(GOOD | {"client_id": ""}), "no ban of this broker"),
    (json.dumps(GOOD | {"client_id": "x" * 65}), "client_id must be a text of up to 64 characters"),
    (json.dumps(GOOD | {"address": "10.0.0.1/8"}), "10.0.0.1/8 has host bits set"),
    (json.dumps(GOOD | {"address": 7}), "address must be a text"),
    (json.dumps({"cause": "operator", "client_id": "c"}), "no key 'bans'"),
    ("\xff", ""),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_damaged_line_is_named_and_kept(tmp_path: Path, line: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    text = f"{json.dumps(GOOD)}\n{line}\n{json.dumps(GOOD | {'client_id': 'last'})}\n"
    (tmp_path / BAN_FILE).write_text(text, encoding="latin-1")

    def check(bans: Bans, now: float) -> None:
        assert [ban.key[2] for ban in bans.banned(now)] == ["good", "last"]

    restarted(tmp_path, check, check)
    warnings = [record.getMessage() for record in caplog.records if "event=ban_left_out" in record.getMessage()]
    assert len(warnings) == 1 and f"file={tmp_path / BAN_FILE} line=2 " in warnings[0] and reason in warnings[0]
    assert [path.read_text(encoding="latin-1") for path in tmp_path.glob(f"{BAN_FILE}.damaged-*")] == [text]


@pytest.mark.parametrize("kill", [False, True])
def test_a_ban_outlives_a_restart_of_the_broker(start_broker: Callable[..., BrokerProcess], tmp_path: Path, kill: bool) -> None:
    users = tmp_path / "users"
    users.write_text(f"alice:{hash_password(b'secret')}\n")
    broker = start_broker(config={"password_file": str(users), "bans": {"failures": 2, "first": "100s"}})

    def login(password: bytes) -> int:
        with RawClient(broker.port) as client:
            return client.connect("c", username="alice", password=password).reason_code

    assert [login(b"x"), login(b"x"), login(b"secret")] == [BAD_USER_NAME_OR_PASSWORD] * 2 + [BANNED]
    file = broker.data_dir / BAN_FILE
    wait_until(lambda: not kill or (file.exists() and '"banned": true' in file.read_text()))
    broker.restart(kill)
    assert login(b"secret") == BANNED
    broker.wait_for_log("event=bans_restored bans=1")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["until"] - time.time() > 50 for row in rows if row["banned"]] == [True]


def test_a_defect_of_its_thread_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ban_file, "replace_file", lambda *arguments, **options: 1 // 0)
    restarted(tmp_path, lambda bans, now: bans.ban(("10.0.0.1", "", ""), FOREVER, "", now), lambda bans, now: None)
    assert "event=defect in=ban_file" in caplog.text and "ZeroDivisionError" in caplog.text
