"""`rlsys train`: compose, check, then run or print the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rlsys.cluster.planning.plan import make_plan, render_plan
from rlsys.config.compose import load_config
from rlsys.config.schema import RunConfig
from rlsys.orchestrator.validate import validate

ConfigName = Annotated[
    str,
    typer.Option(
        "--config-name", "-c", help="A config of the project, or the path of a YAML file: rlsys' keys, or RLinf's."
    ),
]
ConfigDir = Annotated[Path | None, typer.Option(help="Folder of configs; the project's own by default.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings such as trainer.steps=5.")]


def command(
    config_name: ConfigName,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    dry_run: Annotated[bool, typer.Option(help="Print the resolved plan and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: the plan as JSON.")] = False,
    no_wandb: Annotated[bool, typer.Option("--no-wandb", help="Leave Weights & Biases out.")] = False,
    folder_to: Annotated[
        Path | None, typer.Option(help="Write the run's folder to this file as soon as it is known.")
    ] = None,
) -> None:
    """Train a policy."""
    config = load_config(config_name, overrides or (), config_dir)
    if no_wandb:
        config.tracking.wandb = False
    if as_json and not dry_run:
        raise typer.BadParameter("it goes with --dry-run", param_hint="--json")
    validate(config)
    if dry_run:
        plan = make_plan(config)
        typer.echo(json.dumps(plan, indent=2) if as_json else render_plan(plan))
        return
    _run(config, folder_to)


def _run(config: RunConfig, folder_to: Path | None) -> None:
    # Ray, transformers and the trackers take seconds to load, which a plan or a mistake need not wait for.
    from rich.console import Console

    from rlsys.apps.running import run_to_end
    from rlsys.files import claim, write_atomically
    from rlsys.observe.table import render_summary
    from rlsys.orchestrator.starting import ready_to_start
    from rlsys.train import train

    run_dir, origin = ready_to_start(config, lambda text: typer.echo(f"Note: {text}", err=True))
    if folder_to is not None:
        write_atomically(folder_to, str(run_dir.resolve()))
    with claim(run_dir):
        summary = run_to_end(train(config, run_dir, origin))
    render_summary(summary, Console())
    typer.echo(f"The run is in {run_dir}.")
