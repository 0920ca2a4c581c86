"""`rlsys watch`: the page of a run while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as outputs/NAME-20260101-120000.")],
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8800,
    host: Annotated[
        str, typer.Option(help="Address to listen at; by default only this machine comes in.")
    ] = "127.0.0.1",
) -> None:
    """Show a run in a browser while it goes on, and its figures to Prometheus at /metrics."""
    from rlsys.report.watch.watch_server import serve_run

    serve_run(run, host, port, lambda text: typer.echo(text, err=True))
