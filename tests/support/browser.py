"""A headless Chromium for tests of the dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from support.tools import any_program, lacking

WAIT = 15_000  # ms for what a page must show


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser; without one the test is skipped, or fails in CI."""
    program = any_program("chromium")
    if program is None:
        lacking("needs a Chromium: apt-get install chromium-headless-shell")
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
