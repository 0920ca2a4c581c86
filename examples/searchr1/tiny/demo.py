"""Runs the whole system in small: world, index, ceiling, training, conversion, check and report.

Run `make demo`, or `python -m examples.searchr1.tiny.demo [setting=value ...]` from the project's root. The world and
its index are made once and reused.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape
from transformers.utils.logging import disable_progress_bar

from examples.searchr1.tiny.oracle import Ceiling, measure_ceiling
from examples.searchr1.tiny.world import WorldSpec, build_world, write_world
from rlsys.apps.cli.main import app, run_command
from rlsys.apps.running import run_to_end
from rlsys.config.compose import load_config
from rlsys.config.schema import RunConfig
from rlsys.errors import RunError
from rlsys.observe.outcome import render_summary
from rlsys.observe.records import write_summary
from rlsys.orchestrator.evaluation.heldout import heldout_questions
from rlsys.orchestrator.resume import CHECKPOINTS
from rlsys.orchestrator.run_logger import new_run_dir
from rlsys.orchestrator.search_server import serving
from rlsys.orchestrator.validate import validate
from rlsys.search.client import SearchClient
from rlsys.search.index.make import make_index
from rlsys.train import train
from rlsys.weights.checkpoint.store import CheckpointStore

CONFIG = "searchr1_tiny_cpu"
WORLD = Path("data/tiny_world")


def main(overrides: Sequence[str]) -> None:
    """Run all steps of the demo in order."""
    disable_progress_bar()
    console = Console()
    prepare_world(console)
    config = load_config(CONFIG, overrides)
    validate(config)
    run_dir = new_run_dir(config)
    console.print(f"[bold]Training[/]: run folder {run_dir}", highlight=False)
    with serving(config.search, config.cluster.threads, run_dir / "logs") as search:
        search.wait_healthy()
        served = replace(config, search=search.search)
        ceiling = asyncio.run(find_ceiling(served))
        console.print(
            f"ceiling: the scripted policy answers {ceiling.oracle_em:.3f} of the held-out questions, and "
            f"{ceiling.recall_at_3:.3f} of its searches find the passage that it needs",
            highlight=False,
        )
        summary = run_to_end(train(served, run_dir))
        summary |= {"oracle_em": ceiling.oracle_em, "recall_at_3": ceiling.recall_at_3}
        summary |= convert_and_evaluate(served, overrides, run_dir, console)
    write_summary(run_dir / "summary.json", summary)
    render_summary(summary, console)
    command(console, "report", run_dir)


def prepare_world(console: Console) -> None:
    """Write questions and passages, and encode the passages unless the index is complete.

    Waits for another process that is doing the same.
    """
    WORLD.mkdir(parents=True, exist_ok=True)
    with (WORLD / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        console.print("[bold]World[/]: questions and passages from GeoNames", highlight=False)
        spec = WorldSpec()
        write_world(build_world(spec), spec, WORLD)
        console.print("[bold]Index[/]: encoding the passages, unless the index exists", highlight=False)
        make_index("dense", WORLD / "corpus.jsonl", WORLD / "index")


async def find_ceiling(config: RunConfig) -> Ceiling:
    """Return the ceiling of the scripted policy on the evaluated questions and the run's own search server."""
    assert config.search.url is not None
    questions = heldout_questions(config)
    async with SearchClient(config.search.url, topk=config.search.topk) as client:

        async def retrieve(query: str) -> list[str]:
            result = await client.search(query)
            if result.error:
                raise RunError(f"the search server did not answer {query!r}: {result.error}")
            return [passage.contents for passage in result.passages]

        return await measure_ceiling(questions, retrieve)


def convert_and_evaluate(
    config: RunConfig, overrides: Sequence[str], run_dir: Path, console: Console
) -> dict[str, Any]:
    """Convert the last checkpoint to a Hugging Face folder, verify it, and evaluate it with plain transformers.

    Runs the same `rlsys` commands as a user. Returns the share of answers equal to the engine's last answers, the exact
    match and the seconds.
    """
    started = time.perf_counter()
    checkpoint, hf, out = newest_checkpoint(run_dir) / "actor", run_dir / "hf", run_dir / "eval"
    original = config.model.path
    command(console, "convert", "mg2hf", checkpoint, hf, "--hf", original)
    command(console, "convert", "verify", checkpoint, hf, "--hf", original)
    engine = ["--engine", "transformers", "--model", hf, "--out", out]
    command(console, "eval", "-c", CONFIG, *engine, f"search.url={config.search.url}", *overrides)
    last = max((run_dir / "evaluations").glob("step_*.jsonl"))
    asked, again = answers_in(last), answers_in(out / "answers.jsonl")
    return {
        "hf_engine_agreement": fmean(again[uid] == answer for uid, answer in asked.items()),
        "hf_em": json.loads((out / "results.json").read_text())["average"]["em"]["mean"],
        "convert_and_check_s": time.perf_counter() - started,
    }


def command(console: Console, *words: object) -> None:
    """Print an `rlsys` command and run it in this process. Raises RunError if it fails."""
    arguments = list(map(str, words))
    console.print(f"[bold]$ rlsys[/] {escape(shlex.join(arguments))}", highlight=False, soft_wrap=True)
    if app(arguments, standalone_mode=False):
        raise RunError("the converted model differs from the checkpoint: see the table above.")


def newest_checkpoint(run_dir: Path) -> Path:
    """Return the folder of the run's last checkpoint."""
    return CheckpointStore(run_dir / CHECKPOINTS).saved()[-1].folder


def answers_in(file: Path) -> dict[str, str | None]:
    """Return question id -> answer."""
    return {row["uid"]: row["answer"] for row in map(json.loads, file.open(encoding="utf-8"))}


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
