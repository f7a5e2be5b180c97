"""Users and access rules over HTTP: what is in force, and changes, which are written to the files and apply at once."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.http.access import Right
from mqttbroker.admin.http.operations import CURSOR, LIMIT, Call, page, page_of, route
from mqttbroker.admin.http.parameters import MAX_BODY, MAX_TEXT, Field, Word, decode_cursor, encode_cursor
from mqttbroker.admin.http.request_error import RequestError
from mqttbroker.admin.http.routes import Answer, Route
from mqttbroker.admin.http.schemas import BOOLEAN, TEXT, Schema, described, nullable, record
from mqttbroker.auth.acl import AclError, parse_rule
from mqttbroker.auth.acl_text import AclRule, check_username, has_rule, rules_in, with_rule, without_rule
from mqttbroker.auth.passwords import check_name, hash_password, scram_password, with_password
from mqttbroker.auth.replace_file import FileChanged, read_contents
from mqttbroker.auth.security import Edit, Security
from mqttbroker.config.setting_kinds import Boolean, Choice
from mqttbroker.core.broker import Broker
from topic_matcher.filters import is_valid_filter

T = TypeVar("T")

USER = record(
    "User",
    username=TEXT,
    file=described(TEXT, "the password file"),
    hash=described(TEXT, "argon2id, pbkdf2-sha512, sha512 or scram-sha-256"),
)
RULE = record(
    "Rule",
    file=described(TEXT, "the ACL file"),
    username=described(nullable(TEXT), "null = anonymous clients, or all clients if it is a pattern"),
    pattern=described(BOOLEAN, "%c and %u stand for client id and user name"),
    access=described(TEXT, "read, write, readwrite or deny"),
    filter=described(TEXT, "the topic filter"),
)
ACL_FILE = record(
    "AclFile",
    file=TEXT,
    text=TEXT,
    version=described(TEXT, "names this text"),
    in_force=described(BOOLEAN, "false: the file has changed since the broker read it"),
)


class UserName(Word):
    """A user name that a password file can contain."""

    def __init__(self, high: int) -> None:
        super().__init__(1, high, '^[!-"$-9;-~]+$', "a user name")

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("must be a user name")
        self.check_length(value)
        check_name(value)
        return value


class RuleUser(UserName):
    """A user name that an ACL file can contain."""

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("must be a user name")
        self.check_length(value)
        check_username(value)
        return value


class RuleFilter(Word):
    """A topic filter that an ACL file can contain."""

    def __init__(self, high: int) -> None:
        super().__init__(1, high, "^[A-Za-z0-9_-]+(/[A-Za-z0-9_-]*)*(/#)?$", "a topic filter")

    def read(self, value: object) -> str:
        if not isinstance(value, str) or not is_valid_filter(value) or value.startswith("$share/"):
            raise ValueError("must be a topic filter")
        if value != value.strip() or "\n" in value or "\r" in value:
            raise ValueError("must not begin or end with a blank or have a line break")
        self.check_length(value)
        return value


class FileText(Word):
    """The text of a file; only the length of the body limits it."""

    def __init__(self) -> None:
        super().__init__(0, MAX_BODY)

    @property
    def schema(self) -> Schema:
        return {"type": "string", "pattern": self.pattern}


class AccountRoutes:
    """The operations. Their methods run on the HTTP server's thread, changes of `Security` on the event loop."""

    def __init__(self, security: Security, broker: Broker, runner: ControlRunner) -> None:
        self._security = security
        self._broker = broker
        self._runner = runner

    def routes(self) -> list[Route]:
        """All operations."""
        file = Field("file", Word(1), "one of the files, if there are several", None)
        name = Field("username", UserName(2000), "a user name, percent-encoded")
        secret = [
            Field("password", Word(1, MAX_TEXT), "the password"),
            Field("scram", Boolean(), "for SCRAM-SHA-256, too; else argon2id, for CONNECT only", False),
        ]
        done, administer = Answer("done"), Right.ADMINISTER

        def rule(high: int) -> list[Field]:
            return [
                Field("username", RuleUser(high), "absent = anonymous clients, or all clients if it is a pattern", None),
                Field("pattern", Boolean(), "%c and %u stand for client id and user name", False),
                Field("access", Choice("read", "write", "readwrite", "deny"), "what the rule is about"),
                Field("filter", RuleFilter(high), "the topic filter"),
            ]

        return [
            route("GET", "/users", self._users, Right.LIST, "Users of the password files, by name", page(USER),
                  [Field("prefix", Word(), "names that begin with this", ""), file, LIMIT, CURSOR], tag="accounts",
                  errors=(404, 409)),
            route("GET", "/users/{username}", self._user, Right.LIST, "One user", USER, [name, file], tag="accounts",
                  errors=(404, 409)),
            route("POST", "/users", self._add_user, administer, "Add a user", USER, [file],
                  body=[name._replace(kind=UserName(MAX_TEXT)), *secret], action="add_user", tag="accounts",
                  errors=(404, 409)),
            route("PUT", "/users/{username}/password", self._set_password, administer,
                  "Set a user's password; clients that used the old one are disconnected", USER, [name, file],
                  body=secret, action="set_password", tag="accounts", errors=(404, 409)),
            route("DELETE", "/users/{username}", self._remove_user, administer,
                  "Remove a user; its clients are disconnected", None, [name, file], done=done, action="remove_user",
                  tag="accounts", errors=(404, 409)),

            route("GET", "/acl/rules", self._rules, Right.LIST, "Access rules in force, in the order of their checks",
                  page(RULE), [Field("username", Word(1), "of this user", None),
                               Field("pattern", Boolean(), "patterns, or other rules", None), file, LIMIT, CURSOR],
                  tag="accounts", errors=(404, 409)),
            route("POST", "/acl/rules", self._add_rule, administer, "Add an access rule", RULE, [file],
                  body=rule(MAX_TEXT), action="add_rule", tag="accounts", errors=(404, 409)),
            route("DELETE", "/acl/rules", self._remove_rule, administer, "Remove an access rule", None,
                  [*rule(2000), file], done=done, action="remove_rule", tag="accounts", errors=(404, 409)),
            route("GET", "/acl/file", self._acl_file, Right.LIST, "The text of an ACL file", ACL_FILE, [file],
                  tag="accounts", errors=(404, 409)),
            route("PUT", "/acl/file", self._set_acl_file, administer, "Replace the text of an ACL file",
                  record(version=TEXT), [file],
                  body=[Field("text", FileText(), "the new text"),
                        Field("version", Word(1), "of the text that it replaces")],
                  action="set_acl_file", tag="accounts", errors=(404, 409)),
        ]  # fmt: skip

    # --- users --------------------------------------------------------------------------------------------------------

    async def _users(self, call: Call) -> Any:
        files = self._password_files(call)
        after = decode_cursor(call["cursor"], str, str)
        left = call["limit"] + 1
        found: list[tuple[str, str]] = []
        for file in sorted(map(str, files)):
            if after is not None and file < after[0]:
                continue
            least = after[1] if after is not None and file == after[0] else ""
            names = self._security.passwords_in_force(Path(file)).fingerprints
            wanted = (name for name in names if name > least and name.startswith(call["prefix"]))
            found += ((file, name) for name in heapq.nsmallest(left - len(found), wanted))
        shown = found[: call["limit"]]
        following = encode_cursor(*shown[-1]) if len(shown) < len(found) else None
        return page_of((self._user_json(Path(file), name) for file, name in shown), following)

    async def _user(self, call: Call) -> Any:
        for file in self._password_files(call):
            if call["username"] in self._security.passwords_in_force(file).hashes:
                return self._user_json(file, call["username"])
        raise _no_user(call)

    def _user_json(self, file: Path, username: str) -> dict[str, Any]:
        stored = self._security.passwords_in_force(file).hashes.get(username)
        return {"username": username, "file": str(file), "hash": "" if stored is None else stored.kind}

    async def _add_user(self, call: Call) -> Any:
        file, encoded = self._password_file(call), await _encoded(call)

        def edit(text: str) -> str:
            changed, known = with_password(text, call["username"], encoded)
            if known:
                raise RequestError(409, f"user {call['username']!r} is in {file} already", "username")
            return changed

        await self._change_passwords(file, edit)
        return self._user_json(file, call["username"])

    async def _set_password(self, call: Call) -> Any:
        file = self._password_file(call)
        if call["username"] not in self._security.passwords_in_force(file).hashes:
            raise _no_user(call)  # before the hash, which takes time
        encoded = await _encoded(call)
        await self._change_passwords(file, lambda text: _with_known(text, call, encoded))
        return self._user_json(file, call["username"])

    async def _remove_user(self, call: Call) -> None:
        await self._change_passwords(self._password_file(call), lambda text: _with_known(text, call, None))

    async def _change_passwords(self, file: Path, edit: Edit) -> None:
        await self._change(file, lambda: self._security.change_passwords(self._broker, file, edit))

    # --- rules --------------------------------------------------------------------------------------------------------

    async def _rules(self, call: Call) -> Any:
        files = sorted(self._acl_files(call))
        # A change of the rules would move the place of the next page.
        state = " ".join(map(self._security.version_in_force, files))
        cursor = decode_cursor(call["cursor"], int, str)
        if cursor is not None and cursor[1] != state:
            raise RequestError(404, "cursor: the rules have changed since the page before", "cursor")
        start, limit = 0 if cursor is None else max(0, cursor[0]), call["limit"]
        found = list(islice(self._rules_of(files, call), start, start + limit + 1))
        following = encode_cursor(start + limit, state) if len(found) > limit else None
        return page_of((_rule_json(file, rule) for file, rule in found[:limit]), following)

    def _rules_of(self, files: Sequence[Path], call: Call) -> Iterator[tuple[Path, AclRule]]:
        for file in files:
            for rule in rules_in(self._security.acl_in_force(file)):
                if call["username"] in (None, rule.username) and call["pattern"] in (None, rule.pattern):
                    yield file, rule

    async def _add_rule(self, call: Call) -> Any:
        file, rule = self._acl_file_of(call), _rule(call)
        if rule.pattern and rule.username is not None:
            raise RequestError(400, "username: a pattern is for all clients", "username")
        try:
            parse_rule(f"{rule.access} {rule.topic_filter}", rule.pattern)
        except ValueError as error:
            raise RequestError(400, f"filter: {error}", "filter") from None

        def edit(text: str) -> str:
            if has_rule(text, rule):
                raise RequestError(409, f"{file} has this rule already", "filter")
            return with_rule(text, rule)

        await self._change_acl(file, edit)
        return _rule_json(file, rule)

    async def _remove_rule(self, call: Call) -> None:
        file, rule = self._acl_file_of(call), _rule(call)

        def edit(text: str) -> str:
            if not has_rule(text, rule):
                raise RequestError(404, f"{file} has no such rule", "filter")
            return without_rule(text, rule)

        await self._change_acl(file, edit)

    async def _acl_file(self, call: Call) -> Any:
        file = self._acl_file_of(call)
        try:
            data = (await asyncio.to_thread(read_contents, file)).data
            text = data.decode()
        except OSError as error:
            raise RequestError(409, f"{file}: cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise RequestError(409, f"{file}: not UTF-8") from None
        version = self._security.version_of(data)
        return {"file": str(file), "text": text, "version": version, "in_force": version == self._security.version_in_force(file)}

    async def _set_acl_file(self, call: Call) -> Any:
        file = self._acl_file_of(call)

        def edit(text: str) -> str:
            if call["version"] != self._security.version_in_force(file):
                raise RequestError(409, f"{file} has another version now: read it again", "version")
            return str(call["text"])

        return {"version": await self._change_acl(file, edit)}

    async def _change_acl(self, file: Path, edit: Edit) -> str:
        try:
            return await self._change(file, lambda: self._security.change_acl(self._broker, file, edit))
        except AclError as error:
            raise RequestError(400, str(error), "text") from None

    # --- files --------------------------------------------------------------------------------------------------------

    async def _change(self, file: Path, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await asyncio.wrap_future(self._runner.start(begin))
        except FileChanged as error:
            raise RequestError(409, str(error)) from None
        except OSError as error:
            raise RequestError(409, f"{file}: cannot be written: {error.strerror or error}") from None

    def _password_files(self, call: Call) -> Sequence[Path]:
        return _chosen(self._security.password_files, call["file"], "password_file")

    def _password_file(self, call: Call) -> Path:
        return _only(self._password_files(call))

    def _acl_files(self, call: Call) -> Sequence[Path]:
        return _chosen(self._security.acl_files, call["file"], "acl_file")

    def _acl_file_of(self, call: Call) -> Path:
        return _only(self._acl_files(call))


def _chosen(files: Sequence[Path], name: str | None, key: str) -> Sequence[Path]:
    """The files that a request is about: the one of that name, or all. Raises RequestError."""
    if not files:
        raise RequestError(409, f"there is no {key}: set it and restart the broker")
    chosen = [file for file in files if name in (None, str(file))]
    if not chosen:
        raise RequestError(404, f"file: must be {_names(files)}", "file")
    return chosen


def _only(files: Sequence[Path]) -> Path:
    if len(files) > 1:
        raise RequestError(400, f"file: is required, {_names(files)}", "file")
    return files[0]


def _names(files: Sequence[Path]) -> str:
    return " or ".join(map(str, files))


async def _encoded(call: Call) -> str:
    """The hash of the password of a request, computed in a thread."""
    hashed = scram_password if call["scram"] else hash_password
    return await asyncio.to_thread(hashed, call["password"].encode())


def _with_known(text: str, call: Call, encoded: str | None) -> str:
    changed, known = with_password(text, call["username"], encoded)
    if not known:
        raise _no_user(call)
    return changed


def _no_user(call: Call) -> RequestError:
    return RequestError(404, f"no user {call['username']!r}", "username")


def _rule(call: Call) -> AclRule:
    """The rule in a request."""
    return AclRule(call["username"], call["pattern"], call["access"], call["filter"])


def _rule_json(file: Path, rule: AclRule) -> dict[str, Any]:
    """A rule as `RULE` describes it."""
    return {"file": str(file), "username": rule.username, "pattern": rule.pattern, "access": rule.access, "filter": rule.topic_filter}
