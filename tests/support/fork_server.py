"""Forks processes of the ``mqttbroker`` command, for `forked_process`, from one that has imported what ``serve`` needs.

Run as a script with a descriptor: a socket with a request per packet, and with it the output of the process and a pipe for its status.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys

from setproctitle import setproctitle

from mqttbroker.cli.main import main

# What ``serve`` imports when it starts, and what it imports later if it is used.
for module in (
    "server.server",
    "admin.http.application",
    "admin.http.api",
    "admin.http.accounts",
    "admin.http.alarms",
    "admin.http.bridges",
    "admin.http.dashboard",
    "admin.http.groups",
    "admin.http.history",
    "admin.http.stream_admin",
    "admin.http.trace",
    "admin.metrics.text",
    "net.revocation",
    "net.websocket",
):
    importlib.import_module(f"mqttbroker.{module}")

MAX_REQUEST = 1 << 20  # bytes


def serve(requests: socket.socket) -> None:
    """Fork a process for each request until the socket is closed; returns in each of these processes, to be it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    statuses: dict[int, int] = {}  # by the id of the process, where its status is written
    while True:
        ready, _, _ = select.select([requests, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            report(statuses)
        if requests in ready:
            text, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST, 2)
            if not text:
                sys.exit()
            output, status = descriptors
            process = os.fork()
            if not process:
                for each in (ended, wake, status, *statuses.values()):
                    os.close(each)
                requests.close()
                become(json.loads(text), output)
                return
            os.close(output)
            statuses[process] = status
            requests.send(str(process).encode())


def report(statuses: dict[int, int]) -> None:
    """Write the status of each process that has ended, as text: its exit status, or the signal as a negative number."""
    while statuses:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        where = statuses.pop(process)
        try:
            os.write(where, str(os.waitstatus_to_exitcode(status)).encode())
        except BrokenPipeError:
            pass  # nobody asks for it
        os.close(where)


def become(request: dict[str, object], output: int) -> None:
    """Make this process like one that was started with the command, directory and environment of a request."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    command, directory, environment = request["command"], request["directory"], request["environment"]
    assert isinstance(command, list) and isinstance(directory, str) and isinstance(environment, dict)
    sys.orig_argv = list(command)
    sys.argv = ["mqttbroker", *command[command.index("serve") :]]
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    setproctitle("mqttbroker: forks brokers of tests")  # the first title has to be set while the environment is where it was
    serve(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(main())
