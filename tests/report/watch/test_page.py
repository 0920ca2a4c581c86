"""The live page in a browser: it follows the run, says what the groups do, and runs nothing that a run has written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.watch.test_server import watching
from tests.support.browser import DESKTOP, Look, browser, look
from tests.support.growing_run import EVIL, add_evaluation, add_step, write_run, write_status
from tests.support.ports import free_port

__all__ = ["browser", "look"]

pytestmark = pytest.mark.slow


def test_the_page_follows_a_run_from_before_its_first_step_to_its_end(tmp_path: Path, look: Look) -> None:
    folder = write_run(tmp_path / "run")
    with watching(folder) as (address, _):
        looked = look(address, DESKTOP)
        page = looked.page
        page.wait_for_selector(".live:has-text('The run has not begun yet.')")
        write_status(folder, step=0)
        page.wait_for_selector(".live:has-text('actor waits for log-probs and values')")
        add_step(folder, 1)
        add_evaluation(folder, 0, 0.125)
        page.wait_for_selector("main:has-text('12.5 %')")
        write_status(folder, step=1, states={EVIL: {"text": EVIL, "since": 0}})
        page.wait_for_selector(".live:has-text('onerror')")
        assert page.locator("img").count() == 0, "text of others stays text"
        write_status(folder, step=1, ended="failed: engine 0 has died")
        page.wait_for_selector(".badge:has-text('failed: engine 0 has died')")
        page.wait_for_selector(".live:has-text('The run is over')")
        assert looked.problems == []
        assert {request.startswith(address) for request in looked.requests} == {True}


def test_a_step_made_while_the_server_was_away_is_shown(tmp_path: Path, look: Look) -> None:
    folder = write_run(tmp_path / "run")
    add_step(folder, 1, **{"time/step": 3.0})
    write_status(folder)
    port = str(free_port())
    with watching(folder, "--port", port) as (address, _):
        page = look(address).page
        page.wait_for_selector(".tiles:has-text('mean of 1 step')")
    page.wait_for_selector(".live:has-text('The server does not answer')")
    add_step(folder, 2, **{"time/step": 3.0})
    with watching(folder, "--port", port):
        page.wait_for_selector(".tiles:has-text('mean of 2 steps')")
        page.wait_for_selector(".live:has-text('step 1 of 9')")
