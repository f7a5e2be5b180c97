"""The Spark session of the ingest job, and how it fails.

The rule kept here: what goes wrong reaches the user as one line, never as
Java's or Python's stack alone.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from bridge_spark.java import JavaError, use_java
from bridge_spark.tables.ingest_config import IngestConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PREFIX = re.compile(r"^(?:: |Caused by: )?(?:(?:org\.apache\.spark|pyspark|py4j)\.[\w.$]+: )?")
"""What stands before a message in a stack, a class of Spark's own too."""
_WRAPPER = re.compile(r"Exception thrown in awaitResult|An error occurred while calling |JVM stacktrace:"
                      r"|An exception was raised by the Python Proxy|.*Traceback \(most recent call last\):$")
"""Messages that only say that there is a cause."""
_NO_CHECKS = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
"""Rows from Python are taken out of Arrow without bounds checks, and without a second look for NULL where Spark has had
one, as it has for columns that may hold it: up to a fifth less CPU of the JVM."""
_CHECKPOINT_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


class IngestError(Exception):
    """Why the job cannot go on, in one line."""


def require_spark() -> None:
    """Raise `IngestError` where there is no Java or no PySpark."""
    try:
        if "PYSPARK_GATEWAY_PORT" not in os.environ:
            use_java()
        import pyspark  # noqa: F401
    except JavaError as error:
        raise IngestError(str(error)) from None
    except ImportError:
        raise IngestError("PySpark is not installed: pip install 'mqttbroker[spark]'") from None


def make_session(config: IngestConfig) -> SparkSession:
    """A Spark session for the job, or for anything that reads streams:
    UTC, no web interface, quiet; ``config.spark`` overrides each setting, and
    so does, where ``spark-submit`` runs the program, its command line.  The
    handlers that the program has for SIGINT and SIGTERM stay, and hear of
    signals that reach ``spark-submit``.

    Raises `IngestError` as `require_spark` does.
    """
    require_spark()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    _show_workers_this_package()
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",
        "spark.driver.defaultJavaOptions": _NO_CHECKS,
        "spark.executor.defaultJavaOptions": _NO_CHECKS,
        "spark.python.unix.domain.socket.enabled": "true",  # rows from Python cost a seventh less than through TCP
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
        "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINT_FILES,
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    }
    builder = SparkSession.builder.appName("mqttbroker ingest")
    if submitted:
        settings = {key: value for key, value in settings.items() if SparkContext.getSystemProperty(key) is None}
    else:
        master = config.master or "local[*,4]"
        builder = builder.master(master)
        if master.startswith("local"):
            settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    for key, value in (settings | config.spark).items():
        builder = builder.config(key, value)
    interrupt = signal.getsignal(signal.SIGINT)
    heard = [number for number in (signal.SIGINT, signal.SIGTERM)
             if callable(signal.getsignal(number)) and signal.getsignal(number) is not signal.default_int_handler]
    session: SparkSession = builder.getOrCreate()
    if threading.current_thread() is threading.main_thread() and interrupt not in (None, signal.default_int_handler):
        signal.signal(signal.SIGINT, interrupt)  # Spark's own cancels all jobs and raises KeyboardInterrupt
    if submitted:
        for number in heard:
            _pass_on(number, session)
    if importlib.util.find_spec("pyspark_mqtt") is None:
        from bridge_spark.datasource import MqttDataSource

        session.dataSource.register(MqttDataSource)
    return session


def spark_path(path: Path) -> str:
    """A place of this machine as Spark takes it: not as a URI, of whose escapes it would make another place."""
    return f"file://{path}"


def one_line(error: BaseException) -> str:
    """The line of an error that says what happened, without Java's and Python's stacks."""
    texts = list(_texts(error))
    for text in texts:
        own = re.findall(r"mqtt source: .*", text)
        if own:
            return str(own[-1]).strip()
    lines = [line for text in texts for line in text.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
    said = [_PREFIX.sub("", line).strip() for line in lines]
    told = [line for line in said if not _WRAPPER.match(line)]
    return next(iter(told or said), type(error).__name__)


def _texts(error: Optional[BaseException]) -> Iterator[str]:
    """What an error of Spark and its causes say, the outermost first, without the plan of the query."""
    while error is not None:
        yield str(error).partition("\n=== Streaming Query ===")[0]
        cause = getattr(error, "_cause", None)
        error = cause if isinstance(cause, BaseException) else None


class _ToThisProcess:
    """Java's handler of a signal, which hands it on."""

    def handle(self, number: Any) -> None:
        os.kill(os.getpid(), number.getNumber())

    class Java:
        implements = ["sun.misc.SignalHandler"]


def _pass_on(number: signal.Signals, session: SparkSession) -> None:
    """``spark-submit`` is a JVM, and this process its child: a signal would end that at once, and this with it."""
    from pyspark import java_gateway

    gateway: Any = java_gateway
    gateway.ensure_callback_server_started(session.sparkContext._gateway)
    java: Any = session.sparkContext._jvm
    java.sun.misc.Signal.handle(java.sun.misc.Signal(number.name.removeprefix("SIG")), _ToThisProcess())


def _show_workers_this_package() -> None:
    """Python workers are new processes: a source tree that is not installed must be on their path."""
    root = str(Path(__file__).resolve().parents[2])
    there = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if "site-packages" not in root and root not in there:
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (root, *there) if part)
