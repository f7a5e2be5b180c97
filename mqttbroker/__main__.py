"""``python -m mqttbroker``: the same as the ``mqttbroker`` command."""

from __future__ import annotations

import sys

from mqttbroker.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
