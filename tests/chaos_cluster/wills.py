"""Devices with wills, and the check that the will of each connection that ended without DISCONNECT is published once."""

from __future__ import annotations

import asyncio
from collections import Counter

from chaos.device import Address, Device
from chaos.record import Record, Sent

from mqttbroker.codec.packets import Will

WILLS = "wills of broken connections that are missing, or were published twice"
WILLS_OF_LIVING = "wills of clients that are connected, or have sent DISCONNECT"
WATCHED = "will/#"
PAUSE = 0.1  # seconds between two attempts to connect


class Mortal(Device):
    """Connects to one node, and again when the connection ends. Each connection has a will of its own."""

    def __init__(self, name: str, version: int, record: Record, address: Address, qos: int) -> None:
        super().__init__(name, version, record, False)
        self.address = address
        self.qos = qos
        self.lives = 0
        self.broken: list[Sent] = []  # wills that are to be published
        self.kept: list[Sent] = []  # wills that must not be published

    async def live(self) -> None:
        """Connect again and again, until the task is cancelled."""
        while True:
            self.lives += 1
            message = self.record.send(self.name, f"will/{self.name}/{self.lives}", self.qos, False, 40)
            self.will = Will(message.topic, message.payload, message.qos)
            link = await self.connect(self.address)
            if link is None:
                # The node may have got the CONNECT, so this will may be published or not.
                await asyncio.sleep(PAUSE)
                continue
            self.kept.append(message)
            await link.closed.wait()
            self.broken.append(self.kept.pop())

    async def finish(self) -> None:
        """Behind `live`: disconnect in order."""
        if self.up and await self.ping():
            self.leave()
        elif self.kept:
            self.broken.append(self.kept.pop())


def complete(mortals: list[Mortal], seen: set[int]) -> bool:
    return all(message.number in seen for mortal in mortals for message in mortal.broken)


def judge_wills(record: Record, mortals: list[Mortal], watcher: str) -> None:
    """Check what the persistent subscriber ``watcher`` got at QoS 2; a will at QoS 1 may come twice."""
    times = Counter(number for number, _ in record.deliveries.get(watcher, []))
    for mortal in mortals:
        for message in mortal.broken:
            record.checked[WILLS] += 1
            if not times[message.number] or (message.qos == 2 and times[message.number] > 1):
                record.fault(WILLS, f"{message} was delivered {times[message.number]} times")
        for message in mortal.kept:
            record.checked[WILLS_OF_LIVING] += 1
            if times[message.number]:
                record.fault(WILLS_OF_LIVING, f"{message} was delivered {times[message.number]} times")
