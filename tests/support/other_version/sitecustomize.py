"""Makes the processes of a node that load this at their start speak other versions of links and logs: SPEAKS = OLDEST:NEWEST."""

from __future__ import annotations

import os

from mqttbroker.cluster import formats

if "SPEAKS" in os.environ:
    formats.SPOKEN = formats.Versions(*map(int, os.environ["SPEAKS"].split(":")))
