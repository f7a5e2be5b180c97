"""The password and ACL files of a broker, loaded at start and reloaded on SIGHUP.

The broker does not start with an invalid file, and a reload of an invalid file changes nothing. A reload disconnects
the clients whose password was changed or removed; new access rules apply from the next message on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Optional

from mqttbroker.auth.acl import Acl, AclError, parse_acl
from mqttbroker.auth.authentication import PasswordAuthenticator
from mqttbroker.auth.background import BackgroundAuthenticator
from mqttbroker.auth.ban_file import BanFile
from mqttbroker.auth.certificates import CertificateAuthenticator
from mqttbroker.auth.external import ExternalAuthenticator
from mqttbroker.auth.external_specs import EXTERNAL, spec_of, terms_of
from mqttbroker.auth.passwords import PasswordFileError, Passwords, parse_passwords
from mqttbroker.auth.proven_passwords import ProvenPasswords
from mqttbroker.auth.worker_process import WorkerFailed
from mqttbroker.codec.reason_codes import NOT_AUTHORIZED
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Listener, Settings
from mqttbroker.core.bans import Bans, BanTerms
from mqttbroker.core.broker import Broker
from mqttbroker.core.networks import Networks
from mqttbroker.core.policy import (
    AllowAll,
    AnonymousPolicy,
    AuthenticationChain,
    AuthenticationPolicy,
    Authenticator,
    Authorizer,
    Rules,
)

if TYPE_CHECKING:
    from mqttbroker.auth.jwt_authenticator import JwtAuthenticator

log = logging.getLogger("mqttbroker")
audit = logging.getLogger("mqttbroker.audit")


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
        self.jwt: Optional[JwtAuthenticator] = None
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
                self._password_authenticators[path] = PasswordAuthenticator(
                    _read_passwords(path, key),
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
                self._acls[path] = _read_acl(path, key)
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
                    self._external[kind] = ExternalAuthenticator(
                        kind, spec, terms_of(kind, self._settings), self.bans
                    )
                except WorkerFailed as error:
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

    def _authorizer(self, acl_file: Optional[Path]) -> Authorizer:
        return AllowAll() if acl_file is None else self._acls[acl_file]

    def _authenticator(self, kind: str, listener: Listener) -> Optional[Authenticator]:
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

    def rules_of(self, listener: Listener) -> Optional[str]:
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

    async def reload(self, broker: Broker) -> list[str]:
        """Read the files again and apply each valid one; returns the problems of the others."""
        loop = asyncio.get_running_loop()
        problems: list[str] = []
        for path, key in self._password_files.items():
            try:
                passwords = await loop.run_in_executor(None, _read_passwords, path, key)
                authenticator = self._password_authenticators[path]
                _disconnect_users(broker, authenticator, authenticator.replace(passwords))
                audit.info("event=passwords_reloaded file=%s users=%d", path, len(passwords.hashes))
            except ConfigError as error:
                problems += error.problems
        for path, key in self._acl_files.items():
            try:
                acl = await loop.run_in_executor(None, _read_acl, path, key)
                self._acls[path].replace(acl)
                broker.rules_changed()
                audit.info("event=acl_reloaded file=%s users=%d", path, len(acl.users))
            except ConfigError as error:
                problems += error.problems
        for background in self._background():
            problems += await background.reload()
        for problem in problems:
            log.error("event=reload_failed reason=%s", problem)
        return problems


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


def _jwt_authenticator(settings: Settings) -> Optional[JwtAuthenticator]:
    """The authenticator of tokens; None without one in the settings. Raises ConfigError."""
    if not settings.jwt.configured:
        return None
    from mqttbroker.auth.jwt_authenticator import JwtAuthenticator  # imports 10 MB that few brokers need

    return JwtAuthenticator(settings.jwt, settings.logins.max_waiting, settings.limits.max_total_connect_bytes)


def _note(files: dict[Path, str], path: Optional[Path], key: str) -> None:
    if path is not None:
        files.setdefault(path, key)


def _disconnect_users(broker: Broker, authenticator: PasswordAuthenticator, usernames: set[str]) -> None:
    """Disconnect the clients that the authenticator accepted as these users."""
    for connection in list(broker.clients.connections):
        if connection.username in usernames and connection.authenticator is authenticator:
            connection.disconnect(NOT_AUTHORIZED, "the password was changed")


def _read_passwords(path: Path, key: str) -> Passwords:
    try:
        return parse_passwords(_text(path), str(path))
    except (PasswordFileError, _Unreadable) as error:
        raise ConfigError([f"{key}: {error}"]) from None


def _read_acl(path: Path, key: str) -> Acl:
    try:
        return parse_acl(_text(path), str(path))
    except (AclError, _Unreadable) as error:
        raise ConfigError([f"{key}: {error}"]) from None


class _Unreadable(Exception):
    """One line: the file and the reason."""


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _Unreadable(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _Unreadable(f"{path}:{line}: not UTF-8") from None
