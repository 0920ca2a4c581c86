"""Implements `rlsys plan`: predicts the steps of a config by simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from typer import Option

from rlsys.apps.cli.options import ConfigDir, ConfigName, Overrides
from rlsys.config.compose import load_config

_ON = "Machines, such as 8xH100 or 2x8xH200; by default those of the config, with H100."
_ASSUME = "Assumption about episodes, such as turn=400; may be repeated."
_PRICE = "Price of a device and hour, for the cost of the run."
_CALIBRATE = "Folder of a run, whose measured costs and episodes replace the assumed ones."
_BENCH = "Result file of `python -m bench.gpu`, whose measured shares replace the fitted ones."
_HTML = "File to which the prediction is written as a page, with the timeline of the simulated steps."
_SAVE = "Folder of a run, into which the prediction is written; `rlsys report` shows it beside what was measured."


def command(
    config_name: ConfigName,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    on: Annotated[str | None, Option(metavar="[MACHINESx]DEVICESxKIND", help=_ON)] = None,
    assume: Annotated[list[str] | None, Option(metavar="KEY=VALUE", help=_ASSUME)] = None,
    price_per_gpu_hour: Annotated[float | None, Option(min=0, help=_PRICE)] = None,
    calibrate: Annotated[Path | None, Option(metavar="RUN", help=_CALIBRATE)] = None,
    bench: Annotated[Path | None, Option(metavar="FILE", help=_BENCH)] = None,
    html: Annotated[Path | None, Option(metavar="FILE", help=_HTML)] = None,
    save: Annotated[Path | None, Option(metavar="RUN", help=_SAVE)] = None,
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
    from rlsys.apps.planner.calibrate import Calibration
    from rlsys.apps.planner.gpu_bench import read_bench
    from rlsys.apps.planner.page import save_prediction, write_page
    from rlsys.apps.planner.search import PlacementSearch, render_search
    from rlsys.apps.planner.workload import Workload
    from rlsys.cluster.planning.hardware import REACHED, REACHED_SOURCE
    from rlsys.observe.run_folder import open_run

    config, device = machines_of(with_shape(config), on, placed=not search)
    reached, source = REACHED, REACHED_SOURCE
    if bench is not None:
        reached, source = read_bench(bench, device).reached(reached, source)
    measured = None if calibrate is None else Calibration(open_run(calibrate), device, reached)
    workload = (Workload() if measured is None else measured.workload(Workload())).changed(assume or ())
    planner = Planner(config, device, reached, source, workload, seed, measured)
    if search:
        placements = PlacementSearch(planner)
        best = placements.best()
        typer.echo(json.dumps(best, indent=2) if as_json else render_search(best, placements.counts))
        return
    with Console(stderr=True).status("Simulating the run ...") as status:
        found = planner.run()
        answer = planner.answer(found, price_per_gpu_hour)
        answer["helps"] = planner.helps(lambda change: status.update(Text(f"Simulating {change} ...")))
    if save is not None:
        save_prediction(answer, save)
    if html is not None:
        write_page(config, found, answer, html)
    typer.echo(json.dumps(answer, indent=2) if as_json else render(answer))
