"""The typed columns of a table, of the payloads that the source parses.

Every message becomes either rows of the table or a dead letter with the reason.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    MapType,
    NumericType,
    StringType,
    StructField,
    StructType,
)

from bridge_spark.log.columns import SCHEMA_DDL
from bridge_spark.tables.ingest_config import PayloadConfig
from bridge_spark.tables.recorded_columns import RESERVED_COLUMNS
from bridge_spark.tables.rows.column_names import quoted

PARSED = "value"
REASON = "reason"
EXTRA = "_extra"  # the table's column of fields that are not in the schema
ITEM = "item"  # the column that numbers the rows of one message
DEAD_LETTER_COLUMNS = ("topic", "payload", "qos", "retain", "partition", "offset", "timestamp", "client_id", "stream")
_REJECTED = "rejected"


class SchemaError(ValueError):
    """An invalid schema of a table; the text is one line."""


def payload_schema(config: PayloadConfig) -> StructType:
    """The fields of a payload.  Needs a Spark session.  Raises `SchemaError`."""
    schema = StructType([]) if config.format == "raw" else _from_ddl(config.schema)
    names = [name.lower() for name, _ in table_columns(config, schema)]
    for name in names:
        if name in RESERVED_COLUMNS:
            raise SchemaError(
                f"no column can be named {name!r}, as directories of tables are: rename a field in 'fields' with \"{name} as NAME\""
            )
        if names.count(name) > 1:
            raise SchemaError(
                f"two columns are named {name!r}: rename the message's in 'columns' or the payload's "
                f"in 'fields' with \"... as NAME\", or leave it out"
            )
    if config.format == "number" and (len(schema) != 1 or not isinstance(schema[0].dataType, NumericType)):
        raise SchemaError('format "number" fills one column of a number type')
    return schema


def table_columns(config: PayloadConfig, schema: StructType) -> list[tuple[str, Column]]:
    """The table's columns in order, each as an expression on the result of `parse`.  Raises `SchemaError`."""
    columns = [(alias, F.col(column)) for column, alias in config.columns]
    columns += [(name, F.col(name)) for name in config.levels]
    if config.several:
        columns.append((ITEM, F.col(ITEM)))
    fields = config.fields
    if fields is None:
        fields = tuple(((field.name,), field.name) for field in schema.fields)
    for path, name in fields:
        _check_path(schema, path)
        columns.append((name, _field(*path)))
    if config.extra_fields != "ignore":
        columns.append((EXTRA, F.col("extra")))
    return columns


def source_schema(config: PayloadConfig, schema: StructType, payload: bool = False) -> StructType:
    """The columns to request from the source: those that `parse`, the table and its dead letters need.

    ``payload``: also the payloads of messages that parse.
    """
    wanted = {column for column, _ in config.columns} | {"topic", "timestamp"}
    if config.format != "raw" or payload:
        wanted |= {*DEAD_LETTER_COLUMNS} - {"payload"}
    if payload:
        wanted.add("payload")
    ddl = StructType.fromDDL(SCHEMA_DDL)
    assert isinstance(ddl, StructType)
    fields = [field for field in ddl.fields if field.name in wanted]
    fields += [StructField(name, StringType()) for name in config.levels]
    if config.format != "raw":
        fields += [StructField(PARSED, schema), StructField(REASON, StringType()), StructField(_REJECTED, BinaryType())]
        if config.several:
            fields.append(StructField(ITEM, IntegerType()))
        if config.extra_fields != "ignore":
            fields.append(StructField("extra", MapType(StringType(), StringType())))
    return StructType(fields)


def parse(messages: DataFrame, config: PayloadConfig) -> DataFrame:
    """``messages`` of the source, with a text `REASON` that is NULL if the payload parses, as it does with format "raw"."""
    return messages.withColumn(REASON, F.lit(None).cast("string")) if config.format == "raw" else messages


def table_rows(found: DataFrame, config: PayloadConfig, schema: StructType) -> DataFrame:
    """The table's rows, of the messages that parse."""
    return found.where(F.col(REASON).isNull()).select(*(column.alias(name) for name, column in table_columns(config, schema)))


def dead_letter_schema() -> StructType:
    """The columns of `dead_letters`.  Needs a Spark session."""
    known = StructType.fromDDL(SCHEMA_DDL)
    assert isinstance(known, StructType)
    return StructType([*(known[name] for name in DEAD_LETTER_COLUMNS), StructField("reason", StringType())])


def dead_letters(found: DataFrame) -> DataFrame:
    """The messages that do not parse, as received, with ``reason``."""
    payload = F.col("payload" if "payload" in found.columns else _REJECTED).alias("payload")
    return found.where(F.col(REASON).isNotNull()).select(
        *(payload if name == "payload" else F.col(name) for name in DEAD_LETTER_COLUMNS), F.col(REASON).alias("reason")
    )


def _from_ddl(ddl: str) -> StructType:
    try:
        schema = StructType.fromDDL(ddl)
    except Exception as error:
        raise SchemaError(f"{ddl!r} is not a DDL schema: {str(error).strip().splitlines()[0]}") from None
    if not isinstance(schema, StructType) or not schema.fields:
        raise SchemaError("names no column: give NAME TYPE, NAME TYPE ...")
    return schema


def _check_path(schema: StructType, path: tuple[str, ...]) -> None:
    kind: DataType = schema
    for name in path:
        if not isinstance(kind, StructType) or name not in kind.fieldNames():
            raise SchemaError(f"has no field {'.'.join(path)!r}, which 'fields' names")
        kind = kind[name].dataType


def _field(*path: str) -> Column:
    return F.col(quoted(PARSED, *path))
