"""Implements `rlsys train` and `rlsys launch`: checks a config, then prints the plan or trains on one or more machines."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from rlsys.apps.cli.doctor import look
from rlsys.apps.cli.options import ConfigDir, ConfigName, Overrides
from rlsys.apps.running import run_to_end, supervise
from rlsys.cluster.launch.role import LaunchTask, Role, check_searching, find_role, machine_count
from rlsys.cluster.local_ray import RAY_PORT
from rlsys.cluster.planning.placement import memory_problems
from rlsys.cluster.planning.resolve import make_plan, render_plan
from rlsys.cluster.planning.splits import faster_split
from rlsys.config.compose import load_config
from rlsys.config.schema import RunConfig
from rlsys.errors import UserError, in_one
from rlsys.observe.faults import KILLED_BY, Restarts
from rlsys.orchestrator.validate import find_problems, validate
from rlsys.weights.weight_map import read_architecture

_FOLDER = "Write the path of the run's folder to this file when the run starts."
_NODES = "Number of machines; by default from the environment, else cluster.nodes."
_HEAD = "Address of the machine of rank 0; by default from the environment."
_CLUSTER = "Use the running Ray cluster at this address (auto: the current one) instead of starting one."


def train(
    config_name: ConfigName,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    dry_run: Annotated[bool, Option(help="Print the resolved plan and exit.")] = False,
    as_json: Annotated[bool, Option("--json", help="With --dry-run: print the plan as JSON.")] = False,
    no_wandb: Annotated[bool, Option("--no-wandb", help="Do not log to Weights & Biases.")] = False,
    folder_to: Annotated[Path | None, Option(help=_FOLDER)] = None,
) -> None:
    """Train a policy.

    With resume=auto, the run continues from its last checkpoint if its driver is killed, at most cluster.restarts times.
    """
    config = load_config(config_name, overrides or (), config_dir)
    if no_wandb:
        config.tracking.wandb = False
    if as_json and not dry_run:
        raise typer.BadParameter("it needs --dry-run", param_hint="--json")
    if dry_run:
        _print_plan(config, as_json)
        return
    validate(config)
    if not _outlives_its_driver(config):
        _train(config, folder_to)
        return
    words = ["train", "-c", config_name, *(overrides or ()), *(["--no-wandb"] if no_wandb else [])]
    given = {"--config-dir": config_dir, "--folder-to": folder_to}
    words += [word for option, path in given.items() if path is not None for word in (option, str(path))]
    command = [sys.executable, "-m", "rlsys.apps.cli.main", *words]
    raise typer.Exit(supervise(command, Restarts(config.cluster), lambda text: typer.echo(f"Note: {text}", err=True)))


def _print_plan(config: RunConfig, as_json: bool) -> None:
    """Print the plan of `config`. The shape of its model is enough: what a run needs besides is a note.

    Raises UserError for all other problems.
    """
    from rlsys.apps.planner.answer import with_shape  # Imported late: Ray takes seconds to load.

    shaped = with_shape(config)
    if wrong := [problem for problem in find_problems(shaped) if problem.code not in ("missing", "not_found")]:
        raise in_one(wrong)
    plan = make_plan(shaped)
    if short := [*memory_problems(shaped, plan)]:  # `find_problems` checks memory only if nothing is missing.
        raise in_one(short)
    plan["model"]["path"] = config.model.path
    if faster := faster_split(shaped, read_architecture(shaped.model.path, shaped.model.family)):
        plan["notes"].append(faster)
    plan["notes"] += (f"A run needs more: {problem}" for problem in find_problems(config))
    typer.echo(json.dumps(plan, indent=2) if as_json else render_plan(plan))


def _outlives_its_driver(config: RunConfig) -> bool:
    """Return True if this process starts the driver, again if it is killed.

    On a cluster, Ray ends the workers of a killed driver, and gives their devices to the next one when they have ended.
    """
    return KILLED_BY not in os.environ and config.resume == "auto" and config.cluster.restarts > 0


def _train(config: RunConfig, folder_to: Path | None) -> None:
    # Imported late: Ray, transformers and the trackers take seconds to load.
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
    rank: Annotated[int | None, Option(help="Rank of this machine, from 0; by default from the environment.")] = None,
    head: Annotated[str | None, Option(metavar="HOST[:PORT]", help=_HEAD)] = None,
    wait: Annotated[float, Option(metavar="SECONDS", help="Time to wait for all machines.")] = 600.0,
    cluster: Annotated[str | None, Option(metavar="ADDRESS", help=_CLUSTER)] = None,
    preflight: Annotated[
        bool, Option(help="Run `rlsys doctor --for` first, and start only if it finds no problem.")
    ] = True,
) -> None:
    """Connect the machines of a cluster, train, and clean up.

    Run the same command on every machine. The head (rank 0) also starts search servers (cluster.search), collects the logs of
    all machines in the run's folder, and returns the run's exit status.
    """
    config = load_config(config_name, overrides or (), config_dir)
    if preflight and any(find_problems(config)):
        # Reports the problems of the config and of this machine, then exits.
        look(config_name, overrides or (), config_dir, launched=True)
    validate(config)
    check_searching(config)
    task = LaunchTask(config, config_name, tuple(overrides or ()), config_dir, preflight, wait)
    if cluster is not None:
        if rank is not None or head is not None:
            raise UserError(
                "--cluster uses a running cluster: leave --rank and --head out.",
                code="conflict",
                key="--cluster",
            )
        role = Role(0, machine_count(nodes, config.cluster.nodes), "", RAY_PORT)
    else:
        role = find_role(os.environ, config.cluster.nodes, rank=rank, nodes=nodes, head=head)
    raise typer.Exit(_launch(task, role, cluster))


def _launch(task: LaunchTask, role: Role, cluster: str | None) -> int:
    from rlsys.cluster.launch.ray_node import health_check_timeouts
    from rlsys.cluster.local_ray import require_token

    # Ray reads these variables once, at import.
    os.environ.update(health_check_timeouts(os.environ))
    if cluster is None and role.rank == 0:
        os.environ.update(require_token(os.environ, make=True))

    # Imported late: Ray takes seconds to load.
    from rlsys.cluster.launch.head import run_head, run_on_cluster
    from rlsys.cluster.launch.ray_node import join_head

    def notify(text: str) -> None:
        with suppress(OSError):  # The terminal may have been closed.
            typer.echo(f"launch: {text}", err=True)

    if cluster is not None:
        return run_to_end(run_on_cluster(task, role, cluster, notify))
    if role.rank == 0:
        return run_to_end(run_head(task, role, notify))
    return run_to_end(join_head(role, task.config, task.wait_s, notify)).status
