"""Security: the files that say who may come in and do what, from start to SIGHUP to the end.

The rule kept here: the broker starts only with files that are right from the
first to the last line; a file that is wrong when it is read again changes
nothing.  Who was let in by a line that is gone or different is sent away;
everybody else stays, under the new rules from the next message on.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Callable, Optional

from mqttbroker.acl import Acl, AclError, parse_acl
from mqttbroker.authentication import Authenticator
from mqttbroker.broker import Broker
from mqttbroker.config import ConfigError
from mqttbroker.passwords import PasswordFileError, Passwords, parse_passwords
from mqttbroker.policy import AnonymousPolicy, Authorizer, PasswordPolicy, Policy
from mqttbroker.reason_codes import NOT_AUTHORIZED
from mqttbroker.settings import Settings

log = logging.getLogger("mqttbroker")


class Security:
    """What the files of these settings say.  Raises ConfigError if one of them cannot be used."""

    def __init__(self, settings: Settings) -> None:
        self._password_file = settings.password_file
        self._acl_file = settings.acl_file
        problems: list[str] = []
        passwords: Optional[Passwords] = None
        acl: Optional[Acl] = None
        try:
            passwords = _read_passwords(self._password_file)
        except ConfigError as error:
            problems += error.problems
        try:
            acl = _read_acl(self._acl_file)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        anonymous = AnonymousPolicy(settings.allow_anonymous)
        self.policy: Policy = anonymous
        self.authenticator: Optional[Authenticator] = None
        if passwords is not None:
            self.authenticator = Authenticator(passwords, settings.limits.connect_timeout)
            self.policy = PasswordPolicy(anonymous, self.authenticator)
        self._acl = acl
        self.authorizer: Authorizer = Authorizer() if acl is None else acl
        named = any(listener.use_identity_as_username for listener in settings.listeners)
        if acl is not None and acl.users and passwords is None and not named:
            log.warning("event=acl_without_users reason=%s", "no password_file, so every client is anonymous")

    def start(self, loop: asyncio.AbstractEventLoop, tell_time: Callable[[], object]) -> None:
        """``tell_time`` sets the broker's clock."""
        if self.authenticator is not None:
            self.authenticator.start(loop, tell_time)

    def stop(self) -> None:
        if self.authenticator is not None:
            self.authenticator.stop()

    async def reload(self, broker: Broker) -> None:
        """Read the files again; each that is right counts from now on."""
        loop = asyncio.get_running_loop()
        try:
            passwords = await loop.run_in_executor(None, _read_passwords, self._password_file)
            if passwords is not None and self.authenticator is not None:
                self._revoke(broker, self.authenticator.replace(passwords))
                log.info("event=passwords_reloaded users=%d", len(passwords.hashes))
        except ConfigError as error:
            _complain(error)
        try:
            acl = await loop.run_in_executor(None, _read_acl, self._acl_file)
            if acl is not None and self._acl is not None:
                self._acl.take(acl)
                broker.rules_changed()
                log.info("event=acl_reloaded users=%d", len(acl.users))
        except ConfigError as error:
            _complain(error)

    def _revoke(self, broker: Broker, usernames: set[str]) -> None:
        for connection in list(broker.clients.connections):
            if connection.username in usernames:
                connection.disconnect(NOT_AUTHORIZED, "the password was changed")


def _complain(error: ConfigError) -> None:
    for problem in error.problems:
        log.error("event=reload_failed reason=%s", problem)


def _read_passwords(path: Optional[Path]) -> Optional[Passwords]:
    if path is None:
        return None
    try:
        return parse_passwords(_text(path), str(path))
    except PasswordFileError as error:
        raise ConfigError([str(error)]) from None


def _read_acl(path: Optional[Path]) -> Optional[Acl]:
    if path is None:
        return None
    try:
        return parse_acl(_text(path), str(path))
    except AclError as error:
        raise ConfigError([str(error)]) from None


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror or error}"]) from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{path}:{line}: not UTF-8"]) from None
