"""Fixtures that open pages in a real browser.

Import both into a test module: `from tests.support.browser import browser, look`. Tests that use them are skipped if
there is no Chromium. `browser` is open for a whole module, and its event loop is then the running loop of the thread,
so asynchronous tests must be in other modules.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="Playwright is missing: pip install -r requirements/dev.txt.")

from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
DESKTOP, PHONE = (1280, 900), (390, 844)
"""Width and height in CSS pixels."""
PATIENCE_MS = 180_000
"""Time limit of each action; pages are slow on a busy machine."""
expect.set_options(PATIENCE_MS)


@dataclass(slots=True)
class Looked:
    """An open page, its errors and its network requests."""

    page: Page
    problems: list[str] = field(default_factory=list)
    """Script and console errors, including violations of the page's content policy."""
    requests: list[str] = field(default_factory=list)
    """URLs of all requests, the page's own first."""


Look = Callable[..., Looked]


def chromium() -> str | None:
    """Path of Chromium: $CHROMIUM, or the first of `NAMES` on the path; None if there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    found = chromium()
    if found is None:
        pytest.skip("There is no Chromium: install it (apt install chromium), or set CHROMIUM=/path/to/chromium.")
    with sync_playwright() as playwright:
        # Chromium has no sandbox as root; the pages are the project's own.
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def look(browser: Browser) -> Iterator[Look]:
    """Function `look(address or file, size=DESKTOP, dark=False)` that opens a page in a new browser profile."""
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
