"""Tests of the report and the live page in a real browser: views, interaction, and hostile text."""

import re
from pathlib import Path

import numpy as np
import pytest

from rlsys.observe.run_folder import RunFolder, open_run
from rlsys.report.report_page import write_report
from tests.report.watch.watching import watching
from tests.support.answers import answered, asked
from tests.support.browser import DESKTOP, PHONE, Look, browser, expect, look
from tests.support.growing_run import add_evaluation, add_step, write_run, write_status
from tests.support.made_run import Maker, Size, add_faults, add_measured, made_run

__all__ = ["browser", "look"]

slow = pytest.mark.slow

VIEWS = ("overview", "curves", "time", "tokens", "trajectories", "evaluations", "setup")
EVIL = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=1">',
    "</script><script>document.title='owned'</script>",
    "<!--<script>",
    "\x1b[31m\u202eevil\u2066\x00\ud800",
    "javascript:document.title='owned'",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return open_run(made_run(tmp_path_factory.mktemp("runs") / "first"))


@pytest.fixture(scope="module")
def report(run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([run], tmp_path_factory.mktemp("report") / "report.html")


def at(report: Path, where: str) -> str:
    return f"{report.resolve().as_uri()}#{where}"


@slow
@pytest.mark.parametrize(("size", "dark"), [(DESKTOP, False), (PHONE, True)], ids=["desktop", "phone, dark"])
def test_every_view_opens_directly_and_fits_the_screen(
    report: Path, look: Look, size: tuple[int, int], dark: bool
) -> None:
    opened = look(report, size, dark)
    page = opened.page
    for view in VIEWS:
        page.goto("about:blank")
        page.goto(at(report, f"view={view}"))
        expect(page.get_by_role("navigation", name="Views").locator("[aria-current=page]")).to_have_text(
            view.capitalize()
        )
        expect(page.locator("#main > *").first).to_be_visible()
        expect(page.locator(".note.bad")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} is too wide"
    assert opened.problems == []
    assert set(opened.requests) == {report.resolve().as_uri()}, "the page may load nothing else"


@slow
def test_filters_select_trajectories_and_stay_in_the_address(run: RunFolder, report: Path, look: Look) -> None:
    kept = list(run.trajectories())
    page = look(at(report, "view=trajectories")).page
    found = page.locator("output")
    expect(found).to_contain_text(f"{len(kept)} of {len(kept)}")
    page.locator("#f-right").select_option("0")
    page.locator("#f-to").fill("1")
    wrong = sum(not one.exact and one.step == 1 for one in kept)
    expect(found).to_contain_text(f"{wrong} of {len(kept)}")
    expect(page.locator("#results .card")).to_have_count(wrong)
    page.reload()
    expect(found).to_contain_text(f"{wrong} of {len(kept)}")
    page.get_by_role("button", name="reset").click()
    page.locator("#f-q").fill("train:2-3")
    expect(found).to_contain_text(f"4 of {len(kept)}")


@slow
def test_trajectory_is_shown_token_by_token(run: RunFolder, report: Path, look: Look) -> None:
    number = 21
    one = list(run.trajectories())[number]
    opened = look(at(report, f"trajectory={number}"))
    page = opened.page
    expect(page.locator(".tokens")).to_be_visible()
    trained = zip(one.pieces, one.loss_mask[one.prompt_length :], strict=True)
    assert page.locator(".tokens .tok").all_text_contents() == [piece for piece, own in trained if own]
    page.get_by_role("radio", name="ratio").check()
    page.locator(".tokens").press("ArrowRight")
    place = int(np.flatnonzero(one.loss_mask)[0])
    ratio = np.exp(float(one.old_logprobs[place]) - float(one.rollout_logprobs[place]))
    tip = page.locator("#tip")
    expect(tip).to_contain_text(f"{ratio:.4f}"[:5])
    expect(tip).to_contain_text(str(one.token_ids[place]))
    assert "colour=ratio" in page.url
    page.get_by_label("next trajectory").click()
    expect(page).to_have_url(re.compile(rf"trajectory={number + 1}\b"))
    assert "colour=ratio" in page.url
    page.go_back()
    expect(page).to_have_url(re.compile(rf"trajectory={number}\b"))
    assert opened.problems == []


@slow
def test_faults_have_a_table_and_mark_their_steps(tmp_path: Path, look: Look) -> None:
    run = made_run(tmp_path / "run", Maker(Size(steps=5)))
    add_faults(run, part=EVIL[0], detail="; ".join(EVIL))
    opened = look(write_report([open_run(run)]))
    page = opened.page
    page.get_by_role("link", name=re.compile("3 faults: 1 recovered within 12.5.s, 1 given up, 1 not over")).click()
    rows = page.get_by_role("region", name="Faults").locator("tbody tr")
    expect(rows).to_have_count(3)
    for row, text in zip(rows.all(), ("restarted at version 1", "given up", "not over"), strict=True):
        expect(row).to_contain_text(text)
    expect(rows.first).to_contain_text(EVIL[0])
    expect(page.locator(".bar .mark")).to_have_count(3)
    marked = page.locator(".bar", has=page.locator(".mark"))
    labels = [bar.get_attribute("aria-label") or "" for bar in marked.all()]
    assert [label.split(",")[0] for label in labels] == ["step 1", "step 2", "step 3"]
    assert page.title() != "owned"
    assert opened.problems == []


def test_untrusted_text_stays_text(tmp_path: Path, look: Look) -> None:
    folder = made_run(
        tmp_path / "<img src=x onerror=alert(1)>\u202e\x1b", Maker(Size(steps=1), words=EVIL), name="</script><b>"
    )
    add_measured(folder, f"eval-{EVIL[5]}<b>", answered(asked(1, "a", source=EVIL[1]), "a"), model=EVIL[0])
    report = write_report([open_run(folder)], tmp_path / "evil.html")
    for view in (*VIEWS[:4], "trajectories&trajectory=1", *VIEWS[5:]):
        opened = look(at(report, f"view={view}"))
        page = opened.page
        expect(page.locator("#main > *").first).to_be_visible()
        if "trajectory" in view:
            page.locator(".tok").first.wait_for()
            assert "\\u202e" in page.locator(".tokens").text_content()
        if view == "evaluations":
            page.locator(".answers summary").first.click()
            expect(page.get_by_role("region", name="Measured by rlsys eval")).to_contain_text(EVIL[1])
        assert page.locator("img:not([role]), iframe, #page script, b b").count() == 0
        assert "owned" not in page.title()
        assert not set(page.title()) & {"\u202e", "\x1b"}
        text = page.locator("body").inner_text()
        assert not set(text) & {"\u202e", "\u2066", "\x1b", "\x00"}
        assert opened.problems == []


@slow
def test_live_page_follows_a_run_from_before_its_first_step_to_its_end(tmp_path: Path, look: Look) -> None:
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
        write_status(folder, step=1, states={EVIL[1]: {"text": EVIL[1], "since": 0}})
        page.wait_for_selector(".live:has-text('onerror')")
        assert page.locator("img").count() == 0, "states must stay text"
        write_status(folder, step=1, ended="failed: engine 0 has died")
        page.wait_for_selector(".badge:has-text('failed: engine 0 has died')")
        page.wait_for_selector(".live:has-text('The run is over')")
        assert looked.problems == []
        assert {request.startswith(address) for request in looked.requests} == {True}
