"""Figures of the report that its scripts work out, in a real browser: drift, evaluations, units and axes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Page

from rlsys.observe.kept import write_kept
from rlsys.observe.run_folder import open_run
from rlsys.report.report_page import bundle, write_report
from tests.report.audit.episodes import CODEC, POLICY, with_differences
from tests.support.browser import PHONE, Look, browser, look
from tests.support.paths import PROJECT

__all__ = ["browser", "look"]

pytestmark = pytest.mark.slow


def test_every_cause_has_its_size(tmp_path: Path, look: Look) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    sampling = {"temperature": 1.0, "top_p": 0.5}
    config = {"rollout": {"sampling": sampling}, "task": {"token_mode": "retokenize"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    write_kept(folder, POLICY + 1, [with_differences({1: 0.5, 2: -0.25, POLICY: 0.125})])
    report = write_report([open_run(folder)], tmp_path / "report.html")
    opened = look(f"{report.resolve().as_uri()}#view=tokens", PHONE)
    page = opened.page
    names = page.locator(".pairs dt").all_inner_texts()
    sizes = dict(zip(names, page.locator(".pairs dd").all_inner_texts(), strict=True))
    # The squares of 0.5 and 0.25 in mean are 0.15625, less that of 0.125 they are that of 0.375.
    assert sizes["version lag"].startswith("0.375 nats a token, rms")
    assert sizes["numerics"].startswith("0.125 nats a token, rms")
    assert "as top_p 0.5 cut what is drawn from" in sizes["sampler"]
    rows = page.get_by_role("region", name="Drift by version lag", exact=True).locator("tbody tr").all()
    count = str(len(CODEC.encode("Paris")))
    assert [row.locator("th, td").all_inner_texts() for row in rows] == [
        ["0", count, "0.125", "0.125", "0.125"],
        ["1", count, "−0.250", "0.250", "0.250"],
        ["2", count, "0.500", "0.500", "0.500"],
    ]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.problems == []


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
