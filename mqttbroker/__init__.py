"""The MQTT broker. Importing the package costs nothing: no event loop, no third-party module is loaded here."""

from __future__ import annotations

from importlib.util import find_spec

__version__ = "0.1.0"


def build_kind() -> str:
    """``"compiled"`` when the hot path runs as mypyc's machine code, ``"plain"`` when it is interpreted."""
    spec = find_spec("mqttbroker.codec.packets")
    return "compiled" if spec is not None and not str(spec.origin).endswith(".py") else "plain"
