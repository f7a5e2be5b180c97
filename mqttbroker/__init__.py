"""The MQTT broker. Importing the package loads no event loop and no third-party module."""

from __future__ import annotations

from importlib.util import find_spec

__version__ = "0.9.0"


def build_kind() -> str:
    """``"compiled"`` if the hot path is compiled by mypyc, ``"plain"`` if it is interpreted."""
    spec = find_spec("mqttbroker.codec.packets")
    return "compiled" if spec is not None and not str(spec.origin).endswith(".py") else "plain"
