"""Standard input, output and error of the process."""

from __future__ import annotations

import os
import sys


def open_standard_files() -> None:
    """Open those that were closed when the process started on the null device.

    Else the next socket or file would get their descriptor: what is printed would end in a data file, and libuv ends the process
    when it closes one of the three. Processes that this one starts inherit them.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null == descriptor:
                os.set_inheritable(null, True)
            else:
                os.dup2(null, descriptor)
                os.close(null)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)
