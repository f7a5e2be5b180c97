"""Writes a cluster's stream to Parquet files: Spark's own Kafka source, the code of docs/spark.md, and Spark's own file sink.

    python -m chaos_spark.kafka_query SETTINGS --trigger 100ms

The settings are those of `KafkaSourceJob`. Runs until SIGTERM, exit status 0, or until the query fails: one line, and 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from support.class_archive import QUICK_JVM
from support.documented_kafka_source import kafka_source_code, kafka_source_options
from support.spark_kafka_jars import spark_kafka_jars
from support.spark_session import start_session

POLL_S = 0.5
COLUMNS = ("partition", "offset", "topic", "payload", "client_id", "qos")


def main() -> int:
    parser = argparse.ArgumentParser(prog="kafka_query")
    parser.add_argument("settings", type=Path)
    parser.add_argument("--trigger", required=True)
    arguments = parser.parse_args()
    stop = threading.Event()
    settings = json.loads(arguments.settings.read_text(encoding="utf-8"))
    jars = ",".join(spark_kafka_jars())
    os.environ["PYSPARK_SUBMIT_ARGS"] = f'--jars {jars} --driver-java-options "{QUICK_JVM}" pyspark-shell'
    spark = start_session(arguments.settings.parent / "warehouse", master="local[2,4]")
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    names: dict[str, Any] = {"spark": spark}
    code = kafka_source_code(settings["servers"], settings["topic"])
    exec(compile(code, "docs/spark.md", "exec"), names)
    options = {**kafka_source_options(code), **settings["options"]}
    records = spark.readStream.format("kafka").options(**options).load()
    messages = names["messages_of"](records, "chaos").select(*COLUMNS)
    query = (
        messages.writeStream.option("checkpointLocation", settings["checkpoint"])
        .trigger(processingTime=arguments.trigger.replace("ms", " milliseconds"))
        .start(settings["output"], "parquet")
    )
    while query.isActive and not stop.wait(POLL_S):
        pass
    error = query.exception()
    if error is not None:
        print(f"kafka_query: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1
    query.stop()
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
