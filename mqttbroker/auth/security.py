"""The password and ACL files of a broker, loaded at start and reloaded on SIGHUP.

The broker does not start with an invalid file, and a reload of an invalid file changes nothing. A reload disconnects
the clients whose password was changed or removed; new access rules apply from the next message on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import ipaddress
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mqttbroker.auth.acl import Acl, AclError, parse_acl
from mqttbroker.auth.authentication import PasswordAuthenticator
from mqttbroker.auth.background import BackgroundAuthenticator
from mqttbroker.auth.ban_file import BanFile
from mqttbroker.auth.certificates import CertificateAuthenticator
from mqttbroker.auth.external import ExternalAuthenticator
from mqttbroker.auth.external_specs import EXTERNAL, spec_of, terms_of
from mqttbroker.auth.passwords import PASSWORD_FILE_MODES, PasswordFileError, Passwords, parse_passwords
from mqttbroker.auth.plugin_process import PluginFailed
from mqttbroker.auth.proven_passwords import ProvenPasswords
from mqttbroker.auth.replace_file import Contents, FileChanged, read_contents, rewrite_file
from mqttbroker.codec.reason_codes import NOT_AUTHORIZED
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Listener, Settings
from mqttbroker.core.access.bans import Bans, BanTerms
from mqttbroker.core.access.policy import (
    AllowAll,
    AnonymousPolicy,
    AuthenticationChain,
    AuthenticationPolicy,
    Authenticator,
    Authorizer,
    Rules,
)
from mqttbroker.core.broker import Broker
from mqttbroker.core.terms.networks import Networks

if TYPE_CHECKING:
    from mqttbroker.auth.jwt_authenticator import JwtAuthenticator

log = logging.getLogger("mqttbroker.auth")
audit = logging.getLogger("mqttbroker.audit")

Edit = Callable[[str], str]


class Security:
    """The policies and rules in the files that the settings name. Raises ConfigError for an invalid file."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.bans = Bans(ban_terms(settings))
        self._ban_file = BanFile(self.bans)
        remember = settings.logins.remember
        self._proven = ProvenPasswords(0 if remember == "off" else settings.logins.max_remembered)
        self._password_authenticators: dict[Path, PasswordAuthenticator] = {}
        self._acls: dict[Path, Acl] = {}
        self._versions: dict[Path, str] = {}  # of the contents in force of each file
        self._reading = asyncio.Lock()  # held while files are read or changed, and put in force
        self.jwt: JwtAuthenticator | None = None
        self._external: dict[str, ExternalAuthenticator] = {}
        # The key that names each file, for errors; the first if there are several.
        self._password_files: dict[Path, str] = {}
        self._acl_files: dict[Path, str] = {}
        _note(self._password_files, settings.password_file, "password_file")
        _note(self._acl_files, settings.acl_file, "acl_file")
        for index, listener in enumerate(settings.listeners):
            _note(self._password_files, settings.password_file_of(listener), f"listeners.{index}.password_file")
            _note(self._acl_files, settings.acl_file_of(listener), f"listeners.{index}.acl_file")
        self._read()
        self.policy = self.policy_of(settings.listeners[0])
        by_name = {}
        for listener in settings.listeners:
            name = self.rules_of(listener)
            if name is not None:
                by_name[name] = self._authorizer(settings.acl_file_of(listener))
            self._warn(listener)
        self.rules = Rules(self._authorizer(settings.acl_file), by_name, self.jwt is not None or bool(self._external))

    def _read(self) -> None:
        problems: list[str] = []
        try:
            self.jwt = _jwt_authenticator(self._settings)
        except ConfigError as error:
            problems += error.problems
        for path, key in self._password_files.items():
            try:
                passwords, self._versions[path] = _read_passwords(path, key)
                self._password_authenticators[path] = PasswordAuthenticator(
                    passwords,
                    self._settings.limits.connect_timeout,
                    capacity=self._settings.logins.max_waiting,
                    max_bytes=self._settings.limits.max_total_connect_bytes,
                    proven=self._proven,
                    bans=self.bans,
                )
            except ConfigError as error:
                problems += error.problems
        for path, key in self._acl_files.items():
            try:
                self._acls[path], self._versions[path] = _read_acl(path, key)
            except ConfigError as error:
                problems += error.problems
        if not problems:  # else no process is needed
            problems += self._start_external()
        if problems:
            raise ConfigError(problems)

    def _start_external(self) -> list[str]:
        """Start the processes of external authenticators; returns the problems, with which none runs."""
        problems: list[str] = []
        for kind in EXTERNAL:
            spec = spec_of(kind, self._settings)
            if spec is not None:
                try:
                    self._external[kind] = ExternalAuthenticator(kind, spec, terms_of(kind, self._settings), self.bans)
                except PluginFailed as error:
                    problems.append(f"{kind}: {error}")
        if problems:
            for authenticator in self._external.values():
                authenticator.stop()
        return problems

    def _warn(self, listener: Listener) -> None:
        """Log a warning if the ACL file has users but the listener cannot authenticate any."""
        acl_file = self._settings.acl_file_of(listener)
        if acl_file is not None and self._acls[acl_file].users and not self._settings.authenticators_of(listener):
            reason = "no authentication, so every client is anonymous"
            log.warning("event=acl_without_users listener=%s reason=%s", listener.address, reason)

    def _authorizer(self, acl_file: Path | None) -> Authorizer:
        return AllowAll() if acl_file is None else self._acls[acl_file]

    def _authenticator(self, kind: str, listener: Listener) -> Authenticator | None:
        """The authenticator of a kind for clients of a listener; None if the listener has none."""
        if kind == "certificate":
            return CertificateAuthenticator(listener.certificate_identity) if listener.use_identity_as_username else None
        if kind == "jwt":
            return self.jwt
        if kind in self._external:
            return self._external[kind]
        path = self._settings.password_file_of(listener)
        return None if path is None else self._password_authenticators[path]

    def policy_of(self, listener: Listener) -> AuthenticationPolicy:
        """The authentication policy of a listener."""
        settings = self._settings
        found = (self._authenticator(kind, listener) for kind in settings.authenticators_of(listener))
        chain = [authenticator for authenticator in found if authenticator is not None]
        return AuthenticationChain(chain, AnonymousPolicy(settings.anonymous_of(listener)))

    def _background(self) -> list[BackgroundAuthenticator]:
        """The authenticators that are started and stopped."""
        found: list[BackgroundAuthenticator] = list(self._password_authenticators.values())
        if self.jwt is not None:
            found.append(self.jwt)
        found += self._external.values()
        return found

    def rules_of(self, listener: Listener) -> str | None:
        """The name of a listener's rules in ``rules``; None = the common ones."""
        path = self._settings.acl_file_of(listener)
        return None if path == self._settings.acl_file else str(path or "")

    def start(self, loop: asyncio.AbstractEventLoop, update_clock: Callable[[], object]) -> None:
        """``update_clock`` sets the broker's clock."""
        self._ban_file.load(self._settings.data_dir, loop)
        logins = self._settings.logins
        if self._password_authenticators and logins.remember == "restart":
            self._proven.load(self._settings.data_dir, logins.key_file, loop)
        for authenticator in self._background():
            authenticator.start(loop, update_clock)

    def stop(self) -> None:
        for authenticator in self._background():
            authenticator.stop()
        self._proven.stop()
        self._ban_file.stop()

    def apply(self, settings: Settings) -> None:
        """Use other settings, which name the same files."""
        self._settings = settings
        self.policy = self.policy_of(settings.listeners[0])
        self.bans.apply(ban_terms(settings))
        for authenticator in self._password_authenticators.values():
            authenticator.timeout = settings.limits.connect_timeout
            authenticator.capacity = settings.logins.max_waiting
            authenticator.max_bytes = settings.limits.max_total_connect_bytes
        if self.jwt is not None:
            self.jwt.settings = settings.jwt
            self.jwt.capacity = settings.logins.max_waiting
            self.jwt.max_bytes = settings.limits.max_total_connect_bytes
        for kind, external in self._external.items():
            spec = spec_of(kind, settings)
            if spec is not None:
                external.configure(spec, terms_of(kind, settings))

    @property
    def external(self) -> Mapping[str, ExternalAuthenticator]:
        """The authenticators in other processes, by kind."""
        return self._external

    def runs(self, kind: str) -> bool:
        """Whether there is an external authenticator of this kind; a new one needs a restart."""
        return kind in self._external

    async def reload(self, broker: Broker | None) -> list[str]:
        """Read the files again and apply each valid one; returns the problems of the others. ``broker`` has the clients, if there are any."""
        async with self._reading:
            return await self._reload(broker)

    async def _reload(self, broker: Broker | None) -> list[str]:
        loop = asyncio.get_running_loop()
        problems: list[str] = []
        for path, key in self._password_files.items():
            try:
                self._use_passwords(broker, path, *await loop.run_in_executor(None, _read_passwords, path, key))
            except ConfigError as error:
                problems += error.problems
        for path, key in self._acl_files.items():
            try:
                self._use_acl(broker, path, *await loop.run_in_executor(None, _read_acl, path, key))
            except ConfigError as error:
                problems += error.problems
        for background in self._background():
            problems += await background.reload()
        for problem in problems:
            log.error("event=reload_failed reason=%s", problem)
        return problems

    def _use_passwords(self, broker: Broker | None, path: Path, passwords: Passwords, version: str) -> None:
        authenticator = self._password_authenticators[path]
        changed = authenticator.replace(passwords)
        if broker is not None:
            _disconnect_users(broker, authenticator, changed)
        self._versions[path] = version
        audit.info("event=passwords_reloaded file=%s users=%d", path, len(passwords.hashes))

    def _use_acl(self, broker: Broker | None, path: Path, acl: Acl, version: str) -> None:
        self._acls[path].replace(acl)
        if broker is not None:
            broker.rules_changed()
        self._versions[path] = version
        audit.info("event=acl_reloaded file=%s users=%d", path, len(acl.users))

    # --- changes of the files ---------------------------------------------------------------------------------------

    @property
    def password_files(self) -> Sequence[Path]:
        """The password files, that of all listeners first."""
        return tuple(self._password_files)

    @property
    def acl_files(self) -> Sequence[Path]:
        """The ACL files, that of all listeners first."""
        return tuple(self._acl_files)

    def passwords_in_force(self, path: Path) -> Passwords:
        """The users of one of `password_files`; for any thread."""
        return self._password_authenticators[path].passwords

    def acl_in_force(self, path: Path) -> Acl:
        """The rules of one of `acl_files`; for any thread."""
        return self._acls[path]

    @staticmethod
    def version_of(data: bytes) -> str:
        """A word that names the contents of a file."""
        return _version(data)

    def version_in_force(self, path: Path) -> str:
        """`version_of` the contents of a file that are in force; for any thread."""
        return self._versions[path]

    async def change_passwords(self, broker: Broker, path: Path, edit: Edit) -> str:
        """Rewrite one of `password_files` by ``edit`` and put it in force, as `reload` does; returns its version.

        ``edit`` makes the new text of the old one, in a thread, and may raise an error. Raises FileChanged if the file
        is not the one in force, which an operator may be editing; OSError if it cannot be written; PasswordFileError if
        its new text is invalid. Then nothing is changed.
        """
        async with self._reading:
            passwords, version = await asyncio.get_running_loop().run_in_executor(
                None, _rewritten_passwords, path, self._versions[path], edit
            )
            self._use_passwords(broker, path, passwords, version)
            return version

    async def change_acl(self, broker: Broker, path: Path, edit: Edit) -> str:
        """`change_passwords` for one of `acl_files`. Raises AclError if its new text is invalid."""
        async with self._reading:
            acl, version = await asyncio.get_running_loop().run_in_executor(None, _rewritten_acl, path, self._versions[path], edit)
            self._use_acl(broker, path, acl, version)
            return version


