"""The messages of cores to each other over their links: topic filters, members of shared subscriptions, and signs of life."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from mqttbroker.codec.reason_codes import PROTOCOL_ERROR, MQTTError

TOPIC: Final = b"$core/links"

# Kinds of changes.
BEGIN: Final = 0  # everything follows; what is not among it is gone at `END`
END: Final = 1
ADD: Final = 2  # a filter
REMOVE: Final = 3
GROUP: Final = 4  # all members of a shared subscription, none if it is gone

# Flags of a member.
CONNECTED: Final = 1
AVAILABLE: Final = 2  # connected, with room in the outbox and in the in-flight window
PERSISTENT: Final = 4


class MemberState(msgspec.Struct, array_like=True, frozen=True):
    """A member of a shared subscription: CRC-32 of its client id, flags, and its unacknowledged messages."""

    client_id_hash: Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
    flags: Annotated[int, msgspec.Meta(ge=0, le=255)]
    load: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Change(msgspec.Struct, array_like=True, frozen=True):
    """``text`` is a filter, or the name and filter of a shared subscription."""

    kind: int
    text: str = ""
    members: tuple[MemberState, ...] = ()


class Update(msgspec.Struct, array_like=True, frozen=True, tag="update"):
    """Changes of the sender's filters, in order; answered by `Done`. None = the sender asks for that answer alone."""

    number: int
    changes: tuple[Change, ...]


class Done(msgspec.Struct, array_like=True, frozen=True, tag="done"):
    """The changes of an `Update` are in force, and stored where that is needed. All messages with RETAIN that were published before and
    belong to other cores are in the log."""

    number: int


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="ping"):
    """Answered by `Pong`."""


class Pong(msgspec.Struct, array_like=True, frozen=True, tag="pong"):
    pass


LinkMessage = Update | Done | Ping | Pong

encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LinkMessage).decode


def decode(payload: bytes) -> LinkMessage:
    """The message in a payload; `MQTTError` if it is none."""
    try:
        message: LinkMessage = _decode(payload)
        return message
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MQTTError(PROTOCOL_ERROR, f"not a message of a link: {error}") from None
