"""The first packet of a client: its bytes are gathered until the client id is known.

A packet that is no valid CONNECT is for any core: each answers it as a broker does that clients connect to.
"""

from __future__ import annotations

from typing import cast

from mqttbroker.codec.packets import Connect, decode_body
from mqttbroker.codec.reason_codes import CONNECT, MQTTError

_FIRST_BYTE = CONNECT << 4
_LENGTH_BYTES = 4


class FirstPacket:
    """The bytes of one client, until `add` returns true.

    ``connect`` is then the CONNECT, or None if a core will refuse what came. It is decoded when it is whole, at most
    ``max_connect_size`` bytes. It is ``alone`` if nothing came behind it.
    """

    def __init__(self, max_connect_size: int) -> None:
        self.connect: Connect | None = None
        self.alone = False
        self.data = b""  # everything received, once `add` has returned true
        self._max_connect_size = max_connect_size
        self._gathered = bytearray()
        self._needed = 2  # bytes before the packet is looked at again

    @property
    def size(self) -> int:
        """Bytes gathered."""
        return len(self._gathered) + len(self.data)

    def add(self, data: bytes) -> bool:
        """Add received bytes; whether a core can have them now."""
        if self._gathered:
            self._gathered += data
            if len(self._gathered) < self._needed:
                return False
            data = bytes(self._gathered)
        if not self._is_done(data):
            if not self._gathered:
                self._gathered += data
            return False
        self._gathered = bytearray()
        self.data = data
        return True

    def _is_done(self, data: bytes) -> bool:
        if len(data) < 2:
            return False
        if data[0] != _FIRST_BYTE:
            return True
        remaining = 0
        for index, byte in enumerate(data[1 : 1 + _LENGTH_BYTES]):
            remaining |= (byte & 127) << 7 * index
            if byte < 128:
                body = index + 2
                if byte == 0 and index > 0:
                    return True  # [MQTT-1.5.5-1]
                break
        else:
            self._needed = len(data) + 1
            return len(data) > _LENGTH_BYTES  # a Remaining Length of more than 4 bytes
        end = body + remaining
        if end > self._max_connect_size:
            return True
        if end > len(data):
            self._needed = end
            return False
        try:
            self.connect = cast(Connect, decode_body(CONNECT, 0, data, body, end, 0))
            self.alone = end == len(data)
        except MQTTError:
            pass
        return True
