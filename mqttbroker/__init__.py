"""The MQTT broker. Importing the package costs nothing: no event loop, no third-party module is loaded here."""

from __future__ import annotations

__version__ = "0.1.0"
