"""A new password for a user, from the terminal or standard input."""

from __future__ import annotations

import getpass
import sys


def ask_password(user: str) -> bytes:
    """A new password: typed twice on a terminal, else the first line of standard input. Raises ValueError."""
    if sys.stdin.isatty():
        password = getpass.getpass(f"Password for {user}: ").encode()
        if getpass.getpass("Again: ").encode() != password:
            raise ValueError("the two passwords differ")
    else:
        password = sys.stdin.buffer.readline().rstrip(b"\r\n")
    if not password:
        raise ValueError("the password is empty")
    return password
