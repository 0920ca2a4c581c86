"""`rlsys audit`: checks on what a finished or running run has written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Checks on what a run has written.", no_args_is_help=True)


@app.callback()
def _commands() -> None:
    """Keeps `tokens` a command of its own, though it is the only one."""


@app.command()
def tokens(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with the run's tokenizer; its config's model.path by default."),
    ] = None,
) -> None:
    """Say which drawn tokens re-tokenising the text does not give back, where, and what that does to the ratio."""
    from rlsys.observe.run_folder import open_run
    from rlsys.report.audit import token_audit

    folder = open_run(run)
    before = len(folder.problems)
    found = token_audit.audit_run(folder, tokenizer)
    for problem in folder.problems[before:]:
        typer.echo(problem, err=True)
    if as_json:
        import json

        typer.echo(json.dumps(token_audit.as_json(found), ensure_ascii=True, allow_nan=False))
        return
    from rich.console import Console

    from rlsys.report.audit.audit_table import render_audit

    render_audit(found, Console())
