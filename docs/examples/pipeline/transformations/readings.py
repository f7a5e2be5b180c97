"""The streaming table `readings`: every message of the stream `sensors` once, its JSON payload as columns."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

spark: SparkSession  # spark-pipelines puts it here


@dp.table
def readings() -> DataFrame:
    source = {
        "url": os.environ.get("MQTT_URL", "http://127.0.0.1:18083"),
        "stream": "sensors",
        "filter": "sensors/+",
        "startingOffsets": "earliest",
    }
    if "MQTT_TOKEN" in os.environ:
        source["token"] = os.environ["MQTT_TOKEN"]
    messages = spark.readStream.format("mqtt").options(**source).load()
    payload = F.from_json(F.col("payload").cast("string"), "ts timestamp, value double")
    return messages.select(
        F.split("topic", "/")[1].alias("sensor"),
        payload["ts"].alias("ts"),
        payload["value"].alias("value"),
        "partition",
        "offset",
    )
