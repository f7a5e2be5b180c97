"""Opens the storage that a source's options name."""

from __future__ import annotations

from bridge_spark.source.directory_storage import DirectoryStorage
from bridge_spark.source.http_storage import HttpStorage
from bridge_spark.source.options import SourceOptions
from bridge_spark.source.storage import Storage


def open_storage(options: SourceOptions) -> Storage:
    """The storage that the options name.  Does not read or connect."""
    if options.url is not None:
        return HttpStorage(
            options.url, options.stream, options.token, options.ca_file, options.fetch_retries,
            options.fetch_retry_interval_ms / 1000, options.request_timeout_ms / 1000)
    assert options.path is not None
    return DirectoryStorage(options.path, options.stream)
