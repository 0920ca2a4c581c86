"""A real browser for tests of pages.

`from tests.support.browser import browser, look` in a test module gives two fixtures; where there is no Chromium the tests that
use them are skipped, with the reason. `browser` lasts for one module: while it is open its event loop is the
running one of the thread, so asynchronous tests belong into other modules.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (requirements/dev.txt).")

from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
DESKTOP, PHONE = (1280, 900), (390, 844)
"""Width and height in CSS pixels."""
PATIENCE_MS = 180_000
"""On a busy machine a page takes its time."""
expect.set_options(PATIENCE_MS)


@dataclass(slots=True)
class Looked:
    """An open page, what went wrong on it, and what it asked the network for."""

    page: Page
    problems: list[str] = field(default_factory=list)
    """Errors of scripts and on the console, refusals by the page's policy among them."""
    requests: list[str] = field(default_factory=list)
    """Addresses, the page's own first."""


Look = Callable[..., Looked]


def chromium() -> str | None:
    """Where Chromium is: $CHROMIUM, or the first of `NAMES` on the path."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium without a window."""
    found = chromium()
    if found is None:
        pytest.skip(f"No Chromium: none of {', '.join(NAMES)} is on the path, and $CHROMIUM is not set.")
    with sync_playwright() as playwright:
        # As root, Chromium's sandbox cannot be had; the pages are this project's own.
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def look(browser: Browser) -> Iterator[Look]:
    """`look(address or file, size=DESKTOP, dark=False)` opens a page in a profile of its own."""
    contexts = []

    def open_page(what: str | Path, size: tuple[int, int] = DESKTOP, dark: bool = False) -> Looked:
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        looked = Looked(context.new_page())

        def asked(request: Request) -> None:
            looked.requests.append(request.url)

        looked.page.on("request", asked)
        looked.page.on("pageerror", lambda error: looked.problems.append(str(error)))
        looked.page.on("console", lambda said: looked.problems.append(said.text) if said.type == "error" else None)
        looked.page.goto(what.resolve().as_uri() if isinstance(what, Path) else what)
        return looked

    yield open_page
    for context in contexts:
        context.close()
