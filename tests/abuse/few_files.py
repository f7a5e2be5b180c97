"""The `mqttbroker` command with a limit of 150 open files."""

from __future__ import annotations

import resource
import sys

from mqttbroker.cli.main import main

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (150, 150))
    sys.exit(main())
