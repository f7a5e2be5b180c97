"""Reloads settings, password and ACL files, and certificates on SIGHUP.

Each setting that changed is applied and logged, or named as one that needs a restart. An invalid file changes nothing:
the settings in force stay, and the log, /readyz and the metrics say so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from mqttbroker.auth.external_specs import EXTERNAL
from mqttbroker.auth.security import Security
from mqttbroker.config.in_force import flatten, shown_value
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Settings
from mqttbroker.server import config_check
from mqttbroker.system.defects import report_defect
from mqttbroker.system.service_manager import ServiceManager

log = logging.getLogger("mqttbroker")
audit = logging.getLogger("mqttbroker.audit")

# Keys that may change while the broker runs, beside the contents of the files that others name.
RELOADABLE = re.compile(
    r"allow_anonymous|reveal_denials|max_created_streams|response_information|sys_interval|sys_client_events|worker_timeout|alarms\.\w+|log\.levels?|redirect\.\w+|limits\.\w+"
    r"|streams\.\d+\.(filters|retention_\w+|segment_\w+|seal|compact\w*|dedup|dedup_producers)"
    r"|bans\.\w+|crl\.\w+|logins\.max_waiting|jwt\.\w+|http\.(token(_file)?|access)"
    r"|listeners\.\d+\.(allow_anonymous|max_\w+|connect_timeout|receive_maximum|topic_alias_maximum|username_query|client_id_from"
    r"|certificate_identity|use_identity_as_username|client_certificate|certfile|keyfile|cafile|crlfile|tls_version)"
)


class Reloaded(NamedTuple):
    """The outcome of a reload: lines for its problems, and the keys that changed, those of streams with their names."""

    problems: list[str] = []
    applied: list[str] = []
    restart_needed: list[str] = []  # whose values wait for the next start


class Reloadable(Protocol):
    """A part of a broker or a node that a reload changes."""

    def apply(self, settings: Settings, before: Settings) -> None:
        """Put other settings in force; called for all parts, in one step."""
        return None

    async def reload(self, settings: Settings) -> list[str]:
        """Read files again, or tell other processes; returns the problems, which are logged. Called after `apply` of all parts."""
        return []


class Reloader:
    """Applies a changed configuration. ``settings`` are those in force.

    ``reread`` loads the settings again and raises ConfigError. ``security`` says which authenticators there are. Parts are added by `register`,
    and reloaded in that order.
    """

    def __init__(self, reread: Callable[[], Settings], settings: Settings, security: Security, manager: ServiceManager) -> None:
        self.settings = settings
        self.last = Reloaded()
        self.reloaded = asyncio.Event()  # set, and replaced by a new one, after each reload
        self._reread = reread
        self._security = security
        self._manager = manager
        self._parts: list[Reloadable] = []
        self._task: asyncio.Task[None] | None = None

    def register(self, *parts: Reloadable) -> None:
        """Have these parts reloaded, after those that are registered."""
        self._parts += parts

    @property
    def problems(self) -> list[str]:
        """The problems of the last reload."""
        return self.last.problems

    def start(self) -> None:
        """Reload as a task; for a signal handler."""
        audit.info("event=admin action=reload user=%s", "SIGHUP")
        self.reload()

    def reload(self) -> asyncio.Task[None]:
        """Reload as a task, after one that is still running; returns that task."""
        self._task = asyncio.create_task(self._reload(self._task))
        report_defect(self._task, "reload")
        return self._task

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _reload(self, previous: asyncio.Task[None] | None) -> None:
        if previous is not None and not previous.done():
            await asyncio.wait([previous])  # also if it failed
        self._manager.reloading()
        try:
            reloaded = await self._reload_settings()
            problems = list(reloaded.problems)
            for part in self._parts:
                problems += await part.reload(self.settings)
        finally:
            self._manager.ready()
        self.last = reloaded._replace(problems=problems)
        log.info("event=reloaded problems=%d", len(problems))
        done, self.reloaded = self.reloaded, asyncio.Event()
        done.set()

    async def _reload_settings(self) -> Reloaded:
        try:
            reread = self._reread()
            refused = await asyncio.to_thread(config_check.stored, reread)
            if refused:
                sources = [(config_check.source_of(problem, reread, None), problem) for problem in refused]
                raise ConfigError([": ".join(filter(None, each)) for each in sources])
        except ConfigError as error:
            for problem in error.problems:
                log.error("event=reload_failed reason=%s", problem)
            return Reloaded(error.problems)
        return self._apply_settings(reread)

    def _apply_settings(self, reread: Settings) -> Reloaded:
        applied, restart_needed = [], []
        in_force = self.settings
        before, after = flatten(in_force), flatten(reread)
        # Keys name streams by their positions in the file, which change when a stream is added or removed.
        same_streams = [each.name for each in in_force.streams] == [each.name for each in reread.streams]
        for key in sorted(before.keys() | after.keys()):
            by_name = key.startswith("bridges.") or (key.startswith("streams.") and not same_streams)
            if before.get(key) == after.get(key) or by_name:
                continue
            name = named_key(key, reread if key in after else in_force)
            if key in before and key in after and self._is_reloadable(key, after[key]):
                self.settings = with_key(self.settings, key, after[key])
                values = shown_value(key, before[key]), shown_value(key, after[key])
                audit.info("event=setting_changed key=%s from=%s to=%s", name, *values)
                applied.append(name)
            else:
                restart_needed.append(name)
        if not same_streams:
            restart_needed += _changed_tables("streams", in_force.streams, reread.streams)
        for name in restart_needed:
            audit.warning("event=restart_needed key=%s", name)
        # Keys name bridges by their positions, too.
        applied += _changed_tables("bridges", in_force.bridges, reread.bridges)
        self.settings = dataclasses.replace(self.settings, sources=reread.sources, bridges=reread.bridges)
        for part in self._parts:
            part.apply(self.settings, in_force)
        return Reloaded([], applied, restart_needed)

    def _is_reloadable(self, key: str, value: object) -> bool:
        section = key.partition(".")[0]
        if section in EXTERNAL:  # one that begins or ends needs a restart
            return self._security.runs(section) and (value is not None or key not in ("http_callback.url", "plugin.object"))
        if key.startswith("jwt.") and self._security.jwt is None:
            return False  # a new authenticator needs a restart
        return RELOADABLE.fullmatch(key) is not None


def _changed_tables(section: str, before: Sequence[Any], after: Sequence[Any]) -> list[str]:
    """The keys of the tables with names that are new, gone or changed."""
    old, new = ({each.name: each for each in tables} for tables in (before, after))
    return [f"{section}.{name}" for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]


def named_key(key: str, settings: Settings) -> str:
    """A key of `flatten`, with the name of the stream or queue in the place of its number."""
    section, _, rest = key.partition(".")
    number, dot, rest = rest.partition(".")
    if section not in ("streams", "queues") or not dot:
        return key
    return f"{section}.{getattr(settings, section)[int(number)].name}.{rest}"


def with_key(settings: Any, key: str, value: Any) -> Any:
    """A copy with another value for a key of `flatten`."""
    name, _, rest = key.partition(".")
    if not rest:
        return dataclasses.replace(settings, **{name: value})
    part = getattr(settings, name)
    if isinstance(part, tuple):
        index, _, rest = rest.partition(".")
        changed = list(part)
        changed[int(index)] = with_key(part[int(index)], rest, value)
        return dataclasses.replace(settings, **{name: tuple(changed)})
    return dataclasses.replace(settings, **{name: with_key(part, rest, value)})
