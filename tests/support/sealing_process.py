"""A program that seals the log below a data directory as a broker does, and ends when all closed segments are sealed.

It creates the log of `damaged_log` if there is none.  Exit status 0: each closed segment is sealed and its unsealed
file is removed; 3: sealing failed; 4: there was no closed segment.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bridge_spark.log import stream_log
from bridge_spark.log.files import sync_directory
from bridge_spark.log.sealed.sealer import Sealer
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from support.damaged_log import make


def main(data_dir: Path, end: int) -> int:
    if not data_dir.exists():
        data_dir.mkdir()
        sync_directory(data_dir.parent)
        make(data_dir, end)
    stream_log.UNSEALED_STAYS = 0.0
    logs = StreamLogs(data_dir / "streams", [StreamConfig("s", ["sensors/#"], segment_bytes=5000, seal=True)], lambda: 1e6)
    logs.recover({("s", 0): end})
    sealer = Sealer(logs)
    sealer.start()
    closed = len(logs.manifest("s")["partitions"][0]["segments"]) - 1
    while not logs.sealing_failures and len(list((data_dir / "streams/s/0").glob("*.seg"))) > 1:
        logs.committed()
        time.sleep(0.005)
    sealer.stop()
    logs.close()
    return 3 if logs.sealing_failures else 0 if closed else 4


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
