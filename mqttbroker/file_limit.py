"""The limit of open files: raised for the configured connections if the hard limit allows."""

from __future__ import annotations

import logging
import resource
import sys

from mqttbroker.config.settings import Settings

log = logging.getLogger("mqttbroker")

OWN_FILES = 256  # database, logs, threads, and connections that are being closed
FILES_PER_PARTITION = 6  # of a stream, those that readers have open included


def client_sockets(settings: Settings) -> int:
    """Raise the soft limit as far as needed and possible; returns the number of sockets for clients."""
    for_clients = settings.limits.max_connections + settings.limits.max_half_open
    if settings.worker_count:
        allowed = _sockets_of_workers(settings.worker_count)
        if allowed < for_clients:
            log.warning("event=open_files_limited limit=%d needed=%d client_sockets=%d", allowed, for_clients, allowed)
        return min(for_clients, allowed)
    for_broker = _files_of_broker(settings)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = soft
    if soft != resource.RLIM_INFINITY and soft < for_broker + for_clients:
        limit = for_broker + for_clients if hard == resource.RLIM_INFINITY else min(hard, for_broker + for_clients)
        if limit > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == resource.RLIM_INFINITY or limit >= for_broker + for_clients:
        return for_clients
    allowed = max(limit - for_broker, limit // 2)
    needed = for_broker + for_clients
    log.warning("event=open_files_limited limit=%d needed=%d client_sockets=%d", limit, needed, allowed)
    return allowed


def _files_of_broker(settings: Settings) -> int:
    partitions = sum(stream.partitions for stream in settings.streams)
    return OWN_FILES + settings.http.max_connections + FILES_PER_PARTITION * partitions


def files_needed(settings: Settings) -> int:
    """The open files that the process with most of them needs for the configured connections."""
    sockets = settings.limits.max_connections + settings.limits.max_half_open
    if settings.worker_count:
        return max(_files_of_broker(settings), OWN_FILES + -(-sockets // settings.worker_count))
    return _files_of_broker(settings) + sockets


def _sockets_of_workers(count: int) -> int:
    """The sockets that so many workers may have, each of which raises its soft limit to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else count * max(1, hard - OWN_FILES)


def raise_file_limit() -> None:
    """Raise the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
