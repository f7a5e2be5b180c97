"""Spark's own Kafka source, which PySpark does not contain: its files come from Maven by name, once per environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.local_kafka import DOWNLOAD_S
from support.tools import lacking

VERSION = "4.2.0"  # Maven Central has none of Spark 4.3, which loads this one
JARS = {
    "org.apache.spark:spark-sql-kafka-0-10_2.13": VERSION,
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13": VERSION,
    "org.apache.kafka:kafka-clients": "3.9.2",
    "org.apache.commons:commons-pool2": "2.12.1",
}
LIBRARIES = Path(sys.prefix) / f"spark-kafka-{VERSION}"


def spark_kafka_jars() -> list[str]:
    """The paths of the files, which are downloaded if they are not there. Without Maven the test is skipped, or fails in CI."""
    if not LIBRARIES.exists():
        maven = shutil.which("mvn")
        if maven is None:
            lacking("Spark's Kafka source is downloaded by Maven, and there is no mvn")
        unfinished = LIBRARIES.with_suffix(f".{os.getpid()}")
        unfinished.mkdir()
        (unfinished / "pom.xml").write_text(_pom(), encoding="utf-8")
        subprocess.run(
            [maven, "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={unfinished}"],
            cwd=unfinished,
            check=True,
            timeout=DOWNLOAD_S,
        )
        try:
            unfinished.rename(LIBRARIES)
        except OSError:  # another process was first
            shutil.rmtree(unfinished)
    return sorted(map(str, LIBRARIES.glob("*.jar")))


def _pom() -> str:
    """Without what these need beside each other: PySpark has it."""
    needed = []
    for name, version in JARS.items():
        group, artifact = name.split(":")
        needed.append(
            f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version><exclusions>"
            "<exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions></dependency>"
        )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>mqttbroker</groupId><artifactId>spark-kafka</artifactId><version>1</version>"
        f"<dependencies>{''.join(needed)}</dependencies></project>"
    )
