"""Payloads of any DataFrame as typed columns, parsed as by the source `mqtt`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from pyspark.sql.types import StructField, StructType

from bridge_spark.source.batch_bytes import pieces, row_bytes
from bridge_spark.source.option_values import OptionNames
from bridge_spark.source.payload_options import PAYLOAD_OPTION_NAMES, payload_options
from bridge_spark.source.payload_reader import ROWS_BYTES, PayloadReader, PayloadSchemaError
from bridge_spark.source.spark_types import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NAMES = OptionNames([name for name in PAYLOAD_OPTION_NAMES if name != "topicPattern"], (), {}, "", "the options")
_ROW = "_place"
"""Numbers the rows of a batch."""
_NEEDED = {"payload": "binary", "topic": "string"}


def parse_payloads(messages: DataFrame, schema: str | StructType, **options: str) -> DataFrame:
    """``messages``, a batch or a stream, with the columns of ``schema`` added.

    ``messages`` has a binary column `payload` and, for `payloadFormat` `topics`, a string column `topic`.  Columns and
    options are those of the source: `value` and `reason`, also `rejected`, `extra` and `item`; `payloadFormat` and the
    others that begin with `payload`.  NULL counts as an empty payload.  Raises ValueError with one line for columns and
    options that cannot be used.
    """
    added = schema if isinstance(schema, StructType) else StructType.fromDDL(schema)
    assert isinstance(added, StructType)
    for name in added.names:
        if name.lower() in {other.lower() for other in messages.columns}:
            raise PayloadSchemaError(f"there is a column {name!r} already")
    given = _NAMES.given(options)
    wanted = pa.schema([pa.field(_ROW, pa.int64()), *arrow_schema(added)])
    reader = PayloadReader(wanted, payload_options(given), None)
    kinds = {field.name: field.dataType.simpleString() for field in messages.schema.fields}
    for field in reader.message_schema:
        needed = _NEEDED.get(field.name, "a column of payloads")
        if field.name != _ROW and kinds.get(field.name) != needed:
            raise PayloadSchemaError(f"column {field.name!r} is {kinds.get(field.name, 'missing')}, not {needed}")
    fields = [*messages.schema.fields, *(StructField(field.name, field.dataType) for field in added.fields)]

    def parse(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from _parsed(reader, batch)

    return messages.mapInArrow(parse, StructType(fields))


def _parsed(reader: PayloadReader, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch with the columns of ``reader``, in batches of at most `ROWS_BYTES` of repeated columns, or one row."""
    columns = []
    for field in reader.message_schema:
        if field.name == _ROW:
            columns.append(pa.array(range(len(batch)), pa.int64()))
        else:
            empty = b"" if field.name == "payload" else ""
            columns.append(pc.fill_null(batch.column(field.name), empty))
    sizes = row_bytes(batch.columns, len(batch))
    for found in reader.rows(pa.RecordBatch.from_arrays(columns, schema=reader.message_schema)):
        for start, end in pieces(sizes[found.column(_ROW).to_numpy()], ROWS_BYTES):
            rows = found.slice(start, end - start)
            kept = batch.take(rows.column(_ROW))
            names = [name for name in rows.schema.names if name != _ROW]
            yield pa.RecordBatch.from_arrays([*kept.columns, *map(rows.column, names)], names=[*kept.schema.names, *names])
