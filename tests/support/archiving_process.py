"""A program that archives the log below a data directory as a broker does, and ends when nothing is left to do.

It creates the log of `damaged_log` if there is none, and seals it.  Exit status 0: each closed segment is archived and its
local file is removed; 3: a job failed.  With a third argument, the archive keeps so many bytes.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from bridge_spark.log import stream_log
from bridge_spark.log.archive.archiver import Archiver
from bridge_spark.log.files import sync_directory
from bridge_spark.log.sealed.sealer import Sealer
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from support.damaged_log import END, KEY, make


def main(data_dir: Path, archive: str, archive_bytes: int | None) -> int:
    if not data_dir.exists():
        data_dir.mkdir()
        if archive.startswith("/"):
            Path(archive).mkdir(exist_ok=True)
        sync_directory(data_dir.parent)
        make(data_dir, END)
    stream_log.UNSEALED_STAYS = 0.0
    config = StreamConfig(
        "s",
        ["sensors/#"],
        segment_bytes=5000,
        seal=True,
        archive=archive,
        retention_bytes=1,
        archive_retention_bytes=archive_bytes,
    )
    clock = itertools.count(1_000_000, 2)
    logs = StreamLogs(data_dir / "streams", [config], lambda: float(next(clock)))
    logs.recover({KEY: END})
    sealer, archiver = Sealer(logs), Archiver(logs)
    sealer._seal_all()
    for _ in range(3):  # show the sealed files, remove the unsealed ones, apply retention
        logs.committed()
    archiver.work()
    logs.committed()
    archiver.work()
    archiver._process.close()
    sealer._process.close()
    logs.close()
    return 3 if logs.sealing_failures or logs.archive_failures else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None))
