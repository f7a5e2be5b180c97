"""Python workers of Spark, forked from one process that has imported what they need: a start takes a tenth of the CPU time.

Spark starts a Python process for each streaming query and for each kind of worker.  Each imports PySpark, from a ZIP file without
compiled modules, then PyArrow and the data source.  `worker_python` gives a program for ``PYSPARK_PYTHON`` that asks the server in
this module to fork, and becomes Python itself if its modules would come from elsewhere than those of the server.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

MODULES = (
    "pandas",
    "pyarrow.compute",
    "pyarrow.parquet",
    "pyspark.worker",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.write_into_data_source",
    "bridge_spark.datasource",
)
MAX_REQUEST = 1 << 20  # bytes
LAUNCHER = """#!{python} -IS
import json, os, select, signal, socket, sys
try:
    request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect({address!r})
    socket.send_fds(server, [request], [0, 1, 2])
    process = int(server.recv(20))
except (OSError, ValueError):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
signal.signal(signal.SIGTERM, lambda number, frame: os.kill(process, number))
for descriptor in (0, 1, 2):
    os.close(descriptor)
try:
    select.select([os.pidfd_open(process)], [], [])
except ProcessLookupError:
    pass
"""


@functools.cache
def worker_python(path: str) -> str:
    """The program for workers whose PYTHONPATH is ``path``; its server ends with this process.

    It is Python itself where processes have no descriptors (pidfd).
    """
    if not hasattr(os, "pidfd_open") or " " in sys.executable:
        return sys.executable
    directory = TemporaryDirectory(prefix="mqttbroker-workers-")
    atexit.register(directory.cleanup)
    address = f"{directory.name}/requests"
    program = Path(directory.name) / "python"
    program.write_text(LAUNCHER.format(python=sys.executable, address=address))
    program.chmod(0o700)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}  # Spark's for workers
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        number = listener.fileno()
        server = subprocess.Popen([sys.executable, "-P", __file__, str(number)], stdin=subprocess.PIPE, env=environment, pass_fds=[number])
    assert server.stdin is not None
    atexit.register(server.wait)
    atexit.register(server.stdin.close)
    return str(program)


def serve(listener: socket.socket) -> str:
    """Fork a process for each request until standard input ends; returns in each of these processes the name of its main module."""
    given = own_paths(dict(os.environ))
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()
    children = 0
    while True:
        ready, _, _ = select.select([0, listener], [], [])
        while children and os.waitpid(-1, os.WNOHANG)[0]:
            children -= 1
        if 0 in ready:
            sys.exit()
        launcher, _ = listener.accept()
        with launcher:
            text, descriptors, _, _ = socket.recv_fds(launcher, MAX_REQUEST, 3)
            if len(descriptors) == 3:
                arguments, directory, environment = json.loads(text)
                if arguments[0] == "-m" and own_paths(environment) == given:
                    process = os.fork()
                    if not process:
                        listener.close()
                        launcher.close()
                        become(arguments, directory, environment, descriptors)
                        return str(arguments[1])
                    children += 1
                    launcher.send(str(process).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def own_paths(environment: dict[str, str]) -> str:
    """PYTHONPATH without what Spark adds to it, its own files."""
    spark = [str(Path(importlib.import_module("pyspark").__path__[0])), environment.get("SPARK_HOME", os.devnull)]
    own = tuple(directory + os.sep for directory in spark)
    return os.pathsep.join(
        dict.fromkeys(path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and not path.startswith(own))
    )


def become(arguments: list[str], directory: str, environment: dict[str, str], descriptors: list[int]) -> None:
    """Make this process like one that was started with this directory, environment, input and output."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv = arguments[1:]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module = serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
