"""Parts of the page's script by themselves, in a browser: units, scales, and charts of which one fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from rlsys.report.report_page import bundle
from tests.support.browser import Look, browser, look
from tests.support.paths import PROJECT

__all__ = ["browser", "look"]

METRICS = PROJECT / "docs" / "metrics.md"


@pytest.fixture
def page(look: Look) -> Page:
    return look("about:blank").page


def run(page: Page, imports: str, body: str) -> Any:
    """What a module of the page with these imports returns."""
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
                yield (
                    filled.replace("<k>", "2").replace("<hops>", "2").replace("<", "").replace(">", ""),
                    cells[1],
                )


def test_figures_are_shown_in_the_units_of_their_reference(page: Page) -> None:
    rows = [(name, unit) for name, unit in documented() if unit]
    assert len(rows) > 100
    # Rows without a unit of their own say by their names what they are.
    rows += [
        ("engine/0/pause_s", "s"),
        ("engine/0/cached_fraction", "share"),
        ("engine/0/tokens_per_s", "1/s"),
    ]
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


def test_a_chart_that_fails_says_so_and_leaves_others_alone(page: Page) -> None:
    run(
        page,
        'import { fitted, h } from "./dom.js";\nimport { lineChart } from "./chart.js";',
        """
        const broken = fitted(h("div", { id: "broken" }), () => { throw new Error("no such thing"); });
        document.body.append(broken, lineChart({ title: "whole", series: [{ points: [[1, 2], [2, 3]] }] }));
        """,
    )
    expect(page.locator("#broken")).to_have_text("This chart could not be drawn: no such thing")
    expect(page.get_by_role("img", name="whole").locator("path.curve")).to_have_count(1)


def test_bars_that_were_put_together_say_of_which_steps_they_are(page: Page) -> None:
    run(
        page,
        'import { stackedBars } from "./bars.js";',
        """
        const bars = Array.from({ length: 1001 }, (_, place) => ({ label: String(place + 1), title: `step ${place + 1}, 9 s`, parts: [{ name: "a", value: place }] }));
        document.body.append(stackedBars({ bars, format: String, label: "Steps" }));
        """,
    )
    page.get_by_role("img", name="Steps").press("ArrowRight")
    expect(page.locator("#tip strong")).to_have_text("steps 1 to 4, mean")
    page.keyboard.press("End")
    expect(page.locator("#tip strong")).to_have_text("step 1001, 9 s")