def ban_terms(settings: Settings) -> BanTerms:
    terms = BanTerms()
    for field in dataclasses.fields(settings.bans):
        if field.name != "exempt":
            setattr(terms, field.name, getattr(settings.bans, field.name))
    terms.exempt = [ipaddress.ip_network(text) for text in settings.bans.exempt]
    terms.networks = Networks(settings.limits.ipv4_prefix, settings.limits.ipv6_prefix)
    return terms


def http_ban_terms(settings: Settings) -> BanTerms:
    """When to ban addresses that send wrong tokens to the HTTP server, which have no user name."""
    terms = ban_terms(settings)
    terms.failures = 0
    return terms


def _jwt_authenticator(settings: Settings) -> JwtAuthenticator | None:
    """The authenticator of tokens; None without one in the settings. Raises ConfigError."""
    if not settings.jwt.configured:
        return None
    from mqttbroker.auth.jwt_authenticator import JwtAuthenticator  # imports 10 MB that few brokers need

    return JwtAuthenticator(settings.jwt, settings.logins.max_waiting, settings.limits.max_total_connect_bytes)


def _note(files: dict[Path, str], path: Path | None, key: str) -> None:
    if path is not None:
        files.setdefault(path, key)


def _disconnect_users(broker: Broker, authenticator: PasswordAuthenticator, usernames: set[str]) -> None:
    """Disconnect the clients that the authenticator accepted as these users."""
    for connection in list(broker.clients.connections):
        if connection.username in usernames and connection.authenticator is authenticator:
            connection.disconnect(NOT_AUTHORIZED, "the password was changed")


