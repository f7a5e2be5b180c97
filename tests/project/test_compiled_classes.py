"""Objects of compiled classes are freed without damage to memory.

The tests run in a Python of their own that checks the bytes around each object (``PYTHONMALLOC=debug``): damaged bytes
end it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CLASSES = """
from mqttbroker.core.client.outgoing import Outgoing
from sessions.journal import Entry
from sessions.message import Message
from sessions.window import AWAIT_PUBACK, Unpersisted

message = Message("a", b"payload", 0, False, b"", "", 0, 0)
"""

# CPython ends the nesting of deallocations at 50.
NESTED = (
    CLASSES
    + """
for make in (lambda: message.copy(), lambda: Entry(1, message, 1, False, b""), lambda: Unpersisted(AWAIT_PUBACK)):
    for depth in range(120):
        nested = make()
        for _ in range(depth):
            nested = [nested]
        del nested

spare = Outgoing(b"a", message, 0)  # one object of its class is kept for reuse
for depth in range(120):
    nested, used = Outgoing(b"a", message, 0), Outgoing(b"a", message, 0)
    for _ in range(depth):
        nested = [nested]
    del used
    del nested
"""
)

SCANNED = (
    CLASSES
    + """
from topic_matcher.topic_tree import TopicTree

tree = TopicTree()
for number in range(1000):
    tree.set(str(number), message.copy())
scan = tree.scan("#")
assert len(scan.read(1)) == 1
for number in range(1000):
    tree.pop(str(number))
del scan
"""
)

WEAK = """
import weakref

from mqttbroker.auth.acl import AclError
from mqttbroker.auth.permissions import PermissionsError
from mqttbroker.codec.reason_codes import MQTTError

for make in (lambda: MQTTError(0x80, "refused"), lambda: AclError("line 1"), lambda: PermissionsError("no list")):
    for _ in range(100):
        error = make()
        seen = weakref.ref(error)
        del error
        assert seen() is None
"""


@pytest.mark.parametrize("program", [NESTED, SCANNED, WEAK], ids=["nested", "removed-under-a-scan", "weak-references"])
def test_objects_are_freed_without_damage(program: str) -> None:
    environment = {**os.environ, "PYTHONMALLOC": "debug"}
    done = subprocess.run([sys.executable, "-P", "-c", program], env=environment, capture_output=True, timeout=50)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
