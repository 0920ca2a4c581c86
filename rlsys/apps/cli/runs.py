"""Implements `rlsys report`, `rlsys watch` and `rlsys audit`: report page, live page and checks of a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

audit = typer.Typer(help="Check the records of a run.", no_args_is_help=True)
_OUT = "File to write; by default report.html in the first run's folder."
_TOKENIZER = "Folder with the run's tokenizer; by default model.path of its config."


def report(
    runs: Annotated[list[Path], Argument(help="Folders of runs; several are compared.", show_default=False)],
    out: Annotated[Path | None, Option(help=_OUT, show_default=False)] = None,
) -> None:
    """Write a report page of RUNS."""
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
    run: Annotated[Path, Argument(help="Folder of a run, such as outputs/NAME-20260101-120000.")],
    port: Annotated[int, Option(help="Port; 0 takes a free one.")] = 8800,
    host: Annotated[str, Option(help="Address to listen on; by default only this machine can reach it.")] = "127.0.0.1",
) -> None:
    """Serve the live page of a run, and its metrics for Prometheus at /metrics."""
    from rlsys.report.watch import serve_run

    serve_run(run, host, port, lambda text: typer.echo(text, err=True))


@audit.callback()
def _commands() -> None:
    """Keep `tokens` a subcommand, although it is the only one."""


@audit.command()
def tokens(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a run.")],
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    tokenizer: Annotated[Path | None, Option(help=_TOKENIZER)] = None,
) -> None:
    """Audit the effects of re-tokenisation. Reports which sampled tokens change, where, and the effect on the ratio."""
    from rlsys.observe.run_folder import open_run
    from rlsys.report import token_audit

    folder = open_run(run)
    before = len(folder.problems)
    found = token_audit.audit_run(folder, tokenizer)
    for problem in folder.problems[before:]:
        typer.echo(problem, err=True)
    if as_json:
        typer.echo(json.dumps(token_audit.as_json(found), ensure_ascii=True, allow_nan=False))
    else:
        token_audit.render_audit(found, Console())
