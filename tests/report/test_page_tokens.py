"""Tokens and environment in the report, in a real browser: how large each cause of drift is, and runs side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from playwright.sync_api import Page

from rlsys.observe.environment import Life
from rlsys.observe.kept import Kept, write_kept
from rlsys.observe.run_folder import open_run
from rlsys.report.report_page import write_report
from tests.report.audit.episodes import CODEC, POLICY, TOKENIZER, played
from tests.support.browser import DESKTOP, PHONE, Look, browser, look

__all__ = ["browser", "look"]

PARIS = CODEC.encode("Paris")
LETTERS = [token for letter in "Paris" for token in CODEC.encode(letter)]
ONE_CUT_OTHERWISE = ([(PARIS, "\n")] * 3 + [(LETTERS, "\n")], (1, 2, POLICY, POLICY))
"""Turns of versions 1, 2 and 3, the trained one, as they are trained, and one that is not."""
APART = {1: 0.5, 2: -0.25, POLICY: 0.125}
TURN = -1.5


def trained(turns: Sequence[tuple[list[int], str]], versions: Sequence[int], apart: dict[int, float] = APART) -> Kept:
    """An episode whose tokens as drawn are off by `apart` of their version, and whose other turns by `TURN`."""
    one = played("x\n", turns, versions=versions)
    known = np.isfinite(one.rollout_logprobs)
    offsets = np.array([apart.get(int(version), 0.0) for version in one.versions])
    old = np.where(known, one.rollout_logprobs + offsets, 0.0)
    for number, turn in enumerate(one.turns):
        own = np.flatnonzero(one.loss_mask & (one.turn_of_token == number))
        if not known[own].all():
            old[own] = (turn.sampled_logprobs.sum() + TURN) / len(own)
    return replace(one, old_logprobs=old.astype(np.float32))


def run_of(folder: Path, kept: Kept, rows: Sequence[dict[str, float]] = ({},), **config: Any) -> Path:
    """A folder of a run with this trajectory alone; `config` has the parts that are not as here."""
    folder.mkdir()
    written = {"rollout": {"sampling": {"temperature": 1.0}}, "task": {"token_mode": "retokenize"}} | config
    (folder / "config.yaml").write_text(yaml.safe_dump(written))
    lines = (json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows, 1))
    (folder / "metrics.jsonl").write_text("".join(lines))
    write_kept(folder, kept.step, [kept])
    return folder


def page_of(look: Look, *folders: Path, view: str = "tokens", size: tuple[int, int] = DESKTOP) -> Page:
    """The view of the report over these runs, which fits and has no problem."""
    report = write_report([open_run(folder) for folder in folders], folders[0].parent / "report.html")
    opened = look(f"{report.resolve().as_uri()}#view={view}", size)
    assert opened.page.locator("section").count() > 1
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.problems == []
    return opened.page


def rows_of(page: Page, table: str) -> dict[str, list[str]]:
    """First cell -> the others, without the head's row."""
    rows = page.get_by_role("region", name=table, exact=True).locator("tbody tr").all()
    cells = [row.locator("th, td").all_inner_texts() for row in rows]
    return {first: others for first, *others in cells}


def sizes_of(page: Page) -> dict[str, str]:
    """Cause -> its size and what is said of it."""
    names = page.locator(".pairs dt").all_inner_texts()
    return dict(zip(names, page.locator(".pairs dd").all_inner_texts(), strict=True))


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_cause_has_its_size(tmp_path: Path, look: Look, size: tuple[int, int]) -> None:
    folder = run_of(
        tmp_path / "run",
        trained(*ONE_CUT_OTHERWISE),
        rollout={"sampling": {"temperature": 1.0, "top_p": 0.5}},
    )
    page = page_of(look, folder, size=size)
    sizes = sizes_of(page)
    assert list(sizes) == ["version lag", "sampler", "tokenisation", "numerics"]
    # The squares of 0.5 and 0.25 in mean are 0.15625, less that of 0.125 they are that of 0.375.
    assert sizes["version lag"].startswith(
        "0.375 nats a token, rms: tokens of older policies are off by 0.395, those of the trained policy by 0.125,"
    )
    assert sizes["tokenisation"].startswith("−1.50 nats a turn, mean of 1 turn cut otherwise")
    assert sizes["numerics"].startswith("0.125 nats a token, rms")
    assert "as top_p 0.5 cut what is drawn from" in sizes["sampler"]
    assert page.get_by_role("region", name="side by side").count() == 0
    count = str(len(PARIS))
    assert rows_of(page, "Drift by version lag") == {
        "0": [count, "0.125", "0.125", "0.125"],
        "1": [count, "−0.250", "0.250", "0.250"],
        "2": [count, "0.500", "0.500", "0.500"],
    }
    sums = [len(PARIS) * one for one in APART.values()]
    turns = rows_of(page, "Drift by turn")
    assert turns["cut otherwise"] == ["1", "−1.50", "1.50", "1.50"]
    assert turns["not comparable"][0] == "0"
    assert turns["as drawn"][0] == "3"
    assert [float(cell) for cell in turns["as drawn"][1:]] == pytest.approx(
        [np.mean(sums), np.mean(np.abs(sums)), np.sqrt(np.mean(np.square(sums)))], abs=0.005
    )


