"""Users and access rules changed over HTTP: in force at once, in the files, and never over an operator's edit."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.api_client import ACCESS, Api
from support.broker_process import BrokerProcess
from support.raw_client import RawClient

from mqttbroker.auth.passwords import hash_password, parse_passwords
from mqttbroker.codec.packets import Disconnect

pytestmark = pytest.mark.one_build

RULES = """# The rules of the plant
topic read public/#
user alice
topic readwrite alice/#  
# patterns
pattern write devices/%u/#
"""


@pytest.fixture(scope="module")
def alice() -> str:
    return f"alice:{hash_password(b'old')}"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, alice: str) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("files")
    write_files(directory, alice)
    files = {"password_file": str(directory / "passwords"), "acl_file": str(directory / "rules")}
    with BrokerProcess(config={"http": {"access": ACCESS}, **files}) as process:
        yield process


@pytest.fixture
def files(broker: BrokerProcess, alice: str) -> Path:
    """The directory of the password file and the ACL file, as they are before each test."""
    directory = Path(Api(broker).get("/users")["items"][0]["file"]).parent
    write_files(directory, alice)
    assert Api(broker).ask("POST", "/reload") == (200, {"problems": [], "applied": [], "restart_needed": []})
    return directory


@pytest.fixture
def api(broker: BrokerProcess, files: Path) -> Api:
    return Api(broker)


def write_files(directory: Path, alice: str) -> None:
    (directory / "passwords").write_text(f"# users of the plant\n{alice}\n\n# the last line\n")
    (directory / "rules").write_text(RULES)
    os.chmod(directory / "passwords", 0o640)
    os.chmod(directory / "rules", 0o644)


def login(api: Api, username: str, password: str) -> tuple[RawClient, int]:
    """A client, and the reason code of its CONNACK."""
    client = RawClient(api.broker.port)
    return client, client.connect(f"c-{username}", username=username, password=password.encode()).reason_code


def test_users_are_added_changed_and_removed_at_once(api: Api, files: Path, alice: str) -> None:
    path, first = files / "passwords", len(api.broker.lines)
    assert api.get("/users")["items"] == [{"username": "alice", "file": str(path), "hash": "argon2id"}]
    bob = {"username": "bob", "password": "b", "scram": True}
    assert api.ask("POST", "/users", bob) == (200, {"username": "bob", "file": str(path), "hash": "scram-sha-256"})
    api.refused(409, "username", "POST", "/users", bob)
    client, code = login(api, "bob", "b")
    assert code == 0
    assert api.ask("PUT", "/users/bob/password", {"password": "ü b"})[1]["hash"] == "argon2id"
    client.expect(Disconnect)
    client.close()
    assert login(api, "bob", "b")[1] == 0x86
    client, code = login(api, "bob", "ü b")
    assert code == 0
    assert api.ask("DELETE", "/users/bob") == (204, None)
    client.expect(Disconnect)
    client.close()
    assert login(api, "bob", "ü b")[1] == 0x86 and login(api, "alice", "old")[1] == 0
    assert path.read_text() == f"# users of the plant\n{alice}\n\n# the last line\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    for method, where, body in (("DELETE", "/users/bob", None), ("PUT", "/users/bob/password", {"password": "x"})):
        api.refused(404, "username", method, where, body)
    api.refused(404, "username", "GET", "/users/bob")
    for name, field in (("a:b", "username"), (" a", "username"), ("#a", "username"), ("a\n", "username")):
        api.refused(400, field, "POST", "/users", {"username": name, "password": "x"})
    api.refused(400, "password", "POST", "/users", {"username": "a", "password": ""})
    audit = [line for line in api.broker.lines[first:] if "username=bob" in line]
    actions = [line.split("action=")[1].split()[0] for line in audit]
    assert actions == ["add_user", "set_password", "remove_user"]
    assert all("event=admin" in line and "user=admin" in line and "address=127.0.0.1" in line for line in audit)
    assert "ü b" not in api.broker.log


def test_pages_of_users(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    names = [f"user-{number:03d}" for number in range(250)]
    path.write_text("".join(f"{name}:$6$YQ==${'A' * 86}==\n" for name in reversed(names)))
    with BrokerProcess(config={"http": {"access": ACCESS}, "password_file": str(path)}) as broker:
        api = Api(broker, "viewer")
        assert [item["username"] for item in api.pages("/users", 40)] == names
        assert [item["username"] for item in api.pages("/users", 4, prefix="user-01")] == names[10:20]
        api.refused(404, "cursor", "GET", "/users", cursor="beyond")
        api.refused(409, None, "GET", "/acl/rules")
        api.refused(404, "file", "GET", "/users", file="/etc/passwd")


def test_rules_are_added_and_removed_at_once(api: Api, files: Path) -> None:
    path = files / "rules"
    client, _ = login(api, "alice", "old")

    def published(topic: str) -> int:
        return client.publish(topic, b"x", qos=1)

    rule = {"username": "alice", "access": "write", "filter": "tools/#"}
    shown = {**rule, "file": str(path), "pattern": False}
    assert published("tools/1") == 0x87
    assert api.ask("POST", "/acl/rules", rule) == (200, shown)
    assert published("tools/1") in (0, 0x10)
    api.refused(409, "filter", "POST", "/acl/rules", rule)
    assert shown in api.get("/acl/rules", username="alice")["items"]
    assert api.ask("DELETE", "/acl/rules", **rule) == (204, None)
    assert published("tools/1") == 0x87
    api.refused(404, "filter", "DELETE", "/acl/rules", **rule)
    assert path.read_text() == RULES and stat.S_IMODE(path.stat().st_mode) == 0o644
    pattern = {"pattern": True, "access": "deny", "filter": "x/%c"}
    assert api.ask("POST", "/acl/rules", pattern)[0] == 200
    assert [item["filter"] for item in api.pages("/acl/rules", 1, pattern="true")] == ["x/%c", "devices/%u/#"]
    for field, wrong in (
        ("filter", {"filter": "a/#/b"}),
        ("filter", {"filter": "x%c", "pattern": True}),
        ("access", {"access": "all"}),
        ("username", {"username": "a\nb"}),
        ("filter", {"filter": "a\n"}),
        ("username", {"username": "alice", "pattern": True}),
    ):
        api.refused(400, field, "POST", "/acl/rules", {"access": "read", "filter": "a", **wrong})
    client.close()


def test_an_acl_file_is_replaced_if_it_is_the_one_that_was_read(api: Api, files: Path) -> None:
    read = api.get("/acl/file")
    assert (read["text"], read["in_force"], read["file"]) == (RULES, True, str(files / "rules"))
    text = RULES + "user bob\ntopic read bob/#\n"
    status, answer = api.ask("PUT", "/acl/file", {"text": text, "version": read["version"]})
    assert status == 200 and api.get("/acl/file") == {**read, "text": text, "version": answer["version"]}
    api.refused(409, "version", "PUT", "/acl/file", {"text": "", "version": read["version"]})
    detail = api.refused(400, "text", "PUT", "/acl/file", {"text": "topic\nbad line", "version": answer["version"]})
    assert detail == f"{files / 'rules'}:1: no topic filter"
    assert (files / "rules").read_text() == text
    page = api.get("/acl/rules", limit=1)
    assert api.ask("POST", "/acl/rules", {"access": "read", "filter": "more"})[0] == 200
    api.refused(404, "cursor", "GET", "/acl/rules", limit=1, cursor=page["next_cursor"])


def test_an_edit_by_an_operator_is_neither_lost_nor_put_in_force_half_done(api: Api, files: Path, alice: str) -> None:
    for name, method, where, body in (
        ("passwords", "POST", "/users", {"username": "bob", "password": "b"}),
        ("rules", "POST", "/acl/rules", {"access": "read", "filter": "new"}),
    ):
        path = files / name
        edited = path.read_text() + "# half do"
        path.write_text(edited)
        assert "reload first" in api.refused(409, None, method, where, body)
        assert path.read_text() == edited
        assert api.ask("POST", "/reload") == (200, {"problems": [], "applied": [], "restart_needed": []})
        assert api.ask(method, where, body)[0] == 200
        assert set(path.read_text().split("\n")) > set(edited.split("\n"))
    assert set(parse_passwords((files / "passwords").read_text(), "").hashes) == {"alice", "bob"}


def test_a_missing_file_is_said(api: Api, files: Path) -> None:
    (files / "passwords").unlink()
    assert "No such file" in api.refused(409, None, "DELETE", "/users/alice")
    assert api.get("/users/alice")["username"] == "alice"


def test_viewers_and_operators_change_no_users_and_rules(api: Api, files: Path) -> None:
    before = [(files / name).read_text() for name in ("passwords", "rules")]
    for role in ("viewer", "operator"):
        other = Api(api.broker, role)
        assert other.get("/users")["items"] and other.get("/acl/rules")["items"] and other.get("/acl/file")["text"]
        for method, where, body in (
            ("POST", "/users", {"username": "bob", "password": "b"}),
            ("DELETE", "/users/alice", None),
            ("PUT", "/users/alice/password", {"password": "b"}),
            ("DELETE", "/acl/rules", None),
            ("POST", "/acl/rules", {"access": "read", "filter": "#"}),
            ("PUT", "/acl/file", {}),
        ):
            other.refused(403, None, method, where, body)
    assert [(files / name).read_text() for name in ("passwords", "rules")] == before


def test_several_password_files_of_which_one_cannot_be_replaced(tmp_path: Path, alice: str) -> None:
    names = ["one", "two", "x" * 250]  # no name for a temporary file fits beside the last one
    paths = [str(tmp_path / name) for name in names]
    for path in paths:
        Path(path).write_text(f"{alice}\n")
    listeners = [{"port": 0, "password_file": path} for path in paths]
    with BrokerProcess(config={"http": {"access": ACCESS}, "listeners": listeners}) as broker:
        api = Api(broker)
        body = {"username": "bob", "password": "b"}
        detail = api.refused(400, "file", "POST", "/users", body)
        assert all(path in detail for path in paths)
        assert api.ask("POST", "/users", body, file=paths[1])[0] == 200
        users = [(item["file"], item["username"]) for item in api.pages("/users", 1)]
        assert users == [(paths[0], "alice"), (paths[1], "alice"), (paths[1], "bob"), (paths[2], "alice")]
        detail = api.refused(409, None, "POST", "/users", body, file=paths[2])
        assert detail.endswith("cannot be written: File name too long")
        assert [len(Path(path).read_text().split("\n")) for path in paths] == [2, 3, 2]
