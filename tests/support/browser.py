"""A headless Chromium for tests of the dashboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WAIT = 15_000  # ms for what a page must show


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser; skips the test if none is installed (tests/interop/debian.sh installs one)."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"no browser is installed: none of {', '.join(PROGRAMS)}")
    with sync_playwright() as playwright:
        # The sandbox of Chromium does not work for root.
        launched = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield launched
        finally:
            launched.close()


class Errors:
    """What a page complains about: exceptions, and errors on its console such as violations of its policy."""

    def __init__(self, page: Page) -> None:
        self.found: list[str] = []
        page.on("pageerror", lambda error: self.found.append(f"exception: {error}"))
        page.on("console", self._console)

    def _console(self, message: Any) -> None:
        # A refused or failed request is a console error that no page can prevent.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.found.append(f"console: {message.text}")