@pytest.mark.parametrize(
    ("turns", "versions", "apart", "said"),
    [
        ([(PARIS, "\n")], (POLICY,), APART, {"version lag": "None: no ", "tokenisation": "None: every "}),
        (
            [(PARIS, "\n")],
            (1,),
            APART,
            {"version lag": "At most 0.500 nats a token,", "numerics": "Not known: "},
        ),
        ([(PARIS, "\n")] * 2, (1, POLICY), {1: 0.125, POLICY: 0.5}, {"version lag": "None that shows: "}),
        ([(LETTERS, "\n")], (POLICY,), APART, {"tokenisation": "−1.50 nats a turn", "sampler": "None: "}),
        # The tokenizer joins >>, so that the turn's end lies within a token, which is not trained.
        (
            [([token for letter in "<search>" for token in CODEC.encode(letter)], "> x")],
            (POLICY,),
            APART,
            {"tokenisation": "Not known: ", "numerics": "Not known: "},
        ),
    ],
    ids=["numerics alone", "older alone", "numerics are more", "re-tokenised alone", "edge lost"],
)
def test_a_size_that_cannot_be_had_has_its_reason(
    tmp_path: Path,
    look: Look,
    turns: Sequence[tuple[list[int], str]],
    versions: Sequence[int],
    apart: dict[int, float],
    said: dict[str, str],
) -> None:
    page = page_of(look, run_of(tmp_path / "run", trained(turns, versions, apart)))
    sizes = sizes_of(page)
    assert {cause: sizes[cause][: len(text)] for cause, text in said.items()} == said
    lagging = any(version < POLICY for version in versions)
    assert page.get_by_role("region", name="Drift by version lag").count() == lagging


def test_tokens_of_several_runs_stand_side_by_side(tmp_path: Path, look: Look) -> None:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    model = {"model": {"path": str(tmp_path / "tokenizer")}}
    # 900 sampled tokens of which a third is a version old, then 100 of which all are.
    old = (
        {"staleness/lag_0": 2 / 3, "staleness/lag_1": 1 / 3, "staleness/mean": 1 / 3}
        | {"state_tokens/total": 1000, "staleness/unversioned_tokens": 100},
        {"staleness/lag_0": 0.0, "staleness/lag_1": 1.0, "staleness/mean": 1.0, "state_tokens/total": 100},
    )
    new = ({"staleness/lag_0": 1.0, "staleness/mean": 0.0, "state_tokens/total": 1000},)
    # Of one token the sampler keeps no less than itself, or than the half of all.
    cut = {"rollout": {"sampling": {"temperature": 1.0, "top_p": 0.5}}}
    first = trained(*ONE_CUT_OTHERWISE)
    drawn = first.rollout_logprobs[first.loss_mask & np.isfinite(first.rollout_logprobs)]
    sampler = -np.maximum(drawn, np.log(0.5)).mean()
    folders = (
        run_of(tmp_path / "old", first, old, **model, **cut),
        run_of(tmp_path / "new", trained([(PARIS, "\n")], (POLICY,), {POLICY: 0.25}), new, **model),
    )
    page = page_of(look, *folders)
    assert page.get_by_role("region", name="side by side").locator("thead th").all_inner_texts() == [
        "",
        "old",
        "new",
    ]
    rows = rows_of(page, "Tokens of the runs side by side")
    # Not one of the letters is a token of "Paris", which was drawn three times more.
    assert not set(LETTERS) & set(PARIS)
    differing = f"{100 * len(LETTERS) / (len(LETTERS) + 3 * len(PARIS)):.1f}\xa0%"
    assert rows == {
        "staleness, mean versions": ["0.400", "0"],
        "tokens 0 versions older": ["60.0\xa0%", "100\xa0%"],
        "tokens 1 version older": ["40.0\xa0%", "0\xa0%"],
        "numerics, mean |d|": ["0.125", "0.250"],
        "version lag, mean |d|": ["0.375", "–"],
        "version lag beyond numerics, rms": ["0.375", "–"],
        "sampler, mean at most": [f"{sampler:.3f}", "0"],
        "turns cut otherwise, mean": ["−1.50", "–"],
        "tokens that re-tokenising changes": [differing, "0\xa0%"],
    }
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    table = page.get_by_role("region", name="Tokens of the runs side by side")
    assert table.evaluate("box => box.scrollWidth <= box.clientWidth"), "two runs stand beside each other"


def lived(folder: Path, *lives: Life) -> Path:
    (folder / "run.json").write_text(json.dumps({"lives": [asdict(life) for life in lives]}))
    return folder


def test_where_runs_ran_otherwise_is_shown(tmp_path: Path, look: Look) -> None:
    paths = [run_of(tmp_path / name, trained([(PARIS, "\n")], (POLICY,))) for name in ("one", "two", "lost")]
    life = Life(1.0, 0, {"host": "here", "python": "3.11", "torch": "2.9"}, "a" * 40, False, ["rlsys"])
    lived(paths[0], life, replace(life, environment={**life.environment, "torch": "2.10"}))
    assert page_of(look, *paths, view="setup").get_by_text("Nothing to compare: run.json is missing").count()
    lived(paths[1], replace(life, changed=True, environment={"host": "here", "python": "3.12"}))
    page = page_of(look, *paths, view="setup", size=PHONE)
    assert rows_of(page, "Environment that differs") == {
        "commit": ["aaaaaaaaaaaa", "aaaaaaaaaaaa with changes", "not known"],
        "python": ["3.11", "3.12", "not known"],
        "torch": ["2.9, then 2.10", "not there", "not known"],
    }
    for path in paths:
        lived(path, life)
    page = page_of(look, *paths, view="setup")
    assert page.get_by_text("Nothing: machine, versions and commit are the same.").count() == 1
