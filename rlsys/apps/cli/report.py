"""`rlsys report`: a run, or several side by side, as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Runs = Annotated[list[Path], typer.Argument(help="Folders of runs; several are compared.", show_default=False)]
Out = Annotated[
    Path | None,
    typer.Option(help="File to write; report.html in the first run's folder.", show_default=False),
]


def command(runs: Runs, out: Out = None) -> None:
    """Write the report of RUNS."""
    from rich.console import Console
    from rich.text import Text

    from rlsys.observe.run_folder import open_run
    from rlsys.observe.samples import visible
    from rlsys.report.report_page import write_report
    from rlsys.report.run_model import names_of

    opened = [open_run(run) for run in runs]
    names = [visible(name) for name in names_of(opened)]
    with Console(stderr=True).status(Text(f"Reading {', '.join(names)} …")):
        path = write_report(opened, out)
    for name, run in zip(names, opened, strict=True):
        for problem in run.problems:
            print(f"{name}: {visible(problem)}")
    print(f"{visible(str(path))} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser.")
