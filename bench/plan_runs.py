"""Compares predictions of `rlsys plan` with short runs of the demo on this machine.

The costs are measured in one sequential run (`rlsys plan --calibrate`), and predict all others: other schedules, numbers of
prompts, search latencies and engines, and a deeper model. All runs have the policy with which the newest run of the demo
ended, and a learning rate that does not change it, so that episodes stay as long as they are; they get their searches from
one cassette. The first and the last step of a run are not compared: the first warms up, and in the last one nothing rolls
out ahead. Each run is made twice, the second time after all others, and the faster one counts: what else a machine does can
only slow a run down.

A run that is in the result file with the same settings is not repeated, so an interrupted comparison goes on where it
stopped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from scipy.stats import spearmanr

from bench.pipeline import ASYNC, PIPELINED, SEQUENTIAL
from bench.record_searches import record_searches
from bench.training_run import CONFIG, demo_policy, training_run
from rlsys.apps.planner.answer import Planner, machines_of
from rlsys.apps.planner.calibrate import Calibration
from rlsys.apps.planner.simulation import measured_steps
from rlsys.apps.planner.workload import Workload
from rlsys.cluster.planning.hardware import REACHED, REACHED_SOURCE
from rlsys.config.compose import load_config
from rlsys.observe.run_folder import open_run

OUT = Path("outputs/bench/plan")
"""Folder of the runs."""
RESULT = OUT.with_suffix(".json")
STEPS = 5
SHORT = (f"trainer.steps={STEPS}", "eval.limit=8", "eval.interval=0", "actor.optimizer.lr=1e-12")
ROUNDS = 2
EPISODES = 6_000
"""Episodes that are simulated of each row."""
DEEP = "pipelined, deeper model"
"""Name of the row with the deeper model."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    settings: tuple[str, ...]
    latency: float = 1.0
    """Multiple of the recorded search latencies."""


ROWS = (
    Row("sequential", SEQUENTIAL.settings),
    Row("pipelined", PIPELINED.settings),
    Row("async 1", ASYNC[0].settings),
    Row("async 2", ASYNC[1].settings),
    Row("pipelined, 16 prompts", (*PIPELINED.settings, "trainer.prompts_per_step=16")),
    Row("async 1, 48 prompts", (*ASYNC[0].settings, "trainer.prompts_per_step=48")),
    Row("sequential, no latency", SEQUENTIAL.settings, 0.0),
    Row("async 1, 4x latency", ASYNC[0].settings, 4.0),
    Row("pipelined, two engines", (*PIPELINED.settings, "cluster.placement.rollout='2-3'")),
    Row(DEEP, PIPELINED.settings),
)
"""The costs are measured in the first one."""


def compare_runs(only: Sequence[str] = ()) -> None:
    """Run the rows `only`, by default all, predict every row that has been run, and write the result file."""
    console, measured, policy = Console(), _known(), demo_policy()
    cassette, deeper = record_searches(), OUT / "deeper" / policy.name
    if not (deeper / "config.json").is_file():
        deepen(policy, deeper)
    for number, row in product(range(ROUNDS), ROWS):
        model = f"model.path={deeper if row.name == DEEP else policy}"
        asked = [*row.settings, *SHORT, model, f"search.cassette.latency_scale={row.latency}"]
        known = measured.get(row.name, {})
        runs = known["runs"] if known.get("settings") == asked else {}
        if (only and row.name not in only) or len(runs) > number:
            continue
        console.print(f"{row.name}, round {number + 1} ...", highlight=False)
        run = training_run(OUT / row.name.replace(", ", "-").replace(" ", "-") / str(number), asked, cassette)
        measured[row.name] = {"settings": asked, "runs": runs | {str(run): step_seconds(run)}}
        _write(measured, {})
    _write(measured, predictions(measured))
    console.print({key: value for key, value in json.loads(RESULT.read_text()).items() if key != "rows"})


def _known() -> dict[str, dict[str, Any]]:
    """Return row -> settings, and seconds of a step by folder, of the runs that are there."""
    if not RESULT.is_file():
        return {}
    rows = json.loads(RESULT.read_text())["rows"]
    return {
        row["name"]: {
            "settings": row["settings"],
            "runs": {run: seconds for run, seconds in row["runs"].items() if Path(run).is_dir()},
        }
        for row in rows
    }


def step_seconds(run: Path) -> float:
    """Return the mean seconds of a run's steps without the first and the last one."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return fmean(row["time/step"] for row in rows[1:-1])


def predictions(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return row -> predicted seconds of a step, for the rows that were run; none without the first one."""
    first, *others = ROWS
    if first.name not in measured:
        return {}
    runs = measured[first.name]["runs"]
    calibration = Calibration(open_run(Path(min(runs, key=runs.get))), "CPU", REACHED)
    workload = calibration.workload(Workload())
    found = {}
    for row in (first, *others):
        if row.name in measured:
            config, device = machines_of(load_config(CONFIG, measured[row.name]["settings"]), None)
            lengths = replace(workload, tool_s=workload.tool_s * row.latency)
            planner = Planner(config, device, REACHED, REACHED_SOURCE, lengths, calibration=calibration)
            found[row.name] = planner.simulated(config, lengths, measured_steps(config, EPISODES)).step_s
    return found


def _write(measured: Mapping[str, Mapping[str, Any]], predicted: Mapping[str, float]) -> None:
    rows = []
    for name, one in measured.items():
        seconds = min(one["runs"].values())
        figures = {"predicted": predicted[name], "error": abs(predicted[name] / seconds - 1)} if predicted else {}
        rows.append({"name": name, **one, "measured": seconds, **figures})
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({**summary(rows), "rows": rows}, indent=1) + "\n")


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the errors of the predicted rows but the first, and the rank correlation of all of them."""
    known = [row for row in rows if "predicted" in row]
    errors = [row["error"] for row in known if row["name"] != ROWS[0].name]
    if not errors:
        return {}
    ranks = spearmanr([row["predicted"] for row in known], [row["measured"] for row in known]).statistic
    return {"median_error": median(errors), "max_error": max(errors), "rank_correlation": float(ranks)}


def deepen(model: Path, into: Path, times: int = 3) -> None:
    """Write `model` with `times` as many layers into the folder `into`; it computes the same.

    The further layers add nothing to the residual stream: their output projections are zero. So episodes keep their
    lengths while a step costs more.
    """
    import torch
    from transformers import AutoModelForCausalLM

    shutil.copytree(model, into, dirs_exist_ok=True)
    shallow = AutoModelForCausalLM.from_pretrained(model)
    config = shallow.config
    layers = config.num_hidden_layers
    config.num_hidden_layers = layers * times
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types] * times
    deep = AutoModelForCausalLM.from_config(config)
    deep.load_state_dict(shallow.state_dict(), strict=False)
    with torch.no_grad():
        for layer in deep.model.layers[layers:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    deep.save_pretrained(into)
