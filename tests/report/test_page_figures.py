"""Figures of the report that its scripts work out, in a real browser: drift, evaluations, units and axes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from playwright.sync_api import Page

from rlsys.observe.kept import Kept, write_kept
from rlsys.observe.run_folder import open_run
from rlsys.report.report_page import bundle, write_report
from tests.report.audit.episodes import CODEC, POLICY, by_letter, played
from tests.support.browser import DESKTOP, PHONE, Look, browser, look
from tests.support.paths import PROJECT

__all__ = ["browser", "look"]

pytestmark = pytest.mark.slow

PARIS = CODEC.encode("Paris")
LETTERS = by_letter("Paris")
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
    for number, said in enumerate(one.turns):
        own = np.flatnonzero(one.loss_mask & (one.turn_of_token == number))
        if not known[own].all():
            old[own] = (said.sampled_logprobs.sum() + TURN) / len(own)
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


def test_every_cause_has_its_size(tmp_path: Path, look: Look) -> None:
    folder = run_of(
        tmp_path / "run", trained(*ONE_CUT_OTHERWISE), rollout={"sampling": {"temperature": 1.0, "top_p": 0.5}}
    )
    page = page_of(look, folder, size=PHONE)
    sizes = sizes_of(page)
    assert list(sizes) == ["version lag", "sampler", "tokenisation", "numerics"]
    # The squares of 0.5 and 0.25 in mean are 0.15625, less that of 0.125 they are that of 0.375.
    assert sizes["version lag"].startswith(
        "0.375 nats a token, rms: tokens of older policies are off by 0.395, those of the trained policy by 0.125,"
    )
    assert sizes["tokenisation"].startswith("−1.50 nats a turn, mean of 1 turn cut otherwise")
    assert sizes["numerics"].startswith("0.125 nats a token, rms")
    assert "as top_p 0.5 cut what is drawn from" in sizes["sampler"]
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


METRICS = PROJECT / "docs" / "metrics.md"


@pytest.fixture
def page(look: Look) -> Page:
    return look("about:blank").page


def run(page: Page, imports: str, body: str) -> Any:
    """The value that a module of the page with these imports returns."""
    static = files("rlsys.report") / "static"
    sources = {one.name: one.read_text() for one in static.iterdir() if one.name.endswith(".js")}
    sources["test.js"] = f"{imports}\nwindow.found = (() => {{ {body} }})();\n"
    page.evaluate(bundle(sources, "test.js"))
    return page.evaluate("window.found")


def documented() -> Iterator[tuple[str, str]]:
    """(name, unit) of every row of the reference, with its placeholders filled in."""
    for line in METRICS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| `") or len(cells) < 3 or cells[0].startswith("`guard/"):
            continue
        for name in re.findall("`([^`]+)`", cells[0]):
            choices = re.search(r"\{(.*)\}", name)
            for one in choices[1].split(",") if choices else [""]:
                filled = name.replace(choices[0], one) if choices else name
                yield (filled.replace("<k>", "2").replace("<hops>", "2").replace("<", "").replace(">", ""), cells[1])


def test_figures_are_shown_in_the_units_of_their_reference(page: Page) -> None:
    rows = [(name, unit) for name, unit in documented() if unit]
    assert len(rows) > 100
    # Rows without a unit of their own say by their names what they are.
    rows += [("engine/0/pause_s", "s"), ("engine/0/cached_fraction", "share"), ("engine/0/tokens_per_s", "1/s")]
    formats = run(
        page,
        'import { formatOf } from "./format.js";',
        f"return {[name for name, _ in rows]!r}.map((name) => formatOf(name).name);",
    )
    expected = [{"s": "seconds", "share": "share"}.get(unit, "number") for _, unit in rows]
    assert dict(zip((name for name, _ in rows), formats, strict=True)) == {
        name: format_ for (name, _), format_ in zip(rows, expected, strict=True)
    }


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.5, 1]),
        (-3, 3, [-2, 0, 2]),
        (0.9999999999999999, 1.0, None),
        (1e308, float("inf"), None),
        (float("nan"), 1, []),
    ],
)
def test_an_axis_always_has_few_ticks(page: Page, low: float, high: float, ticks: list[float] | None) -> None:
    page.evaluate("([low, high]) => { window.low = low; window.high = high; }", [low, high])
    shown = run(page, 'import { niceTicks } from "./chart.js";', "return niceTicks(low, high, 3);")
    assert len(shown) <= 50
    assert ticks is None or shown == pytest.approx(ticks)
