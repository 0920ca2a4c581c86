"""Trains the demo's policy natively and through the gateway, from the same start, and compares what comes out.

    python -m bench.agents                    # seven runs of the demo's length; about 45 minutes on two quiet cores
    python -m bench.agents --seeds 1 --agent openai_sdk     # a part; what is there is not run again

Run it from the project's root after `make demo`, which makes the world. An agent from examples/agents acts by the same
tags as the native one, so that only the way of a token differs: HTTP, a client's messages, and the recorder's tree. Both
have `task.token_mode=append` and `task.train_eos=false`, and one cassette of searches. The runs of a seed begin with the
same weights and prompts. LangGraph has the first seed only. A run is kept in outputs/bench/agents/AGENT-SEED, and a
finished one is read instead of repeated. The results are printed and written to outputs/bench/agents.json:

- `em`: held-out exact match after the run; `em_gap_AGENT`: difference of the means over the seeds that both have;
- `first_ratio_dev_max`: largest distance of a ratio from 1 in the first update of a step, over all steps;
- `logprob_max_diff`: largest difference between the log-probs of engine and trainer on the same tokens, over all steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.record_searches import record_searches
from bench.training_run import training_run

OUT = Path("outputs/bench")
RESULT = OUT / "agents.json"
NATIVE = "native"
AGENTS = {NATIVE: 3, "openai_sdk": 3, "langgraph": 1}
"""Agent -> number of seeds."""
SETTINGS = ("task.token_mode=append", "task.train_eos=false", "eval.interval=0")
QUESTIONS = 400
"""Held-out questions after a run."""


def run_of(agent: str, seed: int, cassette: Path, steps: int) -> Path:
    """Return the folder of a finished run, which is made unless it is there."""
    outputs = OUT / "agents" / f"{agent}-{seed}-{steps}"
    done = [file.parent for file in outputs.glob("*/summary.json")]
    if done:
        return done[0]
    through = [] if agent == NATIVE else ["task.agent=gateway", f"task.agent.entry=examples.agents.{agent}.agent"]
    own = [f"trainer.seed={seed}", f"trainer.steps={steps}", f"eval.limit={QUESTIONS}"]
    return training_run(outputs, [*SETTINGS, *through, *own], cassette)


def figures(run: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {
        "em": json.loads((run / "summary.json").read_text())["em_after"],
        "first_ratio_dev_max": max(row["actor/first_ratio_dev_max"] for row in rows),
        "logprob_max_diff": max(row["logprob/max_diff"] for row in rows),
        "step_s": fmean(row["time/step"] for row in rows[1:] or rows),
    }
    if "gateway/branches/mean" in rows[0]:
        found["branches"] = fmean(row["gateway/branches/mean"] for row in rows)
    return found


def gaps(found: dict[str, dict[int, dict[str, float]]]) -> dict[str, float]:
    """Return, for each agent, its mean exact match less that of the native runs with the same seeds."""
    native = found.get(NATIVE, {})
    differences = {}
    for agent, runs in found.items():
        both = sorted(runs.keys() & native.keys())
        if agent != NATIVE and both:
            differences[f"em_gap_{agent}"] = fmean(runs[seed]["em"] - native[seed]["em"] for seed in both)
    return differences


def main(
    seeds: Annotated[int, typer.Option(help="Largest number of seeds of an agent.", min=1)] = 3,
    agent: Annotated[list[str] | None, typer.Option(help=f"Repeat for several: {', '.join(AGENTS)}.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of a run.", min=1)] = 12,
) -> None:
    """Compare training through the gateway with native training."""
    if unknown := {*(agent or ())} - {*AGENTS}:
        raise typer.BadParameter(f"{unknown.pop()} is not one of {', '.join(AGENTS)}")
    console, cassette = Console(), record_searches()
    found: dict[str, dict[int, dict[str, float]]] = {}
    for seed in range(1, seeds + 1):  # All agents of a seed, one after the other: a part compares what it has.
        for name, most in AGENTS.items():
            if seed > most or (agent and name not in agent):
                continue
            console.print(f"{name}, seed {seed} ...", highlight=False)
            found.setdefault(name, {})[seed] = figures(run_of(name, seed, cassette, steps))
            result: dict[str, Any] = {"steps": steps, "questions": QUESTIONS, **gaps(found), "runs": found}
            RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    names = list(dict.fromkeys(figure for runs in found.values() for run in runs.values() for figure in run))
    table = Table("agent", "seed", *(name.replace("_", " ") for name in names))
    for name, runs in found.items():
        for seed, run in runs.items():
            table.add_row(name, str(seed), *(f"{run[figure]:.4g}" if figure in run else "" for figure in names))
    console.print(table)
    for name, gap in gaps(found).items():
        console.print(f"{name} {gap:+.3f}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