def _read_passwords(path: Path, key: str) -> tuple[Passwords, str]:
    try:
        text, version = _text(path)
        return parse_passwords(text, str(path)), version
    except (PasswordFileError, _Unreadable) as error:
        raise ConfigError([f"{key}: {error}"]) from None


def _read_acl(path: Path, key: str) -> tuple[Acl, str]:
    try:
        text, version = _text(path)
        return parse_acl(text, str(path)), version
    except (AclError, _Unreadable) as error:
        raise ConfigError([f"{key}: {error}"]) from None


def _rewritten_passwords(path: Path, in_force: str, edit: Edit) -> tuple[Passwords, str]:
    before, text = _edited(path, in_force, edit)
    passwords = parse_passwords(text, str(path))
    rewrite_file(path, text.encode(), PASSWORD_FILE_MODES, before)
    return passwords, _version(text.encode())


def _rewritten_acl(path: Path, in_force: str, edit: Edit) -> tuple[Acl, str]:
    before, text = _edited(path, in_force, edit)
    acl = parse_acl(text, str(path))
    rewrite_file(path, text.encode(), before=before)
    return acl, _version(text.encode())


def _edited(path: Path, in_force: str, edit: Edit) -> tuple[Contents, str]:
    """The contents of a file, and its new text. Raises FileChanged if they are not those in force."""
    before = read_contents(path)
    if _version(before.data) != in_force:
        raise FileChanged(f"{path} was changed since the broker read it: reload first")
    return before, edit(before.data.decode())


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


class _Unreadable(Exception):
    """One line: the file and the reason."""


def _text(path: Path) -> tuple[str, str]:
    """The text of a file, and its version."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _Unreadable(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        return data.decode("utf-8"), _version(data)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _Unreadable(f"{path}:{line}: not UTF-8") from None
