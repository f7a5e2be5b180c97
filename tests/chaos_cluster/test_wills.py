"""`judge_wills` counts the wills of broken connections, and those that must not come."""

from __future__ import annotations

from chaos.device import Link
from chaos.record import PROTOCOL, Record

from chaos_cluster.wills import WILLS, WILLS_OF_LIVING, Mortal, complete, judge_wills
from mqttbroker.codec.packets import Connack, Disconnect


def test_each_will_of_a_broken_connection_is_counted() -> None:
    record = Record((WILLS, WILLS_OF_LIVING))
    mortal = Mortal("mortal", 5, record, ("127.0.0.1", 1883), 2)
    wills = {
        name: record.send("mortal", f"will/mortal/{name}", qos, False, 40)
        for name, qos in {"once": 2, "again at 1": 1, "never": 1, "twice": 2, "alive": 2, "early": 2}.items()
    }
    mortal.broken = [wills[name] for name in ("once", "again at 1", "never", "twice")]
    mortal.kept = [wills[name] for name in ("alive", "early")]
    for name in ("once", "again at 1", "again at 1", "twice", "twice", "early"):
        record.deliver("watcher", wills[name], wills[name].qos)
    assert not complete([mortal], record.seen["watcher"])
    judge_wills(record, [mortal], "watcher")
    assert record.checked == {WILLS: 4, WILLS_OF_LIVING: 2}
    assert record.faults == {
        WILLS: [f"{wills['never']} was delivered 0 times", f"{wills['twice']} was delivered 2 times"],
        WILLS_OF_LIVING: [f"{wills['early']} was delivered 1 times"],
    }
    assert complete([mortal], record.seen["watcher"] | {wills["never"].number})


async def test_a_connack_that_comes_when_the_run_ends_is_no_fault() -> None:
    record = Record((PROTOCOL,))
    mortal = Mortal("mortal", 5, record, ("127.0.0.1", 1883), 2)
    link = Link(mortal, 0.0, 65535)
    link.connack.cancel()
    mortal.handle(link, Connack(False, 0))
    assert not record.faults[PROTOCOL] and not link.up
    again = Link(mortal, 0.0, 65535)
    for _ in range(2):
        mortal.handle(again, Connack(False, 0))
    assert record.faults[PROTOCOL] == ["mortal was sent CONNACK with reason code 0x0"]


async def test_only_a_disconnect_may_say_that_a_commit_is_undecided() -> None:
    record = Record((PROTOCOL,))
    record.undecided = frozenset((0x80,))
    mortal = Mortal("mortal", 5, record, ("127.0.0.1", 1883), 2)
    link = mortal.link = Link(mortal, 0.0, 65535)
    mortal.handle(link, Disconnect(0x80))
    assert not record.faults[PROTOCOL]
    mortal.handle(link, Disconnect(0x82))
    mortal.handle(link, Connack(False, 0x80))
    assert record.faults[PROTOCOL] == ["mortal was sent Disconnect with reason code 0x82", "mortal was sent CONNACK with reason code 0x80"]
