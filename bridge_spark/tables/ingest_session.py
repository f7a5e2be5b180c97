"""The Spark session of the ingest job, and errors as one line without stack traces."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge_spark.java import JavaError, use_java
from bridge_spark.tables.ingest_config import IngestConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PREFIX = re.compile(r"^(?:: |Caused by: )?(?:(?:org\.apache\.spark|pyspark|py4j)\.[\w.$]+: )?")
"""Prefixes of a message in a stack trace, such as the class of a Spark exception."""
_WRAPPER = re.compile(
    r"Exception thrown in awaitResult|An error occurred while calling |JVM stacktrace:"
    r"|An exception was raised by the Python Proxy|.*Traceback \(most recent call last\):$"
)
"""Messages that only announce a cause."""
_NO_CHECKS = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
"""Read Arrow data from Python without bounds checks, and without Arrow's own check for NULL, as Spark checks nullable
columns itself: up to a fifth less CPU time of the JVM."""
_CHECKPOINT_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


class IngestError(Exception):
    """The job cannot continue; the text is one line."""


def require_spark() -> None:
    """Raise `IngestError` if PySpark or Java is missing."""
    try:
        import pyspark  # noqa: F401
    except ImportError:
        raise IngestError("PySpark is not installed: pip install 'mqttbroker[spark]', without a Java 'mqttbroker[spark,jdk]'") from None
    try:
        if "PYSPARK_GATEWAY_PORT" not in os.environ:
            use_java()
    except JavaError as error:
        raise IngestError(str(error)) from None


def make_session(config: IngestConfig) -> SparkSession:
    """A Spark session for the job, or for any program that reads streams: UTC, no web interface, no log.

    ``config.spark`` and the command line of ``spark-submit`` override each setting.  The program's handlers of SIGINT
    and SIGTERM stay in place, and also get the signals that ``spark-submit`` receives.

    Raises `IngestError` as `require_spark` does.
    """
    require_spark()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    _add_package_to_workers_path()
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",
        "spark.driver.defaultJavaOptions": _NO_CHECKS,
        "spark.executor.defaultJavaOptions": _NO_CHECKS,
        "spark.python.unix.domain.socket.enabled": "true",  # a seventh less CPU time per row from Python than TCP
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
    handled = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if callable(signal.getsignal(number)) and signal.getsignal(number) is not signal.default_int_handler
    ]
    session: SparkSession = builder.getOrCreate()
    if threading.current_thread() is threading.main_thread() and interrupt not in (None, signal.default_int_handler):
        signal.signal(signal.SIGINT, interrupt)  # Spark's cancels all jobs and raises KeyboardInterrupt
    if submitted:
        for number in handled:
            _forward_signal(number, session)
    if importlib.util.find_spec("pyspark_mqtt") is None:
        from bridge_spark.datasource import MqttDataSource

        session.dataSource.register(MqttDataSource)
    return session


def spark_path(path: Path) -> str:
    """A local path as Spark reads it: without the escapes of a URI, which Spark would not decode."""
    return f"file://{path}"


def one_line(error: BaseException) -> str:
    """The line of an error that describes it, without the stack traces of Java and Python."""
    texts = list(_texts(error))
    for text in texts:
        from_source = re.findall(r"mqtt (?:source|sink): .*", text)
        if from_source:
            return str(from_source[-1]).strip()
    lines = [line for text in texts for line in text.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
    messages = [_PREFIX.sub("", line).strip() for line in lines]
    causes = [line for line in messages if not _WRAPPER.match(line)]
    return next(iter(causes or messages), type(error).__name__)


def _texts(error: BaseException | None) -> Iterator[str]:
    """The texts of a Spark error and its causes, the outermost first, without the query plan."""
    while error is not None:
        yield str(error).partition("\n=== Streaming Query ===")[0]
        cause = getattr(error, "_cause", None)
        error = cause if isinstance(cause, BaseException) else None


class _SignalForwarder:
    """A signal handler in Java that sends the signal to this process."""

    def handle(self, number: Any) -> None:
        os.kill(os.getpid(), number.getNumber())

    class Java:
        implements = ["sun.misc.SignalHandler"]


def _forward_signal(number: signal.Signals, session: SparkSession) -> None:
    """Forward a signal from ``spark-submit``, the parent JVM, which would otherwise exit at once."""
    from pyspark import java_gateway

    gateway: Any = java_gateway
    gateway.ensure_callback_server_started(session.sparkContext._gateway)
    java: Any = session.sparkContext._jvm
    java.sun.misc.Signal.handle(java.sun.misc.Signal(number.name.removeprefix("SIG")), _SignalForwarder())


def _add_package_to_workers_path() -> None:
    """Put a source tree that is not installed on the path of Spark's Python workers, which are new processes."""
    root = str(Path(__file__).resolve().parents[2])
    there = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if "site-packages" not in root and root not in there:
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (root, *there) if part)
