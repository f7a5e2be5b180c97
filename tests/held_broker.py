"""``mqttbroker`` with a store that stops at a chosen commit, so that a kill falls exactly between two steps.

Rule: nothing of the broker is changed but when its store answers. A word in the file that HOLD_FILE names says where
it stops; from there on nothing more is written or acknowledged, and the log says so.

Not a module of the suite: ``BrokerProcess(program=[PATH])`` runs it in the place of the package.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

PATH = str(Path(__file__).resolve())

# What a commit may hold (`sessions.write_set`): the columns of entries and updates by their position there.
AWAIT_PUBREC, AWAIT_PUBCOMP = 3, 5
CONTENTS = {
    "message": lambda w: bool(w.entries or w.stream_messages or w.retained),
    "packet id of the publisher": lambda w: bool(w.received),
    "release": lambda w: bool(w.released),
    "packet id of the delivery": lambda w: any(row[7] and row[8] == AWAIT_PUBREC for row in w.entries)
    or any(row[1] == AWAIT_PUBREC for row in w.updates),
    "PUBREC": lambda w: any(row[1] == AWAIT_PUBCOMP for row in w.updates),
    "end of the delivery": lambda w: bool(w.deletes),
}
# Where it stops: nothing of the commit is written; the stream log is, SQLite is not; all is, and nobody hears of it.
POINTS = ("before", "synced", "after")


def main() -> int:
    from mqttbroker import cli, server

    wish = Path(os.environ["HOLD_FILE"])

    def is_held(point: str, write_set: Any) -> bool:
        wanted = wish.read_text(encoding="utf-8") if wish.exists() else ""
        return any(wanted == f"{point} {name}" and holds(write_set) for name, holds in CONTENTS.items())

    def say(point: str) -> None:
        print(f"event=held point={point}", flush=True)

    class HeldStreams(server.StreamLogs):
        write_set: Any = None

        def sync(self) -> None:
            super().sync()
            if is_held("synced", self.write_set):
                say("synced")
                threading.Event().wait()

    class HeldStore(server.Store):
        def __init__(self, path: Any, durability: str, log: Any) -> None:
            super().__init__(path, durability, log)
            self.log = log

        def submit(self, write_set: Any) -> None:
            if is_held("before", write_set):
                say("before")
                return
            self.log.write_set = write_set
            super().submit(write_set)

        def start(self, done: Any) -> None:
            def tell(write_set: Any, pages: Any, error: Any) -> None:
                if is_held("after", write_set):
                    say("after")
                else:
                    done(write_set, pages, error)

            super().start(tell)

    server.StreamLogs = HeldStreams  # type: ignore[misc]
    server.Store = HeldStore  # type: ignore[misc]
    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
