"""``python -m mqttbroker.worker NUMBER DESCRIPTOR``."""

import os
import sys

from mqttbroker.worker.process import main

os._exit(main(sys.argv[1:]))
