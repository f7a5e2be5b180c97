"""The password file: hashes of Mosquitto, errors in lines, and writing."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tools import needs

from mqttbroker.auth.passwords import (
    Argon2id,
    PasswordFileError,
    Passwords,
    hash_password,
    parse_hash,
    parse_passwords,
    set_password,
)

# (password, line) as written by mosquitto_passwd 2.0 and by Mosquitto 2.1 (64 bytes of salt), and by argon2 of the
# reference implementation: `echo -n password | argon2 somesalt -id -t 1 -m 14 -p 1 -e` and the like.
SAMPLES = {
    "$7$, 12 bytes of salt": (
        b"secret",
        "$7$101$4bi5AyfE2xaqoXIs$RBrASIHOe9NGPzbq836FnJwkFoplgoeGYZDN44qtbvUPuOXvQOwn6INOjOQWl5+oPdMpDZzc0INzO0+xFwXmMw==",
    ),
    "$7$, a blank in the password": (
        b"pass word",
        "$7$101$AT420tgGLNbsjtaZ$ls40kCv9uh9EtWdEv7b6aKM1LdobLHc0BPnwFEXZSORL0tGphm1TwQrpfqfr6OnTGdwGH8FrTT8PFXyTxqLN6w==",
    ),
    "$6$": (
        b"c3",
        "$6$7hTeO4IYYf6eW/M6$4VgZ0s7tczxpwmI/uzPTdwJ0dq3vxQbPTUgo5C6bwLPa5NTV2JCKo52rmpXRxeO8oVygfs7/OblFUXhozly5QA==",
    ),
    "argon2id": (
        b"password",
        "$argon2id$v=19$m=65536,t=2,p=1$c29tZXNhbHQ$CTFhFdXPJO1aFaMaO6Mm5c8y7cJHAph8ArZWb2GRPPc",
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_hashes_of_other_programs_verify(name: str) -> None:
    password, encoded = SAMPLES[name]
    stored = parse_hash(encoded)
    assert stored.verify(password)
    for wrong in (b"", password + b"!", password[:-1], password.upper(), password * 2):
        assert not stored.verify(wrong)


KEY = "A" * 86 + "=="
SALT = "AAAAAAAAAAAAAAAA"
WRONG_LINES = [
    ("bob", '"user:hash"'),
    (f":$6${SALT}${KEY}", "user name"),
    ("bob:", "not hashed"),
    ("bob:secret", "not hashed"),
    ("bob:$1$salt$hash", "unknown kind"),
    (f"bob:$6${SALT}", "unknown kind"),
    (f"bob:$6${SALT}${KEY}$", "unknown kind"),
    (f"bob:$6$*${KEY}", "salt is not base64"),
    (f"bob:$6$${KEY}", "salt is empty"),
    (f"bob:$6${SALT}${KEY[:-4]}", "bytes, not 64"),
    (f"bob:$6${SALT}${KEY[:-1]}", "hash is not base64"),
    (f"bob:$7$0${SALT}${KEY}", "iterations"),
    (f"bob:$7$-1${SALT}${KEY}", "iterations"),
    (f"bob:$7$99999999999${SALT}${KEY}", "iterations"),
    (f"bob:$7$many${SALT}${KEY}", "iterations"),
    ("bob:$argon2id$v=19$m=65536,t=2$c29tZXNhbHQ$CTFhFdXPJO1aFaMaO6Mm5c8y7cJHAph8ArZWb2GRPPc", "not an argon2id"),
    ("bob:$argon2id$v=19$m=65536,t=2,p=1$c29tZXNhbHQ$*", "not an argon2id"),
    ("bob:$argon2id$v=19$m=9999999,t=2,p=1$c29tZXNhbHQ$CTFhFdXPJO1aFaMaO6Mm5c8y7cJHAph8ArZWb2GRPPc", "expensive"),
    (f"alice:$6${SALT}${KEY}", "'alice' stands there twice"),
]


@pytest.mark.parametrize("line, reason", WRONG_LINES)
def test_an_invalid_line_is_named_without_its_hash(line: str, reason: str) -> None:
    text = f"# users\n\nalice:$6${SALT}${KEY}\n{line}\n"
    with pytest.raises(PasswordFileError) as caught:
        parse_passwords(text, "users.txt")
    assert str(caught.value).startswith("users.txt:4: ") and reason in str(caught.value)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_comments_blanks_and_line_ends_do_not_matter() -> None:
    encoded = SAMPLES["$6$"][1]
    users = parse_passwords(f"# none:\r\n\r\n bo b : {encoded} \r\n#x\nünal:{encoded}", "f")
    assert set(users.hashes) == {"bo b", "ünal"}
    assert users.verify("bo b", b"c3") and users.verify("ünal", b"c3")


class Recorder:
    """A stored password that counts its checks."""

    def __init__(self) -> None:
        self.count = 0

    def verify(self, password: bytes) -> bool:
        self.count += 1
        return True


def test_an_unknown_user_takes_as_long_as_a_known_one() -> None:
    hashes = {"a": Recorder(), "b": Recorder()}
    users = Passwords(hashes, {"a": "1", "b": "2"})
    for number in range(20):
        before = [recorder.count for recorder in hashes.values()]
        assert not users.verify(f"stranger-{number}", b"x")
        first = [recorder.count - was for recorder, was in zip(hashes.values(), before)]
        assert sorted(first) == [0, 1]
        assert not users.verify(f"stranger-{number}", b"y")  # the same decoy for the same name
        assert [recorder.count - was for recorder, was in zip(hashes.values(), before)] == [2 * n for n in first]
    assert all(recorder.count for recorder in hashes.values())


def test_an_empty_file_accepts_no_user() -> None:
    assert not parse_passwords("", "f").verify("anybody", b"")


@settings(max_examples=15, deadline=None)
@given(st.binary(max_size=100), st.binary(max_size=100))
def test_only_the_hashed_password_verifies(password: bytes, other: bytes) -> None:
    encoded = hash_password(password)
    assert re.fullmatch(r"\$argon2id\$v=19\$m=47104,t=1,p=1\$[^$]+\$[^$]+", encoded)
    assert Argon2id(encoded).verify(password)
    assert Argon2id(encoded).verify(other) is (password == other)


@needs("mosquitto")
@pytest.mark.parametrize("kind", ["sha512", "sha512-pbkdf2"])
def test_the_output_of_mosquitto_passwd_verifies(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "users"
    command = ["mosquitto_passwd", "-H", kind, "-b"]
    subprocess.run([*command, "-c", str(path), "alice", "s3cret"], check=True, capture_output=True)
    subprocess.run([*command, str(path), "bob", "other"], check=True, capture_output=True)
    users = parse_passwords(path.read_text(), str(path))
    assert users.verify("alice", b"s3cret") and users.verify("bob", b"other") and not users.verify("bob", b"s3cret")
    set_password(path, "bob", None)
    subprocess.run(["mosquitto_passwd", "-D", str(path), "alice"], check=True, capture_output=True)
    assert path.read_text() == ""


# --- writing ------------------------------------------------------------------------------------------------------


def test_the_file_is_created_and_other_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "users"
    assert set_password(path, "bob", "$6$a") is False
    path.write_text("# mine\nbob:$6$a\n\n alice :$6$b")
    path.chmod(0o644)
    assert set_password(path, "bob", "$6$c") is True
    assert set_password(path, "carol", "$6$d") is False
    assert path.read_text() == "# mine\nbob:$6$c\n\n alice :$6$b\ncarol:$6$d\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    assert set_password(path, "alice", None) is True
    assert set_password(path, "alice", None) is False
    assert path.read_text() == "# mine\nbob:$6$c\n\ncarol:$6$d\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["users"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "users", tmp_path / "link"
    link.symlink_to(target)
    set_password(link, "bob", "$6$a")
    assert link.is_symlink() and target.read_text() == "bob:$6$a\n"


def test_deleting_from_a_missing_file_does_not_create_it(tmp_path: Path) -> None:
    assert set_password(tmp_path / "users", "bob", None) is False
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["", " bob", "bob ", "#bob", "bo:b", "bo\nb", "b\0", "x" * 65536])
def test_invalid_user_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError):
        set_password(tmp_path / "users", name, "$6$a")
    assert os.listdir(tmp_path) == []


def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "users"
    path.write_text("bob:$6$a\n")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        set_password(path, "bob", "$6$b")
    assert path.read_text() == "bob:$6$a\n" and os.listdir(tmp_path) == ["users"]


def passwd(*arguments: str, typed: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "mqttbroker", "passwd", *arguments]
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=30, check=False)


def test_the_command_sets_replaces_and_deletes(tmp_path: Path) -> None:
    path = tmp_path / "users"
    for word in ("first", "second"):
        done = passwd(str(path), "bob", typed=f"{word}\n")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        users = parse_passwords(path.read_text(), "f")
        assert users.verify("bob", word.encode()) and len(users.hashes) == 1
    assert passwd("-D", str(path), "bob", typed="").returncode == 0
    assert path.read_text() == ""


@pytest.mark.parametrize(
    "arguments, typed, status, reason",
    [
        (["users", "bob"], "\n", 2, "empty"),
        (["users", "bo:b"], "x\n", 2, "user name"),
        (["users", "-D", "bob"], "", 1, "no user 'bob'"),
        (["missing/users", "bob"], "x\n", 1, "No such file or directory"),
    ],
)
def test_errors_of_the_command_are_one_line(tmp_path: Path, arguments: list[str], typed: str, status: int, reason: str) -> None:
    done = passwd(str(tmp_path / arguments[0]), *arguments[1:], typed=typed)
    assert done.returncode == status
    assert done.stderr.startswith("mqttbroker passwd: ") and done.stderr.count("\n") == 1 and reason in done.stderr
    assert os.listdir(tmp_path) == []
