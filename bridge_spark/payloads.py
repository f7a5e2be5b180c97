"""Payloads to typed columns, in Spark.

The rule kept here: a payload becomes a row of the table or a dead letter with
the reason, never both, never neither, and never a row of silent NULLs for
something that did not parse.
"""

from __future__ import annotations

from typing import Optional

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DoubleType, FloatType, NumericType, StringType, StructField, StructType

from bridge_spark.payload_config import PayloadConfig

PARSED = "_parsed"
REASON = "_reason"
_CORRUPT = "_corrupt_record"
DEAD_LETTER_COLUMNS = ("topic", "payload", "qos", "retain", "partition", "offset", "timestamp", "client_id", "stream")


class SchemaError(ValueError):
    """A table's schema that cannot be used, said in one line."""


def table_schema(table: PayloadConfig) -> StructType:
    """The columns that a table parses; needs a Spark session; raises `SchemaError`."""
    if table.format == "raw":
        return StructType([])
    try:
        schema = StructType.fromDDL(table.schema)
    except Exception as error:
        raise SchemaError(f"{table.schema!r} is not a DDL schema: {str(error).strip().splitlines()[0]}") from None
    if not isinstance(schema, StructType) or not schema.fields:
        raise SchemaError("names no column: give NAME TYPE, NAME TYPE ...")
    names = [*(alias for _, alias in table.columns), *schema.fieldNames()]
    for name in names:
        if [other.lower() for other in names].count(name.lower()) > 1:
            raise SchemaError(f"two columns are named {name!r}: rename the message's in 'columns' "
                              f"with \"COLUMN as NAME\", or leave it out")
    if table.format == "number" and (len(schema) != 1 or not isinstance(schema[0].dataType, NumericType)):
        raise SchemaError("format \"number\" fills one column of a number type")
    return schema


def parsed(messages: DataFrame, table: PayloadConfig, schema: StructType) -> DataFrame:
    """``messages`` with a struct `PARSED` and a text `REASON`, which is NULL
    where the payload fits the schema."""
    if table.format == "raw":
        return messages.withColumn(REASON, F.lit(None).cast("string"))
    text = F.col("payload").cast("string")
    if table.format == "number":
        return _parsed_number(messages, text, schema)
    options = {**table.options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    columns = StructType([*(StructField(field.name, field.dataType) for field in schema.fields),
                          StructField(_CORRUPT, StringType())])
    if table.format == "json":
        options.setdefault("allowNonNumericNumbers", "false")
        value = F.from_json(text, columns, options)
    else:
        value = F.from_csv(text, F.lit(columns.toDDL()), options)
    found = messages.withColumn(PARSED, value)
    reason = (
        F.when(F.length("payload") == 0, F.lit("empty payload"))
        .when(~F.is_valid_utf8(text), F.lit("not UTF-8"))
        .when(F.col(PARSED).isNull(), F.lit(f"not a {table.format.upper()} record"))
        .when(F.col(f"{PARSED}.{_CORRUPT}").isNotNull(), F.lit("does not fit the schema"))
    )
    for field in schema.fields:
        if not field.nullable:
            reason = reason.when(_field(field.name).isNull(), F.lit(f"field '{field.name}' is missing"))
        unusable = _not_finite(_field(field.name), field.dataType)
        if unusable is not None:
            reason = reason.when(unusable, F.lit(f"field '{field.name}' is not a finite number"))
    return found.withColumn(REASON, reason)


def good_rows(found: DataFrame, table: PayloadConfig, schema: StructType) -> DataFrame:
    """The table's rows."""
    columns = [F.col(column).alias(alias) for column, alias in table.columns]
    columns += [_field(field.name).alias(field.name) for field in schema.fields]
    return found.where(F.col(REASON).isNull()).select(*columns)


def dead_letters(found: DataFrame) -> DataFrame:
    """What did not parse: the message as it came, and ``reason``."""
    bad = found.where(F.col(REASON).isNotNull())
    return bad.select(*DEAD_LETTER_COLUMNS, F.col(REASON).alias("reason"))


def _parsed_number(messages: DataFrame, text: Column, schema: StructType) -> DataFrame:
    field = schema[0]
    number = F.trim(text).try_cast(field.dataType)
    found = messages.withColumn(PARSED, F.struct(number.alias(field.name)))
    reason = (
        F.when(F.length("payload") == 0, F.lit("empty payload"))
        .when(_field(field.name).isNull(), F.lit("not a number"))
    )
    unusable = _not_finite(_field(field.name), field.dataType)
    if unusable is not None:
        reason = reason.when(unusable, F.lit("not a finite number"))
    return found.withColumn(REASON, reason)


def _not_finite(value: Column, kind: DataType) -> Optional[Column]:
    if not isinstance(kind, (DoubleType, FloatType)):
        return None
    return F.isnan(value) | F.abs(value).eqNullSafe(F.lit(float("inf")))


def _field(name: str) -> Column:
    quoted = name.replace("`", "``")
    return F.col(f"{PARSED}.`{quoted}`")
