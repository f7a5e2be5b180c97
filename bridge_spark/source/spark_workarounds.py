"""Workarounds for Spark's behaviour with Python data sources."""

from __future__ import annotations

import sys
from typing import NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from bridge_spark.source.errors import SourceError


def is_writing() -> bool:
    """Whether Spark has created this process for `writer` or `streamWriter`."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    return any("write_into_data_source" in name for name in (*sys.argv, getattr(main, "name", "")))


class FailedStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Raises an error at its first call: an error of `streamReader` is hidden by an UnboundLocalError of Spark's."""

    def __init__(self, error: SourceError) -> None:
        self._error = error

    def initialOffset(self) -> NoReturn:
        raise self._error

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> NoReturn:
        raise self._error

    def prepareForTriggerAvailableNow(self) -> None:
        raise self._error

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> NoReturn:
        raise self._error

    def read(self, partition: InputPartition) -> NoReturn:
        raise self._error
