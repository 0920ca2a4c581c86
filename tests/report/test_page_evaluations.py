"""The view of evaluations in a real browser: what `rlsys eval` has measured, and several runs beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from rlsys.data.trajectory import Action
from rlsys.observe.run_folder import open_run
from rlsys.report.report_page import write_report
from tests.apps.evaluation.answers import SEARCH, answered, asked, turn
from tests.report.made import Maker, Size, add_measured, made_run
from tests.report.test_page import at, bare_run
from tests.support.browser import DESKTOP, PHONE, Look, browser, look

__all__ = ["browser", "look"]

SMALL = Size(steps=1, groups=1)
FAILED = turn(Action.SEARCH, "x", "Search failed", error="no answer")


def cells(page: Page, name: str) -> list[list[str]]:
    """Texts of a table's rows, its head first."""
    rows = page.get_by_role("region", name=name, exact=True).locator("tr").all()
    return [[text.replace("\u00a0", " ").strip() for text in row.locator("th, td").all_text_contents()] for row in rows]


def test_what_was_measured_is_shown_with_its_interval(tmp_path: Path, look: Look) -> None:
    """1 of 4 has Wilson's 4.6 % to 69.9 %; one right of two answers is right by one draw of two, surely by two."""
    folder = made_run(tmp_path / "run", Maker(SMALL))
    said = ["in the Nile", None, "x", "Nile"]
    answers = [answered(asked(number, "Nile"), one, 0, SEARCH) for number, one in enumerate(said)]
    add_measured(folder, "eval", *answers, started="1")
    both = [answered(asked(1, "Nile", source=name), one, n) for name in "ab" for n, one in enumerate(["Nile", "x"])]
    add_measured(folder, "eval-2", *both, started="2", samples=2, temperature=0.5, baseline="cot", model="/m")
    opened = look(at(write_report([open_run(folder)]), "view=evaluations"))
    head, first, *others = cells(opened.page, "Measured by rlsys eval")
    assert head == [
        "folder",
        "set",
        "questions",
        "EM",
        "F1",
        "sub-EM",
        "pass@1",
        "pass@2",
        "searches",
        "engine",
        "model",
    ]
    em, f1 = "25.0 % 4.6 % to 69.9 %", "41.7 %"
    assert first == ["eval", "nq", "4", em, f1, "50.0 %", "–", "–", "1", "sglang", "hf"]
    assert [row[1:3] for row in others] == [["a", "1"], ["b", "1"], ["average", "2"]]
    how = "sglang, cot, 2 answers, temperature 0.5"
    assert {tuple(row[6:]) for row in others} == {("50.0 %", "100 %", "0", how, "/m")}
    expect(opened.page.get_by_text("EM with its 95 % interval")).to_be_visible()
    assert opened.problems == []


def test_without_a_measurement_there_is_no_table_and_without_an_evaluation_there_is_one(
    tmp_path: Path, look: Look
) -> None:
    folder = bare_run(tmp_path / "run", {"actor/entropy": 1.0})
    page = look(at(write_report([open_run(folder)]), "view=evaluations")).page
    expect(page.get_by_text("Nothing has been evaluated")).to_be_visible()
    expect(page.get_by_text("Measured by rlsys eval")).to_have_count(0)
    add_measured(folder, "eval", answered(asked(1, "a"), "a"))
    page = look(at(write_report([open_run(folder)]), "view=evaluations")).page
    expect(page.get_by_text("Nothing has been evaluated")).to_be_visible()
    expect(page.get_by_role("region", name="Measured by rlsys eval").locator("tbody tr")).to_have_count(1)


def test_failed_searches_are_said_once_for_each_set(tmp_path: Path, look: Look) -> None:
    """The average has the sum of its sets, which is not counted again."""
    folder = made_run(tmp_path / "run", Maker(SMALL))
    failed = [answered(asked(1, "a", source=name), "a", 0, FAILED) for name in "ab"]
    add_measured(folder, "eval", *failed)
    page = look(at(write_report([open_run(folder)]), "view=evaluations")).page
    expect(page.locator(".bad")).to_have_text("2 searches failed: these figures are not those of the whole search.")


def test_the_last_evaluations_of_several_runs_stand_beside_each_other(tmp_path: Path, look: Look) -> None:
    first = made_run(tmp_path / "first", Maker(Size(steps=2, groups=1)))
    row = {"step": 2, "questions": 7, "em": 0.125, "em_by_hop": {"2": 0.25}, "searches": 1.0}
    (first / "evaluations/reference_step_000002.json").write_text(json.dumps(row))
    second = made_run(tmp_path / "second", Maker(SMALL))
    row = {"step": 1, "questions": 8, "em": 0.5, "em_by_hop": {"10": 0.75, "2": 0.0}, "searches": 3.0}
    (second / "evaluations/step_000001.json").write_text(json.dumps(row))
    bare = bare_run(tmp_path / "bare", {"actor/entropy": 1.0})
    report = write_report([open_run(one) for one in (first, second, bare)], tmp_path / "all.html")
    opened = look(at(report, "view=evaluations&run=1"))
    page, name = opened.page, "The last evaluation of each run"
    assert cells(page, name) == [
        ["", "after step", "EM", "2-hop", "10-hop", "F1", "searches", "questions"],
        ["first", "2", "80.0 %", "–", "–", "80.0 %", "2", "30"],
        ["its reference policy", "2", "12.5 %", "25.0 %", "–", "–", "1", "7"],
        ["second", "1", "50.0 %", "0 %", "75.0 %", "–", "3", "8"],
        ["bare", "–", "–", "–", "–", "–", "–", "–"],
    ]
    table = page.get_by_role("region", name=name)
    expect(table.locator("[aria-current=true]")).to_have_text("second")
    table.get_by_role("link", name="first").click()
    expect(page.get_by_role("heading", name="Every evaluation of first")).to_be_visible()
    assert opened.problems == []


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_long_names_do_not_widen_the_page(tmp_path: Path, look: Look, size: tuple[int, int]) -> None:
    folder = made_run(tmp_path / "run", Maker(SMALL))
    long = "/a/quite/long/path" * 9
    add_measured(folder, "eval" + "-long" * 20, answered(asked(1, "a", source=long), "a"), model=long)
    page = look(at(write_report([open_run(folder)]), "view=evaluations"), size).page
    expect(page.get_by_role("region", name="Measured by rlsys eval")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_one_run_is_not_compared(tmp_path: Path, look: Look) -> None:
    report = write_report([open_run(made_run(tmp_path / "run", Maker(SMALL)))])
    page = look(at(report, "view=evaluations")).page
    expect(page.get_by_role("heading", name="Every evaluation", exact=True)).to_be_visible()
    expect(page.get_by_text("The last evaluation of each run")).to_have_count(0)
