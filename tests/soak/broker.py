"""The `mqttbroker` command without garbage collection, which reports its memory and objects.

Each connection to the Unix socket SOAK_SOCKET is answered with JSON: allocated memory blocks, resident bytes, and the
numbers of objects by type, of the types that are not Python's own.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import threading
from collections import Counter
from pathlib import Path

from mqttbroker.cli.main import main

SHOWN = 400  # types
OWN = ("mqttbroker", "sessions", "topic_matcher", "bridge_spark", "websockets")


def state() -> bytes:
    kinds = (type(found) for found in gc.get_objects())
    counts = Counter(kind.__name__ for kind in kinds if kind.__module__.partition(".")[0] in OWN)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    answer = {
        "blocks": sys.getallocatedblocks(),
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "types": dict(counts.most_common(SHOWN)),
    }
    return json.dumps(answer).encode()


def answer_all(listening: socket.socket) -> None:
    while True:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(state())


if __name__ == "__main__":
    gc.disable()
    gc.enable = lambda: None
    gc.collect = lambda generation=2: 0
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(os.environ["SOAK_SOCKET"])
    listening.listen()
    threading.Thread(target=answer_all, args=(listening,), daemon=True).start()
    sys.exit(main())
