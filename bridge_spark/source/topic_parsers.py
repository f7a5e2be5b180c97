"""Parses payloads in the format of their topic's filter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from bridge_spark.source.row_parser import Parsed, RowParser
from topic_matcher.filters import matches

NO_FORMAT = "no format for the topic"


class TopicParsers:
    """Parses to ``type``, a struct.  The first filter that matches a topic counts.

    A parser's type is a struct of some fields of ``type``; the other fields are NULL.  A message that no filter matches
    is a dead letter.
    """

    def __init__(self, type: pa.StructType, parsers: Sequence[tuple[str, RowParser]]) -> None:
        self.type = type
        self._parsers = parsers

    def parse(self, topics: pa.Array, payloads: pa.Array) -> Parsed:
        """The rows of ``payloads`` (binary, no NULL), in their order."""
        encoded = topics.dictionary_encode()
        numbers = np.array([self._number(topic) for topic in encoded.dictionary.to_pylist()], np.int32)
        places = numbers[encoded.indices.to_numpy()]
        found: list[Parsed] = []
        origins: list[Any] = []
        for number in np.unique(places).tolist():
            rows = np.flatnonzero(places == number)
            parsed = self._parse(number, payloads.take(pa.array(rows)))
            found.append(parsed)
            origins.append(rows if parsed.payloads is None else rows[parsed.payloads.to_numpy()])
        if not found:
            return Parsed(pa.nulls(0, self.type), pa.nulls(0, pa.string()), None)
        origin = np.concatenate(origins)
        order = pa.array(np.argsort(origin, kind="stable"))
        several = any(parsed.payloads is not None for parsed in found)
        return Parsed(
            pa.concat_arrays([parsed.values for parsed in found]).take(order),
            pa.concat_arrays([parsed.reasons for parsed in found]).take(order),
            pa.array(np.sort(origin), pa.int32()) if several else None,
        )

    def _number(self, topic: str) -> int:
        """The index of the parser, -1 if there is none."""
        for number, (topic_filter, _) in enumerate(self._parsers):
            if matches(topic_filter, topic):
                return number
        return -1

    def _parse(self, number: int, payloads: pa.Array) -> Parsed:
        if number < 0:
            return Parsed(pa.nulls(len(payloads), self.type), pa.repeat(NO_FORMAT, len(payloads)), None)
        parsed = self._parsers[number][1].parse(payloads)
        kind = parsed.values.type
        columns = dict(zip([kind.field(place).name for place in range(kind.num_fields)], parsed.values.flatten()))
        fields = [self.type.field(place) for place in range(self.type.num_fields)]
        arrays = [columns[field.name] if field.name in columns else pa.nulls(len(parsed.values), field.type) for field in fields]
        values = pa.StructArray.from_arrays(arrays, fields=fields, mask=parsed.reasons.is_valid())
        return parsed._replace(values=values)
