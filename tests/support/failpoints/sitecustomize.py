"""Makes a call of the process that loads this at its start fail: FAILPOINT = PROGRAM:CALL:PATTERN:NUMBER:HOW.

From the NUMBER-th call of os.CALL on whose first argument, a path or what a descriptor leads to, fits PATTERN the
process is killed (HOW is "kill") or the call fails (an errno); only in a process whose command line names PROGRAM.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import Any


def arm(program: str, call: str, pattern: str, number: str, how: str) -> None:
    if program not in " ".join(sys.orig_argv):
        return
    real = getattr(os, call)
    left = int(number)

    def guarded(target: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal left
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        if re.search(pattern, path):
            left -= 1
            if left <= 0 and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if left <= 0:
                raise OSError(int(how), os.strerror(int(how)), path)
        return real(target, *arguments, **options)

    setattr(os, call, guarded)


if "FAILPOINT" in os.environ:
    arm(*os.environ["FAILPOINT"].split(":"))
