"""Opens the storage that a source's options name."""

from __future__ import annotations

from bridge_spark.source.directory_storage import DirectoryStorage
from bridge_spark.source.http_client import PATIENT_RETRIES, RETRIES
from bridge_spark.source.http_storage import HttpStorage
from bridge_spark.source.options import SourceOptions
from bridge_spark.source.storage import Storage


def open_storage(options: SourceOptions, patient: bool = False) -> Storage:
    """The storage that the options name.  Does not read or connect.

    ``patient``: without the option fetch.numRetries, wait for a broker that restarts.  Otherwise a wrong address is
    reported within seconds.
    """
    retries = options.fetch_retries
    if retries is None:
        retries = PATIENT_RETRIES if patient else RETRIES
    if options.kafka is not None:
        # Imported here: only readers of a cluster need a client of Kafka.
        from bridge_spark.source.kafka_storage import KafkaStorage

        return KafkaStorage(
            options.kafka, options.stream, retries, options.fetch_retry_interval_ms / 1000, options.request_timeout_ms / 1000
        )
    if options.url is not None:
        return HttpStorage(
            options.url,
            options.stream,
            options.token,
            options.ca_file,
            retries,
            options.fetch_retry_interval_ms / 1000,
            options.request_timeout_ms / 1000,
            options.archive,
        )
    assert options.path is not None
    return DirectoryStorage(options.path, options.stream, options.archive)
