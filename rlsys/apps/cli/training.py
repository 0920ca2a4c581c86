"""`rlsys train` and `rlsys launch`: compose, check, then print the plan, or train here or on several machines."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from rlsys.apps.cli.doctor import look
from rlsys.apps.cli.options import ConfigDir, ConfigName, Overrides
from rlsys.apps.running import run_to_end
from rlsys.cluster.launch.role import LaunchTask, Role, check_searching, find_role, machine_count
from rlsys.cluster.local_ray import RAY_PORT
from rlsys.cluster.planning.plan import make_plan, render_plan
from rlsys.config.compose import load_config
from rlsys.config.schema import RunConfig
from rlsys.errors import UserError
from rlsys.orchestrator.validate import find_problems, validate

_FOLDER = "Write the run's folder to this file as soon as it is known."
_NODES = "Machines in all; by default from the environment, else cluster.nodes."
_HEAD = "Where the machine of rank 0 is, for all to meet."
_CLUSTER = "Use the Ray cluster that runs there (auto: the one around) and start none."


def train(
    config_name: ConfigName,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    dry_run: Annotated[bool, Option(help="Print the resolved plan and stop.")] = False,
    as_json: Annotated[bool, Option("--json", help="With --dry-run: the plan as JSON.")] = False,
    no_wandb: Annotated[bool, Option("--no-wandb", help="Leave Weights & Biases out.")] = False,
    folder_to: Annotated[Path | None, Option(help=_FOLDER)] = None,
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
    _train(config, folder_to)


def _train(config: RunConfig, folder_to: Path | None) -> None:
    # Ray, transformers and the trackers take seconds to load, which a plan or a mistake need not wait for.
    from rich.console import Console

    from rlsys.files import claim, write_atomically
    from rlsys.observe.outcome import render_summary
    from rlsys.orchestrator.run import ready_to_start
    from rlsys.train import train as train_policy

    run_dir, origin = ready_to_start(config, lambda text: typer.echo(f"Note: {text}", err=True))
    if folder_to is not None:
        write_atomically(folder_to, str(run_dir.resolve()))
    with claim(run_dir):
        summary = run_to_end(train_policy(config, run_dir, origin))
    render_summary(summary, Console())
    typer.echo(f"The run is in {run_dir}.")


def launch(
    config_name: ConfigName,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    nodes: Annotated[int | None, Option(help=_NODES)] = None,
    rank: Annotated[int | None, Option(help="Which of them this is, from 0; by default from the environment.")] = None,
    head: Annotated[str | None, Option(metavar="HOST[:PORT]", help=_HEAD)] = None,
    wait: Annotated[float, Option(metavar="SECONDS", help="For all machines to come.")] = 600.0,
    cluster: Annotated[str | None, Option(metavar="ADDRESS", help=_CLUSTER)] = None,
    preflight: Annotated[bool, Option(help="Start nothing before `rlsys doctor --for` finds everything right.")] = True,
) -> None:
    """Bring the machines of a cluster together, train, and leave nothing behind.

    Give the same command on every machine. The head also starts search servers (cluster.search), gathers the logs of
    all machines under the run's folder, and passes the run's exit status on.
    """
    config = load_config(config_name, overrides or (), config_dir)
    if preflight and any(find_problems(config)):
        # Which says these, and what else is wrong here.
        look(config_name, overrides or (), config_dir, launched=True)
    validate(config)
    check_searching(config)
    task = LaunchTask(config, config_name, tuple(overrides or ()), config_dir, preflight, wait)
    if cluster is not None:
        if rank is not None or head is not None:
            raise UserError(
                "--cluster is for a cluster that runs already: leave --rank and --head out.",
                code="conflict",
                key="--cluster",
            )
        role = Role(0, machine_count(nodes, config.cluster.nodes), "", RAY_PORT)
    else:
        role = find_role(os.environ, config.cluster.nodes, rank=rank, nodes=nodes, head=head)
    raise typer.Exit(_launch(task, role, cluster))


def _launch(task: LaunchTask, role: Role, cluster: str | None) -> int:
    from rlsys.cluster.launch.ray_node import patience
    from rlsys.cluster.local_ray import require_token

    # Ray reads them once, when it is loaded.
    os.environ.update(patience(os.environ))
    if cluster is None and role.rank == 0:
        os.environ.update(require_token(os.environ, make=True))

    # Ray takes seconds to load, which a mistake need not wait for.
    from rlsys.cluster.launch.head import lead, lead_cluster
    from rlsys.cluster.launch.ray_node import work

    def notify(text: str) -> None:
        with suppress(OSError):  # Of a terminal that has been closed.
            typer.echo(f"launch: {text}", err=True)

    if cluster is not None:
        return run_to_end(lead_cluster(task, role, cluster, notify))
    if role.rank == 0:
        return run_to_end(lead(task, role, notify))
    return run_to_end(work(role, task.config, task.wait_s, notify)).status
