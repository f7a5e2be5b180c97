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
    for_broker = _files_of_broker(settings)
    workers = settings.worker_count
    needed = for_broker if workers else for_broker + for_clients
    limit = _raised_limit(needed)
    if workers:
        # Each worker raises its own soft limit to the hard one.
        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = OWN_FILES + -(-for_clients // workers)
        allowed = sys.maxsize if limit == resource.RLIM_INFINITY else workers * max(1, limit - OWN_FILES)
    elif limit == resource.RLIM_INFINITY or limit >= needed:
        return for_clients
    else:
        allowed = max(limit - for_broker, limit // 2)
    if allowed < for_clients:
        reason = "limits.max_connections and limits.max_half_open need more open files than the hard limit (ulimit -Hn)"
        log.warning("event=open_files_limited limit=%d needed=%d client_sockets=%d reason=%s", limit, needed, allowed, reason)
    return min(for_clients, allowed)


def _raised_limit(needed: int) -> int:
    """The soft limit, after it was raised to what is needed, or to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return soft
    limit = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(limit, soft)


def _files_of_broker(settings: Settings) -> int:
    partitions = sum(stream.partitions for stream in settings.streams)
    return OWN_FILES + settings.http.max_connections + FILES_PER_PARTITION * partitions


def files_needed(settings: Settings) -> int:
    """The open files that the process with most of them needs for the configured connections."""
    sockets = settings.limits.max_connections + settings.limits.max_half_open
    if settings.worker_count:
        return max(_files_of_broker(settings), OWN_FILES + -(-sockets // settings.worker_count))
    return _files_of_broker(settings) + sockets


def raise_file_limit() -> None:
    """Raise the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
