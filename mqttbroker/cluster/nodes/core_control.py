"""The messages between the node process and the core process of a shard: one object of JSON per line, over a socketpair.

The node sends `Start`, then commands. The core sends a `Status` at each change and once in `STATUS_INTERVAL`, which is its sign of life.
Both trust each other: they are processes of one user and one program.
"""

from __future__ import annotations

import base64
import pickle
import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from mqttbroker.config.settings import Settings
from mqttbroker.net.link_address import LinkAddress

STATUS_INTERVAL: Final = 1.0  # seconds
MAX_LINE: Final = 16_777_216  # bytes

# States of a core.
STARTING: Final = "starting"
STANDBY: Final = "standby"
TAKING_OVER: Final = "taking over"
OWNER: Final = "owner"
CHECKING: Final = "checking"  # the owner, but the outcome of an append is not known
RELEASING: Final = "releasing"  # it disconnects its clients
RELEASED: Final = "released"  # it ends
FENCED: Final = "fenced"  # it ends


def core_command(shard: int, descriptor: int) -> list[str]:
    """The command of a core process, which inherits its end of the socketpair."""
    return [sys.executable, "-P", "-m", "mqttbroker.node.shard_process", str(shard), str(descriptor)]


def link_port(first: int, shard: int) -> int:
    """The port for links to the core of a shard, behind the node's ``first`` one."""
    return first + 1 + shard


def http_port(first: int | None, shard: int) -> int | None:
    """The port for HTTP of the core of a shard; 0 stays any."""
    return first + 1 + shard if first else first


class CoreSetup(NamedTuple):
    """Everything a core is started with: the settings of its node as they were loaded, the id of the cluster in records, the address that other nodes
    use for links to this node, a digest of the settings that all nodes have in common, and the node's key of links."""

    settings: Settings
    cluster: bytes
    node: str
    link_address: str
    digest: str
    link_key: str

    def encode(self) -> str:
        return base64.b64encode(pickle.dumps(self)).decode("ascii")

    @staticmethod
    def decode(text: str) -> CoreSetup:
        setup: CoreSetup = pickle.loads(base64.b64decode(text))
        return setup


class Start(msgspec.Struct, tag="start", tag_field="do"):
    """The first line: ``setup`` is an encoded `CoreSetup`. The core follows its log from then on."""

    setup: str


class Standby(msgspec.Struct, tag="standby", tag_field="do"):
    """Follow the log, and do not take the shard over; an owner goes on as it is."""


class Own(msgspec.Struct, tag="own", tag_field="do"):
    """Take the shard over; a living owner has ``patience`` seconds to release it."""

    patience: float = 0.0


class Release(msgspec.Struct, tag="release", tag_field="do"):
    """Disconnect the clients, commit everything, release the shard, and end. A standby ends at once."""


class Owners(msgspec.Struct, tag="directory", tag_field="do"):
    """The cores that own the shards, as far as they are known: where to, and with which key, cores have links, by shard; and the number
    of nodes."""

    shards: int
    owners: dict[int, LinkAddress]
    nodes: int = 0


class Reload(msgspec.Struct, tag="reload", tag_field="do"):
    """Use the settings of an encoded `CoreSetup` as SIGHUP would."""

    setup: str


class Snapshot(msgspec.Struct, tag="snapshot", tag_field="do"):
    """Write a snapshot of the shard's tables soon."""


class Stop(msgspec.Struct, tag="stop", tag_field="do"):
    """As `Release`."""


Command = Start | Standby | Own | Release | Owners | Reload | Snapshot | Stop


class Status(msgspec.Struct, omit_defaults=True):
    """How a core is doing.

    ``state`` is one of those from `STARTING` to `FENCED`. ``problem`` is why it does not serve, or why clients should not connect now. ``lag`` is the number of
    records of its own log that it has not read, ``end`` the offset behind the last one that it has; ``bus_lag`` the same of all other
    logs; ``links_missing`` are the shards with an owner to whose core there is no link; ``stream_problem`` is why messages are not copied
    to the topics of streams; ``epoch`` is the takeover in force; ``snapshots`` counts those that this process has written. ``http_port`` is None without HTTP.
    """

    state: str
    problem: str = ""
    lag: int = 0
    end: int = 0
    epoch: int = -1
    epoch_changes: int = 0
    bus_lag: int = 0
    links_missing: list[int] = []
    stream_problem: str = ""
    clients: int = 0
    sessions: int = 0
    http_port: int | None = None
    resident: int = 0
    snapshots: int = 0
    problems: list[str] = []  # of the last reload


_encode = msgspec.json.encode
_decode_command = msgspec.json.Decoder(Command).decode
_decode_status = msgspec.json.Decoder(Status).decode


def encode_line(message: Command | Status) -> bytes:
    return _encode(message) + b"\n"


class Lines:
    """Cuts received bytes into lines. Raises ValueError for a line that is too long."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            raise ValueError("a line is too long")
        return iter(lines)


def decode_command(line: bytes) -> Any:
    """A `Command`. Raises ValueError."""
    return _decoded(_decode_command, line)


def decode_status(line: bytes) -> Status:
    """Raises ValueError."""
    status: Status = _decoded(_decode_status, line)
    return status


def _decoded(decode: Any, line: bytes) -> Any:
    try:
        return decode(line)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
