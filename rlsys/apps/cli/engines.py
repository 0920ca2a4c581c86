"""Implements `rlsys engines`: lists the engines of a run that is active, and lets engines join and leave it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from rlsys.errors import UserError

if TYPE_CHECKING:
    from rlsys.observe.requests import Request

app = typer.Typer(help="List, add and remove the engines of a run that is active.", no_args_is_help=True)
Run = Annotated[Path, Option("--run", metavar="RUN", help="Folder of the run.", show_default=False)]
_LEAVES = "Number of the engine; by default the one with the fewest prompt groups."
_JOINS = "Number of the engine; by default the lowest number that is free."
_LIMIT = "Time for its prompt groups to end; then they run again on other engines. By default all of them end."


@app.command("list")
def listed(run: Run, as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False) -> None:
    """Print the engines of a run, with their state, weight version and prompt groups."""
    from rlsys.observe.requests import Request

    rows = _ask(run, Request("list"), quiet=True)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("engine", "state", "weight version", "prompt groups")
    for row in rows:
        version = "-" if row["version"] is None else str(row["version"])
        table.add_row(str(row["engine"]), str(row["state"]), version, str(row["groups"]))
    Console().print(table)


@app.command()
def join(
    run: Run, engine: Annotated[int | None, Argument(metavar="ENGINE", help=_JOINS, show_default=False)] = None
) -> None:
    """Start an engine on free devices. It gets no prompt group before it has verified the current weights."""
    from rlsys.observe.requests import Request

    _ask(run, Request("join", _number(engine)))


@app.command()
def leave(
    run: Run,
    engine: Annotated[int | None, Argument(metavar="ENGINE", help=_LEAVES, show_default=False)] = None,
    limit: Annotated[float | None, Option(metavar="SECONDS", help=_LIMIT, show_default=False)] = None,
    now: Annotated[bool, Option("--now", help="The same as --limit 0.")] = False,
) -> None:
    """Remove an engine. No work is lost, and its devices are free for another engine."""
    from rlsys.observe.requests import Request

    if now and limit is not None:
        raise UserError("--now and --limit exclude each other: leave one out.", code="conflict", key="--now")
    if limit is not None and not 0 <= limit < float("inf"):
        raise UserError(f"--limit {limit} must be at least 0 seconds.", code="out_of_range", key="--limit")
    _ask(run, Request("leave", _number(engine), 0.0 if now else limit))


def _number(engine: int | None) -> int | None:
    if engine is not None and not 0 <= engine < 2**31:
        raise UserError(f"ENGINE {engine} must be a number of at least 0.", code="out_of_range", key="ENGINE")
    return engine


def _ask(run: Path, request: Request, quiet: bool = False) -> Sequence[Mapping[str, Any]]:
    """Send a request to the run's driver, print what it waits for and how it ends, and return its rows."""
    from rlsys.observe.records import SUMMARY
    from rlsys.observe.requests import ask
    from rlsys.observe.run_folder import require_run
    from rlsys.observe.samples import visible
    from rlsys.observe.status import read_status
    from rlsys.report.run_model import Phase, liveness_here

    require_run(run)

    def over() -> str | None:
        life = liveness_here(read_status(run), (run / SUMMARY).is_file())
        return life.sentence if life.phase in (Phase.finished, Phase.failed, Phase.gone) else None

    return ask(run, request, (lambda _: None) if quiet else lambda text: typer.echo(visible(text)), over)
