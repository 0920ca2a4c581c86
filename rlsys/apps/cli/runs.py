"""`rlsys report`, `rlsys watch`, `rlsys audit`: the folder of a run as a page, while it goes on, and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

audit = typer.Typer(help="Checks on what a run has written.", no_args_is_help=True)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; several are compared.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="File to write; report.html in the first run's folder.", show_default=False)
    ] = None,
) -> None:
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


def watch(
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as outputs/NAME-20260101-120000.")],
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8800,
    host: Annotated[
        str, typer.Option(help="Address to listen at; by default only this machine comes in.")
    ] = "127.0.0.1",
) -> None:
    """Show a run in a browser while it goes on, and its figures to Prometheus at /metrics."""
    from rlsys.report.watch.watch_server import serve_run

    serve_run(run, host, port, lambda text: typer.echo(text, err=True))


@audit.callback()
def _commands() -> None:
    """Keeps `tokens` a command of its own, though it is the only one."""


@audit.command()
def tokens(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the run's tokenizer; its config's model.path by default.")
    ] = None,
) -> None:
    """Say which drawn tokens re-tokenising the text does not give back, where, and what that does to the ratio."""
    import json

    from rich.console import Console

    from rlsys.observe.run_folder import open_run
    from rlsys.report.audit import token_audit
    from rlsys.report.audit.audit_table import render_audit

    folder = open_run(run)
    before = len(folder.problems)
    found = token_audit.audit_run(folder, tokenizer)
    for problem in folder.problems[before:]:
        typer.echo(problem, err=True)
    if as_json:
        typer.echo(json.dumps(token_audit.as_json(found), ensure_ascii=True, allow_nan=False))
    else:
        render_audit(found, Console())
