"""JVM options for tests: a short start-up instead of peak speed.

Most of the time of a short Spark job goes into loading 20,000 classes.  `make test` stores the loaded classes in an
archive (class data sharing, JDK 13 and newer).  Without the archive, or with one of another Java, tests only take
longer.

    python class_archive.py     # creates it, in half a minute
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"
COMPILER = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
USED = f" -XX:SharedArchiveFile={ARCHIVE} -Xlog:cds=off -Xlog:cds+dynamic=off" if ARCHIVE.exists() and " " not in str(ARCHIVE) else ""
QUICK_JVM = COMPILER + USED
END_SECONDS = 120.0
COMPILED_QUERIES: dict[str, str | None] = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}


def use(session: SparkSession, settings: dict[str, str | None]) -> None:
    for name, value in settings.items():
        session.conf.set(name, str(value))


def make(archive: Path, root: Path) -> None:
    """Run a job like those of the tests, in ``root``; its JVM writes ``archive`` when it ends."""
    from bridge_spark.ingest import run
    from bridge_spark.java import use_java
    from bridge_spark.tables.ingest_config import parse_config
    from support.ingest_jobs import document
    from support.spark_home import use_spark_home
    from support.spark_session import StreamWriter, message, start_session

    use_spark_home()  # an archive is for one class path
    java = use_java()
    if not list(java.glob("lib/server/classes*.jsa")):  # the base archive; a JDK from PyPI has none
        subprocess.run([java / "bin" / "java", "-Xshare:dump", "-Xlog:disable"], check=True, stdout=subprocess.DEVNULL)
    archive.unlink(missing_ok=True)
    session = start_session(root / "warehouse", f"{COMPILER} -XX:ArchiveClassesAtExit={archive} -Xlog:cds=off")
    interpreted = {name: session.conf.get(name) for name in COMPILED_QUERIES}
    use(session, COMPILED_QUERIES)  # as in programs with a session of their own
    StreamWriter(root / "data").append(0, [message(n, payload=b"bad" if n == 7 else None) for n in range(60)])
    aggregates = {"minute": {"window": "1 minute", "values": ["n"]}}
    settings = document(root, watermark="1 second", deduplicate_by=["n"], aggregates=aggregates)
    run(parse_config(settings), once=True, session=session)
    use(session, interpreted)
    messages = session.read.format("mqtt").options(path=str(root / "data"), stream="sensors").load()
    print(f"class_archive: {messages.where('offset >= 7').count()} rows read", flush=True)
    session.stop()
    # Closing standard input ends the JVM, which then writes the archive.
    process = session.sparkContext._gateway.proc  # type: ignore[union-attr]
    process.stdin.close()
    process.wait(END_SECONDS)


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        make(ARCHIVE, Path(place))
