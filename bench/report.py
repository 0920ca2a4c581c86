"""Measures the time to make a report, its size, and the time a browser takes to open it.

    python -m bench.report [--trajectories 5000] [--tokens 2000]      # a few minutes

The benchmark writes a synthetic run with trajectories of realistic size (a quarter of the tokens generated, with
log-probs, reference and advantages), makes its report and opens it in Chromium. "Opened" is the time from navigation
until the overview and its charts are drawn, "read" until the whole file is loaded. Then it times the list of
trajectories, one trajectory token by token, and a search through every text. The browser's times are the best of three,
to exclude other load on the machine.
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
"""Trajectories kept per step, the default of tracking.trajectories."""
TRIES = 3
LAST_CHART = 5
"""Index of the last chart on the first screen."""
LONGEST_S = 120
"""Time limit of each action in the browser."""


def main(
    trajectories: Annotated[int, typer.Option(help="Number of kept trajectories.", min=OF_A_STEP)] = 5000,
    tokens: Annotated[int, typer.Option(help="Tokens per trajectory, with the prompt.", min=200)] = 2000,
    folder: Annotated[
        Path | None, typer.Option(help="Folder to keep the run and its report in; default: they are deleted.")
    ] = None,
) -> None:
    """Write a run and its report, open the report, print the times and write the result file."""
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
    """Return the seconds of each action of a reader, who opens trajectory number `trajectory`."""
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
    """Return the seconds from a change of the address until the script `done` returns a true value, by the page's
    clock.

    Raises playwright's Error after LONGEST_S, because playwright's own limits do not apply within a script. Also raises
    it if `done` is true beforehand, because nothing would be measured.
    """
    took: float = page.evaluate(
        f"""async () => {{
            if ({done}) throw new Error("{address}: already shown");
            const begun = performance.now();
            location.hash = "{address}";
            while (!({done})) {{
                if (performance.now() - begun > {1000 * LONGEST_S}) throw new Error("{address}: not shown in time");
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
            "size of the report, and of the trajectories in the run's folder",
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
