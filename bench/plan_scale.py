"""Measures how long the planner takes to simulate a step of runs on 64 to 1,024 GPUs.

    python -m bench.plan_scale      # three minutes; writes outputs/bench/plan_scale.json

All runs are `searchr1_qwen2.5_7b_2node` with more GPUs: half of them train, a sixteenth computes log-probs, the rest
generates, with 24 prompts a step for each GPU and staleness 1. Tool calls take 60 s, so about 100 episodes are in flight for
each GPU. Times are seconds of one core; the first row is the baseline of the time per event.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from rlsys.apps.planner.costs import by_formula
from rlsys.apps.planner.simulation import simulate
from rlsys.apps.planner.workload import Workload
from rlsys.cluster.planning.work import HardwareCosts
from rlsys.config.compose import PROJECT_CONFIGS, load_config
from rlsys.config.schema import AsyncSchedule, RunConfig
from rlsys.weights.flops import flops_of
from rlsys.weights.weight_map import read_architecture

RESULT = Path("outputs/bench/plan_scale.json")
MODEL = read_architecture(PROJECT_CONFIGS / "model" / "shapes" / "qwen2.5-7b-instruct")
GPUS = (64, 256, 1024)
STEPS = 2
"""Steps that are measured, after those that fill the pipeline."""


def config_of(gpus: int) -> RunConfig:
    """Return the config of a run on `gpus` GPUs."""
    config = load_config("searchr1_qwen2.5_7b_2node")
    actor, scored = gpus // 2, gpus // 2 + gpus // 16
    config.cluster.nodes = gpus // 8
    config.cluster.placement = {
        "actor": f"0-{actor - 1}",
        "inference": f"{actor}-{scored - 1}",
        "rollout": f"{scored}-{gpus - 1}",
    }
    config.trainer.prompts_per_step = 24 * gpus
    config.trainer.schedule = AsyncSchedule(max_staleness=1)
    return config


def measured(gpus: int) -> dict[str, Any]:
    """Simulate a run on `gpus` GPUs; return what it took, per simulated step."""
    config = config_of(gpus)
    workload = Workload(tool_s=60.0, tools_per_s=0.0)
    costs = by_formula(HardwareCosts(config, MODEL), "")
    begun = time.process_time()
    found = simulate(config, costs, workload, flops_of(MODEL), STEPS)
    seconds = time.process_time() - begun
    steps = STEPS + config.trainer.schedule.max_staleness + 1
    return {
        "gpus": gpus,
        "in_flight": round(found.in_flight),
        "simulated_step_s": found.step_s,
        "events": round(found.events / steps),
        "seconds": seconds / steps,
        "us_per_event": seconds / found.events * 1e6,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    """Simulate runs of growing size, and print what a step takes."""
    rows = [measured(gpus) for gpus in GPUS]
    table = Table("GPUs", "in flight", "step", "events", "takes", "an event", "ratio", "memory")
    for row in rows:
        row["us_per_event_ratio"] = row["us_per_event"] / rows[0]["us_per_event"]
        table.add_row(
            f"{row['gpus']:,}",
            f"{row['in_flight']:,}",
            f"{row['simulated_step_s']:.0f} s",
            f"{row['events']:,}",
            f"{row['seconds']:.1f} s",
            f"{row['us_per_event']:.1f} us",
            f"{row['us_per_event_ratio']:.2f}",
            f"{row['peak_gib']:.1f} GiB",
        )
    Console().print(table)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    typer.run(main)
