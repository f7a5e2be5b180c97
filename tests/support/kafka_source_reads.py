"""Reads a cluster's stream by Spark's own Kafka source and by format("mqtt"), with a session of its own; a process for tests.

    python kafka_source_reads.py DIRECTORY JOB

The JSON file JOB has ``code``, which defines `messages_of` and the streaming DataFrame ``messages`` from Kafka's rows, and the options
``kafka`` and ``mqtt``. Each line of stdin is a number N: the tables ``kafka-N`` and ``mqtt-N`` get what a batch reads, and
``kafka-stream`` and ``mqtt-stream`` what is new for a streaming query. ``done`` is said then.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.spark_session import start_session


def main(place: str, job_file: str) -> None:
    directory = Path(place)
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    spark = start_session(directory / "warehouse")
    names: dict[str, Any] = {"spark": spark}
    exec(compile(job["code"], "docs/spark.md", "exec"), names)
    mqtt = {"startingOffsets": "earliest", **job["mqtt"]}
    streams = {"kafka": names["messages"], "mqtt": spark.readStream.format("mqtt").options(**mqtt).load()}
    for line in sys.stdin:
        records = spark.read.format("kafka").options(**job["kafka"]).load()
        batches = {"kafka": names["messages_of"](records, "sensors"), "mqtt": spark.read.format("mqtt").options(**mqtt).load()}
        for name, rows in batches.items():
            rows.write.parquet(str(directory / f"{name}-{line.strip()}"))
        for name, rows in streams.items():
            query = rows.writeStream.option("checkpointLocation", str(directory / f"{name}-checkpoint"))
            query.trigger(availableNow=True).start(str(directory / f"{name}-stream"), "parquet").awaitTermination()
        print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
