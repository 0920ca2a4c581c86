"""Implements `rlsys plan`: predicts the steps of a config by simulation."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from typer import Option

from rlsys.apps.cli.options import ConfigDir, ConfigName, Overrides
from rlsys.config.compose import load_config

_ON = "Machines, such as 8xH100 or 2x8xH200; by default those of the config, with H100."
_ASSUME = "Assumption about episodes, such as turn=400; may be repeated."
_PRICE = "Price of a device and hour, for the cost of the run."


def command(
    config_name: ConfigName,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    on: Annotated[str | None, Option(metavar="[MACHINESx]DEVICESxKIND", help=_ON)] = None,
    assume: Annotated[list[str] | None, Option(metavar="KEY=VALUE", help=_ASSUME)] = None,
    price_per_gpu_hour: Annotated[float | None, Option(min=0, help=_PRICE)] = None,
    search: Annotated[bool, Option("--search", help="Search placements, parallel sizes and schedules.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    seed: Annotated[int, Option(min=0, help="Seed of the simulation.")] = 0,
) -> None:
    """Predict the seconds of a step, its bottleneck, and what would help most.

    The scheduler, the pipeline and the weight sync are the real ones; only the workers are simulated.
    """
    config = load_config(config_name, overrides or (), config_dir)

    # Imported late: Ray takes seconds to load.
    from rlsys.apps.planner.answer import Planner, machines_of, render, with_shape
    from rlsys.apps.planner.costs import read_reached
    from rlsys.apps.planner.search import PlacementSearch, render_search
    from rlsys.apps.planner.workload import Workload

    config, device = machines_of(with_shape(config), on, placed=not search)
    planner = Planner(config, device, *read_reached(), Workload().changed(assume or ()), seed)
    if search:
        placements = PlacementSearch(planner)
        best = placements.best()
        typer.echo(json.dumps(best, indent=2) if as_json else render_search(best, placements.candidates))
        return
    answer = planner.predict(price_per_gpu_hour)
    answer["helps"] = planner.helps()
    typer.echo(json.dumps(answer, indent=2) if as_json else render(answer))
