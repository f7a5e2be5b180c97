"""The Spark job: an alert for each machine whose mean of ten seconds is above the limit.

    alerts.py [HTTP_URL [MQTT_URL [CHECKPOINT]]]

Reads the stream `sensors` and publishes to `alerts/MACHINE`, retained, so that a dashboard that starts later sees the last
one. A repeated batch publishes nothing twice: its rows have the same numbers.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from bridge_spark.java import use_java

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LIMIT = 80.0  # °C
DEFAULTS = ["http://127.0.0.1:18083", "mqtt://127.0.0.1:1883", "checkpoint"]
HTTP_URL, MQTT_URL, CHECKPOINT = sys.argv[1:] + DEFAULTS[len(sys.argv) - 1 :]
SCHEMA = "machine string, timestamp timestamp, value struct<temperature double not null>, reason string"


def publish(batch: DataFrame, batch_id: int) -> None:
    batch.write.format("mqtt").option("url", MQTT_URL).option("producerId", f"alerts-{batch_id}") \
        .option("sortRows", "true").option("retain", "true").mode("append").save()


use_java()
spark = (
    SparkSession.builder.master("local[2,4]").appName("alerts")
    .config("spark.sql.shuffle.partitions", "1")
    .config("spark.sql.session.timeZone", "UTC")
    .config("spark.ui.enabled", "false")
    .config("spark.sql.streaming.checkpointFileManagerClass",
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")
readings = (
    spark.readStream.format("mqtt").schema(SCHEMA)
    .options(url=HTTP_URL, stream="sensors", topicPattern="sensors/{machine}/temperature", payloadFormat="json",
             startingOffsets="earliest")
    .load().where("reason IS NULL")
)
means = (
    readings.withWatermark("timestamp", "1 minute").groupBy(F.window("timestamp", "10 seconds", "5 seconds"), "machine")
    .agg(F.avg("value.temperature").alias("mean"), F.max("timestamp").alias("last"))
    .where(F.col("mean") > LIMIT)
)
alerts = means.select(
    F.concat(F.lit("alerts/"), "machine").alias("topic"),
    F.to_json(F.struct("machine", F.round("mean", 2).alias("mean"), F.lit(LIMIT).alias("limit"), "window",
                       F.unix_micros("last").alias("last_us"))).alias("payload"),
)
query = (
    alerts.writeStream.outputMode("update").foreachBatch(publish)
    .option("checkpointLocation", CHECKPOINT).trigger(processingTime="200 milliseconds").start()
)
while query.isActive and query.lastProgress is None:
    time.sleep(0.1)
print("the query runs", flush=True)
query.awaitTermination()
