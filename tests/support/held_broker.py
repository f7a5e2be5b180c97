"""``mqttbroker`` with a store that stops at a chosen commit, so that a test can kill it between two steps.

The file named by HOLD_FILE says where the store stops. From there on nothing is written or acknowledged, and the log
has ``event=held``. ``BrokerProcess(program=[PATH])`` runs this file in place of the package.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from sessions.rows import ENTRY_COLUMNS

PATH = str(Path(__file__).resolve())

# Conditions on the contents of a commit.
AWAIT_PUBREC, AWAIT_PUBCOMP = 3, 5
PACKET_ID, STATE = ENTRY_COLUMNS.index("packet_id"), ENTRY_COLUMNS.index("state")
NEW_STATE = 1  # in an update of an entry
CONTENTS = {
    "message": lambda w: bool(w.entries or w.stream_messages or w.retained),
    "packet id of the publisher": lambda w: bool(w.received),
    "release": lambda w: bool(w.deleted_received),
    "packet id of the delivery": lambda w: (
        any(row[PACKET_ID] and row[STATE] == AWAIT_PUBREC for row in w.entries)
        or any(row[NEW_STATE] == AWAIT_PUBREC for row in w.entry_updates)
    ),
    "PUBREC": lambda w: any(row[NEW_STATE] == AWAIT_PUBCOMP for row in w.entry_updates),
    "end of the delivery": lambda w: bool(w.deleted_entries),
}
# Where the store stops: before it takes a write set, before it writes the record, or after its sync and before it reports.
POINTS = ("before", "uncommitted", "after")


def main() -> int:
    from mqttbroker.cli import main as cli
    from mqttbroker.server import single_parts
    from sessions.store.commit_log.file_log import FileCommitLog

    hold_file = Path(os.environ["HOLD_FILE"])
    submitted: list[Any] = []

    def is_held(point: str) -> bool:
        """Whether the last submitted write set is to stop at this point; logs it."""
        wanted = hold_file.read_text(encoding="utf-8") if hold_file.exists() else ""
        held = any(wanted == f"{point} {name}" and holds(submitted[-1]) for name, holds in CONTENTS.items())
        if held:
            print(f"event=held point={point}", flush=True)
        return held

    append = FileCommitLog.append

    def held_append(log: FileCommitLog, body: bytes) -> None:
        if is_held("uncommitted"):
            threading.Event().wait()
        append(log, body)

    class HeldStore(single_parts.SqliteStore):
        def submit(self, write_set: Any) -> None:
            submitted[:] = [write_set]
            if not is_held("before"):
                super().submit(write_set)

        def start(self, done: Any, read_done: Any) -> None:
            def tell(write_set: Any, error: Any) -> None:
                if not is_held("after"):
                    done(write_set, error)

            super().start(tell, read_done)

    FileCommitLog.append = held_append  # type: ignore[method-assign]
    single_parts.SqliteStore = HeldStore  # type: ignore[misc]
    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
