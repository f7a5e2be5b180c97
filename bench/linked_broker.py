#!/usr/bin/env python3
"""The `mqttbroker` command with link_load in place of connection workers, for bench/links.py.

BENCH_LINK_LOAD is the program and BENCH_LINKS its socket. The modules are those that Python imports, compiled or plain,
or those of the tree BENCH_SOURCE.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if "BENCH_SOURCE" in os.environ:
    sys.path.insert(0, os.environ["BENCH_SOURCE"])
sys.path.append(str(Path(__file__).resolve().parent.parent))

from mqttbroker.cli import main as cli  # noqa: E402
from mqttbroker.net import worker_pool  # noqa: E402

worker_pool.COMMAND = [os.environ["BENCH_LINK_LOAD"], "--hand-over", os.environ["BENCH_LINKS"]]
sys.exit(cli.main(sys.argv[1:]))
