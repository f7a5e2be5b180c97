"""The targets by name, and what each of them has."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from random import Random
from zlib import crc32

CORPUS = Path(__file__).parent.parent / "corpus"
PACKAGES = ["mqttbroker", "sessions", "topic_matcher", "bridge_spark"]  # whose coverage guides the search

# Module and class of each target.
TARGETS = {
    "packets-v3.1": "packets.Version3",
    "packets-v3.1.1": "packets.Version4",
    "packets-v5": "packets.Version5",
    "conversation": "packets.Conversations",
    "websocket-upgrade": "websocket.Upgrade",
    "websocket-frames": "websocket.Frames",
    "proxy": "proxy.Proxy",
    "config": "files.Configuration",
    "acl": "files.AccessRules",
    "passwords": "files.PasswordFile",
    "segments": "log_files.Segments",
    "sealed": "log_files.Sealed",
    "scram": "scram.Scram",
    "http": "http.Http",
    "topics": "topics.Topics",
    "jwt": "tokens.Tokens",
    "link-lines": "cluster_links.Lines",
    "link-frames": "cluster_links.Frames",
    "link-messages": "cluster_links.Messages",
}


class Target(ABC):
    """One target; ``directory`` is an empty directory for its files."""

    modules: tuple[str, ...]  # whose lines the reports count
    max_bytes = 1024  # of an input
    words: tuple[bytes, ...] = ()  # for the mutations of the fuzzer

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @abstractmethod
    def check(self, data: bytes) -> None:
        """Raises Finding, or any exception that escaped, if the tested code fails."""

    def seeds(self) -> Iterator[bytes]:
        """Inputs to begin with, besides those of the corpus."""
        yield b""

    def changed(self, data: bytes, random: Random) -> bytes:
        """``data`` with a change that keeps its structure; the same data if there is none."""
        return data

    def close(self) -> None:
        """Release threads and files."""


def make(name: str, directory: Path) -> Target:
    """The target of that name. Modules are imported now, so that the fuzzer can instrument them."""
    module, _, kind = TARGETS[name].partition(".")
    made: Target = getattr(importlib.import_module(f"fuzz.guided.{module}"), kind)(directory)
    return made


def pieces_of(data: bytes) -> list[bytes]:
    """The data in one piece, in two, or byte by byte, depending on the data alone."""
    choice = crc32(data)
    if choice % 4 == 0:
        return [data[at : at + 1] for at in range(len(data))]
    at = (choice >> 8) % (len(data) + 1) if choice % 4 == 1 else 0
    return [piece for piece in (data[:at], data[at:]) if piece]
