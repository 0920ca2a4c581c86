"""Compares on-policy distillation with RL alone on the demo: tokens generated until the teacher's exact match is near.

    make demo                                    # once; its run trains the teacher
    python -m bench.distil [--teacher FOLDER] [--student FOLDER] [--seeds 3] [--steps 16] [--lr 3e-4]

The teacher is the policy of the newest run of the demo, converted. The student hardly searches: it is the demo's first
policy after a run that only punishes searches. Hugging Face folders may take their places. Every run starts from the
student, with one optimiser step of 64 episodes a step, and answers 200 held-out questions greedily after each. The three
ways to learn have the same questions and learning rate:

    rl              algorithm=grpo: from the reward alone
    distil          algorithm=opd: from the teacher alone, by the reverse KL of the sampled tokens
    whole           likewise, by the forward KL over the whole vocabulary, as a loss

The command prints the mean tokens that the engines generated before exact match first reached 90 % of the teacher's, and
writes outputs/bench/distil.json after each run; a run that the file has with the same settings is not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.record_searches import record_searches
from bench.training_run import converted, demo_policy, training_run

OUT = Path("outputs/bench")
RESULT = OUT / "distil.json"
REACHED = 0.9
"""Share of the teacher's exact match that counts as reaching it; the rest is 2.7 standard errors of `QUESTIONS` answers."""
QUESTIONS = 200
SILENT = "reward.terms={exact_match: 0}"
UNLEARNING = 12
"""Steps of the run that makes the student; after them, one sampled episode in about 50 searches."""
NO_SEARCH = "reward.terms={exact_match: 0, examples.extend.reward.searches_above: {weight: -1, budget: 0}}"
Curve = list[tuple[int, float]]
"""(tokens generated before, exact match) at the start and after each step."""


def main(
    teacher: Annotated[Path | None, typer.Option(help="Hugging Face folder; by default the demo's result.")] = None,
    student: Annotated[Path | None, typer.Option(help="Hugging Face folder; by default made as above.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each way, with seeds 1, 2, ...", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Steps of each run, of one update each.", min=1)] = 16,
    lr: Annotated[float, typer.Option(help="Learning rate of the runs.")] = 3e-4,
) -> None:
    """Make the runs that are missing, and print and write the table."""
    console = Console()
    folder = teacher.resolve() if teacher else demo_policy()
    cassette, ways = record_searches(), ways_of(folder)
    start = student.resolve() if student else policy_without_searches(cassette)
    found: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    asked = {"teacher": str(folder), "student": str(start), "steps": steps, "lr": lr}
    if {name: found.get(name) for name in asked} != asked:
        found = asked | {"teacher_em": _em_of(folder, cassette), "curves": {}}
    for seed in range(1, seeds + 1):
        for way, settings in ways.items():
            curves = found["curves"].setdefault(way, {})
            if str(seed) not in curves:
                console.print(f"{way}, seed {seed} ...", highlight=False)
                own = (
                    f"model.path={start}",
                    f"actor.optimizer.lr={lr}",
                    f"trainer.seed={seed}",
                    f"trainer.steps={steps}",
                )
                curves[str(seed)] = _curve(way, [*settings, *own], cassette)
                RESULT.parent.mkdir(parents=True, exist_ok=True)
                RESULT.write_text(json.dumps(found, indent=1) + "\n")
    console.print(table(found["teacher_em"], found["curves"]))
    console.print(f"Written to {RESULT}.", highlight=False)


def ways_of(teacher: Path) -> dict[str, list[str]]:
    """Return the settings of each way to learn."""
    taught = ["algorithm=opd", f"algorithm.teacher.model={teacher}"]
    whole = ["algorithm.kl_in=loss", "algorithm.kl_estimator.kind=full_forward"]
    return {"rl": ["algorithm=grpo"], "distil": [*taught, SILENT], "whole": [*taught, SILENT, *whole]}


def policy_without_searches(cassette: Path) -> Path:
    """Return the demo's first policy after `UNLEARNING` steps that punish searches, as a Hugging Face folder."""
    out = OUT / "distil" / "student" / "hf"
    if not (out / "config.json").is_file():
        steps = ("eval.interval=0", f"trainer.steps={UNLEARNING}", "trainer.seed=1")
        run = training_run(out.parent, [*_settings(), NO_SEARCH, *steps], cassette)
        converted(run / "checkpoints" / f"global_step_{UNLEARNING}" / "actor", out)
    return out.resolve()


def tokens_to(curve: Sequence[tuple[int, float]], em: float) -> int | None:
    """Return the tokens generated before exact match first reached `em`; None if it never did."""
    return next((tokens for tokens, reached in curve if reached >= em), None)


def table(teacher_em: float, curves: Mapping[str, Mapping[str, Curve]]) -> Table:
    """Return a table with one row for each way to learn, averaged over its seeds."""
    goal = REACHED * teacher_em
    shown = Table("", "seeds", "before", "last", f"tokens to {goal:.3f}", "each seed")
    for way, of_seeds in curves.items():
        each = list(of_seeds.values())
        tokens = [tokens_to(curve, goal) for curve in each]
        known = [one for one in tokens if one is not None]
        mean = f"{fmean(known):,.0f}" if len(known) == len(tokens) else f"reached by {len(known)}"
        ems = (f"{fmean(curve[end][1] for curve in each):.3f}" for end in (0, -1))
        shown.add_row(way, str(len(each)), *ems, mean, " / ".join("-" if one is None else f"{one:,}" for one in tokens))
    shown.add_row("teacher", "", "", f"{teacher_em:.3f}", "", "")
    return shown


def _settings(questions: int = QUESTIONS) -> list[str]:
    return ["trainer.prompts_per_step=8", "trainer.mini_batches=1", "eval.interval=1", f"eval.limit={questions}"]


def _em_of(model: Path, cassette: Path) -> float:
    """Return the exact match of a model before any step, on the questions of the other runs."""
    run = training_run(OUT / "distil" / "teacher", [*_settings(), f"model.path={model}", "trainer.steps=1"], cassette)
    return float(json.loads((run / "summary.json").read_text())["em_before"])


def _curve(way: str, settings: Sequence[str], cassette: Path) -> Curve:
    run = training_run(OUT / "distil" / way, [*_settings(), *settings], cassette)
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    generated = {row["step"]: int(row["rollout/generated_tokens"]) for row in rows}
    return [
        (sum(tokens for step, tokens in generated.items() if step <= one["step"]), one["em"])
        for one in summary["evaluations"]
    ]


if __name__ == "__main__":
    typer.run(main)
