"""The allocator keeps the memory of freed buffers."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.one_build

BUFFERS = """
import resource
from mqttbroker.system.allocator import keep_freed_memory
keep = {keep}
assert not keep or keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        held = [letter * 8_000_000 for letter in (b"a", b"b", b"c")]
        del held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_buffers_are_reused() -> None:
    def faults(keep: bool) -> int:
        code = BUFFERS.format(keep=keep)
        return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)

    assert 10 * faults(True) < faults(False)
