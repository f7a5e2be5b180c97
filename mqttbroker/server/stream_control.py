"""Streams at run time: created, altered and deleted while messages flow.

Its methods run on the event loop, one change after the other. A change is on disk when its method returns: a stream that was
created keeps its settings in its `stream.json`, beside its records, so that a copy of the data directory has both.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from bridge_spark.log.stream_config import StreamLogError
from bridge_spark.log.stream_files import STREAMS, created_streams, mark_deleted
from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.admin.control.stream_changes import Definition, StreamRefused
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Settings, Stream
from mqttbroker.config.stream_definition import DefinitionError, altered, complete, stream_of
from mqttbroker.core.broker import Broker
from mqttbroker.server.assembly import stream_config, stream_rule
from mqttbroker.server.config_check import unsealed
from sessions.journal import Gate
from sessions.store.interface import Partition, Store

COMMIT_WAIT = 0.002  # seconds between looks whether a batch is committed
FORGOTTEN_AT_ONCE = 1000  # producers of a stream, in one iteration of the event loop

log = logging.getLogger("mqttbroker")


def with_created_streams(settings: Settings, definitions: Mapping[str, Definition]) -> Settings:
    """The settings with the streams that were created at run time; those of the file win. Raises ConfigError."""
    names = {stream.name for stream in settings.streams}
    streams: list[Stream] = list(settings.streams)
    for name, definition in definitions.items():
        if name in names:
            log.warning("event=stream_in_file stream=%s reason=%s", name, "the configuration file has it now, and its settings apply")
            continue
        try:
            streams.append(stream_of(name, definition))
        except DefinitionError as error:
            raise ConfigError([f"{settings.data_dir}/streams/{name}/stream.json: {error}"]) from None
    return dataclasses.replace(settings, streams=tuple(streams))


def created_definitions(settings: Settings) -> dict[str, dict[str, Any]]:
    """The definitions of the streams that were created at run time. Raises `StreamLogError`."""
    return created_streams(settings.data_dir / STREAMS, {stream.name for stream in settings.streams})


class StreamControl:
    """Implements `mqttbroker.admin.control.stream_changes.StreamChanges`. ``streams`` is replaced, never changed.

    ``definitions`` are those of the streams that were created at run time. ``wake`` makes the event loop hand the store
    what is to be written. ``changed`` is called with the streams in force after each change, on the loop. Streams
    that are not ``local`` are topics of Kafka: their topic filters may change, and nothing else here.
    """

    def __init__(
        self,
        broker: Broker,
        store: Store,
        logs: StreamLogs,
        settings: Settings,
        definitions: Mapping[str, Definition],
        max_streams: Callable[[], int],
        wake: Callable[[], None],
        changed: Callable[[list[Stream]], None],
        local: bool = True,
    ) -> None:
        self.streams = {stream.name: stream for stream in settings.streams}
        self._definitions = {name: dict(definition) for name, definition in definitions.items()}
        self._broker = broker
        self._store = store
        self._logs = logs
        self._max_streams = max_streams
        self._wake = wake
        self._changed = changed
        self._local = local
        self._lock = asyncio.Lock()

    def is_created(self, name: str) -> bool:
        """Whether the stream was created at run time; the configuration file has the others. For any thread."""
        return name in self._definitions

    async def create(self, name: str, definition: Definition) -> None:
        """Create a stream. Raises `StreamRefused`."""
        async with self._lock:
            if not self._local:
                raise StreamRefused("streams that are created while the broker runs are not available in a cluster", "name")
            if name in self.streams:
                raise StreamRefused(f"there is a stream {name!r} already", "name")
            if len(self._definitions) >= self._max_streams():
                raise StreamRefused(f"there are {len(self._definitions)} streams already: max_created_streams")
            try:
                definition = complete(definition)
                stream = stream_of(name, definition)
            except DefinitionError as error:
                raise StreamRefused(str(error), error.key) from None
            await self._on_store(lambda ends: ends.update(self._logs.add(stream_config(stream, definition))))
            self._broker.deduplication.set_limit(name, stream.dedup_producers if stream.dedup else 0)
            self._broker.router.add_stream(stream_rule(stream))
            self._definitions = {**self._definitions, name: dict(definition)}
            for text in unsealed([stream]):
                log.warning("event=configuration_warning reason=%s", text)
            self._set({**self.streams, name: stream})

    async def alter(self, name: str, changes: Definition) -> None:
        """Change settings of a stream that was created at run time. Raises `StreamRefused`."""
        async with self._lock:
            stream = self._own(name)
            try:
                definition = altered(stream, self._definitions[name], changes)
                new = stream_of(name, definition)
            except DefinitionError as error:
                raise StreamRefused(str(error), error.key) from None
            await self._apply(new, definition)
            self._definitions = {**self._definitions, name: definition}

    async def apply_file(self, streams: Mapping[str, Stream]) -> None:
        """Apply changed settings of streams of the configuration file. Raises `StreamRefused`."""
        async with self._lock:
            for name, stream in streams.items():
                if name in self.streams and self.streams[name] != stream and not self.is_created(name):
                    await self._apply(stream, None)

    async def _apply(self, stream: Stream, definition: Definition | None) -> None:
        if self._local:
            config = stream_config(stream, definition)
            await self._on_store(lambda ends: self._logs.alter(config))
        producers = stream.dedup_producers if stream.dedup else 0
        await self._forget_producers(stream.name, producers)
        router = self._broker.router
        router.remove_stream(stream.name)
        router.add_stream(stream_rule(stream))
        self._broker.deduplication.set_limit(stream.name, producers)
        self._set({**self.streams, stream.name: stream})

    async def delete(self, name: str) -> None:
        """Delete a stream that was created at run time, with its records. Raises `StreamRefused`.

        Once its description says so, the deletion is completed by the next start if the broker is killed.
        """
        async with self._lock:
            self._own(name)
            await self._on_store(lambda ends: mark_deleted(self._logs.directory / name))
            self._broker.router.remove_stream(name)
            self._broker.stream_subscriptions.stream_removed(name)
            await self._commit()
            try:
                await self._on_store(lambda ends: self._delete_log(name, ends))
            except StreamRefused as error:
                log.warning("event=stream_files_kept stream=%s reason=%s", name, error)
            await self._forget_producers(name, 0)
            self._broker.deduplication.set_limit(name, 0)
            self._definitions = {other: kept for other, kept in self._definitions.items() if other != name}
            self._set({other: stream for other, stream in self.streams.items() if other != name})

    def _delete_log(self, name: str, ends: dict[Partition, int]) -> None:
        partitions = {key: end for key, end in ends.items() if key[0] == name}
        for key in partitions:
            del ends[key]
        self._logs.delete(name, partitions)

    def _own(self, name: str) -> Stream:
        if name not in self.streams:
            raise StreamRefused(f"no stream {name!r}", "name", missing=True)
        if not self.is_created(name):
            raise StreamRefused(f"stream {name!r} is in the configuration file: change it there", "name")
        return self.streams[name]

    def _set(self, streams: dict[str, Stream]) -> None:
        self.streams = streams
        self._changed(list(streams.values()))

    async def _forget_producers(self, name: str, limit: int) -> None:
        while not self._broker.deduplication.forget_excess(name, limit, FORGOTTEN_AT_ONCE):
            self._wake()
            await asyncio.sleep(0)

    async def _commit(self) -> None:
        """Return when everything published before the call is committed, or refused."""
        gate = Gate()
        self._broker.journal.wait_for_commit(gate)
        self._wake()
        while gate.pending:
            await asyncio.sleep(COMMIT_WAIT)

    async def _on_store(self, change: Callable[[dict[Partition, int]], None]) -> None:
        """Run a change on the thread that commits. Raises `StreamRefused` if the files cannot be changed."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def run(ends: dict[Partition, int]) -> None:
            try:
                change(ends)
            except Exception as error:
                loop.call_soon_threadsafe(_fail, done, error)
            else:
                loop.call_soon_threadsafe(_finish, done)

        self._store.change_streams(run)
        try:
            await done
        except StreamLogError as error:
            raise StreamRefused(str(error)) from None
        except OSError as error:
            raise StreamRefused(f"{error.filename or self._logs.directory}: {error.strerror}") from None


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _fail(done: asyncio.Future[None], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
