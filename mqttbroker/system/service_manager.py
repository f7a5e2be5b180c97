"""Notifications to the service manager that started the broker, as sd_notify(3) sends them to systemd."""

from __future__ import annotations

import array
import asyncio
import logging
import os
import socket
import time
from collections.abc import MutableMapping, Sequence

log = logging.getLogger("mqttbroker")


_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "FDSTORE")
STORED_AT_ONCE = 100  # sockets in one message; the kernel takes 253


class ServiceManager:
    """Sends the broker's state to the datagram socket that the variable NOTIFY_SOCKET names; without it does nothing.

    The variables are removed from ``environ`` and are in ``variables``, because they are not for the broker's own child
    processes. A message that cannot be sent is logged once, and never keeps the broker from its work.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self.variables = {name: environ.pop(name) for name in _VARIABLES if name in environ}
        address = self.variables.get("NOTIFY_SOCKET", "")
        # A name that begins with "@" is in Linux' abstract namespace.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        microseconds = self.variables.get("WATCHDOG_USEC", "")
        process = self.variables.get("WATCHDOG_PID", "")
        # systemd 254 and newer say how many descriptors they keep.
        self.keeps_sockets = bool(address) and self.variables.get("FDSTORE", "0") != "0"
        self._watchdog = 0.0  # seconds in which the service manager expects a sign of life; 0 = never
        if microseconds.isdecimal() and process in ("", str(os.getpid())):
            self._watchdog = int(microseconds) / 1_000_000
        self._failed = False

    def ready(self) -> None:
        """The broker serves clients: it has started, or a reload has ended."""
        self._send("READY=1")

    def reloading(self) -> None:
        """A reload begins; `ready` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The broker begins to stop."""
        self._send("STOPPING=1")

    def store(self, name: str, descriptors: Sequence[int]) -> None:
        """Have the manager keep these listening sockets, for the next start of the broker, in the place of all that it
        keeps under this name."""
        if not self.keeps_sockets:
            return
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")
        for first in range(0, len(descriptors), STORED_AT_ONCE):
            self._send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", descriptors[first : first + STORED_AT_ONCE])

    async def keep_alive(self) -> None:
        """Send signs of life from the event loop, so that a broker whose loop hangs is started again."""
        while self._address and self._watchdog:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog / 2)

    def _send(self, message: str, descriptors: Sequence[int] = ()) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
                sender.sendmsg([message.encode()], rights, 0, self._address)
        except OSError as error:
            if not self._failed:
                log.warning("event=service_manager_not_notified reason=%s", error.strerror or error)
            self._failed = True
