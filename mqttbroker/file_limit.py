"""The limit of open files: raised for the configured connections if the hard limit allows."""

from __future__ import annotations

import logging
import resource

from mqttbroker.config.settings import Settings

log = logging.getLogger("mqttbroker")

OWN_FILES = 256  # database, logs, threads, and connections that are being closed
FILES_PER_PARTITION = 6  # of a stream, those that readers have open included


def client_sockets(settings: Settings) -> int:
    """Raise the soft limit as far as needed and possible; returns the number of sockets for clients."""
    wanted = settings.limits.max_connections + settings.limits.max_half_open
    own = OWN_FILES + settings.http.max_connections
    own += FILES_PER_PARTITION * sum(stream.partitions for stream in settings.streams)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = soft
    if soft != resource.RLIM_INFINITY and soft < own + wanted:
        limit = own + wanted if hard == resource.RLIM_INFINITY else min(hard, own + wanted)
        if limit > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == resource.RLIM_INFINITY or limit >= own + wanted:
        return wanted
    allowed = max(limit - own, limit // 2)
    log.warning("event=open_files_limited limit=%d needed=%d client_sockets=%d", limit, own + wanted, allowed)
    return allowed
