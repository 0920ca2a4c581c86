"""How fast a report is made, how large it is, and how fast a browser opens it.

    python -m bench.report [--trajectories 5000] [--tokens 2000]      # some minutes

A made-up run with trajectories of real size (a quarter of the tokens generated, with log-probs, reference and advantages)
is written, reported, and opened in Chromium. "Opened" is the time from the navigation until the overview and its charts
are drawn; "read" until the whole file is; then the list of trajectories, one of them token by token, and a search through
every text. The best of three counts for what is opened anew: what else the machine does is none of the page's.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console
from rich.table import Table

from rlsys.observe.run_folder import open_run
from rlsys.report.report_page import write_report
from tests.support.browser import chromium
from tests.support.made_run import Maker, Size, made_run

RESULT = Path("outputs/bench/report.json")
OF_A_STEP = 64
"""Trajectories, as tracking.trajectories keeps by default."""
TRIES = 3
LAST_CHART = 5
"""Of those on the first screen."""
LONGEST_S = 120
"""That anything may take before it counts as failed."""


def main(
    trajectories: Annotated[int, typer.Option(help="How many are kept.", min=OF_A_STEP)] = 5000,
    tokens: Annotated[int, typer.Option(help="Of each, the prompt included.", min=200)] = 2000,
    folder: Annotated[
        Path | None, typer.Option(help="Where to leave the run and its report; nowhere by default.")
    ] = None,
) -> None:
    """Make the run and its report, open it, show and write down what it took."""
    steps = -(-trajectories // OF_A_STEP)
    turn = (tokens - 200) // 3
    size = Size(steps, OF_A_STEP // 8, 8, 200, 2, turn // 4, turn - turn // 4 + turn // 8, answers=500)
    with TemporaryDirectory() as scratch:
        run = made_run((folder or Path(scratch)) / "run", Maker(size))
        begun = time.perf_counter()
        report = write_report([open_run(run)])
        result: dict[str, Any] = {
            "trajectories": steps * OF_A_STEP,
            "tokens": tokens,
            "made_s": time.perf_counter() - begun,
            "report_mb": report.stat().st_size / 1e6,
            "run_mb": sum(file.stat().st_size for file in (run / "trajectories").iterdir()) / 1e6,
        }
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
            tries = [_open(browser, report, result["trajectories"] // 4) for _ in range(TRIES)]
            browser.close()
    result |= {name: min(one[name] for one in tries) for name in tries[0]}
    Console().print(_table(result))
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


def _open(browser: Browser, report: Path, trajectory: int) -> dict[str, float]:
    """Seconds of each thing that a reader does; of all trajectories, number `trajectory` is read."""
    page = browser.new_page()
    page.set_default_timeout(1000 * LONGEST_S)
    begun = time.perf_counter()
    page.goto(report.resolve().as_uri(), wait_until="commit")
    page.locator(".chart svg").nth(LAST_CHART).wait_for()
    opened = time.perf_counter() - begun
    page.wait_for_load_state("load")
    times = {"opened_s": opened, "read_s": time.perf_counter() - begun}
    times["listed_s"] = _until(page, "#view=trajectories", "document.querySelector('#results .card')")
    times["trajectory_s"] = _until(page, f"#trajectory={trajectory}", "document.querySelector('.tok')")
    searched = "document.querySelector('#f-text:checked') && !document.querySelector('#results[aria-busy]')"
    times["searched_s"] = _until(page, "#view=trajectories&q=zzz&text=1", searched)
    page.close()
    return times


def _until(page: Page, address: str, done: str) -> float:
    """Seconds from a change of the address until the script `done` gives something, by the page's clock.

    Raises playwright's Error after LONGEST_S, for its own limits do not hold within a script, and where `done` gives
    something beforehand, for nothing would be measured.
    """
    took: float = page.evaluate(
        f"""async () => {{
            if ({done}) throw new Error("{address}: it is there already");
            const begun = performance.now();
            location.hash = "{address}";
            while (!({done})) {{
                if (performance.now() - begun > {1000 * LONGEST_S}) throw new Error("{address}: nothing is shown");
                await new Promise((resolve) => setTimeout(resolve, 2));
            }}
            return performance.now() - begun;
        }}"""
    )
    return took / 1e3


def _table(result: dict[str, Any]) -> Table:
    title = f"{result['trajectories']:,} trajectories of {result['tokens']:,} tokens"
    table = Table(title=title, title_justify="left", show_header=False)
    rows = (
        ("report made", f"{result['made_s']:.1f} s"),
        (
            "report, and the trajectories in the run's folder",
            f"{result['report_mb']:.1f}, {result['run_mb']:.1f} MB",
        ),
        ("opened: overview drawn", f"{result['opened_s']:.2f} s"),
        ("whole file read", f"{result['read_s']:.2f} s"),
        ("list of trajectories", f"{result['listed_s']:.2f} s"),
        ("one trajectory, token by token", f"{result['trajectory_s']:.2f} s"),
        ("search through every text", f"{result['searched_s']:.1f} s"),
    )
    for row in rows:
        table.add_row(*row)
    return table


if __name__ == "__main__":
    typer.run(main)
